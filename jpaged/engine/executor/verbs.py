"""Executor protocols: the methods of one device, several devices or a fake.

Mask channel: the host sends token masks to a running program between its forward passes and its samples.

    device   forward 0 ─ sample 0 ─ forward 1 ─ sample 1 ─ ...
    host     give ─────┘       └ wait ─ give ─┘       └ wait ─ ...

Rows with grammars thus run several steps in one dispatch, like rows without, and the host works between them only for
the masks.

Data port: blocks as device arrays, from the devices of one server to those of another.

    prefill server                                          decode server
    read blocks ──> arrays ──> offer ── control: uuid, shapes ──> pull ──> arrays ──> host pool, prefix cache
                               release <── control: finished ────────┘
                               withdraw, if it was not pulled

The port only moves arrays. A control connection, which is authenticated, announces each offer, and the number of an
offer that was not announced cannot be guessed. Offered arrays stay in memory until they are released or withdrawn.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from numpy.typing import NDArray

from jpaged.engine.executor.aux_io import AuxInputs, AuxOutputs
from jpaged.engine.executor.io import (
    I32,
    BlockMoves,
    Bool,
    DeviceRates,
    ExpertStats,
    Geometry,
    SamplingInputs,
    StepInputs,
    StepOutputs,
)
from jpaged.types import Adapter


class StepDirective(enum.IntEnum):
    """Directive to a step that waits for masks, and to the steps after it."""

    VOID = 0  # the step is not executed, because the feed was closed: the previous step was the last
    LAST = 1
    CONTINUE = 2


class MaskChannel(Protocol):
    """Channel of one dispatch."""

    def give(self, mask_rw: I32, verdict: StepDirective) -> None:
        """Send the next step its masks: `LogitsProcessorInputs.mask_rw`, with the padded rows of the dispatch."""
        ...

    def wait(self) -> tuple[I32, Bool] | None:
        """Return the tokens of the last step with masks, and which are finite, `[R]` each; None if it failed."""
        ...

    def close(self) -> None:
        """Close the channel; a step that waits for masks is not executed. Idempotent."""
        ...


class DecodeInterrupt(Protocol):
    """Means to end a dispatch of several decode steps early."""

    def interrupt(self) -> None:
        """Let the current step be the last. Thread-safe; no-op if the dispatch has ended."""
        ...

    def close(self) -> int:
        """Return the number of executed steps; call it once, after the results were collected."""
        ...


Hidden = TypeVar("Hidden")
"""Output of a forward, for its sample. Opaque to the engine; valid until the next forward."""

Handle = TypeVar("Handle")
"""A dispatched step whose results may not exist yet. Opaque to the engine; collected once, in order of dispatch."""

COMPILER_THREAD = "jpaged-compile"
"""Beginning of the names of threads that compile programs; the end of a process waits for them."""
Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while the executor starts."""


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """Contents of blocks in device arrays, which are opaque to the engine.

    Attributes:
        arrays: [C, *block] each.
        num_rows: rows of each array that are contents of blocks; padding follows.
    """

    arrays: tuple[Any, ...]
    num_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """The part of every block that one device has: its place in a block, and its shape."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockOffer:
    """Blocks that another server may pull.

    Attributes:
        uuid: random number that names the offer, from 1 to 2**63 - 1.
        address: HOST:PORT of the data port that has them.
        dtype: as stored in the pool.
        block_shape: of a block, all its layers; axis 1 is the tokens.
        parts: the parts of each block, by device.
        sizes: rows of each array, with padding.
        num_rows: rows of each array that are contents of blocks.
        positions: index and KV group of each row, array after array.
        last_key: hash of the last block; binds the offer to its tokens.
    """

    uuid: int
    address: str
    dtype: str
    block_shape: tuple[int, ...]
    parts: tuple[ArrayPart, ...]
    sizes: tuple[int, ...]
    num_rows: tuple[int, ...]
    positions: tuple[tuple[int, int], ...] = ()
    last_key: bytes = b""


class BlockPull(Protocol):
    """A pull in flight."""

    @property
    def is_done(self) -> bool:
        """True if the arrays have come, or cannot come any more. Never waits."""
        ...

    def take(self) -> tuple[BlockArrays, tuple[tuple[int, int], ...]]:
        """Return the blocks in the layout of this server, and the position of each row. Call it once, on a thread.

        Raises:
            Unavailable: the pull failed, because the other server has ended.
        """
        ...

    def abandon(self) -> None:
        """Give up waiting. Until the pull ends, nothing else is pulled from the same port."""
        ...


class BlockPort(Protocol):
    """A data port. Any thread may call; no method waits.

    Attributes:
        protocol: name and version of the transport; only equal ones can exchange blocks.
        num_bytes_offered: bytes of offers that are not released.
    """

    protocol: str

    @property
    def num_bytes_offered(self) -> int: ...

    @property
    def is_settled(self) -> bool:
        """True if no offer is being withdrawn; otherwise call `sweep` until it is."""
        ...

    def admit(self, host: str) -> None:
        """Accept connections from the numeric address of a server that may pull; other values are ignored."""
        ...

    def offer(self, contents: BlockArrays) -> BlockOffer:
        """Offer arrays.

        Raises:
            Unavailable: the offers would exceed the limit of the port.
        """
        ...

    def release(self, uuid: int) -> None:
        """Record that the other server has pulled an offer. Unknown numbers are ignored."""
        ...

    def withdraw(self, uuid: int) -> None:
        """Begin to free the memory of an offer that may not have been pulled. Unknown numbers are ignored."""
        ...

    def sweep(self) -> None:
        """Continue what `withdraw` began."""
        ...

    def pull(self, offer: BlockOffer, place: object) -> BlockPull:
        """Start to pull an offer.

        Args:
            place: `HostBlocks.place` of the pool that will have the blocks.

        Raises:
            Incompatible: the blocks of the offer do not fit this server's; states why.
            Unavailable: an earlier pull from the same port has not ended.
        """
        ...

    def close(self) -> None:
        """Free all offers."""
        ...


class HostBlocks(Protocol):
    """Blocks of host memory as bytes or device arrays, for transfers to and from disk and other servers."""

    @property
    def bytes_per_block(self) -> int:
        """The size of a block of one KV group, all its layers."""
        ...

    def view(self, block_id: int) -> memoryview:
        """Return the bytes of a block `[bytes_per_block]`, to read or to write.

        Any thread may call this while it holds the block in the host pool. Holding ensures that nothing is moved to the
        block, and that a move from it sees what was written before. The view is valid until `shutdown`, and its memory
        stays readable after.
        """
        ...

    def have_landed(self, block_ids: Sequence[int]) -> bool:
        """Return True if all swap-outs to these blocks have completed. Never waits; for the engine thread alone."""
        ...

    @property
    def place(self) -> object:
        """The layout and the devices of the pool, for `BlockPort.pull`."""
        ...

    def read(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> BlockArrays:
        """Start to read device blocks, then host blocks, into new device arrays; for the engine thread alone.

        The device blocks may be overwritten as soon as this returns. No swap-out to the host blocks may be in flight.
        """
        ...

    def receive(self, contents: BlockArrays, block_ids: Sequence[int]) -> None:
        """Start to write the rows of device arrays to these host blocks, 0 for none; for the engine thread alone.

        Until they have landed, moves to the device read the arrays. `have_landed` treats them as swap-outs.
        """
        ...

    def kv_identity(self) -> bytes:
        """Return 32 bytes that are equal for two executors whose blocks are interchangeable.

        The first call reads every weight, at about a second per gigabyte. Do not call it on the engine thread, or
        before it is needed. Any other thread may.
        """
        ...


SleepTag = Literal["weights", "kv_cache"]
SLEEP_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache")
"""Device memory that can be released, in the order in which it is restored."""


class WeightUpdate(Protocol):
    """Checked weights that are not in use yet.

    Attributes:
        is_complete: all weights of the model are in it.
    """

    is_complete: bool

    def close(self) -> None:
        """Close its files. Idempotent."""
        ...


class Sleeper(Protocol):
    """Releases device memory, and replaces weights, while no step runs. Only the engine thread calls it.

    Attributes:
        can_reload: weights can be discarded, because `wake_up` can read them again.
    """

    can_reload: bool

    def sleep(self, level: int) -> None:
        """Free the blocks; level 1 moves the weights to host memory, and level 2 discards them, also from there.

        No step, move or adapter may be dispatched until both tags are awake again.
        """
        ...

    def wake_up(self, tag: SleepTag) -> None:
        """Restore what sleeps. Blocks have undefined contents then, and discarded weights are read again."""
        ...

    def check_update(self, weights: object) -> WeightUpdate:
        """Check the names, shapes and types of new weights; any thread may call this.

        Raises:
            InvalidArgument, Unsupported: they are not weights of the model; states why.
        """
        ...

    def update(self, update: WeightUpdate) -> None:
        """Replace the weights in an update of this executor; weights that were asleep are awake then.

        Raises:
            JpagedError: a part of it cannot be read, or is not finite. The weights are discarded then.
        """
        ...

    def discard(self) -> None:
        """Discard the weights, so that no step runs until `update` or `wake_up`."""
        ...


class RoutedExperts(Protocol):
    """Reads the experts of tokens, which the device stores with their keys.

    Attributes:
        block_size: tokens of a block.
    """

    block_size: int

    def read(self, block_ids: Sequence[int], num_tokens: int) -> NDArray[Any]:
        """Return the experts of the first tokens of these blocks of the first KV group, after every dispatched step.

        Returns:
            unsigned integers `[num_tokens, layers, top_k]`, the best expert first; 0 in layers without experts.
        """
        ...


class Executor(Protocol[Hidden, Handle]):
    """A device, several devices or a fake: holds the weights and the pool, and runs steps in order of dispatch.

    Because of that order, a block may be given to another sequence as soon as the host frees it, even while an earlier
    step still writes to it.
    """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def rates(self) -> DeviceRates:
        """The device's rates, known once `warm_up` has returned."""
        ...

    @property
    def host_blocks(self) -> HostBlocks | None:
        """The blocks of host memory; None if there are none, or no process has a whole block."""
        ...

    @property
    def sleeper(self) -> Sleeper | None:
        """Releases the device memory; None if the executor cannot."""
        ...

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Reads the experts of tokens; None if they are not kept."""
        ...

    @property
    def num_compiles_after_warm_up(self) -> int:
        """Programs compiled since `warm_up` returned; any other value than 0 is an error."""
        ...

    @property
    def expert_stats(self) -> ExpertStats | None:
        """Counters of balanced experts; None if experts are not balanced."""
        ...

    def warm_up(self, progress: Progress) -> None:
        """Compile every program on the list and run none of them on real data."""
        ...

    def move_blocks(self, moves: BlockMoves) -> None:
        """Start to move blocks, all layers of their group, as one transfer, before any step that is dispatched later.

        Returns before the transfer is done, also for moves to host memory.
        """
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Start to overwrite a slot with an adapter, before any step that is dispatched later."""
        ...

    def forward(self, inputs: StepInputs) -> Hidden:
        """Start the model on a step's tokens; returns before it is done."""
        ...

    def sample(self, hidden: Hidden, inputs: SamplingInputs) -> Handle:
        """Start to sample from the output of the last forward; returns before it is done.

        The next forward finds the sampled tokens on the device, see `StepInputs.prev_sampled_rows_t`.
        """
        ...

    def compute_aux(self, hidden: Hidden, inputs: AuxInputs) -> Callable[[], AuxOutputs]:
        """Start to compute aux outputs of the last forward; returns before they are done.

        Returns:
            a function that waits and returns the results in host memory; call it once, in the order of dispatch.
        """
        ...

    def decode(self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int) -> Handle:
        """Start several decode steps; returns before they are done. The next forward can use the last tokens.

        Row i has only token i in each step, is of Detail.TOKENS, and its block table has room for all steps. A row that
        samples an ending id (BEYOND_TOKENS is padding) has ended, as has a row that an earlier decode ended in this
        way; its later samples are undefined. A device may skip the steps after all rows have ended.
        """
        ...

    def decode_interruptibly(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[Handle, DecodeInterrupt]:
        """Start several steps like `decode`, which any thread can end after the current step.

        Requires `Geometry.has_fed_steps`. The outputs of steps that were not executed are undefined. No other step may
        be dispatched before the results are collected.
        """
        ...

    def decode_with_masks(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[Handle, MaskChannel]:
        """Start several steps like `decode`, each of which waits for masks before it samples.

        Requires `Geometry.has_fed_steps`. Until the last step has its masks or the feed is closed, only the feed may be
        used, and no other method of the executor. The mask of a row that has ended has no effect.

        Args:
            sampling: its edits are ignored.
            num_steps: maximum; the feed may declare an earlier step the last.
        """
        ...

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> Handle:
        """Start rounds in which a draft model proposes tokens and the model verifies them; do not wait.

        A row samples the same tokens as with `decode`. The proposals only affect the number of tokens per round, 1 to
        `Geometry.num_speculative_tokens` + 1, which `StepOutputs.speculated` reports. The next forward can use the last
        tokens. There is a program for each of `BucketTable.speculates`.

        Args:
            inputs: as `decode` takes them; no two rows share a run.
            sampling: of Detail.TOKENS, without edits, with the number of rows of a bucket.
            ending_token_ids_rx: ids that end each row; it samples nothing after one.
            num_left_r: [R] tokens that a row may still sample. Its block tables have room for them, except for the keys
                of
                the last one: nothing is written after them.
            num_rounds: maximum, up to MAX_NUM_ROUNDS; no further round runs when all rows have ended or used up
                num_left_r.
            unseen: steps of tokens that the model has computed and the draft model has not. The draft model runs them
                before the rounds.
        """
        ...

    def is_done(self, handle: Handle) -> bool:
        """Return True if `collect` would not wait; never waits itself."""
        ...

    def collect(self, handle: Handle) -> StepOutputs:
        """Wait for a step and return its results in host memory."""
        ...

    def shutdown(self) -> None:
        """Free all device memory. Any further call raises."""
        ...
