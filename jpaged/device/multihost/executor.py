"""One executor across several processes: process 0 broadcasts each verb before it runs it, and the others run it, too.

    process 0   engine ─ forward n+1 ─ sample n+1 ─ collect n ─ ...     compares digests on receiving threads
                           │ STEP        │ SAMPLE     │ COLLECT     ↑ DIGEST n
    process i              └ forward     └ sample     └ collect ────┘

A step travels as the two buffers that its programs take, a move as its block ids. A digest covers everything dispatched
since the previous one, and the tokens that the step sampled. If a process differs, all end.

With replicas (`data_parallel_size`), each has the processes of one group, and its messages go to those. Process 0
receives the results of the replicas that it has no part in:

    process 0   engine of replica 1 ─ forward n+1 ─ sample n+1 ─ collect n ─ ...
                                        │ STEP        │ SAMPLE     │ COLLECT     ↑ DIGEST n, RESULT n
    process 1                           └ forward     └ sample     └ collect ────┘

A message is a few numbers, and 32-bit words:

| head: i64 each, as HEADS names them | words: i32 each |
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jpaged import json_text
from jpaged.device.executor import JaxExecutor
from jpaged.device.model_runner import PackedForward
from jpaged.device.multihost.channel import MessageKind
from jpaged.device.multihost.handshake import Follower, Leader
from jpaged.engine.executor import (
    I32,
    ROW_DTYPE,
    BlockMoves,
    DecodeInterrupt,
    Detail,
    DeviceRates,
    ExpertStats,
    Geometry,
    HostBlocks,
    MaskChannel,
    Move,
    Progress,
    SamplingInputs,
    Sleeper,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.aux_io import AuxInputs, AuxKind, AuxOutputs
from jpaged.engine.executor.io import EDIT_DTYPE, SINGLE_DTYPE, LogitsProcessorInputs, TokenCountReset
from jpaged.errors import InternalError, Unavailable
from jpaged.types import Adapter

HEADS: Mapping[MessageKind, tuple[str, ...]] = {
    MessageKind.STEP: ("number", "num_tokens"),  # then the packed inputs of a forward
    # Then the sampler's rows, and their logits processors: words of the records, of token biases, of masks.
    MessageKind.SAMPLE: ("number", "detail", "num_rows", "num_edit_words", "num_single_words", "num_mask_words"),
    MessageKind.TELL: ("number", "tell", "num_rows"),  # then places and ids
    MessageKind.COUNT: ("slot", "num_prompt"),  # then the tokens
    MessageKind.MOVES: ("move",),  # its index in `Move`; then the sources, and the destinations
    MessageKind.COLLECT: ("number",),
    MessageKind.COLLECT_AUX: (),
    MessageKind.DIGEST: ("number",),  # then the digest
    MessageKind.END: (),
}
"""The head fields of each kind of message. Steps are numbered from 1."""

Parts = tuple[bytes, ...]
_NO_WORDS = np.zeros(0, np.int32)


def encode(kind: MessageKind, *head: int, words: NDArray[np.int32] = _NO_WORDS) -> Parts:
    """Return a message as parts, to be sent in order."""
    return struct.pack(f"<{len(HEADS[kind])}q", *head), words.tobytes()


def decode(kind: MessageKind, payload: bytes | bytearray) -> tuple[tuple[int, ...], NDArray[np.int32]]:
    """Parse a message; the inverse of `encode`. The words are a view of the payload."""
    head = struct.Struct(f"<{len(HEADS[kind])}q")
    return head.unpack_from(payload), np.frombuffer(payload, np.int32, offset=head.size)


Outputs = TypeVar("Outputs", StepOutputs, AuxOutputs)
_OUTPUT_DTYPES = {"int32": np.int32, "float32": np.float32, "bool": np.bool_}
_HEADER_LEN = struct.Struct("<I")
_LOOK_S = 0.1
"""How often a wait for results checks whether a process is lost."""


def encode_outputs(outputs: StepOutputs | AuxOutputs) -> Parts:
    """Return outputs as the parts of a message: names, types and shapes of the arrays, and their bytes."""
    named = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    arrays = {name: np.ascontiguousarray(array) for name, array in named.items() if array is not None}
    described = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    header = json_text.dumps(described).encode()
    return _HEADER_LEN.pack(len(header)), header, *(array.tobytes() for array in arrays.values())


def decode_outputs(kind: type[Outputs], payload: bytes | bytearray) -> Outputs:
    """Parse outputs; the inverse of `encode_outputs`."""
    (size,) = _HEADER_LEN.unpack_from(payload)
    begin = _HEADER_LEN.size + size
    arrays: dict[str, Any] = {}
    for name, dtype, shape in json.loads(payload[_HEADER_LEN.size : begin]):
        array = np.frombuffer(payload, _OUTPUT_DTYPES[dtype], math.prod(shape), begin).reshape(shape)
        arrays[name], begin = array, begin + array.nbytes
    return kind(**arrays)


def pack_words(inputs: SamplingInputs) -> NDArray[np.int32]:
    """Return all inputs of a sample as words."""
    return np.concatenate([part.reshape(-1) for part in _parts(inputs)])


def get_sizes(inputs: SamplingInputs) -> tuple[int, int, int, int]:
    """Return the number of rows, and the numbers of words of their logits processors."""
    _, edits, singles, mask = _parts(inputs)
    return len(inputs.rows_r), edits.size, singles.size, mask.size


def parse_sampling(
    detail: Detail, sizes: tuple[int, ...], words: NDArray[np.int32], due: Sequence[TokenCountReset]
) -> SamplingInputs:
    """Parse the inputs of a sample; the inverse of `pack_words`, with the count messages received before."""
    num_rows, *num_words = sizes
    rows, edits, singles, mask = np.split(words, np.cumsum([len(words) - sum(num_words), *num_words[:-1]]).tolist())
    found: LogitsProcessorInputs | None = None
    if len(edits):
        found = LogitsProcessorInputs(
            edits.view(EDIT_DTYPE),
            singles.view(SINGLE_DTYPE).reshape(num_rows, -1) if len(singles) else None,
            mask.reshape(num_rows, -1) if len(mask) else None,
            tuple(due),
        )
    return SamplingInputs(rows.view(ROW_DTYPE), detail, found)


def _parts(inputs: SamplingInputs) -> tuple[NDArray[np.int32], ...]:
    edits = inputs.edits
    if edits is None:
        return inputs.words, _NO_WORDS, _NO_WORDS, _NO_WORDS
    singles, mask_rw = edits.single_words, edits.mask_rw
    return (
        inputs.words,
        edits.words,
        _NO_WORDS if singles is None else singles.reshape(-1),
        _NO_WORDS if mask_rw is None else mask_rw.reshape(-1),
    )


MAX_UNCONFIRMED = 256
"""Maximum steps that process 0 collects before every process has confirmed the first of them."""
_CONFIRM_TIMEOUT_S = 120.0
_LOSS_TIMEOUT_S = 5.0
"""A collective fails slightly before the connection to the lost process does; the connection identifies the process."""

_DIGEST_BYTES = 16
_MOVES = tuple(Move)


def get_sampled(outputs: StepOutputs) -> np.ndarray:
    """Return the tokens that every process must have sampled, -1 where a row's logits were not finite."""
    return np.where(outputs.is_finite_rn, outputs.token_ids_rn, -1)


def compute_digest(told: Sequence[bytes | bytearray], token_ids_rn: np.ndarray) -> bytes:
    """Return the digest of the dispatched messages and of the sampled tokens."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in told:
        digest.update(part)
    digest.update(np.asarray(token_ids_rn, np.int32).tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class MultiHostHandle:
    """A forward, or a step that samples from it, that was sent to every process.

    Attributes:
        number: of the step.
        array: handle of `JaxExecutor`; None in a process that has no part in the replica.
        sent_messages: messages dispatched since the previous step; empty for a forward.
    """

    number: int
    array: Any
    sent_messages: Sequence[bytes | bytearray] = ()


@dataclass(slots=True)
class _Step:
    """A collected step: the part of process 0, and the digests received from the others."""

    sent_messages: Sequence[bytes | bytearray] = ()
    token_ids_rn: np.ndarray | None = None
    digest: bytes = b""
    theirs: dict[int, bytes] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)


class DigestCheck:
    """Compares the digests of each step on the threads that receive them. The engine thread only adds its own part."""

    def __init__(self, num_others: int) -> None:
        self._num_others = num_others
        self._steps: dict[int, _Step] = {}
        self._news = threading.Condition()

    def add_own(self, number: int, told: Sequence[bytes | bytearray], token_ids_rn: np.ndarray) -> None:
        """Add the messages and the sampled tokens of process 0.

        Raises:
            InternalError: another process differs.
        """
        if self._num_others == 0:
            return
        with self._news:
            step = self._steps.setdefault(number, _Step())
            step.sent_messages, step.token_ids_rn = told, token_ids_rn
            theirs = dict(step.theirs)
        for process, digest in theirs.items():
            self._compare(number, process, digest)

    def add(self, process: int, payload: bytes | bytearray) -> None:
        """Add another process's digest.

        Raises:
            InternalError: it differs.
        """
        (number,), words = decode(MessageKind.DIGEST, payload)
        digest = words.tobytes()
        with self._news:
            step = self._steps.setdefault(number, _Step())
            step.theirs[process] = digest
            is_collected = step.token_ids_rn is not None
        if is_collected:
            self._compare(number, process, digest)

    def wait(self, max_unconfirmed: int, timeout_s: float) -> bool:
        """Wait until at most `max_unconfirmed` steps are unconfirmed; return False on timeout."""
        with self._news:
            return self._news.wait_for(lambda: len(self._steps) <= max_unconfirmed, timeout_s)

    @property
    def num_unconfirmed(self) -> int:
        """Number of steps that not every process has confirmed."""
        return len(self._steps)

    def _compare(self, number: int, process: int, digest: bytes) -> None:
        with self._news:
            step = self._steps.get(number)
        if step is None or step.token_ids_rn is None:
            return
        own = step.digest or compute_digest(step.sent_messages, step.token_ids_rn)
        if own != digest:
            raise InternalError(
                f"step {number}: the program or tokens of process {process} differ from those of process 0 (digests "
                f"{digest.hex()} and {own.hex()})"
            )
        with self._news:
            step.digest = own
            step.confirmed.add(process)
            if len(step.confirmed) == self._num_others:
                self._steps.pop(number, None)
                self._news.notify_all()


class _OfProcess0:
    """Geometry and rates of an executor of process 0, which are those of every replica."""

    _executor: Any

    @property
    def geometry(self) -> Geometry:
        found: Geometry = self._executor.geometry
        return found

    @property
    def rates(self) -> DeviceRates:
        found: DeviceRates = self._executor.rates
        return found


class RemoteReplica(_OfProcess0):
    """Stands in for process 0's part of a replica in which it has no part. Used only by the replica's engine thread.

    Args:
        executor: process 0's own, whose geometry, rates and packing are those of every replica.
        process: the process of the replica that sends its results.
    """

    def __init__(self, executor: JaxExecutor, leader: Leader, process: int) -> None:
        self._executor = executor
        self._leader = leader
        self._process = process
        self._results: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        leader.take_results(self._results.put, process)

    @property
    def num_compiles_after_warm_up(self) -> int:
        """0: the process itself logs its compilations."""
        return 0

    @property
    def expert_stats(self) -> ExpertStats | None:
        """None: the processes of the replica count by themselves."""
        return None

    def warm_up(self, progress: Progress) -> None:
        """Return at once: the processes of the replica warm up by themselves."""

    def move_blocks(self, moves: BlockMoves) -> None:
        """Do nothing: the message has been sent."""

    def pack(self, inputs: StepInputs) -> PackedForward:
        """Pack a step's inputs, as `JaxExecutor.pack`."""
        return self._executor.pack(inputs)

    def forward(self, inputs: PackedForward) -> None:
        """Do nothing: the message has been sent."""

    def sample(self, hidden: None, inputs: SamplingInputs) -> None:
        """Do nothing: the message has been sent."""

    def compute_aux(self, hidden: None, inputs: AuxInputs) -> Callable[[], AuxOutputs]:
        """Return a function that requests the outputs and waits for them; call the functions in order."""

        def collect() -> AuxOutputs:
            self._leader.send(MessageKind.COLLECT_AUX, *encode(MessageKind.COLLECT_AUX), to=(self._process,))
            return decode_outputs(AuxOutputs, self._receive())

        return collect

    def is_done(self, handle: None) -> bool:
        """Return False: a step that has run is known only by its results."""
        return False

    def collect(self, handle: None) -> StepOutputs:
        """Wait for the outputs of the oldest step that was not collected.

        Raises:
            JpagedError: a process is lost; all must end.
        """
        return decode_outputs(StepOutputs, self._receive())

    def shutdown(self) -> None:
        """Do nothing: the processes end by themselves."""

    def _receive(self) -> bytearray:
        while True:
            with suppress(queue.Empty):
                return self._results.get(timeout=_LOOK_S)
            if self._leader.failure is not None:
                raise self._leader.failure


class MultiHostExecutor(_OfProcess0):
    """Implements `engine.executor.Executor` in process 0, for all processes. Used only by the engine thread.

    Args:
        executor: process 0's part.
        others: the other processes that take part; None is all.
    """

    def __init__(
        self, executor: JaxExecutor | RemoteReplica, leader: Leader, others: Sequence[int] | None = None
    ) -> None:
        self._executor: Any = executor
        self._leader = leader
        self._others = tuple(range(1, leader.num_processes) if others is None else others)
        self._check = DigestCheck(len(self._others))
        self._sent_messages: deque[bytes] = deque()
        self._num_steps = 0
        leader.take_digests(self._confirm, self._others)

    @classmethod
    def of_replicas(cls, executor: JaxExecutor, leader: Leader, num_replicas: int) -> list[MultiHostExecutor]:
        """Return the executors of replicas that each have equally many processes, in order; process 0 has the first."""
        size, found = leader.num_processes // num_replicas, []
        for begin in range(0, leader.num_processes, size):
            part = executor if begin == 0 else RemoteReplica(executor, leader, begin)
            found.append(cls(part, leader, [process for process in range(begin, begin + size) if process]))
        return found

    @property
    def host_blocks(self) -> HostBlocks | None:
        """None: each process holds only its part of a block."""
        return None

    @property
    def routed_experts(self) -> None:
        """None: experts of tokens are not kept."""
        return None

    @property
    def sleeper(self) -> Sleeper | None:
        """None: each process would have to release its part at the same step."""
        return None

    @property
    def num_compiles_after_warm_up(self) -> int:
        return self._executor.num_compiles_after_warm_up

    @property
    def expert_stats(self) -> ExpertStats | None:
        found: ExpertStats | None = self._executor.expert_stats
        return found

    def warm_up(self, progress: Progress) -> None:
        """Warm up this process. Every process does so without a message, and they wait for each other in it."""
        with self._naming_the_lost():
            self._executor.warm_up(progress)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Move blocks in every process.

        Raises:
            Unavailable: a process is lost.
            InternalError: as `JaxExecutor.move_blocks`.
        """
        with self._naming_the_lost():
            block_ids = np.array([moves.sources, moves.destinations], np.int32)
            self._send(MessageKind.MOVES, _MOVES.index(moves.move), words=block_ids)
            self._executor.move_blocks(moves)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Raise: the geometry of several processes has no adapter slots.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"adapters are not supported with several processes: slot {slot}")

    def forward(self, inputs: StepInputs) -> MultiHostHandle:
        """Start a forward in every process; raises as `move_blocks`."""
        with self._naming_the_lost():
            packed = self._executor.pack(inputs)
            self._num_steps += 1
            self._send(MessageKind.STEP, self._num_steps, packed.num_tokens, words=packed.words)
            return MultiHostHandle(self._num_steps, self._executor.forward(packed))

    def sample(self, hidden: MultiHostHandle, inputs: SamplingInputs) -> MultiHostHandle:
        """Start sampling in every process; raises as `move_blocks`."""
        with self._naming_the_lost():
            for due in () if inputs.edits is None else inputs.edits.due:
                self._send(MessageKind.COUNT, due.slot, due.num_prompt, words=np.array(due.token_ids, np.int32))
            self._send(MessageKind.SAMPLE, hidden.number, inputs.detail, *get_sizes(inputs), words=pack_words(inputs))
            told = tuple(self._sent_messages)
            self._sent_messages.clear()
            return MultiHostHandle(hidden.number, self._executor.sample(hidden.array, inputs), told)

    def compute_aux(self, hidden: MultiHostHandle, inputs: AuxInputs) -> Callable[[], AuxOutputs]:
        """Start computing log-probabilities or hidden states in every process.

        Both this and the returned function raise as `move_blocks`.
        """
        with self._naming_the_lost():
            self._send(MessageKind.TELL, hidden.number, inputs.kind, inputs.num_rows, words=inputs.words)
            collect = self._executor.compute_aux(hidden.array, inputs)

        def collect_here() -> AuxOutputs:
            with self._naming_the_lost():
                return collect()

        return collect_here

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> MultiHostHandle:
        """Raise: the geometry of several processes has one step per dispatch.

        Raises:
            InternalError: always.
        """
        raise InternalError(
            f"multi-step scheduling is not supported with several processes: {num_steps} steps; the limit is 1"
        )

    def decode_interruptibly(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[MultiHostHandle, DecodeInterrupt]:
        """Raise: the geometry of several processes has one step per dispatch.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"a dispatch of {num_steps} steps is not supported with several processes: the limit is 1")

    def decode_with_masks(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[MultiHostHandle, MaskChannel]:
        """Raise: the geometry of several processes has no steps that wait for masks.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"masked multi-step is not supported with several processes: {num_steps} steps")

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> MultiHostHandle:
        """Raise: the geometry of several processes has no draft model.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"draft models are not supported with several processes: {num_rounds} rounds")

    def is_done(self, handle: MultiHostHandle) -> bool:
        """Return True if this process has run its part of the step."""
        return self._executor.is_done(handle.array)

    def collect(self, handle: MultiHostHandle) -> StepOutputs:
        """Collect a step in every process; raises as `move_blocks`, and if another process sampled other tokens."""
        with self._naming_the_lost():
            self._leader.send(MessageKind.COLLECT, *encode(MessageKind.COLLECT, handle.number), to=self._others)
            outputs = self._executor.collect(handle.array)
            try:
                self._check.add_own(handle.number, handle.sent_messages, get_sampled(outputs))
            except InternalError as error:
                self._leader.fail(error)
                raise
            if not self._check.wait(MAX_UNCONFIRMED, _CONFIRM_TIMEOUT_S):
                raise InternalError(f"{self._check.num_unconfirmed} steps were not confirmed by every process")
            return outputs

    def shutdown(self) -> None:
        """End the other processes if no replica is left, and check the digests of the last steps.

        Raises:
            InternalError: some steps were not confirmed. The memory is freed in any case.
        """
        is_well = self._leader.failure is None
        if is_well and not self._leader.release_replica():
            is_well = self._check.wait(0, _CONFIRM_TIMEOUT_S)
        elif is_well:
            is_ended = self._leader.end()
            is_well = is_ended and self._check.wait(0, 0.0)
        self._executor.shutdown()
        if not is_well and self._leader.failure is None:
            raise InternalError(f"at shutdown, {self._check.num_unconfirmed} steps were not confirmed by every process")
        if isinstance(self._leader.failure, InternalError):
            raise self._leader.failure

    def _send(self, kind: MessageKind, *head: int, words: NDArray[np.int32]) -> None:
        parts = encode(kind, *head, words=words)
        self._leader.send(kind, *parts, to=self._others)
        self._sent_messages.extend(parts)

    def _confirm(self, process: int, payload: bytearray) -> None:
        try:
            self._check.add(process, payload)
        except InternalError as error:
            self._leader.fail(error)

    @contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """Replace an error that a lost process caused by one that names the process."""
        try:
            yield
        except (InternalError, ValueError, OSError, jax.errors.JaxRuntimeError) as error:
            lost = self._leader.wait_for_failure(_LOSS_TIMEOUT_S)
            if lost is not None and lost is not error:
                raise lost from error
            failure = error if isinstance(error, InternalError) else InternalError(f"process 0 failed: {error}")
            self._leader.fail(failure)
            raise failure from error


def follow(executor: JaxExecutor, follower: Follower, *, reports: bool = False) -> None:
    """Run what process 0 sends until END.

    Args:
        reports: send the results of a replica that process 0 has no part in.

    Raises:
        InternalError: a device failed, or steps are sampled or collected in another order.
        Unavailable: a message cannot be run.
    """
    told: list[bytearray] = []
    counts: list[TokenCountReset] = []
    forwards: deque[MultiHostHandle] = deque(maxlen=1)
    in_flight: deque[MultiHostHandle] = deque()
    aux: deque[Callable[[], AuxOutputs]] = deque()
    for kind, payload in follower.follow():
        if kind not in HEADS:
            raise Unavailable(f"process 0 sent an unexpected {kind.name}")
        head, words = decode(kind, payload)
        match kind:
            case MessageKind.MOVES:
                told.append(payload)
                sources, destinations = words.reshape(2, -1).tolist()
                executor.move_blocks(BlockMoves(_MOVES[head[0]], sources, destinations))
            case MessageKind.STEP:
                told.append(payload)
                number, num_tokens = head
                forwards.append(MultiHostHandle(number, executor.forward(PackedForward(num_tokens, words))))
            case MessageKind.SAMPLE:
                told.append(payload)
                forward = _next(forwards, "sampled", head[0])
                inputs, counts = parse_sampling(Detail(head[1]), head[2:], words, counts), []
                in_flight.append(MultiHostHandle(forward.number, executor.sample(forward.array, inputs), told))
                told = []
            case MessageKind.TELL:
                told.append(payload)
                if not forwards or forwards[0].number != head[0]:
                    raise Unavailable(f"process 0 refers to step {head[0]}, which was not the last to run")
                collect = executor.compute_aux(forwards[0].array, AuxInputs.of_words(AuxKind(head[1]), words, head[2]))
                if reports:
                    aux.append(collect)
            case MessageKind.COUNT:
                told.append(payload)
                counts.append(TokenCountReset(head[0], words.tolist(), head[1]))
            case MessageKind.COLLECT:
                step = _next(in_flight, "collected", head[0])
                outputs = executor.collect(step.array)
                if reports:
                    follower.send(MessageKind.RESULT, *encode_outputs(outputs))
                digest = compute_digest(step.sent_messages, get_sampled(outputs))
                follower.send(
                    MessageKind.DIGEST, *encode(MessageKind.DIGEST, step.number, words=np.frombuffer(digest, np.int32))
                )
            case MessageKind.COLLECT_AUX:
                if not aux:
                    raise Unavailable("process 0 requests results that it has received")
                follower.send(MessageKind.RESULT, *encode_outputs(aux.popleft()()))
            case MessageKind.END:
                return


def _next(steps: deque[MultiHostHandle], act: str, number: int) -> MultiHostHandle:
    """Remove and return the first step; raise InternalError if it is not step `number`."""
    if not steps or steps[0].number != number:
        raise InternalError(f"step {number}: {act} out of order, before {[step.number for step in steps]}")
    return steps.popleft()
