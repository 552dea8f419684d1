"""Runs points, each once: what was measured before is kept in a folder, and read again while the code is the same."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np

import jpaged
from benchmarks.paper import batches, point
from benchmarks.paper.point import Measured, Point, PoolShares, measure

KEPT = Path(__file__).parent / ".points"


class Runner:
    """Runs points, each once however many figures ask for it, in so many processes.

    Args:
        jobs: processes.
        folder: where points are kept between runs; None keeps them in memory alone.
    """

    def __init__(self, jobs: int, folder: Path | None = None) -> None:
        self._jobs = jobs
        self._folder = folder
        self._known: dict[Point, Measured] = {}

    def run(self, points: Iterable[Point]) -> dict[Point, Measured]:
        wanted = list(points)
        new = [one for one in dict.fromkeys(wanted) if one not in self._known and not self._read(one)]
        if self._jobs == 1 or len(new) < 2:
            for one in new:
                self._keep(one, measure(one))
        else:
            # Spawned: a process that has started threads (jax does) must not be forked.
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(max_workers=self._jobs, mp_context=spawn) as pool:
                for one, measured in zip(new, pool.map(measure, new), strict=True):
                    self._keep(one, measured)
        return {one: self._known[one] for one in wanted}

    def _read(self, one: Point) -> bool:
        path = self._path(one)
        if path is None or not path.exists():
            return False
        kept = json.loads(path.read_text())["measured"]
        shares = kept.pop("pool_shares")
        self._known[one] = Measured(**kept, pool_shares=PoolShares(**shares) if shares else None)
        return True

    def _keep(self, one: Point, measured: Measured) -> None:
        self._known[one] = measured
        path = self._path(one)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(".part")
            written.write_text(json.dumps({"point": asdict(one), "measured": asdict(measured)}, indent=1) + "\n")
            written.replace(path)

    def _path(self, one: Point) -> Path | None:
        if self._folder is None:
            return None
        inputs = f"{code_digest()} {json.dumps(asdict(one), sort_keys=True)}"
        return self._folder / f"{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.json"


@cache
def code_digest() -> str:
    """Changes with any line of the package, with the measures, and with the generator of the traces."""
    package = Path(jpaged.__file__).parent
    files = sorted(package.rglob("*.py"))
    files += [Path(module.__file__) for module in (batches, point) if module.__file__]
    digest = hashlib.sha256(np.__version__.encode())
    for path in files:
        digest.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
