"""The gRPC client: no jax, no engine. `Client` for threads, `AsyncClient` for asyncio, `jpaged.client.batch` for files.

convert.py   values <-> messages, and the assembly of streams: no I/O, shared by both clients
prefixes.py  transfer of prefixes as bytes
errors.py    gRPC errors -> the classes of jpaged.errors
channel.py   connections: keepalive, retries, proxies, TLS, a single health check
base.py      shared base of both clients
sync.py      Client
aio.py       AsyncClient
batch.py     runs an OpenAI batch file against servers, which share its lines
routing/     choice of a server per request, retries and resumed streams
results.py   output file of a batch: locked, whole lines, resumable
parquet.py   Parquet as input and output of a batch
"""

from typing import TYPE_CHECKING

from jpaged.client.aio import AsyncClient, AsyncGenerateStream
from jpaged.client.channel import Tls
from jpaged.client.convert import AdapterInfo, GenerateChunk, ServerInfo
from jpaged.client.prefixes import PrefixArrival
from jpaged.client.routing.retry import ResumePolicy
from jpaged.client.sync import Client, GenerateStream
from jpaged.server_load import Load, ReplicaLoad
from jpaged.types import ModelInfo
from jpaged.version import alias_names

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
    "ResumePolicy",
    "ServerInfo",
    "Tls",
]


_FORMER_NAMES = {
    "Resuming": "ResumePolicy",
}
"""Public names of the previous release. They go with the next one."""

if not TYPE_CHECKING:
    __getattr__ = alias_names(__name__, _FORMER_NAMES)
