"""Default sizes of a step: they depend on the platform, the model's length and the attention kernel.

The minima are the platform's defaults of `block_size`, `max_num_seqs` and `max_num_batched_tokens` in `jpaged.config`.
Options that are not set follow this rule:

1. Rows: as many as sequences of 1024 tokens fit next to the weights, rounded up to a power of two, up to 512 and to a
   MiB of block tables, which go to the device whole with every step.
2. Tokens: as many as matmuls need to take twice the time of reading the weights, rounded up to a power of two, up to
   4096. They are at least four times the rows, so that prompts have room next to decoding rows. If the device is not
   in the table of `jpaged.hardware`, its allocator reports the memory, and its multiprocessors and compute capability
   give an estimate of both rates. Without those, tokens are the platform's.
3. A step has a token for every row: more tokens than these if more rows were chosen, and fewer rows if fewer tokens
   were.
4. On a TPU blocks of 128 if one device's part of a smaller one is below 64 KiB, or if the block tables of the
   platform's rows take a MiB already.

If the platform's own attention kernel does not support these sizes, other options or the device, another backend runs:
`passed_over` gives the reason, and the option that would enable the kernel.

Reasons: a TPU starts a copy for each block, 15 to 58 cycles, and 64 KiB take 70 cycles of a v6e's memory. Rows share
the reading of weights, and cost little if they are empty; the tokens of a step share it too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpaged.checkpoints.names import weight_bytes
from jpaged.config import EngineConfig, iter_options, platform_default
from jpaged.device.context import check_windows, most_rows
from jpaged.device.kv_scales import kv_dtype
from jpaged.device.mesh import first_device, num_context_parts, num_shards, num_stages
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.hardware import Hardware, find_hardware, identify_hardware
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import Choice, Queries, choose
from jpaged.models.layer_kinds import count_state_bytes
from jpaged.models.model import Model
from jpaged.models.sharding import pad_for_sharding

_LARGER_BLOCKS = {"tpu": 128}
_LEAST_BLOCK_BYTES = 64 << 10
"""Bytes of a TPU's block in one layer below which starting its copy takes longer than the copy."""
_LEAST_ROWS, _MOST_ROWS = 8, 512
_MOST_TABLE_ENTRIES = 1 << 18
_MOST_TOKENS, _TOKENS_OF_ROW = 4096, 4
_SEQUENCE_TOKENS = 1024
"""Length of a sequence in the estimate of how many rows fit into memory."""
_BLOCK_SIZES = (16, 32, 64, 128)
"""Block sizes that `passed_over` tries."""
_BFLOAT16 = "--dtype bfloat16"
_READ = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_dtype")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that decide the shapes of a step; the fields have the options' names."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def blocks_per_seq(self) -> int:
        """Blocks of the longest sequence: the width of a block table."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class DeviceAttention:
    """The attention of one device, for the choice of a backend and of sizes.

    Attributes:
        model: as published.
        options: `attention_backend`, `kv_cache_dtype` and the sizes are read.
        device: of the kind to run on; it need not be attached.
        num_parts: devices that share the heads, or with data-parallel attention the sequences.
        num_context_parts: devices that share the slots of every block.
        num_stages: devices that share the layers.
    """

    model: Model
    options: EngineConfig
    device: jax.Device
    num_parts: int
    num_context_parts: int = 1
    num_stages: int = 1

    @classmethod
    def on(cls, model: Model, options: EngineConfig, mesh: Mesh) -> DeviceAttention:
        """Return the attention of each device of a mesh."""
        parts = num_shards(mesh), num_context_parts(mesh), num_stages(mesh)
        return cls(model, options, first_device(mesh), *parts)

    def sizes(self) -> StepSizes:
        """Return the chosen sizes, and those of the rule for options that are not set.

        Raises:
            InvalidArgument: max_model_len is beyond the model's, or blocks or windows cannot be divided into parts.
        """
        scheduler = self.options.scheduler
        limit = self.model.config.max_model_len
        max_model_len = self.options.model.max_model_len or limit
        if max_model_len > limit:
            raise InvalidArgument("max_model_len", f"{max_model_len} is above the limit of the model, {limit}")
        check_windows(self.model.config.attention_kinds, max_model_len, self.num_context_parts)
        block_size = self._block_size(max_model_len)
        own_rows, own_tokens = self._of_device(max_model_len, -(-max_model_len // block_size))
        tokens = scheduler.max_num_batched_tokens
        if self.model.config.is_encoder:
            if tokens is not None and tokens < max_model_len:
                raise InvalidArgument(
                    "max_num_batched_tokens",
                    f"{tokens} is below max_model_len ({max_model_len}): an encoder computes a prompt in one step",
                )
            own_tokens = max(own_tokens, max_model_len)
        rows = scheduler.max_num_seqs or min(own_rows, tokens or own_rows)
        return StepSizes(block_size, rows, tokens or max(rows, own_tokens), max_model_len)

    def choose(self, sizes: StepSizes) -> Choice:
        """Return the backend for steps of these sizes.

        Raises:
            Unsupported: the chosen one cannot run; names the option that would let it.
        """
        try:
            return self._choice(sizes)
        except Unsupported as error:
            raise Unsupported(f"{error}{self._remedy()}") from error

    def passed_over(self) -> list[str]:
        """Return a line for each backend made for the platform that `auto` passes over: the reason, and the remedy."""
        if self.options.model.attention_backend != "auto":
            return []
        choice = self._choice(self.sizes())
        return [
            f"attention {choice.backend}, not {backend}: {reason}{self._remedy()}"
            for backend, reason in choice.passed_over
        ]

    def reasons(self) -> list[str]:
        """Return a line that explains the default sizes; empty if all sizes were chosen, and on a CPU."""
        scheduler = self.options.scheduler
        chosen = (self.options.cache.block_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        if self.device.platform == "cpu" or None not in chosen:
            return []
        usable_bytes = self._usable_bytes()
        hardware, sizes = self._hardware(usable_bytes), self.sizes()
        steps = f"{sizes.max_num_seqs} rows, {sizes.max_num_batched_tokens} tokens and blocks of {sizes.block_size}"
        if usable_bytes is None:
            return [
                f"{steps}: the default for any {self.device.platform.upper()}; {self.device.device_kind} is not in "
                "the table"
            ]
        length = min(_SEQUENCE_TOKENS, sizes.max_model_len)
        num_fitting = self._num_fitting(usable_bytes, sizes.max_model_len)
        if hardware is None or find_hardware(self.device.device_kind) is None:
            line = (
                f"{steps}: {self.device.device_kind} is not in the table; its allocator has room for {num_fitting} "
                f"sequences of {length} tokens after the weights"
            )
            if hardware is not None:
                line += (
                    f"; {self.device.core_count} multiprocessors of compute capability "
                    f"{self.device.compute_capability} make about {hardware.ridge_tokens:.0f} FLOPs per byte of memory"
                )
            return [line]
        block_kib = (
            self._layout(sizes.block_size // self.num_context_parts).bytes_per_block
            / self.model.config.num_attention_layers
            / 1024
        )
        return [
            f"{steps}: {hardware.name} has room for {num_fitting} sequences of "
            f"{length} tokens after the weights, and {hardware.ridge_tokens:.0f} FLOPs per byte of memory; a block is "
            f"{block_kib:.0f} KiB per layer"
        ]

    def _block_size(self, max_model_len: int) -> int:
        """Return the chosen block size, or the rule's."""
        num_parts = self.num_context_parts
        if (chosen := self.options.cache.block_size) is not None:
            if chosen % num_parts:
                raise InvalidArgument(
                    "block_size",
                    f"{chosen} slots cannot be divided evenly among {num_parts} devices (context_parallel_size)",
                )
            return chosen
        platform = self.device.platform
        default, larger = platform_default("block_size", platform), _LARGER_BLOCKS.get(platform)
        is_small = self._layout(default).bytes_per_block < _LEAST_BLOCK_BYTES * self.model.config.num_attention_layers
        num_entries = platform_default("max_num_seqs", platform) * -(-max_model_len // (default * num_parts))
        return num_parts * (larger if larger and (is_small or num_entries >= _MOST_TABLE_ENTRIES) else default)

    def _of_device(self, max_model_len: int, table_width: int) -> tuple[int, int]:
        """Return the rows and tokens of a step that fit the device, or the platform's if the device is unknown."""
        platform = self.device.platform
        least_rows = platform_default("max_num_seqs", platform)
        least_tokens = platform_default("max_num_batched_tokens", platform)
        usable_bytes = self._usable_bytes()
        hardware = self._hardware(usable_bytes)
        if usable_bytes is None:
            return least_rows, least_tokens
        num_fitting = self._num_fitting(usable_bytes, max_model_len)
        of_device = min(_MOST_ROWS, _power_of_two(_MOST_TABLE_ENTRIES // table_width))
        rows = min(of_device * self._dp_size, _power_of_two(num_fitting))
        rows = max(least_rows, rows)
        ridge_tokens = 0 if hardware is None else math.ceil(2 * hardware.ridge_tokens)
        of_products = min(_MOST_TOKENS, max(least_tokens, _power_of_two(ridge_tokens)))
        return rows, max(of_products, _TOKENS_OF_ROW * (self.options.scheduler.max_num_seqs or rows))

    def _hardware(self, usable_bytes: int | None) -> Hardware | None:
        return identify_hardware(self.device, usable_bytes or 0)

    def _usable_bytes(self) -> int | None:
        """Return the memory of the device that programs may use; None if it is neither known nor reported."""
        hardware = find_hardware(self.device.device_kind)
        if hardware is not None:
            return hardware.usable_bytes
        stats = None if self.device.platform == "cpu" else self.device.memory_stats()
        return stats.get("bytes_limit") if stats else None

    def _num_fitting(self, usable_bytes: int, max_model_len: int) -> int:
        """Return how many sequences of 1024 tokens fit into one device's memory next to its weights."""
        share = self.options.cache.memory_utilization or platform_default("memory_utilization", self.device.platform)
        held = weight_bytes(self.model.config, self.model.dtype.itemsize, self.num_parts) / self.num_stages
        sequence_bytes = self._layout(1).bytes_per_block * min(_SEQUENCE_TOKENS, max_model_len) / self.num_stages
        sequence_bytes += count_state_bytes(self.model.config.layer_kinds, self.model.dtype) / self.num_parts
        num_pools = self.num_context_parts * self._dp_size
        return max(0, int((share * usable_bytes - held) * num_pools // sequence_bytes))

    @property
    def _dp_size(self) -> int:
        """Devices that each have the KV cache of some sequences."""
        return self.num_parts if self.model.config.has_dp_attention else 1

    def _layout(self, block_size: int) -> KVLayout:
        config = pad_for_sharding(self.model.config, self.num_parts)
        return KVLayout(
            num_layers=config.num_attention_layers,
            num_blocks=1,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads // (self.num_parts // self._dp_size),
            head_dim=config.head_dim,
            dtype=kv_dtype(self.options.cache.kv_cache_dtype, self.model.dtype),
            value_dim=config.value_dim,
        )

    def _choice(self, sizes: StepSizes) -> Choice:
        config = pad_for_sharding(self.model.config, self.num_parts)
        layout = self._layout(sizes.block_size // self.num_context_parts)
        dp_size = self._dp_size
        queries = Queries(
            config.num_heads // (self.num_parts // dp_size),
            self.model.dtype,
            most_rows(-(-sizes.max_num_seqs // dp_size), sizes.max_num_batched_tokens, self.num_context_parts),
            sizes.blocks_per_seq,
            -(-sizes.max_num_batched_tokens // dp_size),
        )
        return choose(self.options.model.attention_backend, self.device, layout, queries)

    def _runs(self, sizes: StepSizes) -> bool:
        """Return True if the chosen backend runs, or for `auto` the one made for the platform."""
        try:
            return not self._choice(sizes).passed_over
        except Unsupported:
            return False

    def _remedy(self) -> str:
        """Return a text about the change that would enable the backend; "" if there is none.

        It is a single option if that suffices.
        """
        ways = itertools.chain(self._others(), self._without())
        found = next((words for words, other in ways if other._runs(other.sizes())), None)
        return "" if found is None else f"; {found} would enable it"

    def _others(self) -> Iterator[tuple[str, DeviceAttention]]:
        """Yield this attention with one option changed, and its flag.

        Of limits it tries the highest that works, of block sizes the larger ones first.
        """
        sizes = self.sizes()
        own = sizes.block_size // self.num_context_parts
        for of_device in sorted(_BLOCK_SIZES, key=lambda size: (size < own, abs(size - own))):
            block_size = of_device * self.num_context_parts
            yield f"--block-size {block_size}", self._with(block_size=block_size)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            highest = self._highest(name, getattr(sizes, name))
            yield f"{_flag(name)} {highest}", self._with(**{name: highest})
        yield "--kv-cache-dtype auto", self._with(kv_cache_dtype="auto")
        yield _BFLOAT16, self._in_bfloat16()

    def _without(self) -> Iterator[tuple[str, DeviceAttention]]:
        """Yield this attention with some chosen options unset, the fewest first, each also in bfloat16."""
        defaults = {name: (section, spec.default) for name, section, spec in iter_options() if name in _READ}
        chosen = [n for n, (section, value) in defaults.items() if getattr(getattr(self.options, section), n) != value]
        for count in range(1, len(chosen) + 1):
            for names in itertools.combinations(chosen, count):
                words = f"leaving out {' and '.join(map(_flag, names))}"
                other = self._with(**{name: defaults[name][1] for name in names})
                yield words, other
                yield f"{words}, with {_BFLOAT16},", other._in_bfloat16()

    def _in_bfloat16(self) -> DeviceAttention:
        return dataclasses.replace(self, model=Model(self.model.config, jnp.dtype("bfloat16")))

    def _highest(self, name: str, value: int) -> int:
        """Return the largest value of an option, up to its own, with which the backend runs, or else the least."""
        least = self.sizes().max_num_seqs if name == "max_num_batched_tokens" else _LEAST_ROWS
        runs, fails = min(least, value), value + 1
        while fails - runs > 1:
            middle = (runs + fails) // 2
            other = self._with(**{name: middle})
            runs, fails = (middle, fails) if other._runs(other.sizes()) else (runs, middle)
        return runs

    def _with(self, **changes: Any) -> DeviceAttention:
        return dataclasses.replace(self, options=self.options.replace(**changes))


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << max(0, least - 1).bit_length()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
