"""Attention to the first tokens of a context and to the last ones, and to nothing between them: lossy.

    position    0 1 2 3 4 5 6 7 8 9        two first tokens, a window of three
    query 4     s . w w w
    query 9     s s . . . . . w w w        s  sinks: read by a pass of their own      w  the window

A query at position p sees the keys from p - window + 1 to p, and of the first ones those that lie before that: k with
k <= p - window. That is a causal context of the first tokens alone, whose queries stand `window` positions earlier, so
that no kernel has to know of it; the two passes are merged as those of a cascade are. Positions stay what they are in
the text. Where no query is far enough from the beginning the second pass is not run.

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
        rows: what each sees in its window.
        sinks: what each sees of the first tokens besides; none where no query sees any.
    """

    rows: RaggedRows
    sinks: RaggedRows

    @classmethod
    def of(cls, rows: RaggedRows, spec: AttentionSpec) -> StreamingRows:
        """Takes the first tokens from each row's own block table.

        Args:
            rows: which see their contexts from the beginning.
            spec: whose kind has a window and sink tokens.
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
        """Whether any query sees a first token that is not in its window."""
        return self.sinks.num_rows > 0

    def parts(self, spec: AttentionSpec) -> tuple[ContextPart, ...]:
        """What is attended and merged: the windows first."""
        return ContextPart(self.rows, window_spec(spec)), ContextPart(self.sinks, sinks_spec(spec))


def window_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the call over the windows."""
    return dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, num_sink_tokens=0))


def sinks_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the call over the first tokens: how many of them a row sees is in its length."""
    return dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, num_sink_tokens=0, sliding_window=None))
