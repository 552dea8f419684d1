"""Thread-safe front end of prefix transfers, for one pool or the pools of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from jpaged.engine.executor import Geometry, HostBlocks
from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.interface import KVMemory
from jpaged.engine.kv.tiers.arriving import Arriving
from jpaged.engine.kv.tiers.chain import Chain
from jpaged.engine.kv.tiers.leaving import Leaving, Tiers
from jpaged.errors import JpagedError, Unsupported


class Travel:
    """Transfers to and from one pool.

    Args:
        ask: posts a callable to the engine thread, to run between two steps.
    """

    def __init__(
        self,
        memory: KVMemory,
        geometry: Geometry,
        blocks: HostBlocks | None,
        ask: Callable[[Callable[[], None]], None],
    ) -> None:
        self.geometry = geometry
        self._ask = ask
        self._tiers: Tiers | None = None
        self._obstacle = ""
        if memory.prefixes is None or memory.held is None:
            self._obstacle = "the prefix cache is off (enable_prefix_caching, kv_policy)"
        elif memory.host is None:
            self._obstacle = "no host memory is configured for the transfer (swap_space)"
        elif blocks is None:
            self._obstacle = (
                "no process holds whole blocks: the model is split over several processes (coordinator_address)"
            )
        else:
            self._tiers = Tiers(
                memory.prefixes,
                memory.held,
                memory.host,
                blocks,
                geometry.reaches,
                lambda: memory.limit,
                ask,
                memory.disk,
            )

    @property
    def tiers(self) -> Tiers:
        """Return the memory tiers.

        Raises:
            Unsupported: prefixes cannot be transferred; the message states why.
        """
        if self._tiers is None:
            raise Unsupported(f"prefixes cannot be transferred: {self._obstacle}")
        return self._tiers

    def leave(self, chain: Chain, num_skipped: int, is_hurried: bool) -> Future[Leaving]:
        """Find a prefix and pin it for export; see `Leaving`."""
        tiers, future = self.tiers, Future[Leaving]()
        future.set_running_or_notify_cancel()

        def leave() -> None:
            try:
                future.set_result(Leaving(tiers, chain, num_skipped, is_hurried))
            except JpagedError as error:
                future.set_exception(error)
                raise

        self._ask(leave)
        return future


class Travels:
    """Transfers to and from every pool of a server: one, or one per replica.

    Args:
        place: returns the index of the pool that a request with these block hashes would go to.
    """

    def __init__(self, each: Iterable[Travel], place: Callable[[Sequence[Key]], int] = lambda keys: 0) -> None:
        self.each = tuple(each)
        self._place = place

    @property
    def block_size(self) -> int:
        """Return the number of tokens per block."""
        return self.each[0].geometry.block_size

    @property
    def num_kv_groups(self) -> int:
        """Return the number of KV groups: blocks per token range."""
        return len(self.each[0].geometry.windows)

    @property
    def bytes_per_block(self) -> int:
        """Return the size of a transferred block.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        return self.each[0].tiers.blocks.bytes_per_block

    def kv_identity(self) -> bytes:
        """Return what the bytes of a block depend on; slow on the first call, see `HostBlocks.kv_identity`."""
        return self.each[0].tiers.blocks.kv_identity()

    def chain(self, root: Key, token_ids: Sequence[int]) -> Chain:
        """Return the full blocks of a prompt that may be cached; takes a few microseconds per block.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        num_blocks = self.each[0].tiers.prefixes.num_cacheable_blocks(len(token_ids))
        return Chain.of(root, token_ids, self.block_size, num_blocks)

    def num_known(self, chain: Chain) -> int:
        """Return the length of the longest cached prefix, in the pool that has most of it."""
        return max(one.tiers.num_known(chain) for one in self.each)

    def num_findable(self, chain: Chain) -> int:
        """Return the same, with disk blocks included if loading is faster than computing. Any thread may ask."""
        return max(one.tiers.num_findable(chain) for one in self.each)

    def leave(self, chain: Chain, num_skipped: int = 0, *, is_hurried: bool = False) -> Future[Leaving]:
        """Find a prefix in the pool that has most of it, and pin it while it is read.

        Args:
            num_skipped: leading blocks that the receiver has, which are not exported.
            is_hurried: a client waits for the export, so more blocks are staged per step.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        return max(self.each, key=lambda one: one.tiers.num_known(chain)).leave(chain, num_skipped, is_hurried)

    def arrive(self, chain: Chain) -> Arriving:
        """Start the import of a prefix, into the pool that requests with it would go to.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        return Arriving(self.each[self._place(chain.keys)].tiers, chain)
