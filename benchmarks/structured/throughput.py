"""A batch with a JSON schema for each row, and the same batch without: tokens a second on the CPU, with the demo model.

    with      32 prompts, each with a schema
    as long   the same without, each row as long as it was with its schema
    as asked  the same without, each row as long as the model likes

A round runs the three one after another, with seeds of its own; a ratio is of one round, and medians are over rounds.
Time of the processor is counted besides, of all threads of the process: other processes of the machine do not count.
Each case runs twice, in processes of their own: on one processor, and on all.

    python -m benchmarks.structured.throughput
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.record import save
from benchmarks.structured import page
from benchmarks.structured.libraries import versions
from benchmarks.structured.phases import phases
from benchmarks.structured.timing import PERSON
from jpaged.llm import LLM
from jpaged.types import SamplingParams

NUM_ROWS = 32
MAX_TOKENS = 128
_WORDS = ("dog", "cat", "girl", "boy", "bird", "fish", "bear", "frog")


@dataclasses.dataclass(frozen=True, slots=True)
class Throughput:
    """One case: medians over rounds, ranges of ratios.

    Attributes:
        as_long: tokens a second with schemas over those of rows as long without; its least and most.
        as_asked: over those of rows that are as long as the model likes.
        cpu: processor time a token of rows as long without, over that with schemas.
        with_us, without_us: processor time a token, microseconds.
        phases_us: of those, each phase with schemas and without; timing them takes time, too.
        num_tokens: of a round, with schemas.
        forced_share: of them, those that were appended without a step of their own.
    """

    phases_us: dict[str, tuple[float, float]]
    as_long: float
    as_long_range: tuple[float, float]
    as_asked: float
    as_asked_range: tuple[float, float]
    cpu: float
    cpu_range: tuple[float, float]
    with_us: float
    without_us: float
    num_tokens: float
    forced_share: float


def main() -> None:
    """Print a line a case, and keep them in results/structured_throughput.json and docs/structured.md."""
    parser = argparse.ArgumentParser(description="Tokens a second with a JSON schema for each row, and without.")
    parser.add_argument("--num-rounds", type=int, default=9)
    parser.add_argument("--of-this-process", action="store_true", help="measure here, and print the results alone")
    arguments = parser.parse_args()
    if arguments.of_this_process:
        print(json.dumps(_measure(arguments.num_rounds)))
        return
    processors = sorted(os.sched_getaffinity(0))
    found = {}
    for chosen in ([processors[0]], processors):
        name = "1 processor" if len(chosen) == 1 else f"{len(chosen)} processors"
        found[name] = _in_child(arguments.num_rounds, chosen)
        for case, one in found[name].items():
            print(f"{name:14} {case:24} {one}", flush=True)
    record = {
        "versions": versions(),
        "num_rows": NUM_ROWS,
        "max_tokens": MAX_TOKENS,
        "seeds": f"{arguments.num_rounds} rounds: 1000 r + row",
        "throughput": found,
    }
    save("structured_throughput", "python -m benchmarks.structured.throughput", record)
    page.write_throughput(record)


def _in_child(num_rounds: int, processors: list[int]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.structured.throughput", "--of-this-process"]
    found = subprocess.run(
        ["taskset", "-c", ",".join(map(str, processors)), *command, "--num-rounds", str(num_rounds)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    results: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return results


def _measure(num_rounds: int) -> dict[str, dict[str, Any]]:
    prompts = prompts_of(NUM_ROWS)
    with LLM("demo", max_num_seqs=NUM_ROWS, wait_for_all_programs=True) as llm:
        return {name: dataclasses.asdict(_case(llm, prompts, of_row, num_rounds)) for name, of_row in CASES.items()}


def _case(llm: LLM, prompts: list[str], schema_of: Callable[[int], Any], num_rounds: int) -> Throughput:
    rounds = [_round(llm, prompts, schema_of, number) for number in range(num_rounds + 1)][1:]  # one to warm up
    as_long = [without.wall_us / bound.wall_us for bound, without, _ in rounds]
    as_asked = [asked.wall_us / bound.wall_us for bound, _, asked in rounds]
    cpu = [without.cpu_us / bound.cpu_us for bound, without, _ in rounds]
    return Throughput(
        _phases_us(llm, prompts, schema_of, num_rounds),
        *_spread(as_long),
        *_spread(as_asked),
        *_spread(cpu),
        with_us=round(statistics.median(bound.cpu_us for bound, _, _ in rounds), 1),
        without_us=round(statistics.median(without.cpu_us for _, without, _ in rounds), 1),
        num_tokens=statistics.median(bound.num_tokens for bound, _, _ in rounds),
        forced_share=round(statistics.mean(bound.forced_share for bound, _, _ in rounds), 3),
    )


def _phases_us(
    llm: LLM, prompts: list[str], schema_of: Callable[[int], Any], num_rounds: int
) -> dict[str, tuple[float, float]]:
    both: list[list[dict[str, float]]] = [[], []]
    for number in range(num_rounds):
        for found, schema in zip(both, (schema_of, None), strict=True):
            params = [params_of(number, row, schema, ignore_eos=schema is None) for row in range(len(prompts))]
            with phases() as seconds:
                outputs = llm.generate(prompts, params, use_tqdm=False)
            num_tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
            found.append({name: one_s / num_tokens * 1e6 for name, one_s in seconds.items()})
    bound, plain = ({name: statistics.median(one[name] for one in found) for name in found[0]} for found in both)
    return {name: (round(bound[name], 1), round(plain.get(name, 0.0), 1)) for name in bound}


def prompts_of(num_rows: int) -> list[str]:
    """A prompt a row, all different."""
    return [f"Once upon a time there was a {_WORDS[row % len(_WORDS)]} in house {row}" for row in range(num_rows)]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One batch: microseconds a token, of the clock and of the processor."""

    wall_us: float
    cpu_us: float
    num_tokens: int
    forced_share: float
    lens: list[int]


def _round(llm: LLM, prompts: list[str], schema_of: Callable[[int], Any], number: int) -> tuple[Run, Run, Run]:
    plain = [params_of(number, row) for row in range(len(prompts))]
    bound = run(llm, prompts, [params_of(number, row, schema_of) for row in range(len(prompts))])
    lens = zip(plain, bound.lens, strict=True)
    as_long = [dataclasses.replace(one, max_tokens=num_tokens, ignore_eos=True) for one, num_tokens in lens]
    return bound, run(llm, prompts, as_long), run(llm, prompts, plain)


def params_of(
    number: int, row: int, schema_of: Callable[[int], Any] | None = None, *, ignore_eos: bool = False
) -> SamplingParams:
    """How a row of a round is sampled."""
    return SamplingParams(
        temperature=0.8,
        seed=1000 * number + row,
        max_tokens=MAX_TOKENS,
        ignore_eos=ignore_eos,
        structured_outputs=None if schema_of is None else {"json": schema_of(row)},
    )


def run(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> Run:
    """Run a batch."""
    num_forced = llm.load().num_forced_tokens
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    cpu_s, wall_s = time.process_time() - begin_cpu_s, time.perf_counter() - begin_s
    lens = [len(one.outputs[0].token_ids) for one in outputs]
    num_tokens, num_forced = sum(lens), llm.load().num_forced_tokens - num_forced
    return Run(wall_s / num_tokens * 1e6, cpu_s / num_tokens * 1e6, num_tokens, num_forced / num_tokens, lens)


def _spread(ratios: list[float]) -> tuple[float, tuple[float, float]]:
    return round(statistics.median(ratios), 3), (round(min(ratios), 3), round(max(ratios), 3))


def _with_a_number(row: int) -> dict[str, Any]:
    name = f"id_{row}"
    properties = {name: {"type": "integer"}, **PERSON["properties"]}
    return {**PERSON, "properties": properties, "required": [name, *PERSON["required"]]}


def _flat(row: int) -> dict[str, Any]:
    names = [f"f{row}_{column}" for column in range(8)]
    properties = {name: {"type": "string" if column % 2 else "number"} for column, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "a person": lambda row: PERSON,
    "a person, a schema a row": _with_a_number,
    "8 values, a schema a row": _flat,
}


if __name__ == "__main__":
    main()
