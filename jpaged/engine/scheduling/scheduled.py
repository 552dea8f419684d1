"""Parts of a step: rows, their drafts, runs of rows that share a prefix; and the rows that sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from jpaged.engine.sequence import Group, Sequence
from jpaged.structured import GrammarState


@dataclass(slots=True)
class ScheduledRow:
    """A sequence's part in a step: its tokens start to start + num_tokens go through the model.

    A sequence that has just been forked has a row without tokens: its first token is sampled from the leader's row.

    Attributes:
        samples_token: the step samples the sequence's next token in this row.
        sample_row: the row whose last token the sample reads; differs from the row itself only for a fresh fork.
        prev_sampled_row: the row of the previous step that sampled the last input token, which is in flight. None if
            the host knows it.
        output_index: index of the sampled output token; 0 is the first.
        told: prompt positions with aux outputs.
        proposed: the draft token that is the input; the row's sample counts only if that token is accepted.
        grammar: grammar state after the draft token; None without a grammar.
        is_usable: a token sampled after the draft token may be accepted.
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
        """Mark the next token as known, so that the sample is discarded."""
        self.samples_token = False

    def cannot_sample(self) -> None:
        """Mark that no token is allowed after the draft token."""
        self.is_usable = False


@dataclass(slots=True)
class Draft:
    """Draft tokens after the row of a sequence, each in a separate row; see `drafts.py`.

    Attributes:
        place: index of the sequence's row, in the order of addition.
        rows: indices of the draft rows.
    """

    group: Group
    sequence: Sequence
    place: int
    token_ids: list[int]
    rows: range


@dataclass(slots=True)
class Sampled:
    """Columns of the rows that sampled a token.

    Attributes:
        rows: device rows.
        are_last: the sequence reaches max_tokens with this token.
    """

    rows: list[int] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    are_last: list[bool] = field(default_factory=list)

    def add(self, place: int, row: ScheduledRow) -> None:
        """Add a row with its index."""
        self.rows.append(place)
        self.groups.append(row.group)
        self.sequences.append(row.sequence)
        self.are_last.append(row.output_index + 1 >= row.group.request.sampling.max_tokens)

    def move(self, new_places: dict[int, int]) -> None:
        """Map the rows to their places on the device."""
        self.rows = [new_places[place] for place in self.rows]

    def by_group(self) -> dict[Group, dict[Sequence, int]]:
        """Return the row of each sequence of each group."""
        rows: dict[Group, dict[Sequence, int]] = {}
        for row, group, sequence in zip(self.rows, self.groups, self.sequences, strict=True):
            rows.setdefault(group, {})[sequence] = row
        return rows


@dataclass(slots=True)
class SharedPrefixGroup:
    """Run of neighboring rows that read the first tokens of their contexts together.

    Attributes:
        num_rows: rows of the run.
        num_tokens: tokens of the full blocks that all their tables start with; 0 if the rows share nothing.
    """

    num_rows: int
    num_tokens: int

    def add_row(self) -> None:
        """Extend the run by the next row."""
        self.num_rows += 1
