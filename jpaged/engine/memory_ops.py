"""What the device has to move before a step, in the order in which it was decided.

Each decision is made on the state that the ones before it leave behind, so the order is kept: a host block that is read
by one move may be overwritten by the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from jpaged.engine.executor import BlockMoves, Move


@dataclass(slots=True)
class MemoryOps:
    """The moves of one step."""

    _moves: list[tuple[Move, int, int]] = field(default_factory=list)

    def add(self, move: Move, source: int, destination: int) -> None:
        self._moves.append((move, source, destination))

    def __len__(self) -> int:
        return len(self._moves)

    def count(self, move: Move) -> int:
        return sum(1 for kind, _, _ in self._moves if kind is move)

    def batches(self) -> Iterator[BlockMoves]:
        """Runs of one kind, split where a batch would read what it writes or write twice."""
        batch: BlockMoves | None = None
        written: set[int] = set()
        for move, source, destination in self._moves:
            reads_written = move is Move.COPY and source in written
            if batch is None or batch.move is not move or reads_written or destination in written:
                if batch is not None:
                    yield batch
                batch, written = BlockMoves(move, [], []), set()
            batch.sources.append(source)
            batch.destinations.append(destination)
            written.add(destination)
        if batch is not None:
            yield batch
