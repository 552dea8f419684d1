"""One model of the harness in one process: runs tasks and prints what came of them as one line of JSON.

    python -m benchmarks.evaluation.worker '{"model": "hf", "arguments": {"pretrained": "..."}, "tasks": ["..."]}'

It stands in the folder of the tasks, as the harness takes the paths of their files from there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from jpaged import json_text
from jpaged.evaluation.backends import OfflineBackend

REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


def main() -> None:
    """Run what the first argument says."""
    asked = json.loads(sys.argv[1])
    os.chdir(asked["folder"])
    import lm_eval
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    importlib.import_module("lm_eval.models")
    importlib.import_module("jpaged.evaluation.harness")
    began_s = time.perf_counter()
    model = get_model(asked["model"]).create_from_arg_obj(asked["arguments"])
    load_s = time.perf_counter() - began_s
    seconds: dict[str, list[float]] = {}
    options = {
        "model": model,
        "task_manager": TaskManager(include_path="."),
        "bootstrap_iters": 0,
        "apply_chat_template": asked.get("apply_chat_template", False),
    }
    if asked.get("warm_up"):
        lm_eval.simple_evaluate(**options, tasks=asked["tasks"], limit=asked["warm_up"])
    calls = {name: getattr(model, name) for name in REQUESTS}
    answer: dict[str, Any] = {"load_s": load_s, "seconds": seconds, "metrics": {}, "answers": {}}
    for task in asked["tasks"]:
        _forget_prefixes(model)
        for name, call in calls.items():
            setattr(model, name, _timed(call, task, seconds))
        results = lm_eval.simple_evaluate(**options, tasks=[task], limit=asked.get("limit"), log_samples=True)
        answer["metrics"][task] = _numbers(results["results"][task])
        answer["answers"][task] = [_answer(sample) for sample in results["samples"][task]]
    print(json_text.dumps(answer), flush=True)


def _forget_prefixes(model: Any) -> None:
    """A task finds nothing in the prefix cache that another has left there."""
    backend = getattr(model, "_backend", None)
    if isinstance(backend, OfflineBackend):
        backend.reset_prefix_cache()


def _timed(call: Callable[..., Any], task: str, seconds: dict[str, list[float]]) -> Callable[..., Any]:
    """Count the seconds of a task's calls: on the clock, and of the processor, whoever else runs."""

    def run(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter(), time.process_time()
        try:
            return call(*arguments, **options)
        finally:
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            seconds[task] = [a + b for a, b in zip(seconds.get(task, [0.0, 0.0]), took, strict=True)]

    return run


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and "stderr" not in name and "," in name
    }


def _answer(sample: dict[str, Any]) -> list[Any]:
    """What the model said of each request of a document: numbers, or a text."""
    return [one[0] if isinstance(one, list | tuple) and len(one) == 1 else one for one in sample["resps"]]


if __name__ == "__main__":
    main()
