"""Compares policies of eviction on traces, in simulated time, with hindsight and a bound.

python -m benchmarks.eviction [--seconds 600] [--seeds 3] [--blocks 2000 4000 8000] [--save]
python -m benchmarks.eviction chat mixed --policies lru worth     some of it
python -m benchmarks.eviction --host-blocks 4000                  with a host tier below the pool, ordered alike
python -m benchmarks.eviction --kept-only [--save]                what has ended so far of a run that was interrupted
python -m benchmarks.eviction --figures-only                      tables and picture again, from what was saved

Runs that have ended are kept in --kept and not run again; --afresh forgets them. Seconds are those before time is made
six times as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.eviction import decisions
from benchmarks.eviction.device import measured_costs
from benchmarks.eviction.hindsight import bound
from benchmarks.eviction.rows import BOUND, Row, decision_table, gains, seconds_table, table
from benchmarks.eviction.serving import DEVICE, HINDSIGHT, MODEL, costs_of_device, serve
from benchmarks.eviction.traces import BLOCK_SIZE, TRACES, Coming, make_trace
from benchmarks.record import RESULTS, put_on_page, save
from jpaged import json_text

POLICIES = ("lru", "lfu", "2q", "worth", HINDSIGHT, BOUND)
POOLS_OF_DECISIONS = (1_000, 10_000, 100_000)


def main() -> None:
    """Runs what was asked for, and prints and saves it."""
    arguments = _arguments()
    if arguments.figures_only:
        _show(json.loads((RESULTS / "eviction.json").read_text()))
        return
    kept = Path(arguments.kept)
    if arguments.afresh:
        kept.unlink(missing_ok=True)
    rows = list(_all_rows(arguments, kept))
    timed = [asdict(decisions.measure(policy, n)) for policy in POLICIES[:4] for n in POOLS_OF_DECISIONS]
    here = {"model": arguments.rates, **asdict(measured_costs(arguments.rates))}
    record = {"rows": rows, "decisions": timed, "measured_costs": here}
    print(table(rows), seconds_table(rows, here), decision_table(timed), sep="\n\n")
    for row in gains(rows, "worth"):
        print(f"{row['trace']:<8} {row['num_blocks']:>6}  worth - lru {row['points']:+.1f} points, {row['least']:+.1f}")
    if arguments.save:
        about = {"model": MODEL, "device": DEVICE, "block_size": BLOCK_SIZE, "seconds": arguments.seconds}
        command = f"python -m benchmarks.eviction --seeds {arguments.seeds} --save"
        save("eviction", command, {**about, **record})
        _show(record)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description="Compare policies of eviction.")
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"of {', '.join(TRACES)} (default: all)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=600.0, help="of each trace (default: 600)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2000, 4000, 8000], help="of the pool")
    parser.add_argument("--host-blocks", type=int, default=0, help="of host memory (default: 0)")
    parser.add_argument("--kept", default="build/eviction.jsonl", help="runs that have ended (default: %(default)s)")
    parser.add_argument("--kept-only", action="store_true", help="run nothing: take what has ended")
    parser.add_argument("--rates", default="demo", help="a model whose blocks are timed here (default: demo)")
    parser.add_argument("--afresh", action="store_true", help="run everything again")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/eviction.json and the page")
    parser.add_argument("--figures-only", action="store_true", help="from benchmarks/results/eviction.json")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.traces if name not in TRACES]:
        parser.error(f"no such trace: {', '.join(unknown)}; there are {', '.join(TRACES)}")
    if arguments.seeds < 1 or arguments.seconds <= 0 or min(arguments.blocks) < 512 or arguments.host_blocks < 0:
        parser.error("--seeds of at least 1, --seconds above 0, --blocks of at least 512, --host-blocks of at least 0")
    return arguments


def _all_rows(arguments: argparse.Namespace, kept: Path) -> Iterator[Row]:
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = {_key(row): row for row in _kept_rows(kept)}
    for trace in arguments.traces or TRACES:
        for seed in range(arguments.seeds):
            requests: list[Coming] = []
            for num_blocks in arguments.blocks:
                for policy in arguments.policies:
                    about = {"trace": trace, "seed": seed, "num_blocks": num_blocks, "policy": policy}
                    about |= {"seconds": arguments.seconds, "num_host_blocks": arguments.host_blocks}
                    row = done.get(_key(about))
                    if row is None and arguments.kept_only:
                        continue
                    if row is None:
                        requests = requests or make_trace(trace, arguments.seconds, seed)
                        row = about | _measure(requests, policy, num_blocks, arguments.host_blocks)
                        with kept.open("a") as file:
                            file.write(json_text.dumps(row) + "\n")
                        print(json_text.dumps(row), flush=True)
                    yield row


def _kept_rows(kept: Path) -> list[Row]:
    """The rows of a file; what a run that was ended was writing is cut off, for the next line would go on with it."""
    if not kept.exists():
        return []
    content = kept.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(kept, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("trace", "seed", "num_blocks", "policy", "seconds", "num_host_blocks"))


def _measure(trace: list[Coming], policy: str, num_blocks: int, num_host_blocks: int) -> Row:
    begin = time.perf_counter()
    if policy == BOUND:
        costs = costs_of_device()
        num_places = num_blocks + num_host_blocks
        prefill_s = sum(costs.recompute_s(i) for request in trace for i in range(request.num_matchable_blocks))
        num_tokens = sum(len(request.prompt_token_ids) for request in trace)
        saved_s = bound(trace, num_places, costs.recompute_s)
        hits = BLOCK_SIZE * bound(trace, num_places, lambda index: 1.0)
        return {"saved_s": saved_s, "saved_share": saved_s / prefill_s, "hit_rate": hits / num_tokens}
    served = serve(trace, policy, num_blocks, num_host_blocks)
    return asdict(served) | {
        "saved_share": served.saved_s / served.prefill_s,
        "hit_rate": served.num_hit_tokens / served.num_prompt_tokens,
        "run_s": time.perf_counter() - begin,
    }


def _show(record: Row) -> None:
    """Puts the tables on the page, and draws the picture."""
    from benchmarks.eviction.plots import draw  # matplotlib takes a second to import

    draw(record["rows"], RESULTS / "eviction.png")
    texts = {
        "eviction": table(record["rows"]),
        "eviction seconds": seconds_table(record["rows"], record["measured_costs"]),
        "eviction decisions": decision_table(record["decisions"]),
    }
    put_on_page(texts)


if __name__ == "__main__":
    main()
