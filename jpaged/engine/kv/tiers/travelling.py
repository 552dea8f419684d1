"""Prompts on their way between two servers: their blocks are held while they travel, whatever else wants the room.

    out   device block, held ──copy──> host block, reserved ──bytes──>      given back when they are sent
    in    host block, reserved <──bytes──     known by its key when it is whole; given back when its request runs

Each journey has a name, under which it holds what it holds; `let_go` ends it, at whatever point it is. The engine's
thread alone calls, and is what calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jpaged.engine.executor import Geometry
from jpaged.engine.kv.blocks import BlockTable, Key
from jpaged.engine.kv.prefix_cache import keys_seen
from jpaged.engine.kv.prefixes import Held, Prefixes
from jpaged.engine.kv.tiers.host import HostTier
from jpaged.engine.sequence import Group


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Blocks of the host that are sent together.

    Attributes:
        blocks: what each is known by, and which it is.
        tables: what holds them.
    """

    blocks: tuple[tuple[Key, int], ...] = ()
    tables: tuple[BlockTable, ...] = ()


@dataclass(slots=True, eq=False)
class _Journey:
    """What one prompt holds while it travels.

    Attributes:
        keys: of blocks that are still to be brought to the host; the next one last.
        on_device: its blocks of the device; None when they are not held any more.
        tables: of the host's blocks.
    """

    keys: list[Key] = field(default_factory=list)
    on_device: BlockTable | None = None
    tables: dict[BlockTable, None] = field(default_factory=dict)


class Travelling:
    """The journeys of one memory.

    Args:
        limit: blocks of the device that requests, pins and journeys may have.
    """

    def __init__(
        self, prefixes: Prefixes, held: Held, host: HostTier, geometry: Geometry, limit: Callable[[], int]
    ) -> None:
        self._prefixes = prefixes
        self._held = held
        self._host = host
        self._geometry = geometry
        self._limit = limit
        self._journeys: dict[str, _Journey] = {}

    # --- out --------------------------------------------------------------------------------------------------------

    def hold(self, name: str, group: Group, num_known: int, others: Iterable[Group]) -> int:
        """Begins a journey with the full blocks of a group's computed prompt, which are kept until it ends.

        Older journeys are cut short where more than half of the pool would be held, or another request would find no
        room: what they have not copied yet may then be evicted.

        Args:
            num_known: leading blocks that are there already, and stay.
            others: requests in flight.

        Returns:
            how many blocks will travel; 0 where the prompt is not whole in the pool, or has no room.
        """
        leader = group.live[0]
        if leader.kv.root is None or not group.has_prompt_blocks:
            return 0
        num_blocks = self._prefixes.num_cacheable_blocks(leader.num_prompt_tokens)
        chain = leader.kv.keys(leader.token_ids, num_blocks, self._prefixes.pool.block_size)[:num_blocks]
        known = set(chain[:num_known])
        wanted = [key for key in keys_seen(chain, num_blocks, self._geometry.reaches) if key not in known]
        if not wanted:
            return 0
        self._prefixes.register_full_blocks(leader)
        self._begin(name, _Journey(wanted[::-1]), wanted)
        needed = max((other.num_blocks_alone(self._geometry) for other in others if other is not group), default=0)
        self.make_room(max(needed, self._limit() // 2))
        journey = self._journeys[name]
        if journey.on_device is None:
            journey.keys.clear()
        return len(journey.keys)

    def stage(self, name: str, num_blocks: int, then: Callable[[Portion], None]) -> None:
        """Brings up to so many of the next blocks to the host, and says which when their bytes may be read.

        Fewer come where there is no room there, or a block is gone since the journey was cut short; none at the end.
        """
        journey = self._journeys.get(name)
        if journey is None or not journey.keys:
            then(Portion())
            return
        keys = [journey.keys.pop() for _ in range(min(num_blocks, len(journey.keys)))]
        kept = self._host.hold([key for key in keys if key in self._host])
        homes = dict(zip((key for key in keys if key in self._host), kept.block_ids(), strict=True))
        sources = {key: block_id for key in keys if key not in homes and (block_id := self._held.find(key))}
        copies = self._host.reserve(min(len(sources), self._host.pool.num_free))
        for (key, source), home in zip(sources.items(), copies.block_ids(), strict=False):
            self._host.copy_out(source, home)
            homes[key] = home
        there = next((place for place, key in enumerate(keys) if key not in homes), len(keys))
        if there < len(keys):
            journey.keys.clear()  # nothing behind a gap is of use
        portion = Portion(tuple((key, homes[key]) for key in keys[:there]), (kept, copies))
        journey.tables.update(dict.fromkeys(portion.tables))
        self._when_settled([home for _, home in portion.blocks], lambda: then(portion))

    def sent(self, name: str, portion: Portion) -> None:
        """Gives blocks of the host back that have been sent."""
        journey = self._journeys.get(name)
        for table in portion.tables if journey is not None else ():
            self._give_back(journey, table)

    # --- in ---------------------------------------------------------------------------------------------------------

    def expect(
        self, name: str, known: Sequence[Key], wanted: Sequence[Key], then: Callable[[dict[Key, int]], None]
    ) -> None:
        """Begins a journey hither, and says which blocks of the host may be written, when they may.

        Args:
            known: what is here, and is held, for without it what comes is of no use.
            wanted: what comes: as many have blocks as there is room for, in this order.
        """
        kept = self._host.hold([key for key in known if key in self._host])
        self._begin(name, _Journey(tables={kept: None}), known)
        self.make_room(self._limit() // 2)
        table = self._host.reserve(min(len(wanted), self._host.pool.num_free))
        self._journeys[name].tables[table] = None
        homes = dict(zip(wanted, table.block_ids(), strict=False))
        self._when_settled(list(homes.values()), lambda: then(homes))

    def arrived(self, name: str, homes: dict[Key, int]) -> None:
        """Makes blocks known that are whole, but those that somebody else has brought meanwhile, and holds them on."""
        if name in self._journeys:
            for key, home in homes.items():
                self._host.take_in(key, home)

    # --- both -------------------------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int) -> None:
        """Cuts journeys short, the oldest first, until enough blocks of the device are neither pinned nor held."""
        journeys = [journey for journey in self._journeys.values() if journey.on_device is not None]
        left = self._limit() - len(self._prefixes.pinned_blocks)
        left -= sum(journey.on_device.num_blocks for journey in journeys if journey.on_device is not None)
        for journey in journeys:
            if left >= num_blocks:
                return
            left += self._cut(journey)

    def let_go(self, name: str) -> None:
        """Ends a journey, if there is one of this name: what it held is cached like anything else."""
        if name in self._journeys:
            journey = self._journeys.pop(name)
            self._cut(journey)
            for table in list(journey.tables):
                self._give_back(journey, table)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _when_settled(self, homes: list[int], then: Callable[[], None]) -> None:
        table = BlockTable(len(homes))  # of its own: what holds them may be given back before
        table.extend(homes)
        self._host.when_settled(table, then)

    def _give_back(self, journey: _Journey | None, table: BlockTable) -> None:
        if journey is not None and table in journey.tables:
            del journey.tables[table]
            self._host.let_go(table)

    def _begin(self, name: str, journey: _Journey, keys: Sequence[Key]) -> None:
        self._journeys[name] = journey
        journey.on_device = self._held.hold([key for key in keys if self._held.find(key) is not None])

    def _cut(self, journey: _Journey) -> int:
        """Holds nothing of the device any more; how many blocks that were."""
        table, journey.on_device = journey.on_device, None
        if table is None:
            return 0
        num_blocks = table.num_blocks
        self._held.let_go(table)
        return num_blocks
