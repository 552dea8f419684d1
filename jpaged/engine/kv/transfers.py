"""What the device has to move before a step, in as few transfers as the order allows.

Each decision is made on the state that the ones before it leave behind: a block that is read by one move may be given
away and written by the next. A move joins an earlier one of its kind unless it would overtake one that it depends on.

    decided    out 7>h1   copy 3>7   out 8>h2   copy 4>8   copy 5>3
    batches    out 7>h1 8>h2         copy 3>7 4>8          copy 5>3      the last overwrites what the first copy reads
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from jpaged.engine.executor import BlockMoves, Move


@dataclass(slots=True)
class _Batch:
    """Moves that run as one. Host blocks are entered into `reads` and `writes` as negative numbers."""

    moves: BlockMoves
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def add(self, source: int, destination: int, read: int, written: int) -> None:
        self.moves.sources.append(source)
        self.moves.destinations.append(destination)
        self.reads.add(read)
        self.writes.add(written)

    def must_precede(self, read: int, written: int) -> bool:
        return read in self.writes or written in self.writes or written in self.reads


@dataclass(slots=True)
class MemoryCounts:
    """What memory did since the start, in tokens and blocks."""

    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_copies_on_write: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0

    def looked_up(self, num_tokens: int, num_found: int) -> None:
        self.num_prefix_query_tokens += num_tokens
        self.num_prefix_hit_tokens += num_found

    def copied_on_write(self) -> None:
        self.num_copies_on_write += 1

    def swapped_out(self, num_blocks: int) -> None:
        self.num_swapped_out += num_blocks

    def swapped_in(self, num_blocks: int) -> None:
        self.num_swapped_in += num_blocks


@dataclass(slots=True)
class MemoryOps:
    """The moves of one step."""

    _moves: list[tuple[Move, int, int]] = field(default_factory=list)

    def add(self, move: Move, source: int, destination: int) -> None:
        self._moves.append((move, source, destination))

    def take(self) -> MemoryOps:
        """The moves so far, which are not among these any more."""
        taken, self._moves = MemoryOps(self._moves), []
        return taken

    def __len__(self) -> int:
        return len(self._moves)

    def count(self, move: Move) -> int:
        return sum(1 for kind, _, _ in self._moves if kind is move)

    def batches(self) -> Iterator[BlockMoves]:
        """The moves in batches to be run in order; none of them writes what it reads, or writes twice."""
        batches: list[_Batch] = []
        for move, source, destination in self._moves:
            read = -source if move is Move.SWAP_IN else source
            written = -destination if move is Move.SWAP_OUT else destination
            _batch_for(batches, move, read, written).add(source, destination, read, written)
        for batch in batches:
            yield batch.moves


def _batch_for(batches: list[_Batch], move: Move, read: int, written: int) -> _Batch:
    for batch in reversed(batches):
        if batch.must_precede(read, written):
            break
        if batch.moves.move is move:
            return batch
    batches.append(_Batch(BlockMoves(move, [], [])))
    return batches[-1]
