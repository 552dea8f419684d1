"""One process a peer, in the peer's own environment, which answers one order after the other.

protocol.py            the worker's side of the pipe: what is told when, and what is checked
jpaged_offline.py      jpaged's LLM in this process
vllm_offline.py        vLLM's LLM in this process
transformers_batch.py  Hugging Face's generate over batches of like lengths
llama_server.py        llama.cpp's server, and a client of it
openvino_genai.py      OpenVINO GenAI's continuous batching in this process
mistralrs_runner.py    mistral.rs in this process, one request at a time
rates.py               no peer: how fast PyTorch reads memory and multiplies on this core
"""
