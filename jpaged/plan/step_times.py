"""Targets of a plan, and the duration of a step on them: device time, sums over devices, at least the host's time.

    products  = weights over bandwidth, or FLOPs over peak (`jpaged.plan.cost`)
    attention, sampling = measured cycles (`jpaged.plan.cycles`), on TPUs
    glue      = a share of products and attention: norms, rotations, layouts
    sums      = (2 * layers + 1) all-reduces of [tokens, E] in the type that the program sums in, each 2 * (n - 1) / n
                of the bytes over the links and 2 * (size - 1) hops along every axis; if the program sums in parts that
                overlap with products, only the time that the products do not hide: by the compiler's cycles of the
                instructions next to each sum, or by `exposed_s` if the step was not compiled
    exchanges = with data-parallel attention, of each layer with experts: rows to the devices of their experts, and
                results back, each E numbers per row and device that it is sent to (`mean_devices`); a message passes
                the mean distance of two devices on a TPU's mesh. Only other layers, and the ends, have sums.
    merges    = a layer's outputs [tokens, H, D] added up over the devices that share contexts, and their log-sum-exp
                [tokens, H] gathered, in float32; each of those devices reads its part of the contexts
    step      = all of these, and at least the host's part

If no cycles are known, as for GPUs, the roofline includes attention, with lower efficiencies, and omits sampling and
glue. The host prepares a step while the device runs the previous one, so its time counts only if it is longer. Nothing
was measured on these devices.

| target | devices | names |
|---|---|---|
| TPU | all of a slice; jax counts two on a chip of tpu7x | as in libtpu: `v6e:2x4` |
| GPU | some of one machine | `h200`, `a100:8` |
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.names import embedding_bytes, model_leaves, num_params, weight_bytes
from jpaged.device.aot.deployment import CompiledSum
from jpaged.device.aot.topology import GPUS, TOPOLOGIES, device_kind
from jpaged.device.mesh import Microbatches
from jpaged.device.sharded_matmul import num_column_parts, num_row_chunks
from jpaged.errors import InternalError, InvalidArgument
from jpaged.hardware import HARDWARE, Hardware, find_hardware
from jpaged.models.config import Mixture, ModelConfig
from jpaged.models.layer_kinds import count_state_bytes
from jpaged.models.param_specs import leaf_format
from jpaged.models.sharding import pad_for_sharding
from jpaged.plan.cost import ASSUMED, HBM_EFFICIENCY, PRODUCTS_EFFICIENCY, ModelShape, Roofline, StepLoad
from jpaged.plan.cycles import CountedCycles, CountedTimes, HeadShape, counted_cycles

_MAX_GPUS = 8
_FAMILIES = {name.removeprefix("tpu-"): device for name, device in HARDWARE.items()}


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """Devices of one kind.

    Attributes:
        name: as the user writes it.
        family: key of prices: the generation, or the GPU.
        platform: platform of the compiler, `tpu` or `cuda`.
        num_devices: as jax counts them.
        num_chips: as they are billed.
        hardware: data of each device.
        shape: devices along each axis; a message passes all devices of an axis.
    """

    name: str
    family: str
    platform: str
    num_devices: int
    num_chips: int
    hardware: Hardware
    shape: tuple[int, ...]


def find_target(name: str) -> PlanTarget:
    """Return the target of a name.

    Raises:
        InvalidArgument: the name is unknown; the message lists the known ones.
    """
    topology = TOPOLOGIES.get(name)
    if topology is not None:
        chip = topology.generation
        return PlanTarget(
            name, chip.name, "tpu", topology.num_devices, topology.num_chips, _FAMILIES[chip.name], topology.shape
        )
    family, _, count = name.partition(":")
    if family in GPUS and (count or "1") in map(str, range(1, _MAX_GPUS + 1)):
        num_devices = int(count or "1")
        return PlanTarget(name, family, "cuda", num_devices, num_devices, _hardware(family), (num_devices,))
    raise InvalidArgument(
        "topology",
        f"{name!r} is not known; known are {', '.join(GPUS)}, each with an optional suffix :1 to :{_MAX_GPUS}, and "
        f"{', '.join(TOPOLOGIES)}",
    )


def _hardware(gpu: str) -> Hardware:
    """Return the hardware of a GPU that can be compiled for."""
    found = find_hardware(device_kind(gpu))
    if found is None:
        raise InternalError(f"{gpu} reports itself as {device_kind(gpu)!r}, which is not in the hardware table")
    return found


LINK_EFFICIENCY = 0.5
"""Used share of a device's links: small slices have no wrap-around, and a ring does not use all links at once."""
HOP_S = 1e-6
_FLOAT32 = 4
GLUE_SHARE = 0.03
"""Share of products and attention that norms, rotations and layouts take in addition."""
HOST_S, HOST_ROW_S = 0.1e-3, 0.01e-3
"""Upper bound of the host's step time: 0.74 ms for 64 rows; measurements: `benchmarks/results/host_step.json`."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Parts of a step's time, in seconds.

    Attributes:
        products_s: includes attention if that is not measured.
        host_s: preparation of the next step, concurrent with the device.
    """

    products_s: float
    attention_s: float
    sampling_s: float
    glue_s: float
    sums_s: float
    host_s: float
    merges_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration of the whole step."""
        on_device_s = self.products_s + self.attention_s + self.sampling_s + self.glue_s + self.sums_s + self.merges_s
        return max(self.host_s, on_device_s)

    def __str__(self) -> str:
        named = dataclasses.asdict(self)
        if self.host_s < self.seconds:
            del named["host_s"]
        return ", ".join(f"{name.removesuffix('_s')} {value * 1e3:.2f}" for name, value in named.items() if value)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A copy of a model on some devices of a target, as planned or compiled.

    Attributes:
        kv_dtype: type of stored keys and values.
        itemsize: bytes of a weight.
        num_devices: devices that share the copy.
        weight_bytes: bytes on one device.
        block_size: slots of a block on one device.
        bytes_per_block: all layers, on one device.
        number_bytes: bytes of each number that is summed over devices.
        adapter_bytes: the part of weight_bytes for adapter slots.
        num_context_parts: parts of every context, each on num_devices devices that share the copy.
        overlaps_sums: the program sums hidden states in parts: see `jpaged.device.sharded_matmul`.
        compiled_sums: if so, the sums of each compiled forward, by its tokens.
        token_sizes: packed tokens of the compiled forwards, ascending, to which steps are padded; empty pads none.
        num_stages: parts of the layers, which each run on num_devices times num_context_parts devices.
    """

    config: ModelConfig
    kv_dtype: str
    itemsize: int
    target: PlanTarget
    num_devices: int
    weight_bytes: int
    bytes_per_block: int
    block_size: int
    number_bytes: float
    adapter_bytes: int = 0
    num_context_parts: int = 1
    overlaps_sums: bool = False
    compiled_sums: Mapping[int, Sequence[CompiledSum]] = dataclasses.field(default_factory=dict)
    token_sizes: tuple[int, ...] = ()
    num_stages: int = 1

    @property
    def _model_bytes(self) -> float:
        """Bytes of the weights of one copy, of which each stage has its layers and the whole vocabulary."""
        num_ends = 1 if self.config.tie_word_embeddings else 2
        ends = num_ends * embedding_bytes(self.config, self.itemsize)
        return self.weight_bytes * self.num_devices * self.num_stages - (self.num_stages - 1) * ends

    def step_times(self, counted: CountedCycles | None = None) -> PlannedStepTimes:
        """Return the step times. An embedding that is only looked up is ignored, because a step reads little of it.

        Args:
            counted: cycles of kernels; defaults to those of the package.
        """
        config, num_devices, hardware = self.config, self.num_devices, self.target.hardware
        head_params = config.vocab_size * config.hidden_size
        looked_up = 0 if config.tie_word_embeddings else head_params
        num_parts = self.num_context_parts
        seen = (kind.sliding_window for kind in config.attention_kinds)
        windows = tuple(None if window is None else -(-window // num_parts) for window in seen)
        shape = ModelShape(
            num_params=num_params(config) - looked_up,
            num_layers=config.num_layers,
            query_width=config.query_width * config.num_attention_layers // config.num_layers,
            weight_bytes=self._model_bytes - (embedding_bytes(config, self.itemsize) if looked_up else 0),
            kv_bytes_per_token=self.bytes_per_block * (1 if config.has_dp_attention else num_devices) / self.block_size,
            head_params=head_params,
            adapter_params=self.adapter_bytes * num_devices / self.itemsize,
            windows=windows,
            fp8_share=fp8_share(config) if hardware.multiplies_fp8 else 0.0,
            state_bytes=count_state_bytes(config.layer_kinds, np.dtype(f"f{self.itemsize}")),
            **expert_shape(config),
        )
        local = pad_for_sharding(config, num_devices)
        heads = HeadShape(
            num_kv_heads=-(-local.num_kv_heads // num_devices),
            group=local.num_heads // local.num_kv_heads,
            head_dim=local.head_dim,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
        )
        # Kernels over latents were not measured.
        times = (
            None
            if config.value_dim is not None
            else CountedTimes.find(
                counted or counted_cycles(),
                hardware,
                heads,
                windows,
                self.bytes_per_block / self.block_size / config.num_attention_layers,
                math.ceil(local.vocab_size / num_devices),
                is_split=num_devices > 1,
            )
        )
        roofline = Roofline(shape, hardware, num_devices)
        outputs = local.num_heads // num_devices * (local.value_dim or local.head_dim)
        numbers = OutputNumbers(outputs, local.num_heads // num_devices)
        matrices = layer_matrices(config) if self.overlaps_sums else None
        exchange = RowMessages.of(config, num_devices, self.itemsize)
        return PlannedStepTimes(
            *(roofline, self.target, config.hidden_size, self.number_bytes, times, num_parts, numbers, matrices),
            *(exchange, self.token_sizes, self.num_stages, self.compiled_sums),
        )


@dataclass(frozen=True, slots=True)
class OutputNumbers:
    """Attention outputs of a token on one device: numbers of all heads, and log-sum-exps."""

    outputs: int = 0
    heads: int = 0


def mean_devices(mixture: Mixture, num_devices: int) -> float:
    """Return the mean number of devices with experts of a row, if rows choose groups, and experts in them, evenly.

    A device has consecutive experts: of one group, or of several whole ones.
    """
    routing = mixture.routing
    own = routing.num_experts // num_devices
    of_group = routing.num_experts // routing.num_groups
    held, own = max(1, own // of_group), min(own, of_group)
    eligible = routing.top_groups * of_group
    used = 0.0
    for chosen in range(min(held, routing.top_groups) + 1):
        ways = math.comb(held, chosen) * math.comb(routing.num_groups - held, routing.top_groups - chosen)
        missed = math.comb(eligible - chosen * own, routing.top_k) / math.comb(eligible, routing.top_k)
        used += ways / math.comb(routing.num_groups, routing.top_groups) * (1 - missed)
    return num_devices * used


@dataclass(frozen=True, slots=True)
class RowMessages:
    """Rows that devices send to experts and back, with data-parallel attention.

    Attributes:
        num_layers: layers with experts.
        num_devices: mean devices that a row is sent to, its own included.
        number_bytes: bytes of each number of a row.
    """

    num_layers: int
    num_devices: float
    number_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, num_devices: int, number_bytes: int) -> RowMessages | None:
        """Return the messages of a model on some devices; None if its devices have the rows of all sequences."""
        if not config.has_dp_attention or num_devices == 1:
            return None
        num_layers = sum(kind.is_sparse for kind in config.layer_kinds)
        sent_to = 0.0 if config.mixture is None else mean_devices(config.mixture, num_devices)
        return cls(num_layers, sent_to, number_bytes)

    def sent_bytes(self, num_tokens: int, width: int, num_devices: int) -> float:
        """Return the bytes that a device sends to others in one direction of a layer, to experts or back."""
        num_rows = num_tokens / num_devices * self.num_devices * (num_devices - 1) / num_devices
        return num_rows * width * self.number_bytes


@dataclass(frozen=True, slots=True)
class PlannedStepTimes:
    """Step times of a model split over some devices of a target.

    Attributes:
        roofline: of the model on these devices.
        target: the target of the devices.
        hidden_size: width of the sums over devices.
        number_bytes: bytes of each number that is summed over devices.
        counted: times of attention and sampling of one device; None if no cycles are known.
        num_context_parts: parts of every context.
        numbers: attention outputs that are merged over these parts.
        matrices: numbers of each of a layer's matrices, by name, if sums of parts overlap with products; else None.
        messages: rows exchanged for experts instead of sums; None for tensor-parallel attention.
        token_sizes, compiled_sums: see `PlannedModel`.
        num_stages: parts of the layers, each on these devices.
    """

    roofline: Roofline
    target: PlanTarget
    hidden_size: int
    number_bytes: float
    counted: CountedTimes | None = None
    num_context_parts: int = 1
    numbers: OutputNumbers = OutputNumbers()
    matrices: Mapping[str, int] | None = None
    messages: RowMessages | None = None
    token_sizes: tuple[int, ...] = ()
    num_stages: int = 1
    compiled_sums: Mapping[int, Sequence[CompiledSum]] = dataclasses.field(default_factory=dict)

    def parts(self, load: StepLoad) -> StepParts:
        """Return the parts of a step's time.

        With stages, a turn takes the time of one microbatch in a stage's layers; the exchange between two turns is
        neglected.
        """
        whole = self._parts(load)
        if self.num_stages == 1:
            return whole
        padded = 1 << (load.num_tokens - 1).bit_length()
        num = Microbatches.of(padded, self.num_stages, self.target.platform).num
        one, turns = self._parts(load.in_microbatches(num)), (num + self.num_stages - 1) / self.num_stages
        in_layers = ("products_s", "attention_s", "glue_s", "sums_s", "merges_s")
        return dataclasses.replace(whole, **{name: turns * getattr(one, name) for name in in_layers})

    def _parts(self, load: StepLoad) -> StepParts:
        """Return the parts of a step's time without stages."""
        num_tokens, host_s = load.num_tokens, HOST_S + HOST_ROW_S * load.num_rows
        merges_s = self._merges_s(num_tokens)
        load = load.in_parts(self.num_context_parts)
        if self.counted is None:
            sums_s = self._sums_s(num_tokens, 0.0)
            return StepParts(self.roofline.step_s(load), 0.0, 0.0, 0.0, sums_s, host_s, merges_s)
        products_s, attention_s = self.roofline.products_s(load), self.counted.attention_s(load)
        glue_s, sums_s = GLUE_SHARE * (products_s + attention_s), self._sums_s(num_tokens, products_s)
        return StepParts(
            products_s, attention_s, self.counted.sampling_s(load.num_rows), glue_s, sums_s, host_s, merges_s
        )

    def step_s(self, load: StepLoad) -> float:
        """Return the seconds of a step."""
        return self.parts(load).seconds

    def assumptions(self, num_rows: int) -> list[str]:
        """Return lines that describe the assumptions, for steps of at most num_rows rows."""
        links = f"{LINK_EFFICIENCY:.0%} of the links between devices"
        peak = "bfloat16 peak"
        if share := self.roofline.shape.fp8_share:
            peak += f" (twice that for the {share:.0%} of the layers' parameters that are multiplied in 8-bit floats)"
        if self.counted is None:
            return [
                f"no cycles were counted for {self.target.family}: a roofline at {ASSUMED.bandwidth_efficiency:.0%} "
                f"of the HBM's bandwidth, {ASSUMED.flops_efficiency:.0%} of the {peak} and {links}, including "
                "attention but not sampling"
            ]
        return [
            f"matrix products at {PRODUCTS_EFFICIENCY:.0%} of the {peak}, weights at {HBM_EFFICIENCY:.0%} of "
            f"the HBM's bandwidth, {links}, and {GLUE_SHARE:.0%} of products and attention for all else",
            *self.counted.lines(num_rows),
        ]

    def exchange_s(self, link_bytes: float) -> float:
        """Return the seconds of one all-reduce that sends this many bytes over each device's links."""
        n = self.roofline.num_devices
        # A part of the slice is assumed to be a line.
        axes = self.target.shape if n == self.target.num_devices else (n,)
        hops = sum(2 * (size - 1) for size in axes)
        return link_bytes / (self.target.hardware.link_bytes_per_s * LINK_EFFICIENCY) + max(hops, 2) * HOP_S

    def message_s(self, num_tokens: int) -> float:
        """Return the seconds in which all devices send rows to experts, or back, in one layer."""
        if self.messages is None:
            return 0.0
        n = self.roofline.num_devices
        axes = self.target.shape if n == self.target.num_devices and self.target.platform == "tpu" else (n,)
        sent_bytes = self.messages.sent_bytes(num_tokens, self.hidden_size, n)
        is_mesh = self.target.platform == "tpu"
        distance = sum((size * size - 1) / (3 * size) for size in axes) * n / (n - 1) if is_mesh else 1.0
        rate = self.target.hardware.link_bytes_per_s * LINK_EFFICIENCY
        return sent_bytes * distance / rate + max(sum(size - 1 for size in axes) if is_mesh else 1, 1) * HOP_S

    def _sums_s(self, num_tokens: int, products_s: float) -> float:
        """Return the seconds during which devices only sum, of a step with these matrix products; 0 if unknown."""
        n, num_layers = self.roofline.num_devices, self.roofline.shape.num_layers
        if n == 1:
            return 0.0
        num_tokens = next((size for size in self.token_sizes if size >= num_tokens), num_tokens)  # sums have padding
        link_bytes = 2 * (n - 1) / n * num_tokens * self.hidden_size * self.number_bytes
        layer_weights = sum((self.matrices or {}).values()) // n
        whole_s, chunks = self.exchange_s(link_bytes), num_row_chunks(num_tokens, layer_weights)
        parts = num_column_parts(num_tokens // chunks, self.hidden_size)
        if self.messages is not None:
            num_sums = num_layers - self.messages.num_layers + 2
            return num_sums * whole_s + 2 * self.messages.num_layers * self.message_s(num_tokens)
        if self.compiled_sums.get(num_tokens):
            return self._unhidden_s(self.compiled_sums[num_tokens])
        if self.matrices is None or parts == 1 or products_s == 0.0:
            return (2 * num_layers + 1) * whole_s
        part_s = self.exchange_s(link_bytes / parts / chunks)
        share = products_s / parts / chunks / self.roofline.shape.num_params
        times = {name: share * size for name, size in self.matrices.items()}
        return whole_s + num_layers * exposed_s(times, part_s, parts, chunks)

    def _unhidden_s(self, sums: Sequence[CompiledSum]) -> float:
        """Return the seconds that the instructions next to the sums of a compiled step do not hide."""
        n, clock_hz = self.roofline.num_devices, self.target.hardware.clock_hz
        unhidden_s = 0.0
        for one in sums:
            hidden_s = one.hidden_cycles / clock_hz if clock_hz else 0.0
            unhidden_s += one.num_runs * max(0.0, self.exchange_s(2 * (n - 1) / n * one.num_bytes) - hidden_s)
        return unhidden_s

    def _merges_s(self, num_tokens: int) -> float:
        n = self.num_context_parts
        if n == 1:
            return 0.0
        summed, gathered = (_FLOAT32 * num_tokens * num for num in (self.numbers.outputs, self.numbers.heads))
        num_bytes = 2 * (n - 1) / n * summed + (n - 1) * gathered
        moved_s = num_bytes / (self.target.hardware.link_bytes_per_s * LINK_EFFICIENCY)
        return self.roofline.shape.num_layers * (moved_s + 3 * (n - 1) * HOP_S)


_IN_ORDER = ("out", "up", "down", "qkv")


def layer_matrices(config: ModelConfig) -> dict[str, int]:
    """Return the numbers of each matrix of a dense layer, by name; gate and up are one, `up`."""
    sizes = {leaf.path[-2]: math.prod(leaf.shape) for leaf in model_leaves(config).layers[0] if len(leaf.shape) > 1}
    return {name: sizes.get(name, 0) or sizes["gate_up"] for name in _IN_ORDER}


def exposed_s(products_s: Mapping[str, float], sum_s: float, parts: int, chunks: int = 1) -> float:
    """Return the seconds of a layer during which devices only sum, between the products of parts.

        out | 0 | 1 | 2 |                          down | 0 | 1 | 2 |
        sums    | 0 ... | 1 ... | 2 ... |          sums     | 0 ... | 1 ... | 2 ... |
        up              | 0 |   | 1 |   | 2 |      qkv              | 0 |   | 1 |   | 2 |

    With chunks of rows, each chunk has `up` and `down` after the other, so that its sums overlap with the next one.

    Args:
        products_s: of a part of each matrix, by name, for the rows of a chunk.
        sum_s: of the sum of a part.
        parts: of the columns of states.
    """
    feed_forward = [(name, chunk) for chunk in range(chunks) for name in ("up", "down")]
    order = [*(("out", chunk) for chunk in range(chunks)), *feed_forward, *(("qkv", chunk) for chunk in range(chunks))]
    sources, summed_s = {"up": "out", "qkv": "down"}, dict[tuple[str, int, int], float]()
    now_s = computed_s = links_s = 0.0
    for (name, chunk), part in itertools.product(order, range(parts)):
        if name in sources:
            now_s = max(now_s, summed_s[sources[name], chunk, part])
        now_s, computed_s = now_s + products_s[name], computed_s + products_s[name]
        if name not in sources:
            links_s = summed_s[name, chunk, part] = max(now_s, links_s) + sum_s
    return now_s - computed_s


def expert_shape(config: ModelConfig) -> dict[str, Any]:
    """Return the `ModelShape` fields of a model's experts: their parameters, and the share that a token uses."""
    if config.mixture is None:
        return {}
    routing, num_sparse = config.mixture.routing, sum(kind.is_sparse for kind in config.layer_kinds)
    num_matrices = 3.0 if config.mixture.gate.has_gates else 2.0
    expert_params = num_matrices * config.hidden_size * config.mixture.width * routing.num_experts * num_sparse
    return {"expert_params": expert_params, "expert_share": routing.top_k / routing.num_experts}


def fp8_share(config: ModelConfig) -> float:
    """Return the share of the layers' parameters in matrices whose rows are rounded to 8-bit floats as well."""
    sizes = {True: 0, False: 0}
    for leaf in (leaf for layer in model_leaves(config).layers for leaf in layer):
        form = leaf_format(config.quantization, leaf)
        sizes[form is not None and (form.activations or "").startswith("fp8")] += math.prod(leaf.shape)
    return sizes[True] / sum(sizes.values())


ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}


def stored_shape(
    path: Path, dtype: str | None = None, kv_dtype: str | None = None, quantization: str = "auto"
) -> ModelShape:
    """Return what a step of a checkpoint reads and computes, from its config.

    Args:
        path: as `find_folder` returns it.
        dtype: type of weights that are not quantized, in the server; None for that of the files.
        kv_dtype: type of the KV cache; None for that of the weights.
        quantization: method by which weights are rounded at loading.

    Raises:
        InvalidArgument, Unsupported: as `read_config`.
    """
    config = read_config(path)
    if quantization != "auto":
        from jpaged.checkpoints.quantized.quantizer import quantized_here  # imports jax

        config = quantized_here(config, quantization)
    item_bytes = ITEM_BYTES.get(dtype or "") or ITEM_BYTES[config.checkpoint_dtype or "float32"]
    head_params = config.vocab_size * config.hidden_size
    looked_up = 0 if config.tie_word_embeddings else head_params
    return ModelShape(
        num_params=num_params(config) - looked_up,
        num_layers=config.num_layers,
        query_width=config.query_width * config.num_attention_layers // config.num_layers,
        weight_bytes=weight_bytes(config, item_bytes) - (embedding_bytes(config, item_bytes) if looked_up else 0),
        kv_bytes_per_token=config.num_attention_layers * config.kv_width * ITEM_BYTES.get(kv_dtype or "", item_bytes),
        head_params=head_params,
        state_bytes=count_state_bytes(config.layer_kinds, np.dtype(f"f{item_bytes}")),
        **expert_shape(config),
    )
