"""Cycles of the kernels, counted in the programs that libtpu compiles for them, and the times that follow from them.

`cycles.json` is written by `python -m benchmarks.tpu_cycles --record`. Only instruction bundles are counted, without
stalls: a device can only take longer. Lookups return the nearest measured case.

A layer of decoding rows takes, on each device, the larger of

    memory    bytes of their contexts / (bandwidth * HBM_EFFICIENCY)
    kernel    MiB * compute + blocks * issue + chunks * wait + rows * row, in cycles of the clock

and for prefill chunks, with another half tile of 256 keys for each query, because the last tile of a row is masked:

    kernel    (pairs + 128 * tokens) / (256 * 256) * heads * tile

A sampler is assumed to be like the nearest one that was measured, scaled by its logits.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from jpaged.errors import InternalError
from jpaged.hardware import Hardware
from jpaged.plan.cost import HBM_EFFICIENCY, StepLoad

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

    def get_decode(self, generation: str, heads: HeadShape) -> DecodeCycles | None:
        """Return the nearest decode case of a generation, or None."""
        return _nearest(self.decode, generation, heads)

    def get_chunks(self, generation: str, heads: HeadShape) -> ChunkCycles | None:
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


SAMPLED, SAMPLED_IN_PARTS = "top-p", "top-p, in parts"
"""Assumed sampling of every row: the kernel's case, and XLA's case if devices share the vocabulary."""
_MIB = 1 << 20
_TILE = 256


@dataclass(frozen=True, slots=True)
class CountedTimes:
    """Times of one device of a model.

    Attributes:
        hardware: the device's.
        clock_hz: clock of the cycles.
        heads: attention heads on the device.
        windows: tokens that the queries of each layer see; None for all.
        layer_bytes: bytes of one token's keys and values in one layer.
        vocab: logits of a row on the device.
        decode: the nearest measured case.
        chunks: the nearest measured case.
        sampling: the measured cases of the assumed sampling; if empty, sampling counts as 0.
    """

    hardware: Hardware
    clock_hz: float
    heads: HeadShape
    windows: tuple[int | None, ...]
    layer_bytes: float
    vocab: int
    decode: DecodeCycles
    chunks: ChunkCycles
    sampling: tuple[SamplingCycles, ...]

    @classmethod
    def find(
        cls,
        counted: CountedCycles,
        hardware: Hardware,
        heads: HeadShape,
        windows: tuple[int | None, ...],
        layer_bytes: float,
        vocab: int,
        *,
        is_split: bool = False,
    ) -> CountedTimes | None:
        """Return the times of a device, or None if its kernels were not measured.

        `is_split` means that the vocabulary is split over several devices.
        """
        generation = hardware.name.removeprefix("tpu-")
        decode, chunks = counted.get_decode(generation, heads), counted.get_chunks(generation, heads)
        if decode is None or chunks is None or hardware.clock_hz is None:
            return None
        what = SAMPLED_IN_PARTS if is_split else SAMPLED
        sampling = tuple(case for case in counted.sampling if (case.generation, case.what) == (generation, what))
        return cls(hardware, hardware.clock_hz, heads, windows, layer_bytes, vocab, decode, chunks, sampling)

    def attention_s(self, load: StepLoad) -> float:
        """Return the seconds of all layers, for decoding rows and prefill chunks."""
        seen = [(load.within(window), count) for window, count in Counter(self.windows).items()]
        return sum(count * (self._decode_s(load) + self._chunks_s(load)) for load, count in seen)

    def sampling_s(self, num_rows: int) -> float:
        """Return the seconds of the sampler."""
        case = self._get_sampling(num_rows)
        if case is None or num_rows == 0:
            return 0.0
        return case.cycles * (num_rows * self.vocab) / (case.rows * case.vocab) / self.clock_hz

    def _get_sampling(self, num_rows: int) -> SamplingCycles | None:
        def distance(case: SamplingCycles) -> float:
            return abs(math.log2(case.vocab / self.vocab)) + abs(math.log2(case.rows / max(1, num_rows)))

        return min(self.sampling, key=distance, default=None)

    def _decode_s(self, load: StepLoad) -> float:
        if not load.num_decoding:
            return 0.0
        case, num_bytes = self.decode, load.num_decoding_kv_tokens * self.layer_bytes
        context = load.num_decoding_kv_tokens / load.num_decoding
        num_blocks = load.num_decoding * math.ceil(context / self.heads.block_size)
        num_chunks = load.num_decoding * math.ceil(context * self.layer_bytes / case.chunk_bytes)
        cycles = num_bytes / _MIB * case.compute_per_mib + num_blocks * case.issue_per_block
        cycles += num_chunks * case.wait_per_chunk + load.num_decoding * case.per_row
        memory_s = num_bytes / (self.hardware.hbm_bytes_per_s * HBM_EFFICIENCY)
        return max(memory_s, cycles / self.clock_hz)

    def _chunks_s(self, load: StepLoad) -> float:
        num_tokens = load.num_tokens - load.num_decoding
        if num_tokens <= 0:
            return 0.0
        num_pairs = max(0.0, load.num_pairs - load.num_decoding_kv_tokens) + num_tokens * _TILE / 2
        num_tiles = num_pairs / _TILE**2 * self.heads.num_kv_heads * self.heads.group
        return num_tiles * self.chunks.per_256x256_head / self.clock_hz

    def lines(self, num_rows: int) -> list[str]:
        """Return lines that describe the measurements and their cases."""
        decode, chunks, sampling = self.decode, self.chunks, self._get_sampling(num_rows)
        found = [
            f"cycles at {self.clock_hz / 1e9:g} GHz, counted in the compiled kernels, without stalls; attention takes "
            f"at least the time to read its bytes at {HBM_EFFICIENCY:.0%} of "
            f"{self.hardware.hbm_bytes_per_s / 1e9:.0f} GB/s",
            f"decode attention, cycles: {decode.compute_per_mib:g} per MiB of KV, {decode.issue_per_block:g} per "
            f"block, {decode.wait_per_chunk:g} per chunk of {decode.chunk_bytes / _MIB:g} MiB, {decode.per_row:g} per "
            "row" + _counted_for(decode.heads, self.heads),
            f"prefill attention, cycles: {chunks.per_256x256_head:g} per 256 x 256 tile of a head"
            + _counted_for(chunks.heads, self.heads),
        ]
        if sampling is None:
            return [*found, "sampling is not included: its cycles were not counted"]
        return [
            *found,
            f"sampling: every row uses {sampling.what}; {sampling.cycles:g} cycles counted for {sampling.rows} rows of "
            f"{sampling.vocab} logits, scaled to other numbers of rows and logits",
        ]


def _counted_for(counted: HeadShape, asked: HeadShape) -> str:
    return "" if counted == asked else f" (counted for {counted}; here {asked})"
