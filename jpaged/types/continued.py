"""Sequences that go on behind tokens that they have generated elsewhere: on a server that is gone."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.structured import GrammarState


@dataclass(frozen=True, slots=True)
class Generated:
    """What one sequence of a request has generated, as a caller sends it.

    Attributes:
        token_ids: at least one.
        cumulative_logprob: the sum over them; 0 where nobody asks for it.
        has_finished: its finish was told; there is nothing to go on with.
    """

    index: int
    token_ids: tuple[int, ...]
    cumulative_logprob: float = 0.0
    has_finished: bool = False


@dataclass(frozen=True, slots=True)
class TextState:
    """Where the text of a sequence is behind its tokens; as `jpaged.engine.output` keeps it.

    Attributes:
        window: tokens that are the context of the next ones, then those that have no text yet.
        num_read: how many of the window are context.
        text_read: the text of those.
        held: text that may be the beginning of a stop string.
    """

    window: tuple[int, ...] = ()
    num_read: int = 0
    text_read: str = ""
    held: str = ""


@dataclass(frozen=True, slots=True)
class Continued:
    """A sequence that goes on, or that has ended and is counted.

    Attributes:
        shown: the text that was told of its tokens.
        text: what was not told yet, and what comes is made with.
        grammar: behind its tokens; None without one.
    """

    generated: Generated
    shown: str = ""
    text: TextState = TextState()
    grammar: GrammarState | None = None
