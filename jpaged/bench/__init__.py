"""Benchmarks of servers, as their client sees them: no jax, no engine. The command line is `jpaged.cli.bench`.

datasets.py        which requests are sent
vocabulary.py      the tokens that they are made of
arrivals.py        when they are sent
drive.py           sends them, and times what comes back
trace.py           what one request's times were
grpc_backend.py    servers of ours
openai_backend.py  servers with OpenAI's HTTP API
metrics.py         times -> vLLM's numbers
limits.py          what the machine could do at best
machine.py         which machine and versions it was
results.py         the files that are written
compare.py         two of them side by side
plot.py            pictures of a sweep
"""
