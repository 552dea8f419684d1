"""A peer's process as the runner sees it: started on its core, given workloads, ended.

The worker and all its threads have one core (`taskset -c`); of llama.cpp the server has it and the client does not.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.peers.environments import Home, reason, tcmalloc
from benchmarks.peers.peers import LLAMA_SERVER, Model, Peer, options_for

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 1200.0
STOP_LIMIT_S = 60.0


class PeerFailed(Exception):
    """A peer that did not answer, and what it said last."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload by one peer; the fields of `protocol.Answer`."""

    wall_s: float
    processor_s: float
    outputs: list[list[list[int]]]
    ttft_s: list[float]
    tpot_s: list[float]
    counts: dict[str, float]


class Session:
    """A started peer; `ready_s` is how long it took until requests were taken, `about` what it says of itself.

    Raises:
        PeerFailed: it ended, or was not ready in time.
    """

    def __init__(self, peer: Peer, shape: Model, home: Home, core: int | Sequence[int]) -> None:
        self._log = home.log(f"{peer.name}_{shape.name}")
        self._name = peer.name
        self._buffer = b""
        with self._log.open("w") as log:
            begin = time.perf_counter()
            self._process = subprocess.Popen(
                command(peer, shape, home, core),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=home.folder,
                env={**os.environ, **variables(peer, home, core)},
                start_new_session=True,
            )
        try:
            self.about = self._receive(START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        self.ready_s = float(self.about.pop("ready_s", time.perf_counter() - begin))

    def run(self, workload: Path, *, limit_s: float, is_warm_up: bool = False) -> Run:
        """Runs a workload once.

        Raises:
            PeerFailed: it ended, or took more than `limit_s`. The session is over.
        """
        order = json.dumps({"workload": str(workload), "is_warm_up": is_warm_up})
        try:
            _pipe(self._process.stdin).write(order.encode() + b"\n")
            _pipe(self._process.stdin).flush()
            return Run(**self._receive(limit_s))
        except OSError as error:
            self.close()
            raise PeerFailed(self._last_words()) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process: by closing its orders, and if it does not end by killing its group."""
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(STOP_LIMIT_S if self._process.poll() is None else None)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        _pipe(self._process.stdout).close()

    def _receive(self, limit_s: float) -> dict:
        """Returns the next line of the worker's answers."""
        deadline = time.perf_counter() + limit_s
        stdout = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.perf_counter())):
                    os.killpg(self._process.pid, 9)
                    raise PeerFailed(f"{self._name} was cut off after {limit_s:.0f} s")
                part = os.read(stdout.fileno(), 1 << 20)
                if not part:
                    raise PeerFailed(self._last_words())
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        status = self._process.wait()
        said = reason(self._log.read_text(errors="replace"), status)
        return f"{self._name} ended with {status}: {said} (all of it: {self._log})"


def command(peer: Peer, shape: Model, home: Home, core: int | Sequence[int]) -> list[str]:
    """Returns the command line of a peer's worker."""
    path, options = home.folder / "models" / shape.name, options_for(peer, shape)
    if peer.weights or peer.worker == LLAMA_SERVER:
        path = home.gguf(shape.name, peer.weights)
    if peer.worker == LLAMA_SERVER:
        options["binary"] = str(home.llama_server)
    cores = core if isinstance(core, int) else ",".join(map(str, core))
    settings = json.dumps({"folder": str(path), "dtype": shape.dtype, "core": cores, "options": options})
    # -P: the process runs in the home's folder, whose parts are no packages.
    worker = [str(home.python(peer.environment)), "-P", "-m", peer.worker, settings]
    # The server is bound by its worker, which is a client and runs where it may.
    return worker if peer.worker == LLAMA_SERVER else ["taskset", "-c", str(cores), *worker]


def variables(peer: Peer, home: Home, core: int | Sequence[int]) -> dict[str, str]:
    """Return the variables added to a peer's process: one thread per core; no network; own caches."""
    paths, cores = [str(ROOT)], [core] if isinstance(core, int) else list(core)
    found: dict[str, str] = {
        "OMP_NUM_THREADS": str(len(cores)),
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": ",".join(f"{{{number}}}" for number in cores),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONUNBUFFERED": "1",
    }
    if peer.is_ours:
        found |= {"JPAGED_CACHE_DIR": str(home.folder / "cache" / "jpaged"), "JAX_PLATFORMS": "cpu"}
    if peer.environment == "vllm":
        found["VLLM_CACHE_ROOT"] = str(home.folder / "cache" / peer.name)
        found["LD_PRELOAD"] = ":".join(str(path) for path in (tcmalloc(home), _gomp(home)) if path)
    if peer.name == "vllm-zentorch":
        paths.append(str(home.zentorch))
    return {**found, **peer.variables, "PYTHONPATH": os.pathsep.join(paths)}


def require_taskset() -> None:
    """Refuses a machine where no process can be bound to a core.

    Raises:
        PeerFailed: says what to install.
    """
    if shutil.which("taskset") is None:
        raise PeerFailed("taskset was not found, which binds each peer to one core: install util-linux")


def _gomp(home: Home) -> Path | None:
    """Returns the OpenMP library of vLLM's PyTorch: with more processes vLLM loads it first by itself."""
    packages = home.folder / "venvs" / "vllm"
    places = ("torch/lib/libgomp*.so*", "torch.libs/libgomp*.so*")
    found = (path for place in places for path in sorted(packages.glob(f"lib/python3*/site-packages/{place}")))
    return next(found, None)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise PeerFailed("the worker has no pipe")
    return pipe
