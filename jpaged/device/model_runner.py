"""Runs the programs of a step: packs their inputs, finds the compiled program, and owns the state on the device.

    forward   inputs, last tokens  ->  hidden states        the pool is updated in place
    sample    hidden states, rows  ->  outputs              the last tokens are replaced, the copy to the host begins
    decode    inputs, last tokens  ->  outputs              all of that, several times
    speculate inputs, last tokens  ->  outputs              with proposals of a draft (`device/speculative`)

Nothing here traces or waits: the calls pass numpy buffers to executables.

Log-probabilities and hidden states that a client has requested are copied to the host in the background, with a bounded
number of device bytes in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from jpaged.device.compilation.compile import COUNT, LOAD_ADAPTER, TELLS, ProgramSpec
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.device.logits_processors import TokenCounts
from jpaged.device.lora import get_arguments, get_matrices, with_matrices
from jpaged.device.sampling import SamplingStages
from jpaged.engine.executor import (
    BANNED_WIDTH,
    I32,
    ROW_FIELDS,
    Detail,
    Geometry,
    SamplingInputs,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.aux_io import AUX_IDS, AuxInputs, AuxKind, AuxOutputs
from jpaged.engine.executor.io import (
    EDIT_FIELDS,
    LogitsProcessorInputs,
    TokenCountReset,
    no_singles,
    num_mask_words,
    words_of_singles,
)
from jpaged.errors import InternalError, Unavailable
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.cpu import blank_pool
from jpaged.kernels.recurrence import StatefulPool
from jpaged.models.layers import Params
from jpaged.models.lora import HostAdapter


def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """Return traced zeros; on one CPU without touching their memory, which takes a second per GiB."""
    devices: list[jax.Device] = list(sharding.device_set)
    is_one_cpu = len(devices) == 1 and devices[0].platform == "cpu"
    blank = blank_pool(shape, dtype) if is_one_cpu else None
    return jnp.zeros(shape, dtype) if blank is None else blank


class DonatedArray:
    """Holds one array while no step has it.

    Every step donates the array and returns it updated. Between `take` and `put` the array is unavailable; taking it
    raises.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> None:
        self._zeros = jax.jit(functools.partial(_zeros, shape, dtype, sharding), out_shardings=sharding)
        self._array: jax.Array | None = self._zeros()

    def take(self) -> jax.Array:
        """Take the array, to be donated.

        Raises:
            InternalError: a step that took it never returned it, or the pool was released.
        """
        if self._array is None:
            raise InternalError("the KV pool is gone: a step failed after the pool was donated, or it was released")
        array, self._array = self._array, None
        return array

    def put(self, array: jax.Array) -> None:
        """Store the array that a step returned.

        Raises:
            InternalError: the array is already here.
        """
        if self._array is not None:
            raise InternalError("the KV pool was returned twice")
        self._array = array

    def wait(self) -> None:
        """Wait until everything that writes to the array has run."""
        if self._array is not None:
            self._array.block_until_ready()

    def release(self) -> None:
        """Free the memory. Idempotent."""
        if self._array is not None:
            self._array.delete()
            self._array = None

    def renew(self) -> None:
        """Allocate the memory again after `release`, with zeros. Compiles nothing."""
        self.put(self._zeros())


class KVPool(DonatedArray):
    """Keys and values. `jpaged.device.compilation.memory_plan` decides the number of blocks."""

    def __init__(self, layout: KVLayout, sharding: Sharding) -> None:
        super().__init__(layout.shape, layout.storage_dtype, sharding)


class ServedPool:
    """The KV pool as steps take it: with the states of recurrent layers, and what it has of experts.

    Attributes:
        expert_load: the load of experts; None if they are not balanced.
        routes: the experts of tokens; None if they are not kept.

    Args:
        states: shapes of the states.
        load: shape of the load of experts.
        routes: shape of the routes of tokens.
    """

    def __init__(
        self,
        pool: KVPool,
        states: Sequence[jax.ShapeDtypeStruct] = (),
        load: jax.ShapeDtypeStruct | None = None,
        routes: jax.ShapeDtypeStruct | None = None,
    ) -> None:
        self._pool = pool
        self._states = [DonatedArray(one.shape, one.dtype, one.sharding) for one in states]
        self.expert_load = None if load is None else DonatedArray(load.shape, load.dtype, load.sharding)
        self.routes = None if routes is None else DonatedArray(routes.shape, routes.dtype, routes.sharding)
        of_experts = (one for one in (self.expert_load, self.routes) if one is not None)
        self._arrays = (*self._states, *of_experts)

    def take(self) -> Any:
        """Take the arrays, to be donated."""
        kv, load, routes = self._pool.take(), self.expert_load, self.routes
        if not self._arrays:
            return kv
        states = tuple(states.take() for states in self._states)
        return StatefulPool(kv, states, load and load.take(), routes and routes.take())

    def put(self, pool: Any) -> None:
        """Store the arrays that a step returned."""
        if not isinstance(pool, StatefulPool):
            self._pool.put(pool)
            return
        self._pool.put(pool.kv)
        for holder, states in zip(self._states, pool.states, strict=True):
            holder.put(states)
        if self.expert_load is not None:
            self.expert_load.put(pool.expert_load)
        if self.routes is not None:
            self.routes.put(pool.routes)

    def release(self) -> None:
        """Free the memory of all arrays except keys and values. Idempotent."""
        for array in self._arrays:
            array.release()

    def renew(self) -> None:
        """Allocate these arrays again after `release`; see `DonatedArray.renew`."""
        for array in self._arrays:
            array.renew()


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a call; its element type has 32 bits, or is bool."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """One host buffer for all small arrays of a call, in order: packed with numpy, unpacked inside the program.

        fields   token ids [T] i32 | positions [T] i32 | block tables [S, M] i32 | ...
        buffer   int32 [sum of sizes], the bits of all fields one after the other

    A call then transfers one argument instead of a dozen: on a CPU that saves 10 of 90 us, on an accelerator each
    argument would be a separate copy. Hashable: static under jit.
    """

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, **fields: tuple[tuple[int, ...], str]) -> Packing:
        """Build a packing from name=(shape, element type)."""
        return cls(tuple(Field(name, shape, np.dtype(dtype)) for name, (shape, dtype) in fields.items()))

    @property
    def size(self) -> int:
        return sum(field.size for field in self.fields)

    def pack(self, values: object) -> NDArray[np.int32]:
        """Pack the attributes of `values` that the fields name into a new buffer.

        The device may read the buffer after the call. An int counts as an int32 array without axes.

        Raises:
            InternalError: an array is of another shape or type than its field.
        """
        parts = []
        for field in self.fields:
            array = getattr(values, field.name)
            if type(array) is int:
                array = np.asarray(array, np.int32)
            if array.shape != field.shape or array.dtype != field.dtype:
                raise InternalError(
                    f"{field.name} is {array.dtype}{array.shape}; the program expects {field.dtype}{field.shape}"
                )
            parts.append((array.astype(np.int32) if array.dtype == np.bool_ else array.view(np.int32)).reshape(-1))
        return np.concatenate(parts)

    def unpack(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """Return the arrays by name, on the device; leading axes of the buffer become those of every array."""
        arrays, begin = {}, 0
        for field in self.fields:
            part = buffer[..., begin : begin + field.size].reshape(*buffer.shape[:-1], *field.shape)
            if field.dtype == np.bool_:
                part = part != 0
            elif field.dtype != np.int32:
                part = jax.lax.bitcast_convert_type(part, field.dtype)
            arrays[field.name] = part
            begin += field.size
        return arrays


_ROW = Packing.of(**{field.name: (() if field.width is None else (field.width,), field.dtype) for field in ROW_FIELDS})
ROW_WORDS = _ROW.size
"""Words of a row of the sampler."""


def unpack_rows(words: jax.Array) -> dict[str, jax.Array]:
    """Return the fields of `SamplingInputs.words` by name, on the device; rows are the first axis."""
    return _ROW.unpack(words.reshape(-1, ROW_WORDS))


_EDITS = Packing.of(
    **{field.name: (() if field.width is None else (field.width,), field.dtype) for field in EDIT_FIELDS}
)
EDIT_WORDS = _EDITS.size
"""Words of a row's logits processors."""


def unpack_edits(words: jax.Array) -> dict[str, jax.Array]:
    """Return the fields of `LogitsProcessorInputs.words` by name, on the device; rows are the first axis."""
    return _EDITS.unpack(words.reshape(-1, EDIT_WORDS))


NUM_COUNT_WORDS = 4
"""Words before the counted tokens: slot, whether the part is the first, tokens of the prompt, all tokens."""


@dataclass(frozen=True, slots=True)
class DecodePacking:
    """One host buffer for all inputs of a decode of R rows. Hashable: static under jit.

    a forward's fields | number of steps, their mask channel | tokens that end each row [R, X] | the sampler's rows
    """

    step: Packing
    num_rows: int

    @property
    def size(self) -> int:
        return self.step.size + 2 + self.num_rows * (BANNED_WIDTH + ROW_WORDS)

    def pack(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int, feed: int = 0
    ) -> I32:
        """Return the inputs in a new buffer: the device may read it after the call."""
        steps, ending_words = np.array([num_steps, feed], np.int32), ending_token_ids_rx.reshape(-1)
        return np.concatenate([self.step.pack(inputs), steps, ending_words, sampling.words])

    def unpack(self, words: jax.Array) -> tuple[dict[str, jax.Array], jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return the parts in this order, on the device; fields by name, and the two numbers as one array."""
        ends = np.cumsum([self.step.size, 2, self.num_rows * BANNED_WIDTH]).tolist()
        step_words, steps_2, ending_words, row_words = jnp.split(words, ends)
        ending_rx = ending_words.reshape(self.num_rows, BANNED_WIDTH)
        return self.step.unpack(step_words), steps_2, ending_rx, unpack_rows(row_words)


@dataclass(frozen=True, slots=True)
class PackedForward:
    """A step's inputs, packed for the forward of `num_tokens` tokens.

    Attributes:
        embeds_te: input embeddings in the model's type; None if the step has none.
    """

    num_tokens: int
    words: NDArray[np.int32]
    embeds_te: NDArray[Any] | None = None


NUM_TOKEN_COLUMNS = 2
"""Columns of a sample's outputs: token, whether the row's logits were finite."""
NUM_LOGPROB_COLUMNS = 4
"""Columns with log-probabilities: those, log-probability, rank. The top ids and their log-probabilities follow."""


def unpack_outputs(outputs_rc: NDArray[np.int32]) -> StepOutputs:
    """Parse the columns of `packed_sample` on the host, for its `Detail`; or those of several steps, `[n, R, C]`."""
    if outputs_rc.ndim > 2:
        return StepOutputs(outputs_rc[..., 0].T, outputs_rc[..., 1].T != 0)
    num_columns, logprobs_rc = outputs_rc.shape[1], outputs_rc.view(np.float32)
    has_logprobs, num_top = num_columns > NUM_TOKEN_COLUMNS, (num_columns - NUM_LOGPROB_COLUMNS) // 2
    return StepOutputs(
        token_ids_rn=outputs_rc[:, :1],
        is_finite_rn=outputs_rc[:, 1:2] != 0,
        logprobs_rn=logprobs_rc[:, 2:3] if has_logprobs else None,
        ranks_rn=outputs_rc[:, 3:4] if has_logprobs else None,
        top_ids_rnk=outputs_rc[:, None, 4 : 4 + num_top] if num_top > 0 else None,
        top_logprobs_rnk=logprobs_rc[:, None, 4 + num_top :] if num_top > 0 else None,
    )


def unpack_aux(outputs: NDArray[np.generic], inputs: AuxInputs, vocab_size: int) -> AuxOutputs:
    """Parse log-probabilities or hidden states on the host, without padding of rows or vocabulary."""
    used = outputs[: inputs.num_rows]
    if inputs.kind == AuxKind.ALL_LOGPROBS:
        return AuxOutputs(all_logprobs_rv=used[:, :vocab_size].astype(np.float32))
    if inputs.kind == AuxKind.HIDDEN:
        return AuxOutputs(hidden_re=used.astype(np.float32))
    columns = used.astype(np.int32)
    floats, end = columns.view(np.float32), 2 + AUX_IDS
    num_top = (columns.shape[1] - end) // 2
    return AuxOutputs(
        is_sound_r=columns[:, 0] != 0,
        ranks_r=columns[:, 1],
        logprobs_rk=floats[:, 2:end],
        top_ids_rk=columns[:, end : end + num_top],
        top_logprobs_rk=floats[:, end + num_top :],
    )


class DraftPool(Protocol):
    """Holds a draft's state while no program has it: an array, or a tree of arrays."""

    def take(self) -> Any:
        """Take the state, to be donated."""

    def put(self, array: Any) -> None:
        """Store the state that a program returned."""

    def release(self) -> None:
        """Free the memory. Idempotent."""


class ModelRunner:
    """Owns the parameters and the last sampled tokens. Takes the pool for each forward.

    Args:
        dtype: of input embeddings, if the geometry has any.
    """

    def __init__(
        self,
        params: Params,
        last_tokens: jax.Array,
        packings: tuple[Mapping[int, Packing], Mapping[int, DecodePacking]],
        pool: ServedPool,
        programs: ProgramStore,
        counts: TokenCounts,
        geometry: Geometry,
        dtype: np.dtype,
    ) -> None:
        self._params = params
        self._head_params = _without_layers(params)
        self._pool = pool
        self._programs = programs
        self._packings, self._decode_packings = packings
        self._last_tokens = last_tokens
        self._counts = counts
        self._num_mask_words = num_mask_words(geometry.vocab_size)
        self._has_stages = any(spec.stages < SamplingStages.ALL for spec in programs.specs)
        self._nothing: dict[int, tuple[jax.Array, jax.Array]] = {}  # neutral token biases and masks
        self._features: list[jax.Array] = []
        self._embeds = (geometry.embed_width, dtype) if geometry.embed_width else None
        self._no_embeds: dict[int, jax.Array] = {}  # for steps that have none

    @property
    def params(self) -> Params:
        """The parameters; those of adapter slots change with each loaded adapter, and experts may be moved.

        Raises:
            Unavailable: they are not on the device.
        """
        if not self._params:
            raise Unavailable("the weights are asleep: try again after wake_up")
        return self._params

    def set_params(self, params: Params) -> None:
        """Replace the parameters; {} until there are others."""
        self._params, self._head_params = params, _without_layers(params)

    @property
    def last_tokens(self) -> jax.Array:
        """Last sampled token of each row."""
        return self._last_tokens

    def take_features(self) -> list[jax.Array]:
        """Remove and return the hidden states that the last forward left for a head; empty without a head."""
        features, self._features = self._features, []
        return features

    def pack(self, inputs: StepInputs) -> PackedForward:
        """Pack a step's inputs into a new buffer.

        Raises:
            InternalError: shapes of no compiled program.
        """
        num_tokens = len(inputs.token_ids_t)
        self._find(ProgramSpec("forward", num_tokens))
        words, embeds_te = self._packings[num_tokens].pack(inputs), inputs.embeds_te
        if embeds_te is None or self._embeds is None:
            return PackedForward(num_tokens, words)
        return PackedForward(num_tokens, words, embeds_te.astype(self._embeds[1]))

    def forward(self, packed: PackedForward) -> jax.Array:
        """Start the model over a step's tokens; return the hidden states to sample from."""
        program = self._find(ProgramSpec("forward", packed.num_tokens))
        arguments: list[Any] = [packed.words]
        if self._embeds is not None:
            given_te = packed.embeds_te
            arguments.append(self._find_no_embeds(packed.num_tokens) if given_te is None else given_te)
        pool, hidden_se, *self._features = program(self._params, self._pool.take(), self._last_tokens, *arguments)
        self._pool.put(pool)
        return hidden_se

    def _find_no_embeds(self, num_tokens: int) -> jax.Array:
        """Return the embeddings of a step without any, which stay on the device."""
        assert self._embeds is not None
        if num_tokens not in self._no_embeds:
            width, dtype = self._embeds
            self._no_embeds[num_tokens] = self._put(np.zeros((num_tokens, width), dtype))
        return self._no_embeds[num_tokens]

    def sample(self, hidden_se: jax.Array, inputs: SamplingInputs) -> jax.Array:
        """Start sampling; return the outputs as one array, with the copy to the host started.

        Rows with logits processors may be padded to a larger program.
        """
        if inputs.edits is not None:
            outputs_rc = self._sample_edited(hidden_se, inputs, inputs.edits)
        else:
            program = self._find_sample("sample", inputs, inputs.detail)
            self._last_tokens, outputs_rc = program(self._head_params, hidden_se, inputs.words)
        outputs_rc.copy_to_host_async()
        return outputs_rc

    def _find_sample(
        self, kind: Literal["sample", "edited"], inputs: SamplingInputs, detail: Detail
    ) -> jax.stages.Compiled:
        """Find the program of a sample, or one that computes more."""
        stages = SamplingStages.of(inputs) if self._has_stages else SamplingStages.ALL
        spec, ready = ProgramSpec(kind, len(inputs.rows_r), detail, stages=stages), self._programs.ready
        if spec not in ready:
            spec = next((one for one in spec.stand_ins if one in ready), spec)
        return self._find(spec)

    def _sample_edited(self, hidden_se: jax.Array, inputs: SamplingInputs, edits: LogitsProcessorInputs) -> jax.Array:
        for due in edits.due:
            self._count(due)
        num_rows, detail = len(inputs.rows_r), inputs.detail if self._has_stages else Detail.TOKENS
        sizes = self._programs.sizes("edited", detail=Detail.TOP_LOGPROBS if self._has_stages else detail)
        size = next((size for size in sizes if size >= num_rows), num_rows)
        inputs, edits = dataclasses.replace(inputs.padded(size), edits=edits), edits.padded(size)
        no_singles_rx3, no_mask_rw = self._make_empty(size)
        self._counts, self._last_tokens, outputs_rc = self._find_sample("edited", inputs, detail)(
            self._head_params,
            self._counts,
            hidden_se,
            inputs.words,
            np.append(edits.words, np.int32(inputs.detail)),
            no_singles_rx3 if edits.singles_rx is None else edits.single_words,
            no_mask_rw if edits.mask_rw is None else edits.mask_rw,
        )
        return outputs_rc

    def tell(self, hidden_he: jax.Array, inputs: AuxInputs) -> jax.Array:
        """Start computing log-probabilities or hidden states; return the outputs as one array."""
        outputs: jax.Array = self._find(TELLS[inputs.kind])(self._head_params, hidden_he, inputs.words)
        return outputs

    def _count(self, due: TokenCountReset) -> None:
        program, token_ids = self._find(COUNT), due.token_ids
        for begin in range(0, max(1, len(token_ids)), COUNT.size):
            part = token_ids[begin : begin + COUNT.size]
            words = np.zeros(NUM_COUNT_WORDS + COUNT.size, np.int32)
            of_prompt = min(max(due.num_prompt - begin, 0), len(part))
            words[:NUM_COUNT_WORDS] = due.slot, begin == 0, of_prompt, len(part)
            words[NUM_COUNT_WORDS : NUM_COUNT_WORDS + len(part)] = part
            self._counts = program(self._counts, words)

    def _make_empty(self, num_rows: int) -> tuple[jax.Array, jax.Array]:
        if num_rows not in self._nothing:
            masks = np.full((num_rows, self._num_mask_words), -1, np.int32)
            self._nothing[num_rows] = self._put(words_of_singles(no_singles(num_rows))), self._put(masks)
        return self._nothing[num_rows]

    def _put(self, array: NDArray[Any]) -> jax.Array:
        """Return the array on every device. In several processes, `device_put` would compile a comparison."""
        return jax.make_array_from_callback(array.shape, self._last_tokens.sharding, lambda part: array[part])

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int, feed: int = 0
    ) -> jax.Array:
        """Start several decode steps; return the outputs as one array, with the copy to the host started.

        Args:
            feed: number of the mask channel; 0 is none.
        """
        num_rows = len(sampling.rows_r)
        program = self._find(ProgramSpec("decode", num_rows))
        words = self._decode_packings[num_rows].pack(inputs, sampling, ending_token_ids_rx, num_steps, feed)
        pool, self._last_tokens, outputs_nrc = program(self._params, self._pool.take(), self._last_tokens, words)
        self._pool.put(pool)
        outputs_nrc.copy_to_host_async()
        return outputs_nrc

    def speculate(
        self, program: jax.stages.Compiled, words: I32, draft_params: Params, draft_pool: DraftPool
    ) -> jax.Array:
        """Start rounds of proposals; return the outputs as one array, with the copy to the host started."""
        pools = self._pool.take(), draft_pool.take()
        (pool, of_draft), self._last_tokens, outputs_nrc = program(
            self._params, draft_params, pools, self._last_tokens, words
        )
        self._pool.put(pool)
        draft_pool.put(of_draft)
        outputs_nrc.copy_to_host_async()
        return outputs_nrc

    def load_adapter(self, slot: int, adapter: HostAdapter) -> None:
        """Start writing an adapter into its slot; the matrices of all slots are lost if that raises."""
        program = self._find(LOAD_ADAPTER)
        matrices = get_matrices(self._params)
        filled = program(list(matrices.values()), np.int32(slot - 1), get_arguments(adapter, self._params))
        self._params = with_matrices(self._params, dict(zip(matrices, filled, strict=True)))
        self._head_params = _without_layers(self._params)

    def release(self) -> None:
        """Drop the parameters. Idempotent."""
        self._params, self._head_params = {}, {}
        self._pool.release()
        self._nothing.clear()
        self._no_embeds.clear()
        for array in jax.tree.leaves(self._counts):
            if not array.is_deleted():
                array.delete()

    def _find(self, spec: ProgramSpec) -> jax.stages.Compiled:
        program = self._programs.ready.get(spec)
        return self._programs.find(spec) if program is None else program.executable


def _without_layers(params: Params) -> Params:
    return {name: tree for name, tree in params.items() if name != "layers"}


MOST_BYTES = 64 << 20
"""Maximum bytes on one device; a row of all log-probabilities of Llama 3 is half a MiB."""


@dataclass(slots=True, eq=False)
class _PendingCopy:
    array: jax.Array | None
    value: NDArray[np.generic] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that a device holds of it."""
        if self.array is None:
            return 0
        return math.prod(self.array.sharding.shard_shape(self.array.shape)) * self.array.dtype.itemsize

    def land(self) -> NDArray[np.generic]:
        """Wait for the array, and free it on the device."""
        if self.value is None:
            self.value, self.array = np.asarray(self.array), None
        return self.value


class PendingHostCopies:
    """Holds device arrays until the host has them. Those that no caller waits for are dropped as others are added."""

    def __init__(self) -> None:
        self._on_the_way: deque[_PendingCopy] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes that a device holds of all of them."""
        return sum(told.num_bytes for told in self._on_the_way)

    def add(self, array: jax.Array) -> Callable[[], NDArray[np.generic]]:
        """Start the copy to the host, and return a function that waits for it.

        Over the limit of bytes, wait for the oldest copies first.

        Raises:
            JaxRuntimeError: the device failed in a copy that was waited for.
        """
        told = _PendingCopy(array)
        copies: Any = array  # jax's annotations lack the method
        copies.copy_to_host_async()
        self._on_the_way.append(told)
        while len(self._on_the_way) > 1 and self.num_bytes > MOST_BYTES:
            self._on_the_way.popleft().land()

        def wait() -> NDArray[np.generic]:
            value = told.land()
            while self._on_the_way and self._on_the_way[0].array is None:
                self._on_the_way.popleft()
            return value

        return wait

    def release(self) -> None:
        """Drop all of them. Idempotent."""
        self._on_the_way.clear()
