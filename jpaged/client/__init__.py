"""The gRPC client: no jax, no engine. `Client` for threads, `AsyncClient` for asyncio, `jpaged.client.batch` for files.

wire.py       values -> messages and back, and the assembly of streams: no I/O, shared by both clients
chat.py       the same of chats: messages, tools, calls
evaluations.py Score and Embed, likewise
failures.py   gRPC errors -> the tree of jpaged.errors
channel.py    how both connect: keepalive, retries
base.py       what both clients share
sync.py       Client
aio.py        AsyncClient
openai.py     the OpenAI batch file format, without I/O
openai_chat.py  its chats: messages, tools, reasoning, and answers as messages
batch.py      runs such a file against servers
batching/     what that stands on: who runs what, other bodies, Parquet
health.py     asks grpc.health.v1 once
results.py    the file of its answers: locked, whole lines, taken up again
"""

from jpaged.client.aio import AsyncClient, AsyncGenerateStream
from jpaged.client.sync import Client, GenerateStream
from jpaged.client.wire import AdapterInfo, GenerateChunk, ServerInfo
from jpaged.load import Load, ReplicaLoad
from jpaged.types import ModelInfo

__all__ = [
    "AdapterInfo",
    "AsyncClient",
    "AsyncGenerateStream",
    "Client",
    "GenerateChunk",
    "GenerateStream",
    "Load",
    "ModelInfo",
    "ReplicaLoad",
    "ServerInfo",
]
