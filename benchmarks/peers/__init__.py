"""jpaged beside vLLM, Hugging Face and llama.cpp on one core of this machine: `make bench-peers`.

__main__.py       the command: install what is missing, say how long it takes, measure, write JSON and a table
environments.py   an environment of its own for each peer, with pinned versions
peers.py          who is measured, with which settings
checkpoints.py    the two models, made from a seed
gguf_file.py      a model in llama.cpp's format
workloads.py      the requests, made from a seed
session.py        a peer's process on its core
rounds.py         peers in turns, A B A B
serving.py        servers under load, at the rate where vLLM's saturates and above
ratios.py         medians, ratios, agreement of greedy tokens
limits.py         the least seconds that a workload can take on a core
table.py          the record as markdown
pictures.py       and as a picture
pretrained.py     pretrained models in jpaged, OpenVINO GenAI, llama.cpp and mistral.rs: `make bench-pretrained`
pretrained_models.py
                  their files, from packages of the package index
workers/          what runs in a peer's environment
"""
