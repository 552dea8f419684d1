"""Compares jpaged with the harness's own `hf` on one checkpoint, and measures both: `python -m benchmarks.evaluation`.

It runs in an environment with both: `make lm-eval` compares, and `make lm-eval ARGS=--rounds=5` measures as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from benchmarks.evaluation.stories import TASKS
from benchmarks.record import save
from jpaged import json_text
from jpaged.demo import FOLDER

ENDINGS, LETTERS, NEXT, STORIES = "jpaged_endings", "jpaged_letters", "jpaged_next", "jpaged_stories"
KINDS = {"endings": ENDINGS, "letters": LETTERS, "next": NEXT, "stories": STORIES}
ATOL, RTOL = 2e-3, 1e-4
"""Log-probabilities of up to 300 tokens in float32, added up, by two libraries."""
NUM_COMPARED = 60
"""Documents of each task."""
NUM_MEASURED = 120
"""Documents of each task: 480 pairs where there are four choices."""
HF_BATCH_SIZE = 16
_READY_S = 300.0


def main() -> None:
    """Print what agrees and how long it took; the exit code is 1 where something differs."""
    parser = argparse.ArgumentParser(description="lm-evaluation-harness over jpaged and over its own hf.")
    parser.add_argument("--measure-only", action="store_true", help="do not compare before")
    parser.add_argument("--rounds", type=int, default=0, help="measure, so often, and keep the numbers (default: 0)")
    arguments = parser.parse_args()
    if not arguments.measure_only and not _agrees():
        sys.exit(1)
    if arguments.rounds:
        _measure(arguments.rounds)


def _hf(**options: Any) -> dict[str, Any]:
    given = {"pretrained": str(FOLDER), "dtype": "float32", "device": "cpu", "batch_size": HF_BATCH_SIZE, **options}
    return {"model": "hf", "arguments": given}


def _jpaged(**options: Any) -> dict[str, Any]:
    return {"model": "jpaged", "arguments": {"model": "demo", "dtype": "float32", **options}}


def _run(asked: dict[str, Any], *, core: int | None = None) -> dict[str, Any]:
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    words = [
        *pinned,
        sys.executable,
        "-m",
        "benchmarks.evaluation.worker",
        json_text.dumps({**asked, "folder": str(TASKS)}),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{asked['model']} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def _server(port: int) -> Iterator[str]:
    from jpaged.client import Client

    words = [sys.executable, "-m", "jpaged", "serve", "demo", "--dtype", "float32", "--port", str(port)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with Client(f"localhost:{port}") as client:
            client.wait_until_ready(_READY_S)
        yield f"localhost:{port}"
    finally:
        server.terminate()
        server.wait()


def _agrees() -> bool:
    """Both say the same: as it comes, where texts are longer than the model, through a chat template, from a server."""
    every = {"tasks": [ENDINGS, LETTERS, NEXT, STORIES], "limit": NUM_COMPARED}
    short = {"tasks": [ENDINGS, LETTERS, STORIES], "limit": NUM_COMPARED}
    chats = {"tasks": [ENDINGS, NEXT], "limit": NUM_COMPARED, "apply_chat_template": True}
    whole = _run({**_hf(), **every})
    ok = _compare("in this process", whole, _run({**_jpaged(), **every}))
    ok &= _compare("longer than the model", *[_run({**one(max_length=160), **short}) for one in (_hf, _jpaged)])
    ok &= _compare("through a chat template", *[_run({**one(), **chats}) for one in (_hf, _jpaged)])
    with _server(port=50951) as target:
        server = {"model": "jpaged", "arguments": {"target": target}}
        ok &= _compare("from a server", whole, _run({**server, **every}))
    return ok


def _compare(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    num, wrong, far = 0, [], 0.0
    for task, answers in theirs["answers"].items():
        for place, (a, b) in enumerate(zip(answers, ours["answers"][task], strict=True)):
            for one, other in zip(a, b, strict=True):
                num += 1
                far = max(far, _distance(one, other))
                if not _is_near(one, other):
                    wrong.append(f"  {task} {place}: {one!r} by hf, {other!r} by jpaged")
    for task, metrics in theirs["metrics"].items():
        for metric, value in metrics.items():
            other = ours["metrics"][task][metric]
            print(f"{name:24} {task:16} {metric:22} hf {value:.6f}  jpaged {other:.6f}", flush=True)
            if abs(value - other) > RTOL * abs(value):
                wrong.append(f"  {task} {metric}: {value} by hf, {other} by jpaged")
    print(f"{name:24} {num} answers, log-probabilities at most {far:.1e} apart, {len(wrong)} differences", flush=True)
    print("\n".join(wrong[:20]), end="\n" if wrong else "")
    return not wrong


def _logprob(answer: Any) -> float | None:
    value = answer[0] if isinstance(answer, list) else answer
    return None if isinstance(value, str) else float(value)


def _distance(one: Any, other: Any) -> float:
    a, b = _logprob(one), _logprob(other)
    return 0.0 if a is None or b is None else abs(a - b)


def _is_near(one: Any, other: Any) -> bool:
    a, b = _logprob(one), _logprob(other)
    if a is None or b is None:
        return one == other
    greedy = [answer[1] if isinstance(answer, list) else None for answer in (one, other)]
    return abs(a - b) <= ATOL + RTOL * abs(a) and greedy[0] == greedy[1]


def _measure(rounds: int) -> None:
    """Each model in a process of its own on one core, in turn; seconds of the model's calls, tokenising included."""
    models = {"hf": _hf(), "jpaged": _jpaged()}
    clock: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in models} for kind in KINDS}
    processor: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in models} for kind in KINDS}
    for _ in range(rounds):
        for name, model in models.items():
            done = _run({**model, "tasks": list(KINDS.values()), "warm_up": 4, "limit": NUM_MEASURED}, core=0)
            for kind, task in KINDS.items():
                clock[kind][name].append(done["seconds"][task][0])
                processor[kind][name].append(done["seconds"][task][1])
            shown = ", ".join(f"{kind} {each[name][-1]:.2f} s" for kind, each in processor.items())
            print(f"{name:8} {shown} of the processor (loaded in {done['load_s']:.1f} s)", flush=True)
    ratios = {of: _times_as_fast(each) for of, each in (("processor", processor), ("clock", clock))}
    for kind in KINDS:
        print(f"{kind:10} {ratios['processor'][kind]:.2f} times as fast as hf by the processor's seconds")
    names = ("jpaged", "lm_eval", "torch", "transformers", "datasets", "jax")
    record = {
        "num_documents": NUM_MEASURED,
        "hf_batch_size": HF_BATCH_SIZE,
        "versions": {name: metadata.version(name) for name in names},
        "times_as_fast": ratios,
        "processor_s": processor,
        "clock_s": clock,
    }
    save("lm_eval", f"make lm-eval ARGS=--rounds={rounds}", record)


def _times_as_fast(seconds: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """The median of `hf` divided by that of jpaged, of each kind."""
    return {kind: statistics.median(each["hf"]) / statistics.median(each["jpaged"]) for kind, each in seconds.items()}


if __name__ == "__main__":
    main()
