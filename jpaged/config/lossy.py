"""Options that trade accuracy for memory. Off by default; no other option enables them."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config.groups import CacheOptions
from jpaged.config.option import option
from jpaged.errors import InvalidArgument

NUM_SINKS = 4
"""Default number of attention sinks; StreamingLLM's authors found this sufficient."""


@dataclass(frozen=True, slots=True)
class LossyOptions:
    """StreamingLLM (Xiao et al. 2023): attention to a recent window and attention sinks only."""

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
        """Number of attention sinks."""
        return NUM_SINKS if self.lossy_kv_sinks is None else self.lossy_kv_sinks

    def check(self, cache: CacheOptions, draft: str | None) -> None:
        """Check the options against each other, and against those of the pool.

        Args:
            draft: the speculative method, if it has a separate pool; None for none.

        Raises:
            InvalidArgument: sinks are set without a window, or another option conflicts.
        """
        window = self.lossy_kv_window
        if window is None:
            if self.lossy_kv_sinks is not None:
                raise InvalidArgument(
                    "lossy_kv_sinks",
                    f"{self.lossy_kv_sinks} requires lossy_kv_window",
                )
            return
        if cache.kv_policy != "paged":
            raise InvalidArgument(
                "lossy_kv_window",
                f"{window}: kv_policy {cache.kv_policy} reserves memory for whole sequences, so a window frees nothing",
            )
        if draft is not None:
            raise InvalidArgument(
                "lossy_kv_window",
                f"{window}: speculative_config has method {draft}, whose draft model reads all tokens of the blocks",
            )
