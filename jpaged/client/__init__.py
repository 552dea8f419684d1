"""The gRPC client: no jax, no engine. `Client` for threads, `AsyncClient` for asyncio, `jpaged.client.batch` for files.

tls.py        what a client believes and shows
wire.py       values -> messages and back, and the assembly of streams: no I/O, shared by both clients
chat.py       the same of chats: messages, tools, calls
evaluations.py Score and Embed, likewise
prefixes.py   prefixes that travel, as bytes
failures.py   gRPC errors -> the tree of jpaged.errors
channel.py    how both connect: keepalive, retries
base.py       what both clients share
sync.py       Client
aio.py        AsyncClient
batch.py      runs an OpenAI batch file against servers
batching/     what that stands on: who runs what, Parquet
routing/      which server runs a request, and how one goes on elsewhere
health.py     asks grpc.health.v1 once
results.py    the file of its answers: locked, whole lines, taken up again
"""

from jpaged.client.aio import AsyncClient, AsyncGenerateStream
from jpaged.client.prefixes import PrefixArrival
from jpaged.client.routing.tries import Resuming
from jpaged.client.sync import Client, GenerateStream
from jpaged.client.tls import Tls
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
    "PrefixArrival",
    "ReplicaLoad",
    "Resuming",
    "ServerInfo",
    "Tls",
]
