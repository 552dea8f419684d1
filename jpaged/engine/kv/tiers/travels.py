"""What any thread may ask of prefixes that travel between servers: of one pool, or of the pools of all replicas."""

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
    """One pool, as prefixes come to it and leave it.

    Args:
        ask: has something done on the engine's thread, between two steps.
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
            self._obstacle = "nothing is cached (enable_prefix_caching, kv_policy)"
        elif memory.host is None:
            self._obstacle = "there is no host memory for them to pass through (swap_space has none)"
        elif blocks is None:
            self._obstacle = "no process has a block whole: the model is divided among several (coordinator_address)"
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
        """Where prefixes are.

        Raises:
            Unsupported: they cannot travel, and why.
        """
        if self._tiers is None:
            raise Unsupported(f"prefixes cannot travel: {self._obstacle}")
        return self._tiers

    def leave(self, chain: Chain, num_skipped: int, is_hurried: bool) -> Future[Leaving]:
        """Finds a prefix and holds it; see `Leaving`."""
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
    """Every pool of a server: one, or one of each replica.

    Args:
        place: the pool that a request with these keys would go to.
    """

    def __init__(self, each: Iterable[Travel], place: Callable[[Sequence[Key]], int] = lambda keys: 0) -> None:
        self.each = tuple(each)
        self._place = place

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.each[0].geometry.block_size

    @property
    def num_kv_groups(self) -> int:
        """How many blocks the same tokens have."""
        return len(self.each[0].geometry.windows)

    @property
    def bytes_per_block(self) -> int:
        """The size of a block as it travels.

        Raises:
            Unsupported: none can.
        """
        return self.each[0].tiers.blocks.bytes_per_block

    def kv_identity(self) -> bytes:
        """What the bytes of a block depend on; see `HostBlocks.kv_identity`, which takes its time the first time."""
        return self.each[0].tiers.blocks.kv_identity()

    def chain(self, root: Key, token_ids: Sequence[int]) -> Chain:
        """The full blocks of a prompt that may be cached; its keys take a few microseconds each.

        Raises:
            Unsupported: prefixes cannot travel.
        """
        num_blocks = self.each[0].tiers.prefixes.num_cacheable_blocks(len(token_ids))
        return Chain.of(root, token_ids, self.block_size, num_blocks)

    def num_known(self, chain: Chain) -> int:
        """Blocks of the longest prefix that is here, in the pool that has most of it."""
        return max(one.tiers.num_known(chain) for one in self.each)

    def num_findable(self, chain: Chain) -> int:
        """The same, with what disk has where it is quicker than computing. Any thread may ask."""
        return max(one.tiers.num_findable(chain) for one in self.each)

    def leave(self, chain: Chain, num_skipped: int = 0, *, is_hurried: bool = False) -> Future[Leaving]:
        """Finds a prefix where most of it is, and holds it while it is read.

        Args:
            num_skipped: blocks that whoever wants it has: they stay here.
            is_hurried: somebody waits for it, and for nothing else here: more of it is staged in a step.

        Raises:
            Unsupported: prefixes cannot travel.
        """
        return max(self.each, key=lambda one: one.tiers.num_known(chain)).leave(chain, num_skipped, is_hurried)

    def arrive(self, chain: Chain) -> Arriving:
        """Takes a prefix in, to the pool where requests with it would go.

        Raises:
            Unsupported: prefixes cannot travel.
        """
        return Arriving(self.each[self._place(chain.keys)].tiers, chain)
