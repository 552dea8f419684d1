"""One executor in several processes: process 0 says each verb before it runs it, the others run what they hear.

    process 0   engine ─ dispatch n+1 ─ collect n ─ ...          compares digests as they come, beside the steps
                           │ STEP        │ COLLECT       ↑ DIGEST n
    process i              └ dispatch    └ collect ──────┘

A step travels as the two packed buffers that its programs take, a move as its block ids. A digest is of what was
dispatched since the one before, and of the tokens that the step drew. A process that differs ends all.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import numpy as np

from jpaged.device.executor import JaxExecutor, JaxStepHandle
from jpaged.device.multihost.channel import Kind
from jpaged.device.multihost.handshake import Follower, Leader
from jpaged.device.step.inputs import PackedStep
from jpaged.engine.executor import BlockMoves, DeviceRates, Geometry, Move, Progress, StepInputs, StepOutputs
from jpaged.errors import InternalError, Unavailable

MAX_UNCONFIRMED = 256
"""Steps that may be collected before every process has said what it drew in the first of them."""
_CONFIRM_TIMEOUT_S = 120.0
_LOSS_TIMEOUT_S = 5.0
"""A collective breaks a moment before the line to whom it broke with; then the line says who that was."""

_STEP = struct.Struct("<QIIBI")
_MOVES = struct.Struct("<BI")
_NUMBER = struct.Struct("<Q")
_DIGEST_BYTES = 16
_MOVE_CODES = {Move.COPY: 0, Move.SWAP_OUT: 1, Move.SWAP_IN: 2}
_MOVES_BY_CODE = {code: move for move, code in _MOVE_CODES.items()}

Parts = tuple[bytes, ...]


def encode_step(number: int, step: PackedStep) -> Parts:
    """A step as parts of a message."""
    head = _STEP.pack(number, step.num_tokens, step.num_rows, step.want_top_logprobs, step.forward.nbytes)
    return head, step.forward.tobytes(), step.sample.tobytes()


def decode_step(payload: bytearray) -> tuple[int, PackedStep]:
    """The inverse of `encode_step`; the buffers are views of the payload."""
    number, num_tokens, num_rows, want_top_logprobs, num_bytes = _STEP.unpack_from(payload)
    middle = _STEP.size + num_bytes
    forward = np.frombuffer(payload, np.int32, num_bytes // 4, _STEP.size)
    sample = np.frombuffer(payload, np.int32, -1, middle)
    return number, PackedStep(num_tokens, num_rows, bool(want_top_logprobs), forward, sample)


def encode_moves(moves: BlockMoves) -> Parts:
    """Moves as parts of a message."""
    head = _MOVES.pack(_MOVE_CODES[moves.move], len(moves.sources))
    return head, np.asarray([*moves.sources, *moves.destinations], np.int32).tobytes()


def decode_moves(payload: bytearray) -> BlockMoves:
    """The inverse of `encode_moves`."""
    code, count = _MOVES.unpack_from(payload)
    ids = np.frombuffer(payload, np.int32, -1, _MOVES.size).tolist()
    return BlockMoves(_MOVES_BY_CODE[code], ids[:count], ids[count:])


def sampled_of(outputs: StepOutputs) -> np.ndarray:
    """What every process has to have sampled: tokens, and where there is none."""
    return np.where(outputs.is_sound_r, outputs.token_ids_r, -1)


def digest_of(told: Sequence[bytes | bytearray], token_ids_r: np.ndarray) -> bytes:
    """Of what was dispatched, and what it drew."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in told:
        digest.update(part)
    digest.update(np.asarray(token_ids_r, np.int32).tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class MultiHostHandle:
    """A step that every process has been told of."""

    number: int
    told: Parts
    own: JaxStepHandle


@dataclass(slots=True)
class _Step:
    """What is known of a collected step: process 0's part of it, and the digests that came."""

    told: Parts = ()
    token_ids_r: np.ndarray | None = None
    digest: bytes = b""
    theirs: dict[int, bytes] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)


class DigestCheck:
    """Compares the digests of each step, on the threads that receive them: the engine's only leaves its own part."""

    def __init__(self, num_others: int) -> None:
        self._num_others = num_others
        self._steps: dict[int, _Step] = {}
        self._news = threading.Condition()

    def add_own(self, number: int, told: Parts, token_ids_r: np.ndarray) -> None:
        """Takes what process 0 dispatched and drew.

        Raises:
            InternalError: another process drew something else.
        """
        with self._news:
            step = self._steps.setdefault(number, _Step())
            step.told, step.token_ids_r = told, token_ids_r
            theirs = dict(step.theirs)
        for process, digest in theirs.items():
            self._compare(number, process, digest)

    def add(self, process: int, payload: bytes | bytearray) -> None:
        """Takes another process's digest.

        Raises:
            InternalError: it differs.
        """
        (number,) = _NUMBER.unpack_from(payload)
        digest = bytes(payload[_NUMBER.size :])
        with self._news:
            step = self._steps.setdefault(number, _Step())
            step.theirs[process] = digest
            is_collected = step.token_ids_r is not None
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
        if step is None or step.token_ids_r is None:
            return
        own = step.digest or digest_of(step.told, step.token_ids_r)
        if own != digest:
            raise InternalError(
                f"step {number}: process {process} ran or drew something else than process 0 "
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
        leader.on_digest = self._confirm

    @property
    def geometry(self) -> Geometry:
        return self._executor.geometry

    @property
    def rates(self) -> DeviceRates:
        return self._executor.rates

    @property
    def num_compiles_after_warm_up(self) -> int:
        return self._executor.num_compiles_after_warm_up

    def warm_up(self, progress: Progress) -> None:
        """Every process does it without being told, and they wait for each other in it."""
        with self._naming_the_lost():
            self._executor.warm_up(progress)

    def move_blocks(self, moves: BlockMoves) -> None:
        """As every executor's.

        Raises:
            Unavailable: a process is lost.
            InternalError: as `JaxExecutor.move_blocks`.
        """
        with self._naming_the_lost():
            self._tell(Kind.MOVES, encode_moves(moves))
            self._executor.move_blocks(moves)

    def dispatch(self, inputs: StepInputs) -> MultiHostHandle:
        """As every executor's; raises as `move_blocks` does."""
        with self._naming_the_lost():
            step = self._executor.pack(inputs)
            self._num_steps += 1
            self._tell(Kind.STEP, encode_step(self._num_steps, step))
            told = tuple(self._told)
            self._told.clear()
            return MultiHostHandle(self._num_steps, told, self._executor.dispatch_packed(step))

    def collect(self, handle: MultiHostHandle) -> StepOutputs:
        """As every executor's; raises as `move_blocks` does, and when another process drew other tokens."""
        with self._naming_the_lost():
            self._leader.send(Kind.COLLECT, _NUMBER.pack(handle.number))
            outputs = self._executor.collect(handle.own)
            try:
                self._check.add_own(handle.number, handle.told, sampled_of(outputs))
            except InternalError as error:
                self._leader.fail(error)
                raise
            if not self._check.wait(MAX_UNCONFIRMED, _CONFIRM_TIMEOUT_S):
                raise InternalError(f"{self._check.num_unconfirmed} steps were not confirmed by every process")
            return outputs

    def shutdown(self) -> None:
        """Lets the others end, and holds them to what they drew last.

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

    def _tell(self, kind: Kind, parts: Parts) -> None:
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
        InternalError: a fault of a device, or steps that are collected in another order.
        Unavailable: what arrived cannot be run.
    """
    follower.is_following = True
    told: list[bytearray] = []
    in_flight: deque[tuple[int, list[bytearray], JaxStepHandle]] = deque()
    while True:
        kind, payload = follower.messages.get()
        match kind:
            case Kind.STEP:
                number, step = decode_step(payload)
                told.append(payload)
                in_flight.append((number, told, executor.dispatch_packed(step)))
                told = []
            case Kind.MOVES:
                told.append(payload)
                executor.move_blocks(decode_moves(payload))
            case Kind.COLLECT:
                number, parts, handle = in_flight.popleft()
                if payload != _NUMBER.pack(number):
                    raise InternalError(f"step {_NUMBER.unpack(payload)[0]} is collected before step {number}")
                outputs = executor.collect(handle)
                follower.send(Kind.DIGEST, _NUMBER.pack(number), digest_of(parts, sampled_of(outputs)))
            case Kind.END:
                return
            case _:
                raise Unavailable(f"process 0 sent {kind.name}")
