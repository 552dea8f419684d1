"""What a plot is, and the notation that plots are written in.

A plot is a list of beats; a beat is a list of ways to tell it. In the text of a plot an empty line starts the next beat and
every other line is one way to tell the beat:

    {N} had a {obj}.                 <- beat 1, first way
    {N} owned a [lovely|dear] {obj}. <- beat 1, second way

    one {time}, it was gone.         <- beat 2

`[a|b]` chooses one of its texts and `{slot}` stands for a word of the cast. All is written in lower case: the grammar
capitalises sentences and turns "a" into "an" where it must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto


class Theme(Flag):
    """What a plot is about and what it asks of its cast; a request for a story picks among these."""

    HAPPY = auto()
    SAD = auto()
    FUNNY = auto()
    SCARY = auto()
    BRAVE = auto()
    NIGHT = auto()
    FRIEND = auto()
    CONTEST = auto()
    STORM = auto()
    JOURNEY = auto()
    SECRET = auto()
    GIFT = auto()
    WISH = auto()
    SHARING = auto()
    TRICK = auto()
    OBJECT = auto()  # the {obj} is at the heart of it
    STILL = auto()  # works for a hero that cannot move, such as a tree
    PAIR = auto()  # opens with two friends who already know each other


@dataclass(frozen=True, slots=True)
class Plot:
    """One story outline.

    Attributes:
        name: unique among the plots.
        themes: what it is about.
        beats: for each beat the ways to tell it, in the notation above.
        names: slots of this plot alone.
        choices: rows of values for `names`; one row is drawn for a story.
    """

    name: str
    themes: Theme
    beats: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]

    @property
    def has_friend(self) -> bool:
        """Whether a second character takes part."""
        return any("{M}" in line for beat in self.beats for line in beat)


def plot(
    name: str,
    themes: Theme,
    text: str,
    names: tuple[str, ...] = (),
    choices: tuple[tuple[str, ...], ...] = (),
) -> Plot:
    """Read a plot from its text."""
    beats: list[tuple[str, ...]] = []
    lines: list[str] = []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            lines.append(line.strip())
        elif lines:
            beats.append(tuple(lines))
            lines = []
    return Plot(name, themes, tuple(beats), names, choices)
