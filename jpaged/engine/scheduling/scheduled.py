"""What a step is made of: rows, drafts behind them, runs that read together; and which of them sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from jpaged.engine.sequence import Group, Sequence
from jpaged.structured import GrammarState


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
        told: positions of its tokens that are told of.
        proposed: the input token, which is not the sequence's yet: what is sampled is the sequence's if that was drawn.
        grammar: where its text is then; None without one.
        is_usable: a token that is sampled behind a proposal may be the sequence's.
    """

    group: Group
    sequence: Sequence
    start: int
    num_tokens: int
    samples_token: bool
    sample_row: int
    prev_sampled_row: int | None
    output_index: int
    told: range = range(0)
    proposed: int | None = None
    grammar: GrammarState | None = None
    is_usable: bool = True

    def samples_for_nobody(self) -> None:
        """Its token is known before it is sampled."""
        self.samples_token = False

    def cannot_sample(self) -> None:
        """Nothing may come behind what is proposed."""
        self.is_usable = False


@dataclass(slots=True)
class Draft:
    """Tokens that are proposed behind the row of a sequence, each in a row of its own; see `drafts.py`.

    Attributes:
        place: of the sequence's row, as it was entered.
        rows: places of the others.
    """

    group: Group
    sequence: Sequence
    place: int
    token_ids: list[int]
    rows: range


@dataclass(slots=True)
class Sampled:
    """Rows that sampled a token, a column a field.

    Attributes:
        rows: of the device.
        are_last: the sequence has as many tokens with it as it may have.
    """

    rows: list[int] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    are_last: list[bool] = field(default_factory=list)

    def add(self, place: int, row: ScheduledRow) -> None:
        """Enters a row that is at a place."""
        self.rows.append(place)
        self.groups.append(row.group)
        self.sequences.append(row.sequence)
        self.are_last.append(row.output_index + 1 >= row.group.request.sampling.max_tokens)

    def move(self, new_places: dict[int, int]) -> None:
        """The device has the rows in other places."""
        self.rows = [new_places[place] for place in self.rows]

    def by_group(self) -> dict[Group, dict[Sequence, int]]:
        """The row of each sequence of each group."""
        rows: dict[Group, dict[Sequence, int]] = {}
        for row, group, sequence in zip(self.rows, self.groups, self.sequences, strict=True):
            rows.setdefault(group, {})[sequence] = row
        return rows


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
