"""Block tables of any length: they stay outside the core, and pages of them are copied into scalar memory.

    tables      | row 0: page, page, page .. | row 1: page, page, page .. | row 2 ..        of any width
    ring        | 0/2 | 1/0 | 2/0 | 2/1 | 2/2 |                        segment/page, in the order of the fetches
                   └ of blocks in flight or in use
                         └ the next block's    └ in flight

A page has the ids of whole chunks, so that the ids of a fetch are contiguous. A page is requested `PAGES_AHEAD` pages
before its first id is needed, and kept as long as its ids may be read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.tpu import sizes as sizing

if TYPE_CHECKING:
    from jaxtyping import Array, Int


class Pages(NamedTuple):
    """Scalar memory of the pages.

    Attributes:
        ids: the ring.
        cursor: (segment, page of the row, slot) of the next page to request, and the slot of the next to use.
        come: semaphores of the slots.
    """

    ids: Any
    cursor: Any
    come: Any


@dataclass(frozen=True, slots=True)
class Paging:
    """Paging of the tables of a call.

    Attributes:
        table_width: blocks in a row's table (M).
        chunk_blocks: blocks of a chunk; a page has whole chunks.
        block_size: tokens.
        held: chunks in flight or in use, whose ids may be read again.
    """

    table_width: int
    chunk_blocks: int
    block_size: int
    held: int

    @property
    def page_blocks(self) -> int:
        return math.lcm(sizing.PAGE_ALIGNMENT, self.chunk_blocks)

    @property
    def chunks(self) -> int:
        """Number of chunks whose ids a page has: a power of two."""
        return self.page_blocks // self.chunk_blocks

    @property
    def ring(self) -> int:
        return sizing.PAGES_AHEAD + self.held

    @property
    def tokens(self) -> int:
        """Tokens in the blocks of a page."""
        return self.page_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Scalar memory of the pages."""
        return 4 * self.ring * self.page_blocks

    def scratch_shapes(self) -> Pages:
        """Return the shapes of the pages' memory."""
        return Pages(
            ids=pltpu.SMEM((self.ring * self.page_blocks,), jnp.int32),
            cursor=pltpu.SMEM((4,), jnp.int32),
            come=pltpu.SemaphoreType.DMA((self.ring,)),
        )


def whole_pages(tables_sm: Int[Array, "S M"], *pagings: Paging) -> Int[Array, "S N"]:
    """Return tables padded to whole pages of all these pagings; if they are wide enough, nothing is copied."""
    table_width = tables_sm.shape[1]
    num_columns = max(_num_pages(one) * one.page_blocks for one in pagings)
    return jnp.pad(tables_sm.astype(jnp.int32), ((0, 0), (0, num_columns - table_width)))


def begin(segments: Any, first: Any, end: Any, tables_ref: Any, pages: Pages, paging: Paging) -> None:
    """Request the first pages of the segments from `first` on and below `end`."""
    pages.cursor[0] = first
    pages.cursor[1] = _first_page(segments, jnp.clip(first, 0, jnp.maximum(end - 1, 0)), paging)
    pages.cursor[2], pages.cursor[3] = 0, 0

    def ask(_: Any, carry: None) -> None:
        _ask(segments, end, tables_ref, pages, paging)
        return carry

    lax.fori_loop(0, sizing.PAGES_AHEAD, ask, None)


def turn(segments: Any, end: Any, tables_ref: Any, pages: Pages, paging: Paging) -> Any:
    """Wait for the next page in the order of all segments, and request one more; return the place of the ids."""
    slot = pages.cursor[3]
    place = _place(slot, paging)
    pltpu.make_async_copy(pages.ids.at[place], pages.ids.at[place], pages.come.at[slot]).wait()
    _ask(segments, end, tables_ref, pages, paging)
    pages.cursor[3] = _slot_after(slot, paging)
    return slot * paging.page_blocks


def _ask(segments: Any, end: Any, tables_ref: Any, pages: Pages, paging: Paging) -> None:
    """Start the DMA of the page at the cursor, if there is one, and move the cursor."""
    segment, page, slot = (pages.cursor[i] for i in range(3))

    @pl.when(segment < end)
    def _() -> None:
        # A row whose keys are all beyond its table sees none of them, but still has a page.
        first = jnp.minimum(page, _num_pages(paging) - 1) * paging.page_blocks
        source = tables_ref.at[
            segments.row[segment], pl.ds(pl.multiple_of(first, sizing.PAGE_ALIGNMENT), paging.page_blocks)
        ]
        pltpu.make_async_copy(source, pages.ids.at[_place(slot, paging)], pages.come.at[slot]).start()
        is_last = (page + 1) * paging.tokens >= segments.end[segment]
        after = jnp.minimum(segment + 1, end - 1)
        pages.cursor[0] = segment + is_last.astype(jnp.int32)
        pages.cursor[1] = jnp.where(is_last, _first_page(segments, after, paging), page + 1)
        pages.cursor[2] = _slot_after(slot, paging)


def _first_page(segments: Any, segment: Any, paging: Paging) -> Any:
    return lax.div(segments.begin[segment], paging.tokens)


def _place(slot: Any, paging: Paging) -> Any:
    return pl.ds(pl.multiple_of(slot * paging.page_blocks, sizing.PAGE_ALIGNMENT), paging.page_blocks)


def _slot_after(slot: Any, paging: Paging) -> Any:
    return jnp.where(slot + 1 == paging.ring, 0, slot + 1)


def _num_pages(paging: Paging) -> int:
    return -(-paging.table_width // paging.page_blocks)
