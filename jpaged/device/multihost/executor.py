"""One executor in several processes: process 0 says each verb before it runs it, the others run what they hear.

    process 0   engine ─ forward n+1 ─ sample n+1 ─ collect n ─ ...     compares digests as they come, beside the steps
                           │ STEP        │ SAMPLE     │ COLLECT     ↑ DIGEST n
    process i              └ forward     └ sample     └ collect ────┘

A step travels as the two buffers that its programs take, a move as its block ids. A digest is of what was dispatched
since the one before, and of the tokens that the step sampled. A process that differs ends all.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import numpy as np
from numpy.typing import NDArray

from jpaged.device.executor import JaxExecutor
from jpaged.device.multihost.channel import Kind
from jpaged.device.multihost.handshake import Follower, Leader
from jpaged.device.multihost.messages import HEADS, decode, encode, sampling_of, sizes_of, words_of
from jpaged.device.step.runner import PackedForward
from jpaged.engine.executor import (
    I32,
    BlockMoves,
    Detail,
    DeviceRates,
    Geometry,
    HostBlocks,
    MaskFeed,
    Move,
    Progress,
    SamplingInputs,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.edits import CountDue
from jpaged.engine.executor.telling import Tell, TellInputs, ToldOutputs
from jpaged.errors import InternalError, Unavailable
from jpaged.types import Adapter

MAX_UNCONFIRMED = 256
"""Steps that may be collected before every process has said what it sampled in the first of them."""
_CONFIRM_TIMEOUT_S = 120.0
_LOSS_TIMEOUT_S = 5.0
"""A collective breaks a moment before the line to whom it broke with; then the line says who that was."""

_DIGEST_BYTES = 16
_MOVES = tuple(Move)


def sampled_of(outputs: StepOutputs) -> np.ndarray:
    """The tokens that every process must have sampled, -1 where there is none."""
    return np.where(outputs.is_sound_rn, outputs.token_ids_rn, -1)


def digest_of(told: Sequence[bytes | bytearray], token_ids_rn: np.ndarray) -> bytes:
    """The digest of what was dispatched, and of what it sampled."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in told:
        digest.update(part)
    digest.update(np.asarray(token_ids_rn, np.int32).tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class MultiHostHandle:
    """A forward, or a step that samples from it, that every process has been told of.

    Attributes:
        number: the step's.
        array: what `JaxExecutor` has of it.
        told: what was dispatched since the step before.
    """

    number: int
    array: jax.Array
    told: Sequence[bytes | bytearray] = ()


@dataclass(slots=True)
class _Step:
    """One collected step: what process 0 knows of it, and the digests that came from the others."""

    told: Sequence[bytes | bytearray] = ()
    token_ids_rn: np.ndarray | None = None
    digest: bytes = b""
    theirs: dict[int, bytes] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)


class DigestCheck:
    """Compares the digests of each step, on the threads that receive them: the engine's only leaves its own part."""

    def __init__(self, num_others: int) -> None:
        self._num_others = num_others
        self._steps: dict[int, _Step] = {}
        self._news = threading.Condition()

    def add_own(self, number: int, told: Sequence[bytes | bytearray], token_ids_rn: np.ndarray) -> None:
        """Takes what process 0 dispatched and sampled.

        Raises:
            InternalError: another process sampled something else.
        """
        with self._news:
            step = self._steps.setdefault(number, _Step())
            step.told, step.token_ids_rn = told, token_ids_rn
            theirs = dict(step.theirs)
        for process, digest in theirs.items():
            self._compare(number, process, digest)

    def add(self, process: int, payload: bytes | bytearray) -> None:
        """Takes another process's digest.

        Raises:
            InternalError: it differs.
        """
        (number,), words = decode(Kind.DIGEST, payload)
        digest = words.tobytes()
        with self._news:
            step = self._steps.setdefault(number, _Step())
            step.theirs[process] = digest
            is_collected = step.token_ids_rn is not None
        if is_collected:
            self._compare(number, process, digest)

    def wait(self, max_unconfirmed: int, timeout_s: float) -> bool:
        """Waits until no more than so many steps are unconfirmed; False when that took too long."""
        with self._news:
            return self._news.wait_for(lambda: len(self._steps) <= max_unconfirmed, timeout_s)

    @property
    def num_unconfirmed(self) -> int:
        """Steps that not every process has confirmed."""
        return len(self._steps)

    def _compare(self, number: int, process: int, digest: bytes) -> None:
        with self._news:
            step = self._steps.get(number)
        if step is None or step.token_ids_rn is None:
            return
        own = step.digest or digest_of(step.told, step.token_ids_rn)
        if own != digest:
            raise InternalError(
                f"step {number}: process {process} ran or sampled something else than process 0 "
                f"(digests {digest.hex()} and {own.hex()})"
            )
        with self._news:
            step.digest = own
            step.confirmed.add(process)
            if len(step.confirmed) == self._num_others:
                self._steps.pop(number, None)
                self._news.notify_all()


class MultiHostExecutor:
    """Implements `engine.executor.Executor` in process 0, for all of them. Used by one thread, the engine's."""

    def __init__(self, executor: JaxExecutor, leader: Leader) -> None:
        self._executor = executor
        self._leader = leader
        self._check = DigestCheck(leader.num_processes - 1)
        self._told: deque[bytes] = deque()
        self._num_steps = 0
        leader.take_digests(self._confirm)

    @property
    def geometry(self) -> Geometry:
        return self._executor.geometry

    @property
    def rates(self) -> DeviceRates:
        return self._executor.rates

    @property
    def host_blocks(self) -> HostBlocks | None:
        """None: each process has its part of a block."""
        return None

    @property
    def num_compiles_after_warm_up(self) -> int:
        return self._executor.num_compiles_after_warm_up

    def warm_up(self, progress: Progress) -> None:
        """Every process does it without being told, and they wait for each other in it."""
        with self._naming_the_lost():
            self._executor.warm_up(progress)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Moves blocks in every process.

        Raises:
            Unavailable: a process is lost.
            InternalError: as `JaxExecutor.move_blocks`.
        """
        with self._naming_the_lost():
            block_ids = np.array([moves.sources, moves.destinations], np.int32)
            self._tell(Kind.MOVES, _MOVES.index(moves.move), words=block_ids)
            self._executor.move_blocks(moves)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Is not asked for: the geometry of several processes has no adapter slots.

        Raises:
            InternalError: it was.
        """
        raise InternalError(f"several processes were given an adapter for slot {slot}; they have none")

    def forward(self, inputs: StepInputs) -> MultiHostHandle:
        """As every executor's; raises as `move_blocks` does."""
        with self._naming_the_lost():
            packed = self._executor.pack(inputs)
            self._num_steps += 1
            self._tell(Kind.STEP, self._num_steps, packed.num_tokens, words=packed.words)
            return MultiHostHandle(self._num_steps, self._executor.forward(packed))

    def sample(self, hidden: MultiHostHandle, inputs: SamplingInputs) -> MultiHostHandle:
        """As every executor's; raises as `move_blocks` does."""
        with self._naming_the_lost():
            for due in () if inputs.edits is None else inputs.edits.due:
                self._tell(Kind.COUNT, due.slot, due.num_prompt, words=np.array(due.token_ids, np.int32))
            self._tell(Kind.SAMPLE, hidden.number, inputs.detail, *sizes_of(inputs), words=words_of(inputs))
            told = tuple(self._told)
            self._told.clear()
            return MultiHostHandle(hidden.number, self._executor.sample(hidden.array, inputs), told)

    def tell(self, hidden: MultiHostHandle, inputs: TellInputs) -> Callable[[], ToldOutputs]:
        """As every executor's; raises as `move_blocks` does, also when the results are waited for."""
        with self._naming_the_lost():
            self._tell(Kind.TELL, hidden.number, inputs.tell, inputs.num_rows, words=inputs.words)
            collect = self._executor.tell(hidden.array, inputs)

        def collect_here() -> ToldOutputs:
            with self._naming_the_lost():
                return collect()

        return collect_here

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> MultiHostHandle:
        """Is not asked for: the geometry of several processes has one step a dispatch.

        Raises:
            InternalError: it was.
        """
        raise InternalError(f"several processes were asked for {num_steps} steps at once; their limit is 1")

    def decode_fed(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[MultiHostHandle, MaskFeed]:
        """Is not asked for: the geometry of several processes has no such steps.

        Raises:
            InternalError: it was.
        """
        raise InternalError(f"several processes were asked for {num_steps} steps that wait for masks")

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> MultiHostHandle:
        """Is not asked for: the geometry of several processes has no proposals.

        Raises:
            InternalError: it was.
        """
        raise InternalError(f"several processes were asked for {num_rounds} rounds of proposals; they have no draft")

    def is_done(self, handle: MultiHostHandle) -> bool:
        """Whether this process has run its part of the step."""
        return self._executor.is_done(handle.array)

    def collect(self, handle: MultiHostHandle) -> StepOutputs:
        """As every executor's; raises as `move_blocks` does, and when another process sampled other tokens."""
        with self._naming_the_lost():
            self._leader.send(Kind.COLLECT, *encode(Kind.COLLECT, handle.number))
            outputs = self._executor.collect(handle.array)
            try:
                self._check.add_own(handle.number, handle.told, sampled_of(outputs))
            except InternalError as error:
                self._leader.fail(error)
                raise
            if not self._check.wait(MAX_UNCONFIRMED, _CONFIRM_TIMEOUT_S):
                raise InternalError(f"{self._check.num_unconfirmed} steps were not confirmed by every process")
            return outputs

    def shutdown(self) -> None:
        """Lets the others end, and holds them to what they sampled last.

        Raises:
            InternalError: some steps were not confirmed. The memory is given back all the same.
        """
        is_well = self._leader.failure is None
        if is_well:
            is_ended = self._leader.end()
            is_well = is_ended and self._check.wait(0, 0.0)
        self._executor.shutdown()
        if not is_well and self._leader.failure is None:
            raise InternalError(f"at the end, {self._check.num_unconfirmed} steps were not confirmed by every process")
        if isinstance(self._leader.failure, InternalError):
            raise self._leader.failure

    def _tell(self, kind: Kind, *head: int, words: NDArray[np.int32]) -> None:
        parts = encode(kind, *head, words=words)
        self._leader.send(kind, *parts)
        self._told.extend(parts)

    def _confirm(self, process: int, payload: bytearray) -> None:
        try:
            self._check.add(process, payload)
        except InternalError as error:
            self._leader.fail(error)

    @contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """An error that a lost process caused becomes one that names it."""
        try:
            yield
        except (InternalError, ValueError, OSError, jax.errors.JaxRuntimeError) as error:
            lost = self._leader.wait_for_failure(_LOSS_TIMEOUT_S)
            if lost is not None and lost is not error:
                raise lost from error
            failure = error if isinstance(error, InternalError) else InternalError(f"process 0 failed: {error}")
            self._leader.fail(failure)
            raise failure from error


def follow(executor: JaxExecutor, follower: Follower) -> None:
    """Runs what process 0 says until it says END.

    Raises:
        InternalError: a fault of a device, or steps that are sampled or collected in another order.
        Unavailable: what arrived cannot be run.
    """
    told: list[bytearray] = []
    counts: list[CountDue] = []
    forwards: deque[MultiHostHandle] = deque(maxlen=1)
    in_flight: deque[MultiHostHandle] = deque()
    for kind, payload in follower.follow():
        if kind not in HEADS:
            raise Unavailable(f"process 0 sent {kind.name}")
        head, words = decode(kind, payload)
        match kind:
            case Kind.MOVES:
                told.append(payload)
                sources, destinations = words.reshape(2, -1).tolist()
                executor.move_blocks(BlockMoves(_MOVES[head[0]], sources, destinations))
            case Kind.STEP:
                told.append(payload)
                number, num_tokens = head
                forwards.append(MultiHostHandle(number, executor.forward(PackedForward(num_tokens, words))))
            case Kind.SAMPLE:
                told.append(payload)
                forward = _next(forwards, "sampled", head[0])
                inputs, counts = sampling_of(Detail(head[1]), head[2:], words, counts), []
                in_flight.append(MultiHostHandle(forward.number, executor.sample(forward.array, inputs), told))
                told = []
            case Kind.TELL:
                told.append(payload)
                if not forwards or forwards[0].number != head[0]:
                    raise Unavailable(f"process 0 asks of step {head[0]}, which did not run last")
                executor.tell(forwards[0].array, TellInputs.of_words(Tell(head[1]), words, head[2]))
            case Kind.COUNT:
                told.append(payload)
                counts.append(CountDue(head[0], words.tolist(), head[1]))
            case Kind.COLLECT:
                step = _next(in_flight, "collected", head[0])
                digest = digest_of(step.told, sampled_of(executor.collect(step.array)))
                follower.send(Kind.DIGEST, *encode(Kind.DIGEST, step.number, words=np.frombuffer(digest, np.int32)))
            case Kind.END:
                return


def _next(steps: deque[MultiHostHandle], act: str, number: int) -> MultiHostHandle:
    """The first of some steps, which has to be the one that process 0 means."""
    if not steps or steps[0].number != number:
        raise InternalError(f"step {number} is {act} before {[step.number for step in steps]}")
    return steps.popleft()
