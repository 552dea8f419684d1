"""Who is measured: each peer's worker, settings and environment, and how long it takes on a core of 2023.

Settings are the best that were found for each on these workloads, one core. vLLM's blocks of 32 against its default of
128: shared prefixes 1.5 times and samples 1.5 times as fast, chats 4 % slower. llama.cpp's streams have caches of their
own in float16: one unified cache takes twice as long, float32 a third longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.peers.checkpoints import Shape

OURS = "jpaged"
MAX_MODEL_LEN = 1024
KV_CACHE_BYTES = 1 << 30
"""Each peer's pool of keys and values: more than any workload fills at once."""
BLOCK_SIZE = 16
"""Tokens in a block of jpaged."""
SERVE = "serve"
"""Servers under load, as `serving.py` measures them."""
SERVE_EXPECTED_S = 400.0
"""About how long that takes, starts included."""
_WORKERS = "benchmarks.peers.workers"
LLAMA_SERVER = f"{_WORKERS}.llama_server"
START = "start"
"""A second start, until requests are taken: measured beside the workloads."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine.

    Attributes:
        environment: which environment of `environments.py` it runs in; empty is jpaged's own.
        worker: the module that its process runs.
        about: what it is, in the table's notes.
        options: what its worker hands to the library.
        variables: of its process's environment.
        expected_s: seconds of a run by model and workload; None where it cannot.
        needs_bytes: memory that its process takes, besides the weights.
        weights: of a GGUF file, llama.cpp's name of their type, which the file's name ends with; "" is the model's own.
    """

    name: str
    environment: str
    worker: str
    about: str
    options: Mapping[str, object]
    expected_s: Mapping[str, Mapping[str, float | None]]
    variables: Mapping[str, str] = field(default_factory=dict)
    needs_bytes: int = 2 << 30
    weights: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is jpaged, of whatever weights."""
        return not self.environment


def _expected(**workloads: tuple[float | None, float | None]) -> dict[str, dict[str, float | None]]:
    """Returns seconds by model, from seconds of (S, M) by workload."""
    return {model: {name: both[index] for name, both in workloads.items()} for index, model in enumerate(("S", "M"))}


_VLLM_OPTIONS = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 128, "block_size": 32, "seed": 0}
_VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_BYTES >> 30),  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else three processes share the core
    "VLLM_NO_USAGE_STATS": "1",
}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            OURS,
            "",
            f"{_WORKERS}.jpaged_offline",
            "this checkout, offline",
            {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 128, "max_num_batched_tokens": 1024},
            _expected(W1=(40, 50), W2=(1.6, 60), W3=(3.8, 40), W4=(0.9, 20), W5=(1, 16), T1=(7, 35), start=(6, 60)),
        ),
        Peer(
            "vllm",
            "vllm",
            f"{_WORKERS}.vllm_offline",
            "vLLM's CPU build, offline, compiled, in one process, blocks of 32",
            _VLLM_OPTIONS,
            _expected(W1=(35, 37), W2=(1.7, 38), W3=(3.6, 30), W4=(3.9, 62), W5=(0.7, 8), T1=(6, 22), start=(35, 90)),
            _VLLM_VARIABLES,
        ),
        Peer(
            "vllm-zentorch",
            "vllm",
            f"{_WORKERS}.vllm_offline",
            "the same with AMD's products, zentorch",
            _VLLM_OPTIONS,
            _expected(W1=(32, 30), W2=(1.7, 30), W3=(3.6, 25), W4=(3.9, 50), W5=(0.6, 5), T1=(6, 20), start=(32, 70)),
            _VLLM_VARIABLES,
        ),
        Peer(
            "transformers",
            "hf",
            f"{_WORKERS}.transformers_batch",
            "Hugging Face's generate, batches of 32 of like lengths",
            {"batch_size": 32},
            _expected(W1=(140, 120), W2=(10, 150), W3=(25, 120), W4=(2, 60), W5=(1, 14), T1=(28, 51), start=(4, 4)),
        ),
        Peer(
            "llama.cpp",
            "lcpp",
            LLAMA_SERVER,
            "llama.cpp's server, 32 slots, a float16 cache",
            {
                "parallel": 32,
                "ctx_size": 32 * MAX_MODEL_LEN,
                "threads": 1,
                "threads_batch": 1,
                "batch_size": 2048,
                "ubatch_size": 512,
                "cache_type_k": "f16",
                "cache_type_v": "f16",
                "flash_attn": "on",
                "cache_ram": 0,
                "threads_http": 4,
            },
            _expected(W1=(60, 66), W2=(6, 70), W3=(8, 60), W4=(None, None), W5=(0.3, 4), T1=(11, 25), start=(0.5, 1)),
        ),
    )
}


class Model(Protocol):
    """A model by its name and the data type that peers compute in."""

    @property
    def name(self) -> str:
        """Name of its files."""

    @property
    def dtype(self) -> str:
        """float32, bfloat16, or auto for each peer's default."""


def options_for(peer: Peer, shape: Model) -> dict[str, object]:
    """Returns the options for a model: jpaged's pool is counted in blocks."""
    if not peer.is_ours or not isinstance(shape, Shape):
        return dict(peer.options)
    head_values = 2 * shape.num_kv_heads * 64 * shape.bytes_per_value
    num_blocks = KV_CACHE_BYTES // (shape.num_layers * BLOCK_SIZE * head_values)
    return {**peer.options, "block_size": BLOCK_SIZE, "num_blocks": num_blocks}
