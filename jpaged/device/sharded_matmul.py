"""Matmuls that are split over the devices of a mesh: quantized matrices, experts, and sums that overlap with matmuls.

Quantized matrices that a kernel multiplies with carry partition specs. Of experts, each device has a part of every one,
or some whole ones.

If attention is tensor-parallel, hidden states are whole on every device between layers, so each device already has the
rows for the experts that it holds. It computes with its own matrices, and one sum over the devices ends the layer, as
in a dense layer. If attention is data-parallel, a device has the rows of some sequences, and sends each row to the
devices that have experts for it (`RowExchange`): once to each, whatever their number there. One sum of their results
comes back. For T rows of E numbers, d devices per row and n devices, a device sends

    replicated    2 (n - 1) / n  T E        the sum: scattered, and gathered again; T E float32 numbers
    exchanged     2 (n - 1) / n  T E d / n      rows to the experts, and results back, in the type of the rows

Messages have any length (ragged all-to-all), and there is room for all rows of the step at each device, so no row is
dropped. XLA for CPUs has no such collective; there each pair of devices exchanges T / n rows, padded.

If experts are balanced (`ExpertMap`), an expert may be on any device, and on several. Then results come back for each
of a row's K experts. One device sums them in the order in which the router chose them. So a row's numbers do not depend
on where experts are, and `exchange_experts` may move them between any two steps. A device sends

    balanced      (n - 1) / n  T E (d + K) / n     exchanged: rows to the experts, K results of each back
    balanced      (n - 1) / n  T E (K / n + 1)     replicated: K results of each to one device, the sums gathered

Dense layers are summed twice, after attention and after the feed-forward. On TPUs the hidden states are summed in parts
of their columns, so that the compiler overlaps the sum of one part with the matmuls of others
(`jpaged.models.layers.ColumnParts`). Long steps have chunks of rows, too: the feed-forward of one chunk overlaps with
the sums of the other. Each chunk reads the weights of the layer, which takes less time than its products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.device.mesh import (
    MODEL_AXIS,
    TOKENS_SPEC,
    first_device,
    num_context_parts,
    num_shards,
    num_stages,
    on_shards,
    partition_spec,
)
from jpaged.kernels.cuda_library import unsupported_gpu_reason
from jpaged.kernels.experts import (
    ExpertAdapters,
    ExpertsBackend,
    ExpertsKernel,
    ExpertWeights,
    Routes,
    StackedExperts,
    sum_experts,
)
from jpaged.kernels.matmul import QuantizedMatrix
from jpaged.kernels.matmul.on_device import PartedMatrix, kernel_takes
from jpaged.kernels.matmul.triton.grouped import choose_backend
from jpaged.kernels.mixture_kind import GateFunction
from jpaged.models.config import Mixture, ModelConfig
from jpaged.models.decoder.leaves import expert_axes
from jpaged.models.layers import Params
from jpaged.models.model import Model, leaf_axes, placed_leaves
from jpaged.models.param_specs import EXPERT_AXES, LogicalAxes
from jpaged.models.stack import LayerMode

_KINDS = frozenset({"TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x"})
"""Devices for which libtpu runs a sum within matmuls; for v5e it compiles the parts to synchronous sums."""
_LEAST_WEIGHTS = 3 << 24
"""Numbers of a layer's matrices on one device at least: matmuls of fewer are shorter than the sums they would hide."""
_LEAST_STATES: Mapping[int, int] = {4: 1 << 22, 2: 1 << 19}
"""Numbers of hidden states at least, by parts: smaller parts take mainly the latency of their sums."""
_CHUNK_ROWS = 1024
"""Rows of a chunk at least: products of fewer may take as long as reading their weights, which each chunk does."""
_CHUNK_WEIGHTS = 3 << 25
"""Numbers of a layer's matrices on one device at least: chunks of smaller layers cost more than they hide."""
_LANES = 128
WIDER: Mapping[np.dtype, np.dtype] = {
    jnp.dtype(jnp.int4): jnp.dtype(jnp.int8),
    jnp.dtype(jnp.float4_e2m1fn): jnp.dtype(jnp.float8_e4m3fn),
}
"""8-bit types that represent all numbers of 4-bit types."""


def overlaps_sums(model: Model, layer_mode: LayerMode, mesh: Mesh, *, has_adapters: bool) -> bool:
    """Return True if a model's larger steps sum hidden states in parts.

    Quantized matrices and adapters have no parts.
    """
    is_split = num_context_parts(mesh) == num_stages(mesh) == 1
    if has_adapters or not is_split or layer_mode != "scan":
        return False
    return hides_sums(model, num_shards(mesh), first_device(mesh).device_kind)


def hides_sums(model: Model, num_devices: int, device_kind: str) -> bool:
    """Return True if parts of a model on some devices have matmuls that are long enough to hide the sums of parts."""
    if num_devices == 1 or device_kind not in _KINDS:
        return False
    is_large = count_layer_weights(model.config, num_devices) >= _LEAST_WEIGHTS
    return is_large and model.dtype != np.float16 and model.takes_column_parts


@functools.lru_cache(maxsize=32)
def count_layer_weights(config: ModelConfig, num_devices: int) -> int:
    """Return the numbers of the first layer's matrices on one device."""
    layer = (leaf for path, (leaf, *_) in placed_leaves(config, "loop") if path[:2] == ("layers", 0))
    return sum(math.prod(leaf.shape) for leaf in layer) // num_devices


def state_parts(num_tokens: int, config: ModelConfig, num_devices: int) -> tuple[int, int]:
    """Return the chunks of the rows of hidden states and the parts of their columns, if a model has parts."""
    num_chunks = num_row_chunks(num_tokens, count_layer_weights(config, num_devices))
    return num_chunks, num_column_parts(num_tokens // num_chunks, config.hidden_size)


def num_column_parts(num_tokens: int, width: int) -> int:
    """Return the parts of hidden states `[T, E]`, each of whole vectors of columns: 1, 2 or 4."""
    fitting = (parts for parts in _LEAST_STATES if width % (parts * _LANES) == 0)
    return next((parts for parts in fitting if num_tokens * width >= _LEAST_STATES[parts]), 1)


def num_row_chunks(num_tokens: int, layer_weights: int) -> int:
    """Return the chunks of the rows of hidden states in parts, each with equally many: 1 or 2.

    Args:
        layer_weights: numbers of a layer's matrices on one device.
    """
    has_chunks = layer_weights >= _CHUNK_WEIGHTS and num_tokens >= 2 * _CHUNK_ROWS and num_tokens % 2 == 0
    return 2 if has_chunks else 1


def in_parts(params: Params, model: Model, layer_mode: LayerMode, mesh: Mesh) -> Params:
    """Return the parameters, with partition specs attached to each dense matrix that a kernel multiplies with.

    XLA partitions the other matmuls; experts are partitioned layer by layer, too.
    """
    config = model.config
    if mesh.size == 1 or layer_mode != "loop" or config.quantization is None:
        return params
    specs = {
        path: _matrix_specs(leaf_axes(config.quantization, leaf, model.dtype, is_stacked=False))
        for path, (leaf, *_) in placed_leaves(config, layer_mode)
        if path[0] == "layers" and EXPERT_AXES.isdisjoint(leaf.axes)
    }

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        spec = specs.get(tuple(key for key in map(_key, path) if key != "base"))  # `AdaptedMatrix` adds the key "base"
        if not isinstance(leaf, QuantizedMatrix) or spec is None:
            return leaf
        return PartedMatrix(leaf, spec, mesh) if kernel_takes(_part(leaf, spec, mesh), first_device(mesh)) else leaf

    marked: Params = jax.tree_util.tree_map_with_path(
        mark, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix)
    )
    return marked


def _matrix_specs(axes: Any) -> QuantizedMatrix | None:
    """Return the partition specs of a matrix's arrays, from the names of their axes; None if it is not quantized."""
    if not isinstance(axes, QuantizedMatrix):
        return None
    specs: QuantizedMatrix = jax.tree.map(
        lambda names: partition_spec(*names), axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    return specs


def _part(matrix: QuantizedMatrix, specs: QuantizedMatrix, mesh: Mesh) -> QuantizedMatrix:
    """Return the shapes of one device's part."""

    def part(array: jax.Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)

    parts: QuantizedMatrix = jax.tree.map(part, matrix, specs)
    return parts


def _key(key: Any) -> str | int:
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    found: str = key.key if isinstance(key, jax.tree_util.DictKey) else key.name
    return found


_BACKENDS: dict[str, ExpertsBackend] = {"cpu": "tiles", "tpu": "ragged"}


def experts_backend(device: jax.Device) -> ExpertsBackend:
    """Return the backend that multiplies with unpacked expert matrices on a device."""
    if device.platform in _BACKENDS:
        return _BACKENDS[device.platform]
    return "wide-tiles" if unsupported_gpu_reason(device) else choose_backend() or "wide-tiles"


def experts_kernel(config: ModelConfig, mesh: Mesh) -> ExpertsKernel | None:
    """Return the function that computes a model's experts on its devices; None if it has no experts."""
    mixture = config.mixture
    if mixture is None:
        return None
    compute = functools.partial(sum_experts, backend=experts_backend(first_device(mesh)))
    if mesh.size == 1:
        return compute
    if config.has_dp_attention:
        return _exchanging_kernel(compute, mixture, mesh)
    if mixture.num_redundant_experts is not None:
        return _gathering_kernel(compute, mixture, mesh)

    def run(x_te: jax.Array, routes: Routes, weights: ExpertWeights, gate: GateFunction) -> jax.Array:
        def part(x_te: jax.Array, routes: Routes, weights: ExpertWeights) -> jax.Array:
            if mixture.is_parallel:
                num_own = weights.num_experts
                routes = routes.part(jax.lax.axis_index(MODEL_AXIS) * num_own, num_own)
            total: jax.Array = jax.lax.psum(compute(x_te, routes, weights, gate), MODEL_AXIS)
            return total

        whole = PartitionSpec()
        summed: jax.Array = on_shards(part, mesh, (whole, whole, _expert_specs(mixture, weights)), whole)(
            x_te, routes, weights
        )
        return summed

    return run


def _exchanging_kernel(compute: ExpertsKernel, mixture: Mixture, mesh: Mesh) -> ExpertsKernel:
    """Return the function for rows that are split over the devices; see `RowExchange`."""
    is_padded = first_device(mesh).platform == "cpu"

    def run(x_te: jax.Array, routes: Routes, weights: ExpertWeights, gate: GateFunction) -> jax.Array:
        def part(x_ce: jax.Array, routes: Routes, weights: ExpertWeights) -> jax.Array:
            num_own, rank = weights.num_experts, jax.lax.axis_index(MODEL_AXIS)
            everyone = _gathered(routes)
            exchange = RowExchange.of(everyone.ids_tk.reshape(mesh.size, *routes.ids_tk.shape), rank, num_own)
            found_te = exchange.dispatch(x_ce, is_padded=is_padded)
            if mixture.num_redundant_experts is not None:
                pairs = _ExpertPairs.of(everyone, len(x_ce), rank, num_own)
                x_pe = found_te[exchange.places_t[pairs.rows_p]]
                y_pe = compute(x_pe, pairs.routes, weights, gate).astype(x_ce.dtype)
                return pairs.sum(y_pe, is_padded=is_padded)
            ids_tk, weights_tk = everyone.ids_tk[exchange.found_t], everyone.weights_tk[exchange.found_t]
            ids_tk = jnp.where(exchange.is_found_t[:, None], ids_tk, num_own * mesh.size)
            own = Routes(ids_tk, weights_tk).part(rank * num_own, num_own)
            y_te = compute(found_te, own, weights, gate).astype(x_ce.dtype)
            return exchange.combine(y_te, is_padded=is_padded)

        specs = (TOKENS_SPEC, TOKENS_SPEC, _expert_specs(mixture, weights))
        summed: jax.Array = on_shards(part, mesh, specs, TOKENS_SPEC)(x_te, routes, weights)
        return summed

    return run


def _gathering_kernel(compute: ExpertsKernel, mixture: Mixture, mesh: Mesh) -> ExpertsKernel:
    """Return the function for balanced experts and rows that are whole on every device.

    Each device sums an equal part of the rows, and gathers the others' sums.
    """
    is_padded = first_device(mesh).platform == "cpu"

    def run(x_te: jax.Array, routes: Routes, weights: ExpertWeights, gate: GateFunction) -> jax.Array:
        num_rows = -(-len(x_te) // mesh.size)
        missing = ((0, num_rows * mesh.size - len(x_te)), (0, 0))
        none = weights.num_experts
        ids_tk = jnp.pad(routes.ids_tk, missing, constant_values=none)
        padded = Routes(ids_tk, jnp.pad(routes.weights_tk, missing))

        def part(x_te: jax.Array, routes: Routes, weights: ExpertWeights) -> jax.Array:
            rank = jax.lax.axis_index(MODEL_AXIS)
            pairs = _ExpertPairs.of(routes, num_rows, rank, weights.num_experts)
            y_pe = compute(x_te[jnp.minimum(pairs.rows_p, len(x_te) - 1)], pairs.routes, weights, gate)
            y_ce = pairs.sum(y_pe.astype(x_te.dtype), is_padded=is_padded)
            summed: jax.Array = jax.lax.all_gather(y_ce, MODEL_AXIS, tiled=True)[: len(x_te)]
            return summed

        whole = PartitionSpec()
        summed: jax.Array = on_shards(part, mesh, (whole, whole, _expert_specs(mixture, weights)), whole)(
            x_te, padded, weights
        )
        return summed

    return run


@dataclasses.dataclass(frozen=True, slots=True)
class _ExpertPairs:
    """Pairs of a row and an expert: those whose expert a device has, and those whose row it has.

    Attributes:
        exchange: of the results, each pair as a row with one expert.
        rows_p: row of all devices of each pair, P = T * K.
        routes: of the pairs to own experts, `[P, 1]`.
        top_k: K.
    """

    exchange: RowExchange
    rows_p: jax.Array
    routes: Routes
    top_k: int

    @classmethod
    def of(cls, everyone: Routes, num_rows: int, rank: jax.Array, num_own: int) -> _ExpertPairs:
        """Build the pairs.

        Args:
            everyone: routes of the rows of all devices.
            num_rows: rows of each device.
            rank: the index of this device.
            num_own: experts on each device.
        """
        num_devices, top_k = len(everyone.ids_tk) // num_rows, everyone.ids_tk.shape[1]
        exchange = RowExchange.of(everyone.ids_tk.reshape(num_devices, -1, 1), rank, num_own)
        ids_p = jnp.where(exchange.is_found_t, everyone.ids_tk.reshape(-1)[exchange.found_t], num_own * num_devices)
        routes = Routes(ids_p[:, None], everyone.weights_tk.reshape(-1)[exchange.found_t][:, None])
        return cls(exchange, exchange.found_t // top_k, routes.part(rank * num_own, num_own), top_k)

    def sum(self, y_pe: jax.Array, *, is_padded: bool) -> jax.Array:
        """Return the sums `[C, E]` of a device's own rows, in float32 and in the order of the router's choices."""
        y_cke = self.exchange.combine(y_pe, is_padded=is_padded).reshape(-1, self.top_k, y_pe.shape[1])
        summed = y_cke[:, 0]
        for choice in range(1, self.top_k):
            summed = summed + y_cke[:, choice]
        return summed


def _gathered(routes: Routes) -> Routes:
    """Return the routes of all devices `[T, K]`, gathered in one message."""
    bits_tk = jax.lax.bitcast_convert_type(routes.weights_tk, jnp.int32)
    ids_tk, bits_tk = jnp.split(
        jax.lax.all_gather(jnp.concatenate([routes.ids_tk, bits_tk], axis=1), MODEL_AXIS, tiled=True), 2, axis=1
    )
    return Routes(ids_tk, jax.lax.bitcast_convert_type(bits_tk, jnp.float32))


MessageSizes = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""For each device the first of the rows for it, their number, their place there, and the number of rows from it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class RowExchange:
    """An exchange of rows between n devices: C rows on each, sent to the devices of their experts, and back.

        device 0    a b         a -> 0 1    sends    a | a b        for device 0, for device 1
                                b -> 1      finds    a c            of device 0, of device 1
        device 1    c d         c -> 0      sends    c | d
                                d -> 1      finds    a b d

    Every device computes the counts of all from the gathered routes, so no other message is needed.

    Attributes:
        counts_nn: rows from each device to each.
        rank: the index of this device.
        sent_m: own row at each place of the sent rows, M = C * min(K, n).
        places_ck: places of each own row among the sent rows, by device; M if it is sent to fewer.
        found_t: row of all devices at each place of the found rows, T = n * C.
        is_found_t: places of the found rows that are in use, the first ones.
    """

    counts_nn: jax.Array
    rank: jax.Array
    sent_m: jax.Array
    places_ck: jax.Array
    found_t: jax.Array
    is_found_t: jax.Array

    @classmethod
    def of(cls, ids_nck: jax.Array, rank: jax.Array, num_own: int) -> RowExchange:
        """Build the exchange.

        Args:
            ids_nck: experts of the rows of each device; n * num_own is none.
            num_own: experts on each device, consecutive ones.
        """
        num_devices, num_rows, top_k = ids_nck.shape
        devices_n = jnp.arange(num_devices, dtype=jnp.int32)
        uses_ncn = jnp.any((ids_nck // num_own)[..., None] == devices_n, axis=2)
        counts_nn = jnp.sum(uses_ncn, axis=1, dtype=jnp.int32)
        num_sent, num_found = num_rows * min(top_k, num_devices), num_devices * num_rows

        own_cn = uses_ncn[rank]
        places_cn = _starts(counts_nn[rank]) + jnp.cumsum(own_cn, axis=0, dtype=jnp.int32) - 1
        places_cn = jnp.where(own_cn, places_cn, num_sent)
        rows_cn = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32)[:, None], own_cn.shape)
        sent_m = jnp.zeros(num_sent, jnp.int32).at[places_cn].set(rows_cn, mode="drop")

        mine_t = uses_ncn[:, :, rank].reshape(-1)
        places_t = jnp.where(mine_t, jnp.cumsum(mine_t, dtype=jnp.int32) - 1, num_found)
        found_t = jnp.zeros(num_found, jnp.int32).at[places_t].set(jnp.arange(num_found, dtype=jnp.int32), mode="drop")
        is_found_t = jnp.arange(num_found) < jnp.sum(mine_t, dtype=jnp.int32)
        if top_k == 1:
            places_ck = jnp.min(places_cn, axis=1, keepdims=True)
        else:
            places_ck = jnp.sort(places_cn, axis=1)[:, : min(top_k, num_devices)]
        return cls(counts_nn, rank, sent_m, places_ck, found_t, is_found_t)

    @property
    def places_t(self) -> jax.Array:
        """The place of each row of all devices among the found rows; 0 for those that are elsewhere."""
        num_all = len(self.found_t)
        rows_t = jnp.where(self.is_found_t, self.found_t, num_all)
        places_t = jnp.arange(num_all, dtype=jnp.int32)
        return jnp.zeros(num_all, jnp.int32).at[rows_t].set(places_t, mode="drop")

    @property
    def dispatch_sizes(self) -> MessageSizes:
        """Sizes of the messages with rows for experts."""
        counts_nn, rank = self.counts_nn, self.rank
        return _starts(counts_nn[rank]), counts_nn[rank], _starts(counts_nn.T)[:, rank], counts_nn[:, rank]

    @property
    def combine_sizes(self) -> MessageSizes:
        """Sizes of the messages with results."""
        counts_nn, rank = self.counts_nn, self.rank
        return _starts(counts_nn[:, rank]), counts_nn[:, rank], _starts(counts_nn)[:, rank], counts_nn[rank]

    def dispatch(self, x_ce: jax.Array, *, is_padded: bool) -> jax.Array:
        """Return the rows `[T, E]` of all devices that use experts of this one."""
        empty = jnp.zeros((len(self.found_t), x_ce.shape[1]), x_ce.dtype)
        return _exchanged(x_ce[self.sent_m], empty, self.dispatch_sizes, len(x_ce) if is_padded else None)

    def combine(self, y_te: jax.Array, *, is_padded: bool) -> jax.Array:
        """Return the sum `[C, E]` of the results of each own row, in float32 and in the order of the devices."""
        num_sent, num_rows = len(self.sent_m), len(self.places_ck)
        empty = jnp.zeros((num_sent, y_te.shape[1]), y_te.dtype)
        y_me = _exchanged(y_te, empty, self.combine_sizes, num_rows if is_padded else None)
        y_cke = y_me[jnp.minimum(self.places_ck, num_sent - 1)].astype(jnp.float32)
        summed: jax.Array = jnp.sum(jnp.where((self.places_ck < num_sent)[..., None], y_cke, 0.0), axis=1)
        return summed


def replicate_experts(
    leaf: jax.Array, sources: jax.Array, *, spec: PartitionSpec, mesh: Mesh, is_stacked: bool
) -> jax.Array:
    """Return an array of physical experts `[P, ...]`, each a copy of an expert of `leaf`, from any device.

    Args:
        leaf: `[X, ...]`; with an axis of layers before the experts if `is_stacked`.
        sources: int32 `[P]`, or `[L, P]` if `is_stacked`: the expert of `leaf` that each physical one becomes.
        spec: of the leaf.
    """
    fetch = _expert_fetcher(spec, mesh, is_stacked=is_stacked)

    def replicate(own: jax.Array, sources: jax.Array) -> jax.Array:
        return jax.lax.map(lambda each: fetch(*each), (own, sources)) if is_stacked else fetch(own, sources)

    replicated: jax.Array = on_shards(replicate, mesh, (spec, PartitionSpec()), spec)(leaf, sources)
    return replicated


def exchange_experts(
    leaf: jax.Array, layer: jax.Array, sources_p: jax.Array, *, spec: PartitionSpec, mesh: Mesh, is_stacked: bool
) -> jax.Array:
    """Return an array of physical experts with one layer changed: each is a copy of an old one, from any device.

    Each device receives one expert after the other, so it needs room for the new experts of the layer.

    Args:
        leaf: `[P, ...]`; with an axis of layers before the experts if `is_stacked`.
        layer: int32 scalar: the layer; unused if layers are not stacked.
        sources_p: int32 `[P]`: the old physical expert that each one becomes.
        spec: of the leaf.
    """
    fetch = _expert_fetcher(spec, mesh, is_stacked=is_stacked)

    def exchange(own: jax.Array, layer: jax.Array, sources_p: jax.Array) -> jax.Array:
        if not is_stacked:
            return fetch(own, sources_p)
        of_layer = jax.lax.dynamic_index_in_dim(own, layer, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(own, fetch(of_layer, sources_p), layer, 0)

    whole = PartitionSpec()
    exchanged: jax.Array = on_shards(exchange, mesh, (spec, whole, whole), spec)(leaf, layer, sources_p)
    return exchanged


def _expert_fetcher(
    spec: PartitionSpec, mesh: Mesh, *, is_stacked: bool
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function of a device's experts and of all sources that returns the device's new experts."""
    axis = int(is_stacked)
    is_split = len(spec) > axis and spec[axis] == MODEL_AXIS
    is_padded, num_devices = first_device(mesh).platform == "cpu", num_shards(mesh)

    def fetch(own: jax.Array, sources_p: jax.Array) -> jax.Array:
        if not is_split:
            return own[sources_p]
        rank, sent = jax.lax.axis_index(MODEL_AXIS), _for_message(own)

        def receive(sources_n: jax.Array) -> jax.Array:
            owners_n, places_n = jnp.divmod(sources_n, len(own))
            if is_padded:
                return jax.lax.all_to_all(sent[places_n], MODEL_AXIS, 0, 0)[owners_n[rank]]
            sends_n = (owners_n == rank).astype(jnp.int32)
            receives_n = (jnp.arange(num_devices) == owners_n[rank]).astype(jnp.int32)
            sizes = places_n, sends_n, jnp.zeros_like(places_n), receives_n
            empty = jnp.zeros((1, *sent.shape[1:]), sent.dtype)
            received: jax.Array = jax.lax.ragged_all_to_all(sent, empty, *sizes, axis_name=MODEL_AXIS)[0]
            return received

        return _from_message(jax.lax.map(receive, sources_p.reshape(num_devices, -1).T), own.dtype)

    return fetch


def _for_message(array: jax.Array) -> jax.Array:
    """Return numbers in a type that every collective supports: 4-bit ones widened, 8-bit floats as bytes."""
    if array.dtype in WIDER:
        array = array.astype(WIDER[array.dtype])
    is_byte = array.dtype.itemsize == 1
    return jax.lax.bitcast_convert_type(array, jnp.uint8) if is_byte else array


def _from_message(array: jax.Array, dtype: np.dtype) -> jax.Array:
    if array.dtype == dtype:
        return array
    wide = WIDER.get(jnp.dtype(dtype), jnp.dtype(dtype))
    return jax.lax.bitcast_convert_type(array, wide).astype(dtype)


def _starts(counts: jax.Array) -> jax.Array:
    """Return the sum of all counts before each, along the last axis."""
    return jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts


def _exchanged(
    rows_pe: jax.Array,
    empty_qe: jax.Array,
    sizes: MessageSizes,
    most: int | None,
) -> jax.Array:
    """Return rows sent by all devices, device by device, in place of the first ones of `empty_qe`.

    Args:
        most: rows from a device to another at most, to pad each message to; None sends messages of any length.
    """
    first_n, num_n, _, arriving_n = sizes
    if most is None:
        return jax.lax.ragged_all_to_all(rows_pe, empty_qe, *sizes, axis_name=MODEL_AXIS)
    places_nm = first_n[:, None] + jnp.arange(most)
    sent_nme = jnp.where(
        (jnp.arange(most) < num_n[:, None])[..., None], rows_pe[jnp.minimum(places_nm, len(rows_pe) - 1)], 0
    )
    found_nme = jax.lax.all_to_all(sent_nme, MODEL_AXIS, 0, 0)
    place_q, ends_n = jnp.arange(len(empty_qe)), jnp.cumsum(arriving_n)
    source_q = jnp.minimum(jnp.searchsorted(ends_n, place_q, side="right"), len(ends_n) - 1)
    index_q = jnp.clip(place_q - (ends_n - arriving_n)[source_q], 0, most - 1)
    return jnp.where((place_q < ends_n[-1])[:, None], found_nme[source_q, index_q], empty_qe)


def _expert_specs(mixture: Mixture, weights: ExpertWeights) -> ExpertWeights:
    """Return the partition specs of the arrays, in their places."""
    kernels = (_matrix_spec(getattr(weights, part), expert_axes(mixture, part)) for part in ("gate", "up", "down"))
    experts, _, inner = expert_axes(mixture, "gate")
    biases = (None if bias is None else partition_spec(experts, inner) for bias in (weights.gate_bias, weights.up_bias))
    specs = ExpertWeights(*kernels, *biases)
    if weights.adapters is None:
        return specs
    gate, up, down = (expert_axes(mixture, part) for part in ("gate", "up", "down"))
    adapters = [
        ExpertAdapters(partition_spec(None, experts, inputs), partition_spec(None, experts, outputs))  # type: ignore[arg-type]
        for experts, inputs, outputs in (gate, up, down)
    ]
    return dataclasses.replace(specs, adapters=tuple(adapters))


def _matrix_spec(matrix: Any, axes: LogicalAxes) -> Any:
    if isinstance(matrix, StackedExperts):
        of_one = _matrix_spec(jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], matrix.matrices)), axes)
        return StackedExperts(_behind(of_one), PartitionSpec())
    if not isinstance(matrix, QuantizedMatrix):
        return partition_spec(*axes)
    experts, contracted, columns = axes
    of_groups = partition_spec(experts, contracted if matrix.num_groups > 1 else None, columns)
    return dataclasses.replace(
        matrix,
        values=partition_spec(*axes),
        scales=of_groups,
        zeros=None if matrix.zeros is None else of_groups,
        group_ids=None if matrix.group_ids is None else partition_spec(experts, contracted),
        input_scale=None if matrix.input_scale is None else partition_spec(experts),
    )


def _behind(specs: Any) -> Any:
    """Return the specs of arrays with an axis of layers before theirs."""
    return jax.tree.map(
        lambda spec: PartitionSpec(None, *spec), specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )
