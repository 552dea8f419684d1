"""What gives up answers for memory. Off unless it is asked for: no other option does."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config.groups import CacheOptions
from jpaged.config.option import option
from jpaged.errors import InvalidArgument

NUM_SINKS = 4
"""First tokens that are kept where nobody says how many: as many as StreamingLLM's authors found enough."""


@dataclass(frozen=True, slots=True)
class LossyOptions:
    """Old tokens that are forgotten (StreamingLLM, Xiao et al. 2023)."""

    lossy_kv_window: int | None = option(
        None,
        "LOSSY: sliding attention window: each token attends to the last N tokens, itself included, and to the "
        "first lossy_kv_sinks; blocks in between are freed. Outputs differ from the exact model's. Exact if unset",
        low=1,
        unit="tokens",
    )
    lossy_kv_sinks: int | None = option(
        None,
        f"LOSSY: first tokens (attention sinks) kept in addition to lossy_kv_window; {NUM_SINKS} if unset",
        low=0,
        unit="tokens",
    )

    @property
    def num_sinks(self) -> int:
        """First tokens that are seen beside the window."""
        return NUM_SINKS if self.lossy_kv_sinks is None else self.lossy_kv_sinks

    def check(self, cache: CacheOptions, draft: str | None) -> None:
        """Holds them to each other, and to what the pool does.

        Args:
            draft: the method of speculation that has a pool of its own; None is none.

        Raises:
            InvalidArgument: there are first tokens without a window, or another option leaves nothing to forget.
        """
        window = self.lossy_kv_window
        if window is None:
            if self.lossy_kv_sinks is not None:
                raise InvalidArgument(
                    "lossy_kv_sinks",
                    f"{self.lossy_kv_sinks}: lossy_kv_window is left out, so that nothing is forgotten",
                )
            return
        if cache.kv_policy != "paged":
            raise InvalidArgument(
                "lossy_kv_window",
                f"{window}: kv_policy {cache.kv_policy} keeps room for whole sequences: forgetting frees nothing",
            )
        if draft is not None:
            raise InvalidArgument(
                "lossy_kv_window",
                f"{window}: speculative_config has method {draft}, whose draft sees all tokens through the same blocks",
            )
