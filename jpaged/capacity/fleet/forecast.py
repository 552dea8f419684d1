"""Forecast of a simulation's duration on this machine, from a run of one replica with its share of the day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.capacity.fleet.day import Day, Session
from jpaged.capacity.fleet.fleet import Fleet, FleetOptions
from jpaged.capacity.fleet.pods import PoolKind
from jpaged.capacity.fleet.worker import Pool

_SAMPLE = 40
_SAMPLE_S = 120.0
"""Conversations of the trial run, and the maximum delay of their starts after the first."""
_PLACED_S, _PLACED_AMONG_S = 5e-5, 4e-7
"""Seconds to place a request, and for each replica to choose from, which matters with many."""
_WINDOW_S, _WINDOW_OF_S = 2e-4, 5e-7
"""Seconds per window, and per replica in it."""
_BYTES, _BYTES_PER_TOKEN, _BYTES_PER_PROCESS = 3e5, 24.0, 2.3e8
"""Memory of a replica, of each token in its pool, and of a process: as measured, with blocks of 64."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected cost of a simulation.

    Attributes:
        num_turns: turns that begin within the day.
        wall_s: seconds, with one processor per process.
        memory_bytes: maximum, when all pools are full of prefixes.
    """

    num_turns: int
    wall_s: float
    memory_bytes: float


def forecast(
    pools: Sequence[Pool],
    kinds: Sequence[PoolKind],
    kind_of: Sequence[int],
    day: Day,
    sessions: Sequence[Session],
    options: FleetOptions,
) -> Forecast:
    """Run one replica of the most common kind, which takes less than a second, and extrapolate.

    Args:
        sessions: at least one.
    """
    share = [one for one in sessions[:: len(kind_of)] if one.begin_s <= sessions[0].begin_s + _SAMPLE_S][:_SAMPLE]
    most = max(range(len(kinds)), key=kind_of.count)
    alone = FleetOptions("least-load", seed=options.seed, window_s=options.window_s, replays=options.replays)
    tried = Fleet([pools[most]], [kinds[most]], [0], day, share, alone).run()
    num_turns = round(len(tried.ends) / len(share) * len(sessions))
    num_processes = min(options.num_processes, len(kind_of))
    num_windows = tried.elapsed_s / options.window_s + day.seconds / options.window_s
    wall_s = (
        tried.cpu_s / len(tried.ends) * num_turns / num_processes
        + num_turns * (_PLACED_S + _PLACED_AMONG_S * len(kind_of))
        + num_windows * (_WINDOW_S + _WINDOW_OF_S * len(kind_of))
    )
    memory_bytes = num_processes * _BYTES_PER_PROCESS + sum(
        _BYTES + _BYTES_PER_TOKEN * kinds[kind].capacity for kind in kind_of
    )
    return Forecast(num_turns, wall_s, memory_bytes)
