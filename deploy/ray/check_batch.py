"""Runs batch.py here with two workers, kills one in the middle, and holds every line to what `LLM` generates.

`make ray` runs it, and a long test. A line here for each thing that was seen, and exit code 0 when all of them were.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jpaged import LLM, SamplingParams
from jpaged.client.results import failure_in
from jpaged.openai.lines import compute_seed

ENGINE = {"model": "demo", "max_num_seqs": 4, "num_blocks": 256, "max_num_batched_tokens": 64}
NUM_PROMPTS = 60
BLOCK_LINES = 4
NUM_BLOCKS = 17
PATIENCE_S = 60.0
COMMAND = [sys.executable, str(Path(__file__).with_name("batch.py"))]
OPTIONS = ["--num-workers=2", "--num-cpus=0.5", f"--block-lines={BLOCK_LINES}", f"--engine={json.dumps(ENGINE)}"]
REPORT = re.compile(r"block (\d+): \d+ lines by process (\d+)")
EVALUATIONS = [
    {"custom_id": "vector", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Once upon a time"}},
    {
        "custom_id": "likely",
        "method": "POST",
        "url": "/v1/score",
        "body": {"prompt": "Once upon a", "continuations": [" time", " pan"]},
    },
]
NOT_A_REQUEST = "nonsense"
EXPECTED_ERRORS = {None: "INVALID_ARGUMENT"}
TOLERANCE = 1e-4
"""Of numbers that a batch computes beside others."""


def main() -> int:
    """Runs every part; the first that fails ends it with a traceback."""
    began_s = time.monotonic()
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        expected = other.submit(generate_alone).result()
    with tempfile.TemporaryDirectory(prefix="jpaged-ray-") as name:
        source, output = Path(name) / "data", Path(name) / "results"
        write_data_set(source)
        check_lost_worker(source, output, expected)
        check_second_run(source, output, expected)
    say(f"{time.monotonic() - began_s:.0f} s in all")
    return 0


def requests() -> list[dict[str, Any]]:
    """Every second one is greedy, the others have no seed."""
    bodies = [
        {
            "prompt": f"Once upon a time there was a {('fox', 'bear', 'dragon', 'cat')[number % 4]}, number {number},",
            "max_tokens": 20 + number % 5,
            "temperature": 0.8 * (number % 2),
            "ignore_eos": True,
        }
        for number in range(NUM_PROMPTS)
    ]
    return [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]


def write_data_set(folder: Path) -> None:
    """The requests in three files: lines, Parquet with bodies as text, and Parquet with structs; 17 blocks in all."""
    folder.mkdir()
    lines = requests()
    texts = [*map(json.dumps, [*lines[:20], *EVALUATIONS]), NOT_A_REQUEST]
    (folder / "a.jsonl").write_text("".join(f"{text}\n" for text in texts))
    rows = [{**line, "body": json.dumps(line["body"])} for line in lines[20:40]]
    pq.write_table(pa.Table.from_pylist(rows), folder / "b.parquet", row_group_size=10)
    pq.write_table(pa.Table.from_pylist(lines[40:]), folder / "c.parquet")


def generate_alone() -> dict[str, list[Any]]:
    """What one engine makes in one process, by custom_id and as `told` tells of a line, in the order of the input."""
    lines = requests()
    params = [
        SamplingParams(
            max_tokens=line["body"]["max_tokens"],
            temperature=line["body"]["temperature"],
            seed=compute_seed(line["custom_id"]),
            ignore_eos=True,
        )
        for line in lines
    ]
    vector, likely = (line["body"] for line in EVALUATIONS)
    with LLM(**ENGINE) as llm:
        outputs = llm.generate([line["body"]["prompt"] for line in lines], params)
        (embedding,) = llm.embed(vector["input"])
        (scores,) = llm.score_continuations(likely["prompt"], likely["continuations"])
    say(f"LLM generated {len(outputs)} answers to compare with")
    found: dict[str, list[Any]] = {
        line["custom_id"]: [output.outputs[0].text, len(output.outputs[0].token_ids)]
        for line, output in zip(lines, outputs, strict=True)
    }
    evaluated = {"vector": list(embedding.values), "likely": [score.logprob for score in scores]}
    return dict([*list(found.items())[:20], *evaluated.items(), *list(found.items())[20:]])


def told(line: dict[str, Any]) -> list[Any]:
    """What is compared of a line of output: text and number of tokens, the vector, or the log-probabilities."""
    body = line["response"]["body"]
    if line["custom_id"] == "vector":
        return list(body["data"][0]["embedding"])
    if line["custom_id"] == "likely":
        return [entry["logprob"] for entry in body["data"]]
    return [body["choices"][0]["text"], body["usage"]["completion_tokens"]]


def is_same(found: list[Any], expected: list[Any]) -> bool:
    """Whether two are the same; numbers may differ by a rounding."""
    if len(found) != len(expected):
        return False
    pairs = zip(found, expected, strict=True)
    return all(abs(a - b) <= TOLERANCE if isinstance(a, float) else a == b for a, b in pairs)


def check_lost_worker(source: Path, output: Path, expected: dict[str, list[Any]]) -> None:
    """The first worker that ends a block is killed at once, while it holds others."""
    killed, blocks, processes = 0, [], set()
    with started(source, output) as run:
        for text in run.stdout:
            if (report := REPORT.match(text)) is None:
                continue
            blocks.append(int(report[1]))
            processes.add(int(report[2]))
            if not killed:
                killed = int(report[2])
                os.kill(killed, signal.SIGKILL)
    require(run.returncode == 1, f"exit code 1 tells of lines that failed, not {run.returncode}")
    require(sorted(blocks) == list(range(NUM_BLOCKS)), f"every block is told once: {blocks}")
    require(len(processes - {killed}) > 0, "others did what the lost worker had")
    check_results(output, expected)
    say(f"worker {killed} was killed after its first block; {NUM_BLOCKS} blocks by processes {sorted(processes)}")


def check_second_run(source: Path, output: Path, expected: dict[str, list[Any]]) -> None:
    """Blocks whose parts are gone or were never whole run again; the others stay as they are."""
    parts = sorted(output.glob("part-*"))
    gone = (parts[1], parts[5])
    (output / f".{gone[0].name}.torn").write_bytes(gone[0].read_bytes()[:100])
    for part in gone:
        part.unlink()
    before = {part: (part.read_bytes(), part.stat().st_mtime_ns) for part in parts if part not in gone}
    with started(source, output) as run:
        blocks = [int(report[1]) for text in run.stdout if (report := REPORT.match(text))]
    require(sorted(blocks) == [1, 5], f"only what was missing ran: {blocks}")
    after = {part: (part.read_bytes(), part.stat().st_mtime_ns) for part in before}
    require(after == before, "parts that were there stay")
    check_results(output, expected)
    say("a second run did the two blocks that were missing")


def check_results(output: Path, expected: dict[str, list[Any]]) -> None:
    """One result a line, in the order of the input, each as one process alone made it."""
    texts = [text for part in sorted(output.glob("part-*")) for text in part.read_text().split("\n")[:-1]]
    lines = [json.loads(text) for text in texts]
    errors = {line["custom_id"]: code for line in lines if (code := failure_in(line)) is not None}
    require(errors == EXPECTED_ERRORS, f"the errors are those expected: {errors}")
    answers = [line for line in lines if failure_in(line) is None]
    require(len(lines) == len(answers) + len(errors), "one result a line")
    require([line["custom_id"] for line in answers] == list(expected), "every line, once and in order")
    for line in answers:
        found, wanted = told(line), expected[line["custom_id"]]
        require(is_same(found, wanted), f"{line['custom_id']}: {found}, not {wanted}")


@contextmanager
def started(source: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """batch.py in a process of its own, whose output is read as it comes; it ends before the context does."""
    command = [*COMMAND, str(source), str(output), *OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            yield run
            run.wait(PATIENCE_S)
        except BaseException:
            run.terminate()
            raise


def require(condition: bool, what: str) -> None:
    """Fails with what was expected."""
    if not condition:
        raise AssertionError(what)


def say(what: str) -> None:
    """One line, at once."""
    print(f"ray batch: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
