"""Least recently used: the order of the free list itself, which nobody has to be told of.

oldest ...... newest      a table's last block is freed first: of one chain leaves go before what they follow
"""

from __future__ import annotations

from collections import OrderedDict


class LeastRecentlyUsed(OrderedDict[int, None]):
    """A free list (`free_list.FreeList`) of which the block goes first that was freed first, whatever it holds."""
