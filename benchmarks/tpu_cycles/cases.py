"""Which attention calls are counted, and on which memory.

A decode case is a step of 64 rows with a context of 2048 tokens each; a prefill case is a chunk of 2048 tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from benchmarks.tpu_cycles.machine import Memory
from jpaged.errors import InvalidArgument
from jpaged.hardware import HARDWARE, Hardware
from jpaged.kernels.kv_layout import KVLayout

TOPOLOGIES: Mapping[str, str] = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:1x1x1", "tpu7x": "tpu7x:1x1x1"}
LATENCY_S = 0.6e-6
"""From a DMA's start to its first byte; assumed."""

KINDS = ("decode", "prefill")
NUM_ROWS, CONTEXT = 64, 2048
MAX_CONTEXT = 8192
_KV_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
_NUM_KV_HEADS, _BLOCK_SIZES = (8, 4, 2, 1), (64, 16, 128)
_POOL_BYTES = 1 << 28
"""At least: XLA keeps a small pool in vector memory, and a kernel's fetches become copies within that."""


@dataclass(frozen=True, slots=True)
class Case:
    """One compiled call.

    Attributes:
        generation: of the TPU, as `TOPOLOGIES` has them.
        kind: "decode" or "prefill".
        num_kv_heads: on one chip.
        group: query heads of each.
        head_dim: of keys and values.
        kv_dtype: of the pool; queries are bfloat16.
        block_size: tokens.
    """

    generation: str
    kind: str
    num_kv_heads: int
    group: int
    head_dim: int
    kv_dtype: str
    block_size: int

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads}x{self.group}x{self.head_dim}"
        return f"{self.generation}/{self.kind}/{heads}/{self.kv_dtype}/{self.block_size}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `str` writes so: `v6e/decode/8x4x128/bfloat16/64`.

        Raises:
            InvalidArgument: it is not written so.
        """
        try:
            generation, kind, heads, kv_dtype, block_size = text.split("/")
            num_kv_heads, group, head_dim = (int(number) for number in heads.split("x"))
            case = cls(generation, kind, num_kv_heads, group, head_dim, kv_dtype, int(block_size))
        except ValueError as error:
            raise InvalidArgument("case", f"{text!r} is not like v6e/decode/8x4x128/bfloat16/64: {error}") from error
        if case.generation not in TOPOLOGIES or case.kind not in KINDS:
            known = ", ".join(TOPOLOGIES)
            raise InvalidArgument("case", f"{text!r} is not of a generation ({known}) and kind ({', '.join(KINDS)})")
        return case

    @property
    def layout(self) -> KVLayout:
        dtype = jnp.dtype(self.kv_dtype)
        small = KVLayout(2, 1, self.block_size, self.num_kv_heads, self.head_dim, dtype, "tpu")
        return dataclasses.replace(small, num_blocks=_POOL_BYTES // small.bytes_per_block)

    @property
    def block_bytes(self) -> int:
        """What one block of one layer takes in the pool."""
        return self.layout.bytes_per_block // self.layout.num_layers

    @property
    def num_tokens(self) -> int:
        return NUM_ROWS if self.kind == "decode" else CONTEXT

    @property
    def num_rows(self) -> int:
        return NUM_ROWS if self.kind == "decode" else 8


def memory(generation: str) -> Memory:
    """The memory of a generation, in cycles of its core."""
    device = _hardware(generation)
    return Memory(device.hbm_bytes_per_s / _clock(device), LATENCY_S * _clock(device))


def flops_per_cycle(generation: str) -> float:
    """What the matrix units of a device can do in a cycle, in bfloat16."""
    device = _hardware(generation)
    return device.flops / _clock(device)


def _hardware(generation: str) -> Hardware:
    return HARDWARE[generation if generation.startswith("tpu") else f"tpu-{generation}"]


def _clock(device: Hardware) -> float:
    if device.clock_hz is None:
        raise LookupError(f"no clock is known of {device.name}")
    return device.clock_hz


def table() -> Iterator[Case]:
    """All cases: every type with every number of heads and with every block size, other head sizes, and the gated."""
    found = [*gate(), *narrow()]
    for generation in ("v6e", "tpu7x"):
        found += [_decode(generation, heads, kv_dtype) for kv_dtype in _KV_DTYPES for heads in _NUM_KV_HEADS]
        found += [_decode(generation, heads, "bfloat16", size) for heads in (8, 1) for size in _BLOCK_SIZES]
        found += [_decode(generation, 8, kv_dtype, size) for kv_dtype in _KV_DTYPES for size in _BLOCK_SIZES]
        for head_dim in (64, 256):
            found += [_decode(generation, heads, "bfloat16", head_dim=head_dim) for heads in (8, 1)]
            found += [_decode(generation, 8, "int8", head_dim=head_dim)]
        found += [Case(generation, "prefill", 8, 4, 128, kv_dtype, 64) for kv_dtype in _KV_DTYPES]
        found += [Case(generation, "prefill", 1, 8, 128, "bfloat16", 64)]
    return iter(sorted(set(found), key=lambda case: (list(TOPOLOGIES).index(case.generation), str(case))))


def gate() -> Iterator[Case]:
    """A part of the table that a test can compile: of decodes every two values of two properties meet in one of it.

    Rows of an orthogonal array over GF(4); head sizes other than 128 are the table's alone.
    """
    doubled = (0, 2, 3, 1)
    for i, generation in enumerate(TOPOLOGIES):
        for j, num_kv_heads in enumerate(_NUM_KV_HEADS):
            kv_dtype, block_size = _KV_DTYPES[(i ^ j) % 3], _BLOCK_SIZES[(i ^ doubled[j]) % 3]
            yield _decode(generation, num_kv_heads, kv_dtype, block_size)
        yield Case(generation, "prefill", 8, 4, 128, "bfloat16", 64)


def few() -> Iterator[Case]:
    """A part of the gate: a decode of each generation, each of other heads, and prefills."""
    for generation, head in zip(TOPOLOGIES, (2, 0, 3, 1), strict=True):
        of_generation = [case for case in gate() if case.generation == generation]
        yield from (case for case in of_generation if case.kind == "prefill" or case is of_generation[head])


def narrow() -> Iterator[Case]:
    """Cases with the most computation for their bytes: one or two heads of 8 bits on tpu7x, and heads of 64 in int8.

    128 is the block size of a server on tpu7x.
    """
    for kv_dtype in _KV_DTYPES[1:]:
        for num_kv_heads in (2, 1):
            yield from (_decode("tpu7x", num_kv_heads, kv_dtype, block_size) for block_size in (64, 128))
    yield from (_decode(generation, 8, "int8", head_dim=64) for generation in ("v6e", "tpu7x"))


def _decode(generation: str, num_kv_heads: int, kv_dtype: str, block_size: int = 64, head_dim: int = 128) -> Case:
    return Case(generation, "decode", num_kv_heads, 8 if num_kv_heads < 4 else 4, head_dim, kv_dtype, block_size)
