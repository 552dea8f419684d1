"""The verbs of a device, or many, or a fake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from jpaged.engine.executor.feed import MaskFeed
from jpaged.engine.executor.rows import SamplingInputs
from jpaged.engine.executor.shapes import I32, DeviceRates, Geometry
from jpaged.engine.executor.steps import BlockMoves, StepInputs, StepOutputs
from jpaged.engine.executor.telling import TellInputs, ToldOutputs
from jpaged.types import Adapter

Hidden = TypeVar("Hidden")
"""What a forward leaves for its sample. Opaque to the engine, and good until the next forward."""

Handle = TypeVar("Handle")
"""A dispatched step whose results may not exist yet. Opaque to the engine; collected once, in order of dispatch."""

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while the executor starts."""


class HostBlocks(Protocol):
    """The blocks of host memory as bytes: what goes to disk and to other servers, and comes from there."""

    @property
    def bytes_per_block(self) -> int:
        """The size of a block of one KV group, all its layers."""
        ...

    def view(self, block_id: int) -> memoryview:
        """The bytes of a block `[bytes_per_block]`, to read or to write.

        Any thread may, while the caller holds the block in the pool of the host: so nothing is moved to it, and what is
        moved from it was written before. It is good until `shutdown`, and its memory stays readable after.
        """
        ...

    def have_landed(self, block_ids: Sequence[int]) -> bool:
        """Whether all that was swapped out to these blocks is there; never waits. The engine's thread alone asks."""
        ...

    def kv_identity(self) -> bytes:
        """32 bytes that two executors share if the bytes of a block mean the same to both.

        It reads every weight the first time, at about a second a gigabyte: not on the engine's thread, and not before
        somebody needs it. Any other may ask.
        """
        ...


class Executor(Protocol[Hidden, Handle]):
    """A device, or many, or a fake: holds the weights and the pool, runs steps in the order of their dispatch.

    Because steps run in that order, a block may be given to another sequence as soon as the host lets it go, even while
    an earlier step still writes to it.
    """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def rates(self) -> DeviceRates:
        """The device's rates, known once `warm_up` has returned."""
        ...

    @property
    def host_blocks(self) -> HostBlocks | None:
        """The blocks of host memory; None where there are none, or no process has a block whole."""
        ...

    @property
    def num_compiles_after_warm_up(self) -> int:
        """Programs compiled since `warm_up` returned: 0, or something is wrong."""
        ...

    def warm_up(self, progress: Progress) -> None:
        """Compiles every program on the list and runs none of them on real data."""
        ...

    def move_blocks(self, moves: BlockMoves) -> None:
        """Starts moving blocks, all layers of their group, as one transfer; before any step that is dispatched later.

        Returns before it is done, also where blocks leave for host memory.
        """
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Starts writing an adapter over what a slot held; before any step that is dispatched later."""
        ...

    def forward(self, inputs: StepInputs) -> Hidden:
        """Starts the model over a step's tokens; returns before it is done."""
        ...

    def sample(self, hidden: Hidden, inputs: SamplingInputs) -> Handle:
        """Starts sampling from what the last forward leaves; returns before it is done.

        The next forward finds the sampled tokens on the device, see `StepInputs.prev_sampled_rows_t`.
        """
        ...

    def tell(self, hidden: Hidden, inputs: TellInputs) -> Callable[[], ToldOutputs]:
        """Starts telling more of what the last forward leaves than a sample does; returns before it is done.

        Returns:
            what waits for it and brings its results to the host; called once, in the order of dispatch.
        """
        ...

    def decode(self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int) -> Handle:
        """Starts several steps of rows that decode; returns before they are done. The last tokens are as `sample`'s.

        Row i has token i and no other in each of them, is of Detail.TOKENS, and its block table has room for all. One
        that samples an id that ends it (BEYOND_TOKENS is none), or that a decode before has ended so, keeps that token:
        what it gives afterwards is sound and means nothing. No further step is run when all rows have ended.
        """
        ...

    def decode_fed(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[Handle, MaskFeed]:
        """Starts several steps as `decode` does, each of which waits for masks before it samples.

        Only where `Geometry.has_fed_steps`. Until the feed has given the last step its masks, or is closed, nothing may
        be asked of the executor but what the feed is asked. The mask of a row that has ended changes nothing.

        Args:
            sampling: its edits count for nothing.
            num_steps: at most; the feed may say earlier that a step is the last.
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
        """Starts rounds in which a draft model proposes tokens and the model verifies them; returns before it is done.

        What a row samples is what `decode` would sample, whatever is proposed; only how many tokens it goes on by in a
        round depends on that, 1 to `Geometry.num_speculative_tokens` + 1 of them. `StepOutputs.speculated` tells of it.
        The last tokens are as `sample`'s. There is a program for each of `BucketTable.speculates`.

        Args:
            inputs: as `decode` takes them; no two rows read anything together.
            sampling: of Detail.TOKENS, without edits, as many rows as a bucket has.
            ending_token_ids_rx: ids that end each row; it samples nothing behind one.
            num_left_r: [R] tokens that a row may still sample. Its block tables have room for as many, the last one's
                keys not counted: nothing is written behind them.
            num_rounds: at most, up to MAX_NUM_ROUNDS; no further round is run when all rows have ended or used up
                what they had left.
            unseen: steps of tokens that the model has computed and the draft has not, in front of what it is to
                propose. It runs them alone, before the rounds.
        """
        ...

    def is_done(self, handle: Handle) -> bool:
        """Whether `collect` would not wait; asks and never waits itself."""
        ...

    def collect(self, handle: Handle) -> StepOutputs:
        """Waits for a step and brings its results to the host."""
        ...

    def shutdown(self) -> None:
        """Gives all device memory back. The executor is spent: any further call raises."""
        ...
