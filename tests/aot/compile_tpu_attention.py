"""Compiles the TPU backend's attention for a TPU that is not here: a process of its own, since libtpu may abort it.

    TPU_LIBRARY_PATH=... python -m tests.aot.compile_tpu_attention v5e:2x2 kinds

Prints one line of JSON a case: what the compiled program needs, or the error.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Queries, RaggedRows, paged_attention_update
from jpaged.kernels.paged_attention.spec import AttentionCall
from jpaged.kernels.paged_attention.tpu import attention as tpu
from jpaged.kernels.paged_attention.tpu.sizes import key_lanes

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
"""One of each generation; all need a whole host with libtpu 0.0.42. One chip of it is compiled for."""

_KV_HEADS, _KV_DTYPES = (1, 2, 3, 8), ("bfloat16", "float8_e4m3fn", "int8")
_HEAD_DIMS, _BLOCK_SIZES = (64, 128, 256), (16, 32, 128)


@dataclass(frozen=True, slots=True)
class Case:
    """A step's attention in one layer of a pool, new keys stored."""

    num_kv_heads: int
    kv_dtype: str
    head_dim: int
    block_size: int
    group: int = 4
    dtype: str = "bfloat16"
    num_tokens: int = 256
    num_rows: int = 64
    table_width: int = 64
    sliding_window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None

    @property
    def layout(self) -> KVLayout:
        dtype = jnp.dtype(self.kv_dtype)
        heads = self.num_kv_heads, self.head_dim
        return KVLayout(2, 255, self.block_size, *heads, dtype, "tpu", value_dim=self.value_dim)

    @property
    def refusal(self) -> str | None:
        """What our own check says."""
        num_heads = self.num_kv_heads * self.group
        queries = Queries(num_heads, jnp.dtype(self.dtype), self.num_rows, self.table_width, self.num_tokens)
        return tpu.unsupported_reason(self.layout, queries)

    @property
    def query_bytes(self) -> int:
        """The bytes of all tokens' queries, and of one a row padded to the 16 rows of a product."""
        num_heads = self.num_tokens * self.num_kv_heads * self.group + self.num_rows * self.num_kv_heads * 16
        return num_heads * key_lanes(self.layout) * jnp.dtype(self.dtype).itemsize


def pairs() -> Iterator[tuple[str, Case]]:
    """Every two values of two properties meet in one of 16 cases: rows of an orthogonal array over GF(4)."""
    doubled = (0, 2, 3, 1)
    for i in range(4):
        for j in range(4):
            kv_dtype, head_dim, block_size = (x % 3 for x in (i ^ j, i ^ doubled[j], i ^ j ^ doubled[j]))
            case = Case(_KV_HEADS[j], _KV_DTYPES[kv_dtype], _HEAD_DIMS[head_dim], _BLOCK_SIZES[block_size])
            yield TOPOLOGIES[i], dataclasses.replace(case, sliding_window=100, soft_cap=30.0) if i == j else case


def limits() -> Iterator[tuple[str, Case]]:
    """What is not refused: tables of a million tokens, steps of as many tokens as can be, and much vector memory."""
    for topology in TOPOLOGIES:
        yield topology, Case(2, "bfloat16", 128, 16, num_rows=64, table_width=8192)
    yield "v6e:2x2", Case(2, "bfloat16", 128, 16, num_rows=256, table_width=65536, num_tokens=512)
    yield "tpu7x:2x2x1", Case(2, "bfloat16", 128, 8, num_rows=256, table_width=65536, num_tokens=512)
    for topology in TOPOLOGIES:
        yield topology, dataclasses.replace(MOST, num_tokens=MOST_TOKENS)
    for topology in ("v5e:2x2", "tpu7x:2x2x1"):
        yield topology, Case(16, "bfloat16", 256, 128, group=1, dtype="float32")


def latents() -> Iterator[tuple[str, Case]]:
    """A quarter of DeepSeek-V3's heads, and those of DeepSeek-V2-Lite."""
    yield "v6e:2x2", Case(1, "bfloat16", 576, 32, group=32, value_dim=512)
    yield "v5p:2x2x1", Case(1, "float8_e4m3fn", 576, 128, group=16, value_dim=512)


MOST = Case(1, "bfloat16", 128, 128, num_rows=64)
MOST_TOKENS, TOO_MANY_TOKENS = 124160, 130048
"""Steps whose lists just fit into scalar memory, and those that are too large for the compiler."""


def beyond() -> Iterator[tuple[str, Case]]:
    """What is refused: steps that the compiler cannot hold either, of a few tokens more than those that are taken."""
    for topology in TOPOLOGIES:
        yield topology, dataclasses.replace(MOST, num_tokens=TOO_MANY_TOKENS)


GROUPS = {"kinds": (*pairs(), *latents()), "sizes": (*limits(), *beyond())}
"""Every kind of heads, types and blocks; and the largest sizes, with those that are too large."""


def compiled(topology: str, case: Case) -> dict[str, object]:
    """What the program for the topology's first device needs."""
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    mesh, replicated = Mesh(np.array(devices[:1]), ("x",)), PartitionSpec()
    spec = AttentionSpec(case.layout, AttentionKind(case.head_dim**-0.5, case.sliding_window, case.soft_cap))

    def array(shape: tuple[int, ...], dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, replicated))

    def step(q, new_kv, pool, layer, rows, scales):
        if case.refusal is not None:  # the compiler is asked all the same
            return tpu.update(AttentionCall(q, pool, layer, rows, spec, scales), new_kv)
        return paged_attention_update(q, new_kv, pool, layer, rows, spec, scales, backend="pallas-tpu")

    t, s, k = case.num_tokens, case.num_rows, case.num_kv_heads
    new = array((t, k, case.head_dim), case.dtype)
    arguments = (
        array((t, k * case.group, case.head_dim), case.dtype),
        (new, new if case.value_dim is None else None, array((t,))),
        array(case.layout.shape, case.layout.storage_dtype.name),
        array(()),
        RaggedRows(array((s + 1,)), array((s,)), array((s, case.table_width)), array(())),
        array((2, k, 2), "float32") if case.layout.is_scaled else None,
    )
    sharded = jax.shard_map(step, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
    begin = time.monotonic()
    program = jax.jit(sharded, donate_argnums=2).lower(*arguments).compile()
    memory: Any = program.memory_analysis()
    shape, text = ",".join(map(str, case.layout.shape)), program.as_text() or ""
    return {
        "alias_bytes": memory.alias_size_in_bytes,
        "pool_bytes": case.layout.num_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "query_bytes": case.query_bytes,
        "pool_copies": len(re.findall(rf"\[{re.escape(shape)}\]\S* copy\(", text)),
        "seconds": round(time.monotonic() - begin, 1),
    }


def main() -> None:
    for topology, case in GROUPS[sys.argv[2]]:
        if topology == sys.argv[1]:
            try:
                result = compiled(topology, case)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"[:2000]}
            print(json.dumps({"case": dataclasses.asdict(case), "refusal": case.refusal, **result}), flush=True)


if __name__ == "__main__":
    main()
