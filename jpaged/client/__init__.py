"""The gRPC client: no jax, no engine. `Client` for threads, `AsyncClient` for asyncio, `jpaged.client.batch` for files.

tls.py        certificates of a client
wire.py       values <-> messages, and the assembly of streams: no I/O, shared by both clients
chat.py       the same for chats: messages, tools, calls
evaluations.py the same for Score and Embed
prefixes.py   transfer of prefixes as bytes
failures.py   gRPC errors -> the classes of jpaged.errors
channel.py    connections: keepalive, retries, proxies
base.py       shared base of both clients
sync.py       Client
aio.py        AsyncClient
batch.py      runs an OpenAI batch file against servers
batching/     distribution of lines over servers, and Parquet
routing/      choice of a server per request, retries and resumed streams
health.py     a single check of grpc.health.v1
results.py    output file of a batch: locked, whole lines, resumable
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
