"""The attention of a layer, independent of the layout of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A kind of attention: hashable, static under jit. Layers of a model may have different kinds.

    Attributes:
        scale: scores are q . k * scale.
        sliding_window: number of tokens that a token sees, itself included; None sees all.
        num_sink_tokens: first tokens of a context that every query sees in addition to its window (StreamingLLM).
        soft_cap: scores become cap * tanh(score / cap); None leaves them.
        is_causal: a token sees no later tokens. Otherwise a window extends equally far to both sides.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    num_sink_tokens: int = 0
    is_causal: bool = True

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise InvalidArgument("scale", f"{self.scale} is not above 0")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InvalidArgument("sliding_window", f"{self.sliding_window} is below the limit of 1")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise InvalidArgument("soft_cap", f"{self.soft_cap} is not above 0")
        if self.num_sink_tokens < 0 or (self.num_sink_tokens and self.sliding_window is None):
            raise InvalidArgument(
                "num_sink_tokens",
                f"{self.num_sink_tokens} must not be negative, and must be 0 without a sliding_window "
                f"({self.sliding_window})",
            )
        if not self.is_causal and (self.num_sink_tokens or (self.sliding_window or 1) % 2 == 0):
            raise InvalidArgument(
                "is_causal",
                f"is False, which requires no sink tokens ({self.num_sink_tokens}) and an odd sliding_window "
                f"({self.sliding_window})",
            )

    @property
    def reach(self) -> int | None:
        """Number of tokens before itself, with itself, that a token sees; None is all."""
        if self.sliding_window is None or self.is_causal:
            return self.sliding_window
        return self.sliding_window // 2 + 1
