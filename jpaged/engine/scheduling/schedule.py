"""One step, decided: its rows, and what has to be moved before they run."""

from __future__ import annotations

from dataclasses import dataclass, field

from jpaged.engine.kv.transfers import MemoryOps
from jpaged.engine.sequence import Group, Sequence


@dataclass(slots=True)
class ScheduledRow:
    """A sequence's part in a step: tokens start to start + num_tokens of it go through the model.

    A sequence that has just been forked has a row of no tokens: its first token comes of what its leader computed.

    Attributes:
        samples_token: the step samples the sequence's next token in this row.
        sample_row: the row whose last token the sample reads; the row itself, but for a fresh fork.
        prev_sampled_row: the last input token is in flight: it is what the step before sampled in this row. None when
            the host knows it.
        output_index: which output token of the sequence is sampled; 0 is the first.
    """

    group: Group
    sequence: Sequence
    start: int
    num_tokens: int
    samples_token: bool
    sample_row: int
    prev_sampled_row: int | None
    output_index: int


@dataclass(slots=True)
class SharedPrefixGroup:
    """Neighbouring rows that read the first tokens of their contexts together.

    Attributes:
        num_rows: of the run.
        num_tokens: full blocks that begin every one of their tables; 0 where rows share nothing.
    """

    num_rows: int
    num_tokens: int

    def add_row(self) -> None:
        """The next row reads with these."""
        self.num_rows += 1


@dataclass(slots=True)
class Schedule:
    """What to dispatch, and who left for it.

    Attributes:
        runs: cover the rows in their order; none where no two rows read anything together.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    runs: list[SharedPrefixGroup] = field(default_factory=list)
    ops: MemoryOps = field(default_factory=MemoryOps)
    num_tokens: int = 0
    admitted: list[Group] = field(default_factory=list)
    recomputed: list[Group] = field(default_factory=list)
    swapped_out: list[Group] = field(default_factory=list)
    swapped_in: list[Group] = field(default_factory=list)
    num_recomputed_tokens: int = 0

    def add_row(
        self, group: Group, sequence: Sequence, num_tokens: int, *, sample_row: int | None = None
    ) -> ScheduledRow:
        """Enters the next tokens of a sequence, and advances it past the step.

        Args:
            sample_row: where the last token is that is sampled from; None is the row itself.
        """
        place, start = len(self.rows), sequence.num_computed_tokens
        samples_token = start + num_tokens == sequence.num_tokens
        is_fed_back = num_tokens > 0 and samples_token and sequence.num_in_flight_tokens > 0
        row = ScheduledRow(
            group=group,
            sequence=sequence,
            start=start,
            num_tokens=num_tokens,
            samples_token=samples_token,
            sample_row=place if sample_row is None else sample_row,
            prev_sampled_row=sequence.in_flight_row if is_fed_back else None,
            output_index=sequence.num_output_tokens,
        )
        self.rows.append(row)
        sequence.dispatched(num_tokens, place, samples_token=samples_token)
        return row

    def recomputes(self, num_tokens: int) -> None:
        """Counts tokens of a preempted group that run again."""
        self.num_recomputed_tokens += num_tokens

    def close(self, ops: MemoryOps) -> None:
        """Every row is there; these moves come before them."""
        self.ops = ops
        self.num_tokens = sum(row.num_tokens for row in self.rows)

    def reorder(self, order: list[int]) -> None:
        """Puts the rows in another order, `order[new] = old`, and corrects what names them by place."""
        self.rows = [self.rows[old] for old in order]
        new_places = {old: new for new, old in enumerate(order)}
        for row in self.rows:
            row.sample_row = new_places[row.sample_row]
            if row.samples_token:
                row.sequence.moved_to_row(new_places[row.sequence.in_flight_row])

    @property
    def num_tokens_shared(self) -> int:
        """Tokens of context that are not read again, because another row of a run has read them."""
        return sum((run.num_rows - 1) * run.num_tokens for run in self.runs)

    @property
    def num_preempted(self) -> int:
        return len(self.recomputed) + len(self.swapped_out)
