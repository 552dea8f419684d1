"""The table of proposals that are accepted, and of what proposing takes.

python -m benchmarks.speculation [--limit 12] [--save]

greedy stories      20 prompts of the demo model, nothing before them
the same again      the same prompts, after the first were served
other samples       the same prompts with a temperature of 0.8, after the greedy ones
code edits          files as prompts, and the same files with names changed as outputs
novel, 64 rows      streams of phrases that come in any order, of which earlier requests had the same: what 64 rows
                    cost in a step in which little is accepted
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.record import save
from benchmarks.speculation.replay import Replayed, replay
from benchmarks.speculation.streams import Stream, code_edits, stories
from jpaged.config import SpeculativeOptions
from jpaged.engine.speculative.drafter import make_proposer
from jpaged.engine.speculative.ngram import Proposer

_METHODS: dict[str, dict[str, object]] = {
    "ngram 2-4": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "ngram 5": {"method": "ngram", "num_speculative_tokens": 8},
    "suffix": {"method": "suffix"},
}
_VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    method: str
    streams: str
    result: Replayed


def phrases(num_streams: int, num_tokens: int, rng: random.Random) -> list[Stream]:
    """Streams of 400 phrases of 3 to 11 tokens, drawn at random."""
    known = random.Random(0)
    choices = [[known.randrange(_VOCABULARY) for _ in range(known.randrange(3, 12))] for _ in range(400)]

    def stream() -> list[int]:
        token_ids: list[int] = []
        while len(token_ids) < num_tokens:
            token_ids += rng.choice(choices)
        return token_ids[:num_tokens]

    return [Stream(stream(), stream()) for _ in range(num_streams)]


def rows_of(name: str, make: Callable[[], Proposer], limit: int, given: dict[str, list[Stream]]) -> list[Row]:
    proposer = make()
    found = [Row(name, "greedy stories", replay(proposer, given["greedy"], limit))]
    found.append(Row(name, "the same again", replay(proposer, given["greedy"], limit)))
    found.append(Row(name, "other samples", replay(proposer, given["sampled"], limit)))
    found.append(Row(name, "code edits", replay(make(), given["code"], limit)))
    proposer = make()
    replay(proposer, given["earlier"], limit)
    found.append(Row(name, "novel, 64 rows", replay(proposer, given["novel"], limit)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="how many proposed tokens are accepted")
    parser.add_argument("--limit", type=int, default=12, help="proposals of a row in a step at most")
    parser.add_argument("--save", action="store_true", help="write results/speculation.json")
    arguments = parser.parse_args()
    given = {
        "greedy": stories(),
        "sampled": stories(0.8),
        "code": code_edits(),
        "earlier": phrases(200, 200, random.Random(1)),
        "novel": phrases(64, 200, random.Random(2)),
    }
    print(f"{'':12}{'':18}{'tokens a step':>14}{'accepted':>10}{'proposed':>10}{'host us':>9}   of a row")
    rows = []
    for name, values in _METHODS.items():
        options = SpeculativeOptions.of(values)
        for row in rows_of(name, lambda options=options: make_proposer(options), arguments.limit, given):  # type: ignore[misc]
            rows.append(row)
            one = row.result
            numbers = f"{one.tokens_per_step:14.2f}{one.accepted:10.2f}{one.proposed_per_step:10.2f}{one.host_us:9.1f}"
            print(f"{row.method:12}{row.streams:18}{numbers}")
    if arguments.save:
        save(
            "speculation",
            f"python -m benchmarks.speculation --limit {arguments.limit}",
            {"rows": [asdict(row) for row in rows]},
        )


if __name__ == "__main__":
    main()
