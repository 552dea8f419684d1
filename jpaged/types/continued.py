"""Sequences that resume after tokens generated on another server, for example one that failed."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.structured import GrammarState


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens that one sequence of a request has generated, as a caller sends them.

    Attributes:
        token_ids: at least one.
        cumulative_logprob: the sum over them; 0 if not requested.
        has_finished: the sequence has finished; nothing is left to generate.
    """

    index: int
    token_ids: tuple[int, ...]
    cumulative_logprob: float = 0.0
    has_finished: bool = False


@dataclass(frozen=True, slots=True)
class TextState:
    """Detokenizer state of a sequence after its tokens, as `jpaged.engine.output` keeps it.

    Attributes:
        window: context tokens for the next ones, then tokens that have no text yet.
        num_read: how many tokens of the window are context.
        text_read: the text of the context.
        held: text that may be the beginning of a stop string.
    """

    window: tuple[int, ...] = ()
    num_read: int = 0
    text_read: str = ""
    held: str = ""


@dataclass(frozen=True, slots=True)
class Continued:
    """A sequence that resumes, or one that has finished and is only counted.

    Attributes:
        shown: the text already sent for its tokens.
        text: detokenizer state, with text not sent yet.
        grammar: grammar state after its tokens; None without a grammar.
    """

    generated: Generated
    shown: str = ""
    text: TextState = TextState()
    grammar: GrammarState | None = None
