"""One stream of the demo with its draft model, beside plain decoding.

    taskset -c 0 python -m benchmarks.speculation.draft [--save]

Both engines are in one process, on one core. Each prompt is continued by one and then by the other, with the same seed;
the tokens have to be the same. A ratio is of the two times of one text.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles

from benchmarks.record import save
from jpaged import LLM, SamplingParams
from jpaged.errors import InternalError

PROMPTS = (
    "Once upon a time",
    "One day, a boy named Tom",
    "There was a little dog who",
    "Lily wanted to go to the park",
    "In a small village by the sea",
    "The old bear was hungry",
)
TEMPERATURES = (0.0, 0.8, 1.0)
NUMS_ROWS = (1, 2, 4, 8, 32)
_MAX_TOKENS = 400
_NUM_WARM = 8


@dataclass(frozen=True, slots=True)
class Row:
    """What came of some rows at a temperature.

    Attributes:
        tokens_per_s: of plain decoding.
        speedups: the quartiles of the times of plain decoding over those with a draft.
        accepted: proposals of a round that were drawn, on average.
    """

    temperature: float
    num_rows: int
    num_texts: int
    tokens_per_s: float
    speedups: tuple[float, float, float]
    accepted: float


def generate(llm: LLM, prompts: Sequence[str], temperature: float, seed: int) -> tuple[float, list[Sequence[int]]]:
    """Seconds, and the tokens of each."""
    params = [
        SamplingParams(max_tokens=_MAX_TOKENS, temperature=temperature, seed=seed + row) for row in range(len(prompts))
    ]
    begin = time.perf_counter()
    outputs = llm.generate(list(prompts), params)
    return time.perf_counter() - begin, [output.outputs[0].token_ids for output in outputs]


def compare(plain: LLM, drafted: LLM, temperature: float, num_rows: int, num_texts: int) -> Row:
    """Runs both in turn.

    Raises:
        InternalError: their tokens differ.
    """
    for llm in (plain, drafted):
        for seed in range(_NUM_WARM):
            generate(llm, [PROMPTS[seed % len(PROMPTS)]] * num_rows, temperature, seed)
    before = drafted.load().speculation
    rates, speedups = [], []
    for number in range(num_texts):
        prompts = [PROMPTS[(number + row) % len(PROMPTS)] for row in range(num_rows)]
        seconds, want = generate(plain, prompts, temperature, 100 * number)
        with_draft, got = generate(drafted, prompts, temperature, 100 * number)
        if got != want:
            raise InternalError(f"text {number} of {num_rows} rows at {temperature} has other tokens with a draft")
        rates.append(sum(map(len, want)) / seconds)
        speedups.append(seconds / with_draft)
    after = drafted.load().speculation
    num_drafts = after.num_drafts - before.num_drafts
    accepted = (after.num_accepted_tokens - before.num_accepted_tokens) / max(1, num_drafts)
    low, middle, high = quantiles(speedups, n=4)
    return Row(temperature, num_rows, num_texts, median(rates), (low, middle, high), accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description="the demo with its draft model, beside plain decoding")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, help="proposals of a round")
    parser.add_argument("--num-texts", type=int, default=24, help="of each row of the table")
    parser.add_argument("--save", action="store_true", help="write results/speculation_draft.json")
    arguments = parser.parse_args()
    config = {
        "method": "draft_model",
        "model": "demo-draft",
        "num_speculative_tokens": arguments.num_speculative_tokens,
    }
    rows = []
    print(f"{'temperature':>12}{'rows':>6}{'tokens/s':>10}{'speedup':>9}   (quartiles)   accepted of a round")
    with LLM("demo", wait_for_all_programs=True) as plain, LLM("demo", speculative_config=config) as drafted:
        cases = [(temperature, 1) for temperature in TEMPERATURES] + [(0.8, num) for num in NUMS_ROWS[1:]]
        for temperature, num_rows in cases:
            row = compare(plain, drafted, temperature, num_rows, arguments.num_texts)
            rows.append(row)
            low, middle, high = row.speedups
            print(
                f"{temperature:12}{num_rows:6}{row.tokens_per_s:10.0f}{middle:9.2f}   ({low:.2f} .. {high:.2f})"
                f"{row.accepted:10.2f}",
                flush=True,
            )
    if arguments.save:
        command = f"python -m benchmarks.speculation.draft --num-speculative-tokens {arguments.num_speculative_tokens}"
        save("speculation_draft", command, {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
