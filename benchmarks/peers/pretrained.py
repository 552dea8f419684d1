"""Pretrained models, and model M, in jpaged, OpenVINO GenAI, llama.cpp and mistral.rs, on one core or on all.

    make bench-pretrained                                   all models on the last core
    make bench-pretrained ARGS='--cores all'                on all cores
    make bench-pretrained ARGS='--peers llama.cpp --models SmolLM2-135M'

    stream    one request, 16 prompt tokens and 128 of output
    prefill   one request, 1000 prompt tokens and 1 of output
    batch     32 requests at once, 32 prompt tokens and 64 of output each
    start     seconds from a new process to its first token: cold with an empty compile cache and the model's file out
              of the page cache, warm right after

Rates are tokens per second over the whole time, prompts included: output tokens of stream and batch, prompt tokens of
prefill. Every run has new prompts, prefix caches are off or emptied, and each engine has 1 GiB for its KV cache.
Engines alternate, A B A B. jpaged's other options are its defaults. Results go to benchmarks/results/pretrained.json
and into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.peers import workloads
from benchmarks.peers.environments import CannotInstall, Home, install
from benchmarks.peers.peers import KV_CACHE_BYTES, OURS, PEERS, Peer
from benchmarks.peers.pretrained_models import MODELS, Generated, Pretrained, provide
from benchmarks.peers.ratios import Spread, Timed
from benchmarks.peers.session import ROOT, PeerFailed, Session, require_taskset
from benchmarks.peers.workloads import Job
from benchmarks.record import RESULTS, machine, put_on_page
from jpaged import json_text

COMMAND = "make bench-pretrained"
STREAM, PREFILL, BATCH = WORKLOADS = ("stream", "prefill", "batch")
COLD, WARM = STARTS = ("cold", "warm")
SHAPES = {STREAM: (1, 16, 128), PREFILL: (1, 1000, 1), BATCH: (32, 32, 64)}
"""Requests, prompt tokens and output tokens of each workload."""
START_SHAPE = (1, 16, 1)
FIRST_ID, END_ID = 300, 20000
"""Range of prompt ids: ordinary tokens of both vocabularies."""
WARM_UP_TOKENS = 4
LIMIT_S = 600.0
EXPECTED_S = {
    OURS: {"run": 14.0, "start": 16.0},
    "openvino": {"run": 8.0, "start": 3.0},
    "llama.cpp": {"run": 22.0, "start": 1.5},
    "mistral.rs": {"run": 75.0, "start": 3.0},
}
"""About how long one turn of all workloads takes on one core, and one start."""
NOT_MEASURED = {
    "onnxruntime-genai 0.18.0": "installs, but reads ONNX models only, and its builder reads float16 and float32 GGUF "
    "files only: `RuntimeError: Error opening .../genai_config.json`",
    "SGLang 0.5.23": "its package requires CUDA (cuda-python, flash-attn-4, flashinfer); its build for CPUs is not on "
    "the package index: `No matching distribution found for sglang-cpu`",
}
_FOLDERS = re.compile(r"(?<!\S)/(?:[^\s/]+/)+")
"""Folders of an absolute path."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, and the data types that it documents; `{name}` is what it reports at run time.

    Attributes:
        peer: its worker and options.
        weights, activations, accumulation, kv_cache: data types of products and of the cache.
        start_options: options that replace the peer's own when starts are measured.
    """

    peer: Peer
    weights: str
    activations: str
    accumulation: str
    kv_cache: str
    start_options: Mapping[str, object] = field(default_factory=dict)

    def describe(self, about: Mapping[str, object]) -> dict[str, str]:
        """Return the data types, completed with what the engine reported."""
        reported = _Reported(about)
        names = ("weights", "activations", "accumulation", "kv_cache")
        return {name: getattr(self, name).format_map(reported) for name in names}


class _Reported(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return "unknown"


def get_engines(num_cores: int) -> dict[str, Engine]:
    """Return the engines by name, with one thread per core."""
    workers = "benchmarks.peers.workers"
    ours, theirs = PEERS[OURS], PEERS["llama.cpp"]
    every = (
        Engine(
            replace(ours, options={"kv_cache_memory_bytes": KV_CACHE_BYTES}),
            "as stored",
            "{activations}; {products} in products of quantized weights",
            "float32; int32 in a group of int8",
            "{kv_cache}",
            {"wait_for_all_programs": False},  # jpaged's default; rates are measured after all programs are compiled
        ),
        Engine(
            Peer(
                "openvino",
                "openvino",
                f"{workers}.openvino_genai",
                "OpenVINO GenAI, continuous batching",
                {
                    "num_threads": num_cores,
                    "cache_size": KV_CACHE_BYTES >> 30,
                    "max_num_batched_tokens": 512,
                    "enable_prefix_caching": False,
                },
                {},
            ),
            "4 or 8 bits, repacked",
            "{activations}; int8 in products, groups of {dynamic_quantization_group}",
            "not documented",
            "{kv_cache}",
        ),
        Engine(
            replace(theirs, options={**theirs.options, "threads": num_cores, "threads_batch": num_cores}),
            "as stored",
            "float32; int8 in products, blocks of 32 or 256",
            "int32 in a block, float32 across blocks",
            "float16",
        ),
        Engine(
            Peer(
                "mistral.rs",
                "mistralrs",
                f"{workers}.mistralrs_runner",
                "mistral.rs, Python class Runner",
                {"max_seqs": 32, "prefix_cache_n": 0},
                {},
                {"RAYON_NUM_THREADS": str(num_cores)},
            ),
            "as stored",
            "float32; int8 in products, blocks of 32 or 256",
            "int32 in a block, float32 across blocks",
            "float16",
        ),
    )
    return {engine.peer.name: engine for engine in every}


def make_jobs(shape: tuple[int, int, int], seed: Sequence[int]) -> list[Job]:
    """Return jobs of (requests, prompt tokens, output tokens), with prompts that another seed does not repeat."""
    num_jobs, num_prompt, num_output = shape
    rng = np.random.default_rng([workloads.SEED, *seed])
    return [Job(rng.integers(FIRST_ID, END_ID, num_prompt).tolist(), num_output) for _ in range(num_jobs)]


@dataclass(slots=True)
class Cell:
    """Measurements of one engine and model, turn by turn.

    Attributes:
        runs: by workload.
        starts_s: seconds from a new process to the first token, by kind of start.
        about: versions and data types that the engine reported.
        missing: reason by workload or kind of start, for what was not measured.
    """

    runs: dict[str, Timed] = field(default_factory=dict)
    starts_s: dict[str, list[float]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def set_missing(self, reason: str) -> None:
        """Record one reason for everything that has no measurement."""
        for name in (*WORKLOADS, *STARTS):
            if name not in self.runs and name not in self.starts_s:
                self.missing.setdefault(name, reason)


class Measurement:
    """Alternating runs of several engines over one model.

    Args:
        model: its file is in its place.
        engines: what alternates.
        home: where environments and the file are.
        cores: numbers of the cores that all engines share.
        report: receives a line per run.
    """

    def __init__(
        self,
        model: Pretrained | Generated,
        engines: Mapping[str, Engine],
        home: Home,
        cores: Sequence[int],
        report: Callable[[str], None],
    ) -> None:
        self._model = model
        self._peers = {name: replace(engine.peer, weights=model.weights) for name, engine in engines.items()}
        self._start_options = {name: engine.start_options for name, engine in engines.items()}
        self._home = home
        self._cores = cores
        self._report = report
        self.cells = {name: Cell() for name in engines}

    def measure(self, num_turns: int, num_starts: int) -> None:
        """Measure starts, then each workload; an engine that fails has its reason in its cell."""
        self._measure_starts(num_starts)
        sessions: dict[str, Session] = {}
        try:
            for workload in WORKLOADS:
                self._measure_workload(workload, num_turns, sessions)
        finally:
            for session in sessions.values():
                session.close()

    def _measure_starts(self, num_starts: int) -> None:
        path = self._write("start", START_SHAPE, 0)
        for turn in range(num_starts):
            for kind in STARTS:
                for name, cell in self.cells.items():
                    if cell.missing:
                        continue
                    if kind == COLD:
                        self._empty_caches(name)
                    try:
                        seconds = self._start(name, path, cell)
                    except PeerFailed as error:
                        self._report(f"{name}: {error}")
                        cell.set_missing(_reason(error))
                        continue
                    cell.starts_s.setdefault(kind, []).append(seconds)
                    self._report(f"{kind} start {turn + 1} of {name}: {seconds:.2f} s")

    def _start(self, name: str, path: Path, cell: Cell) -> float:
        """Return the seconds from a new process to its first token."""
        session = self._open(name, cell, self._start_options[name])
        try:
            return session.ready_s + session.run(path, limit_s=LIMIT_S).wall_s
        finally:
            session.close()

    def _measure_workload(self, workload: str, num_turns: int, sessions: dict[str, Session]) -> None:
        num_jobs, num_prompt, num_output = SHAPES[workload]
        warm_up = self._write(workload, (num_jobs, num_prompt, min(num_output, WARM_UP_TOKENS)), 0)
        for turn in range(1, 1 + num_turns):
            path = self._write(workload, SHAPES[workload], turn)
            for name, cell in self.cells.items():
                if workload in cell.missing:
                    continue
                try:
                    if name not in sessions:
                        sessions[name] = self._open(name, cell)
                    if turn == 1:
                        sessions[name].run(warm_up, limit_s=LIMIT_S)
                    run = sessions[name].run(path, limit_s=LIMIT_S)
                except PeerFailed as error:
                    self._report(f"{workload} {name}: {error}")
                    cell.missing[workload] = _reason(error)
                    sessions.pop(name, None)
                    continue
                before = cell.runs.get(workload, Timed(()))
                cell.runs[workload] = Timed((*before.wall_s, run.wall_s), (*before.processor_s, run.processor_s))
                self._report(f"{workload} {turn} of {name}: {run.wall_s:.2f} s, processor {run.processor_s:.2f} s")

    def _open(self, name: str, cell: Cell, options: Mapping[str, object] = MappingProxyType({})) -> Session:
        peer = self._peers[name]
        caches = {"JPAGED_CACHE_DIR": str(self._cache(name))} if peer.is_ours else {}
        peer = replace(peer, variables={**peer.variables, **caches}, options={**peer.options, **options})
        session = Session(peer, self._model, self._home, self._cores)
        cell.about = session.about
        return session

    def _cache(self, name: str) -> Path:
        return self._home.folder / "cache" / f"pretrained_{name}"

    def _empty_caches(self, name: str) -> None:
        """Delete the compile cache, and drop the model's file from the page cache."""
        shutil.rmtree(self._cache(name), ignore_errors=True)
        path = self._home.gguf(self._model.name, self._model.weights)
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _write(self, workload: str, shape: tuple[int, int, int], turn: int) -> Path:
        """Write the jobs of a turn and return their path; turn 0 is the warm-up."""
        seed = ("start", *WORKLOADS).index(workload), turn
        path = self._home.folder / "jobs" / f"pretrained_{workload}_{turn}.jsonl"
        workloads.write(path, make_jobs(shape, seed))
        return path


def _reason(error: PeerFailed) -> str:
    """Return an error without the path of its log and without folders, for a page."""
    return _FOLDERS.sub("", str(error).partition(" (all of it: ")[0])


def to_entry(engine: Engine, cell: Cell) -> dict[str, Any]:
    """Return a cell as JSON: options, versions, data types, times, and reasons for what is missing."""
    runs = {name: {"wall_s": run.wall_s, "processor_s": run.processor_s} for name, run in cell.runs.items()}
    return {
        "options": dict(engine.peer.options),
        "start_options": dict(engine.start_options),
        "about": cell.about,
        "dtypes": engine.describe(cell.about),
        "runs": runs,
        "starts_s": cell.starts_s,
        "missing": cell.missing,
    }


def table(record: Mapping[str, Any]) -> str:
    """Return the record as Markdown: a table per model and set of cores, then data types and reasons."""
    parts: list[str] = []
    reasons: list[str] = []
    lines: dict[str, str] = {}
    for label, models in record["cores"].items():
        for name, model in models.items():
            on = model["machine"]
            moment = f"{model['date']}, commit {model['commit']}, {on['processor']}, load {on['load_average']}"
            title = f"{name}, {model['weights']}, {label} ({moment}):"
            if "missing" in model:
                parts.append(f"{title} not measured: {model['missing']}")
                continue
            rows = ["| engine | stream | prefill | batch | cold start | warm start |", "|---|---|---|---|---|---|"]
            for peer, entry in model["peers"].items():
                cells = [*(_rate(entry, workload) for workload in WORKLOADS)]
                cells += [_seconds(entry["starts_s"].get(kind)) for kind in STARTS]
                rows.append(f"| {peer} | {' | '.join(cells)} |")
                for reason in dict.fromkeys(entry["missing"].values()):
                    what = ", ".join(key for key, value in entry["missing"].items() if value == reason)
                    reasons.append(f"- {peer}, {name}, {label}, {what}: {reason}")
                if entry["about"]:
                    lines[f"{peer} {label} {entry['dtypes']}"] = _describe(peer, label, entry)
            parts += [title, "\n".join(rows)]
    if any("\\*" in part for part in parts):
        parts.append("\\* other processes used the cores for part of the time.")
    head = "| engine | cores | weights | activations | accumulation | KV cache | options |"
    parts.append("\n".join([head, "|---|---|---|---|---|---|---|", *lines.values()]))
    reasons += [f"- {name}: {reason}" for name, reason in NOT_MEASURED.items()]
    parts += ["Not measured:", "\n".join(reasons)]
    return "\n\n".join(parts)


def _rate(entry: Mapping[str, Any], workload: str) -> str:
    """Return tokens/s as median and range; * marks runs that had less processor time than one core has."""
    if (run := entry["runs"].get(workload)) is None:
        return "-"
    num_jobs, num_prompt, num_output = SHAPES[workload]
    num_tokens = num_jobs * (num_prompt if workload == PREFILL else num_output)
    spread = Spread.over([num_tokens / wall_s for wall_s in run["wall_s"]])
    mark = "\\*" if Timed(run["wall_s"], run["processor_s"]).is_disturbed else ""
    digits = 0 if spread.median >= 100 else 1
    return f"{spread.median:.{digits}f}{mark} ({spread.least:.{digits}f} to {spread.most:.{digits}f})"


def _seconds(starts: Sequence[float] | None) -> str:
    if not starts:
        return "-"
    spread = Spread.over(starts)
    return f"{spread.median:.2f} s ({spread.least:.2f} to {spread.most:.2f})"


def _describe(peer: str, label: str, entry: Mapping[str, Any]) -> str:
    version = next(iter(entry["about"].values()))
    options = ", ".join(f"{name} {value}" for name, value in entry["options"].items())
    return f"| {peer} {version} | {label} | {' | '.join(entry['dtypes'].values())} | {options} |"


def expected_s(models: Sequence[str], peers: Sequence[str], num_turns: int, num_starts: int) -> float:
    """Return about how long a measurement takes on a quiet core."""
    each = [EXPECTED_S[name] for name in peers]
    return len(models) * sum((num_turns + 0.5) * one["run"] + 2 * num_starts * one["start"] for one in each)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a value out of range ends the process with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.pretrained", description="Pretrained models in jpaged and other engines."
    )
    others = [name for name in EXPECTED_S if name != OURS]
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--peers", nargs="+", choices=others, default=others, help="engines next to jpaged (all)")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], help="(all)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each engine and workload (3)")
    parser.add_argument("--starts", type=int, default=2, help="cold and warm starts of each engine (2)")
    parser.add_argument("--cores", choices=[*map(str, cores), "all"], default=str(cores[-1]), help="(the last)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-peers", help="of the environments (.venv-peers)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of pretrained.json (benchmarks/results)")
    parser.add_argument("--table", action="store_true", help="write the table from the record alone")
    options = parser.parse_args(arguments)
    for name in ("turns", "starts"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name} {value} is out of range: must be >= 1")
    return options


def measure_model(
    model: Pretrained | Generated,
    options: argparse.Namespace,
    home: Home,
    cores: Sequence[int],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """Return a model's part of the record; a model that cannot be downloaded is a part with the reason."""
    about = {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": _commit(),
        "machine": machine(),
        "cores": list(cores),
        "seed": workloads.SEED,
        "weights": model.weights,
        **model.origin,
    }
    try:
        provide(model, home, _say)
    except CannotInstall as error:
        _say(f"{model.label}: {error}")
        return {**about, "missing": f"its file cannot be provided: {error}"}
    engines = {name: get_engines(len(cores))[name] for name in EXPECTED_S if name == OURS or name in options.peers}
    usable = {name: engine for name, engine in engines.items() if name not in missing}
    measurement = Measurement(model, usable, home, cores, _say)
    measurement.measure(options.turns, options.starts)
    for name, reason in missing.items():
        measurement.cells[name] = Cell()
        measurement.cells[name].set_missing(reason)
    peers = {name: to_entry(engine, measurement.cells[name]) for name, engine in engines.items()}
    return {**about, "peers": peers}


def save(label: str, name: str, part: Mapping[str, Any], results: Path) -> dict[str, Any]:
    """Replace a model's measurements on a set of cores in pretrained.json; return the whole record."""
    path = results / "pretrained.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"command": COMMAND, "cores": {}}
    record["cores"].setdefault(label, {})[name] = part
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text.dumps(record, indent=2) + "\n")
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    path = options.results / "pretrained.json"
    if options.table and not path.exists():
        raise SystemExit(f"error: {path} does not exist: run `{COMMAND}` without --table first")
    record = json.loads(path.read_text()) if options.table else _measure(options)
    text = table(record)
    if options.results == RESULTS:
        put_on_page({"pretrained models": text})
    print(text)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    home = Home(options.folder.resolve())
    cores = sorted(os.sched_getaffinity(0)) if options.cores == "all" else [int(options.cores)]
    minutes = expected_s(options.models, [OURS, *options.peers], options.turns, options.starts) / 60
    _say(f"measuring takes about {max(1, round(minutes))} minutes on a quiet core, after the installation")
    require_taskset()
    missing: dict[str, str] = {}
    for name in options.peers:
        try:
            install(home, get_engines(1)[name].peer.environment, _say)
        except CannotInstall as error:
            missing[name] = f"could not be installed: {error}"
            _say(f"{name} {missing[name]}")
    label = "all cores" if options.cores == "all" else "one core"
    record: dict[str, Any] = {}
    for name in options.models:
        measured = measure_model(MODELS[name], options, home, cores, missing)
        record = save(label, name, measured, options.results)
        _say(f"{name} is in {options.results / 'pretrained.json'}")
    return record


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    main()
