"""When jumps pay: the share of rows without a choice from which single steps with jumps beat several steps without.

    schemas   with more and more that is forced
    share     at which the engine goes over to single steps, see `engine/scheduler/multi_step.py`; at 2 it never does

Rounds run all shares one after another, with seeds of their own; times are medians over rounds.

    python -m benchmarks.structured.jumps
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from benchmarks.record import save
from benchmarks.structured.libraries import versions
from benchmarks.structured.throughput import CASES, NUM_ROWS, Run, params_of, prompts_of, run
from jpaged.engine.scheduler import multi_step
from jpaged.llm import LLM

_SHARES = (0.125, 0.25, 0.5, 2.0)


def main() -> None:
    """Print a line a case, and keep them in results/structured_jumps.json."""
    parser = argparse.ArgumentParser(description="Single steps with jumps beside several steps without.")
    parser.add_argument("--num-rounds", type=int, default=6)
    num_rounds = parser.parse_args().num_rounds
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = {share: stack.enter_context(_jumping_from(share)) for share in _SHARES}
        for num_rows in (1, 4, NUM_ROWS):
            for name, schema_of in _SCHEMAS.items():
                found[f"{num_rows} rows, {name}"] = case = _case(engines, schema_of, num_rows, num_rounds)
                print(f"{num_rows} rows, {name}", case, flush=True)
    record = {"versions": versions(), "num_rounds": num_rounds, "found": found}
    save("structured_jumps", "python -m benchmarks.structured.jumps", record)


def _jumping_from(share: float) -> LLM:
    with mock.patch.object(multi_step, "_JUMPING_SHARE_OF_FED", share):
        return LLM("demo", max_num_seqs=NUM_ROWS, wait_for_all_programs=True)


def _case(engines: dict[float, LLM], schema_of: Callable[[int], Any], num_rows: int, num_rounds: int) -> dict[str, Any]:
    runs = dict[float, list[Run]]()
    for number in range(num_rounds + 1):
        params = [params_of(number, row, schema_of) for row in range(num_rows)]
        for share, llm in engines.items():
            runs.setdefault(share, []).append(run(llm, prompts_of(num_rows), params))
    found = {}
    for share, (_, *timed) in runs.items():  # the first round is to warm up
        times = [one.wall_us for one in timed]
        found[f"from {share}"] = {
            "us_a_token": round(statistics.median(times), 1),
            "range": [round(min(times), 1), round(max(times), 1)],
            "forced_share": round(statistics.mean(one.forced_share for one in timed), 3),
        }
    return found


def _numbers(row: int) -> dict[str, Any]:
    return _object([f"name_of_{row}_{column}" for column in range(12)], {"type": "integer", "maximum": 99999})


def _names(row: int) -> dict[str, Any]:
    return _object([f"a_rather_long_name_of_{row}_{column}" for column in range(12)], {"type": "boolean"})


def _object(names: list[str], value: dict[str, Any]) -> dict[str, Any]:
    properties = dict.fromkeys(names, value)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


_SCHEMAS = {"8 values": CASES["8 values, a schema a row"], "12 numbers": _numbers, "12 long names": _names}

if __name__ == "__main__":
    main()
