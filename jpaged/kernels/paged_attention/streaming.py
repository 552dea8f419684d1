"""Lossy attention to the first and the last tokens of a context only (StreamingLLM).

    position    0 1 2 3 4 5 6 7 8 9        two first tokens, a window of three
    query 4     s . w w w
    query 9     s s . . . . . w w w        s  sinks: read in a separate pass           w  the window

A query at position p sees the keys from p - window + 1 to p, and the first tokens before them: k with k <= p - window.
The latter form a causal context of the first tokens alone, whose queries stand `window` positions earlier, so that
kernels need no change. The two passes are merged as in a cascade. Positions are those of the text. If no query is far
enough from the beginning, the second pass is skipped.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import AttentionSpec, ContextPart, RaggedRows

if TYPE_CHECKING:
    from jaxtyping import Array, Bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StreamingRows:
    """The rows of a step, and the same rows over the first tokens of their contexts.

    Attributes:
        rows: over each row's window.
        sinks: over the first tokens before the windows; no rows if no query sees any.
    """

    rows: RaggedRows
    sinks: RaggedRows

    @classmethod
    def of(cls, rows: RaggedRows, spec: AttentionSpec) -> StreamingRows:
        """Build the rows over the first tokens, with each row's own block table.

        Args:
            rows: see their contexts from the beginning.
            spec: its kind has a window and sink tokens.
        """
        window, num_sinks = spec.kind.sliding_window or 0, spec.kind.num_sink_tokens
        ends_s = rows.positions + rows.query_starts_s1[1:] - rows.query_starts_s1[:-1]
        lens_s = jnp.clip(ends_s - window, 0, num_sinks)
        is_any = ((lens_s > 0) & (jnp.arange(lens_s.shape[0]) < rows.num_rows)).any()
        sinks = dataclasses.replace(
            rows,
            kv_lens_s=lens_s,
            num_rows=jnp.where(is_any, rows.num_rows, 0),
            first_positions_s=rows.positions - window,
            kv_begins_s=None,
            lists=None,
        )
        return cls(rows, sinks)

    @property
    def has_others(self) -> Bool[Array, ""]:
        """True if any query sees a first token that is not in its window."""
        return self.sinks.num_rows > 0

    def parts(self, spec: AttentionSpec) -> tuple[ContextPart, ...]:
        """Return the parts to attend to and merge: the windows first."""
        return ContextPart(self.rows, window_spec(spec)), ContextPart(self.sinks, sinks_spec(spec))


def window_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of the call over the windows."""
    return dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, num_sink_tokens=0))


def sinks_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of the call over the first tokens; a row's length limits how many it sees."""
    return dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, num_sink_tokens=0, sliding_window=None))
