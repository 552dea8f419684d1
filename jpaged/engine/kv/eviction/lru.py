"""Least recently used: the order of the free list itself, without bookkeeping.

oldest ...... newest      a table's last block is freed first: leaves of a chain are evicted before their parents
"""

from __future__ import annotations

from collections import OrderedDict


class LeastRecentlyUsed(OrderedDict[int, None]):
    """Free list (`free_list.FreeList`) that allocates the block freed first, whatever it holds."""
