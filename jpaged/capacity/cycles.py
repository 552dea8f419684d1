"""Cycles of the kernels, counted in the programs that libtpu compiles for them.

`cycles.json` is written by `python -m benchmarks.tpu_cycles --record`. Only instruction bundles are counted, without
stalls: a device can only take longer. Lookups return the nearest measured case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from jpaged.errors import InternalError

_PATH = Path(__file__).with_name("cycles.json")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention shape of one device: of a measured case, or of a lookup.

    Attributes:
        num_kv_heads: KV heads on the device.
        group: query heads of each KV head.
        kv_dtype: type of stored keys and values.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    kv_dtype: str
    block_size: int

    def distance(self, other: HeadShape) -> float:
        """Return the distance in doublings; another type or head size outweighs any number of heads."""
        far = 16.0 * (self.kv_dtype != other.kv_dtype) + 8.0 * abs(math.log2(self.head_dim / other.head_dim))
        heads = abs(math.log2(self.num_kv_heads / other.num_kv_heads)) + abs(math.log2(self.group / other.group)) / 2
        return far + heads + abs(math.log2(self.block_size / other.block_size)) / 4

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} x {self.group} heads of {self.head_dim}"
        return f"{heads}, {self.kv_dtype}, blocks of {self.block_size}"


@dataclass(frozen=True, slots=True)
class _AttentionCycles:
    """Measurement for the heads of one device, on a TPU generation."""

    generation: str
    num_kv_heads: int
    group: int
    head_dim: int
    kv_dtype: str
    block_size: int

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.num_kv_heads, self.group, self.head_dim, self.kv_dtype, self.block_size)


@dataclass(frozen=True, slots=True)
class DecodeCycles(_AttentionCycles):
    """Attention of decoding rows.

    Attributes:
        chunk_bytes: bytes that are awaited together.
        compute_per_mib: cycles for a MiB of keys and values.
        issue_per_block: cycles to start the copy of a block.
        wait_per_chunk: cycles to wait for a chunk.
        per_row: additional cycles for each row.
    """

    chunk_bytes: float
    compute_per_mib: float
    issue_per_block: float
    wait_per_chunk: float
    per_row: float


@dataclass(frozen=True, slots=True)
class ChunkCycles(_AttentionCycles):
    """Attention of prefill chunks: cycles of 256 queries of one head with 256 keys."""

    per_256x256_head: float


@dataclass(frozen=True, slots=True)
class SamplingCycles:
    """Sampler of some rows.

    Attributes:
        vocab: logits of a row on one device.
        what: sampling parameters of the rows.
    """

    generation: str
    vocab: int
    rows: int
    what: str
    cycles: float


_Kind = TypeVar("_Kind", DecodeCycles, ChunkCycles, SamplingCycles)
_Heads = TypeVar("_Heads", DecodeCycles, ChunkCycles)


@dataclass(frozen=True, slots=True)
class CountedCycles:
    """All measured cases."""

    decode: tuple[DecodeCycles, ...]
    chunks: tuple[ChunkCycles, ...]
    sampling: tuple[SamplingCycles, ...]

    @classmethod
    def read(cls, text: str) -> CountedCycles:
        """Parse the cases of a file.

        Raises:
            InternalError: a case lacks a number, or has a negative one.
        """
        found = json.loads(text)
        return cls(
            _entries(DecodeCycles, found["decode"]),
            _entries(ChunkCycles, found["chunks"]),
            _entries(SamplingCycles, found["sampling"]),
        )

    def decode_of(self, generation: str, heads: HeadShape) -> DecodeCycles | None:
        """Return the nearest decode case of a generation, or None."""
        return _nearest(self.decode, generation, heads)

    def chunks_of(self, generation: str, heads: HeadShape) -> ChunkCycles | None:
        """Return the nearest prefill case of a generation, or None."""
        return _nearest(self.chunks, generation, heads)


@cache
def counted_cycles() -> CountedCycles:
    """Return the cases shipped with the package."""
    return CountedCycles.read(_PATH.read_text(encoding="utf-8"))


def _nearest(cases: Iterable[_Heads], generation: str, heads: HeadShape) -> _Heads | None:
    ours = [case for case in cases if case.generation == generation]
    return min(ours, key=lambda case: heads.distance(case.heads), default=None)


def _entries(kind: type[_Kind], entries: Iterable[Mapping[str, Any]]) -> tuple[_Kind, ...]:
    """Parse cases; other keys of a case document the measurement."""
    names = [spec.name for spec in fields(kind)]
    cases = []
    for entry in entries:
        if missing := [name for name in names if name not in entry]:
            raise InternalError(f"cycles.json: a {kind.__name__} lacks {', '.join(missing)}: {dict(entry)}")
        values = {name: entry[name] for name in names}
        below = [name for name, value in values.items() if not isinstance(value, str) and not value >= 0]
        if below:
            raise InternalError(f"cycles.json: a {kind.__name__} has {below[0]} below 0: {dict(entry)}")
        cases.append(kind(**values))
    return tuple(cases)
