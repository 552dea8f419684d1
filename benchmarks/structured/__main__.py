"""llguidance and xgrammar, timed and judged: `python -m benchmarks.structured`.

xgrammar takes part where it is installed, with torch: `pip install --no-deps xgrammar apache-tvm-ffi`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.record import save
from benchmarks.structured import page, suite, vocabularies
from benchmarks.structured.libraries import available, versions
from benchmarks.structured.timing import WORKLOADS, measure


def main() -> None:
    """Print a line a measurement, and keep them in results/structured.json and docs/structured.md."""
    parser = argparse.ArgumentParser(
        description="Grammar libraries: compiles, masks, and what of JSON Schema is right."
    )
    parser.add_argument("--suite", type=Path, required=True, help="the source package of jsonschema (.tar.gz)")
    parser.add_argument("--num-rounds", type=int, default=20, help="compiles and texts of each kind")
    arguments = parser.parse_args()
    small, large = vocabularies.small(), vocabularies.large()
    times = {tokens.name: _times(tokens, arguments.num_rounds) for tokens in (small, large)}
    found = {library.name: _judge(library(small), small, arguments.suite) for library in available()}
    record = {"versions": versions(), "suite_of": arguments.suite.name, "times": times, "suite": found}
    save("structured", f"python -m benchmarks.structured --suite {arguments.suite.name}", record)
    page.write(record)


def _times(tokens: vocabularies.Tokens, num_rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for workload in WORKLOADS:
        found[workload] = {}
        for library in available():
            one = measure(library(tokens), tokens, workload, num_rounds)
            found[workload][library.name] = dataclasses.asdict(one)
            print(f"{tokens.name:16} {workload:16} {library.name:12} {one}", flush=True)
    return found


def _judge(library: Any, tokens: vocabularies.Tokens, archive: Path) -> dict[str, Any]:
    counts: dict[str, dict[str, collections.Counter[str]]] = {}
    errors: collections.Counter[str] = collections.Counter()
    for group in suite.groups(archive):
        outcome = suite.outcome(library, tokens, group)
        count = counts.setdefault(group.draft, {}).setdefault(group.keyword, collections.Counter())
        count["groups"] += 1
        count["right"] += outcome.is_right
        count["refused"] += outcome.error is not None
        count["let_by"] += outcome.num_let_by > 0
        count["too_strict"] += outcome.num_refused > 0 and outcome.num_let_by == 0
        if outcome.error is not None:
            errors[outcome.error] += 1
    print(library.name, {draft: sum((c for c in k.values()), collections.Counter()) for draft, k in counts.items()})
    print(errors.most_common(12), flush=True)
    return {draft: {name: dict(one) for name, one in keywords.items()} for draft, keywords in counts.items()}


if __name__ == "__main__":
    main()
