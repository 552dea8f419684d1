"""What serving costs beside the engine: each module runs as `python -m benchmarks.serving.<name>`.

faces.py                tokens a second over HTTP, over those over gRPC
streams.py              tokens a second by `jpaged batch` and as gRPC streams, over those of `LLM.generate`
overload.py             first tokens under a light load, and throughput under more than a server can do
multi_turn.py           host time of a turn of a long conversation, with and without what earlier turns left
inter_token_latency.py  gaps between a stream's tokens while long prompts arrive, with and without a bound
"""
