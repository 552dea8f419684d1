"""The record of a model as markdown: seconds, ratios, whether greedy tokens agree, what was not measured and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.peers.checkpoints import SHAPES, Shape
from benchmarks.peers.limits import Rates, least_s
from benchmarks.peers.peers import OURS, PEERS, SERVE, START
from benchmarks.peers.ratios import Timed, best, ratios
from benchmarks.peers.serving import REFERENCE, saturation, sustained
from benchmarks.peers.workloads import make

ABOUT = {
    "W1": "chats offline",
    "W2": "shared prefix",
    "W3": "6 samples each",
    "W4": "4 beams",
    "W5": "one stream",
    "T1": "half of the chats, shorter",
    START: "second start until requests are taken",
}
NOTHING = "-"


def markdown(records: Mapping[str, Mapping]) -> str:
    """Returns the page of all models, by name, as `__main__` saved them."""
    parts = [
        "# jpaged beside its peers",
        "Each peer on one and the same core, in turns; medians (least to most). Written by `make bench-peers`; the "
        "numbers are in the JSON files beside this page.",
        *(part for model, record in records.items() for part in _of_model(SHAPES[model], record)),
        "Peers: " + "; ".join(f"{name}: {peer.about}" for name, peer in PEERS.items()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _of_model(shape: Shape, record: Mapping) -> Iterator[str]:
    rows = {name: record["rows"][name] for name in ABOUT if name in record["rows"]}
    names = [name for name in PEERS if any(name in row["peers"] for row in rows.values())]
    others = [name for name in names if name != OURS]
    taken = {workload: timed(row) for workload, row in rows.items()}
    least = limits(shape, record, taken)
    yield f"## {shape.name}, {shape.dtype}"
    yield _table(
        ["seconds", *names, "at the core's rates"],
        [
            [_title(name, rows[name]), *(_seconds(taken[name].get(n)) for n in names), _number(least.get(name))]
            for name in rows
        ],
    )
    yield (
        "How many times as fast as each peer jpaged is, by the clock (by processor time), and would be if it did "
        "nothing but load and multiply at the core's rates, those of PyTorch:"
    )
    yield _table(
        ["ratio", *others, "against the best", "at the core's rates"],
        [
            [_title(name, {}), *_ratios(taken[name], others), *_against_best(taken[name], least.get(name))]
            for name in rows
        ],
    )
    yield from _notes(rows, taken)
    if SERVE in record["rows"]:
        yield from _of_servers(record["rows"][SERVE])


def _of_servers(row: Mapping) -> Iterator[str]:
    """Yields the servers under load, rate by rate."""
    yield "Servers, 128 requests of about 128 tokens and 128 more; each on one core, its client on the others:"
    points: Mapping[str, Sequence[Mapping]] = row.get("points", {})
    names = ("request_throughput", "output_throughput", "median_ttft_ms", "median_tpot_ms")
    yield _table(
        ["server", "requests a second", "answered", "tokens a second", "first token ms", "a token ms"],
        [[name, p["rate"], *(_number(p[key]) for key in names)] for name, every in points.items() for p in every],
    )
    if "missing" in row:
        yield f"Not measured, or not to the end: {row['missing']}"
        return
    rate = saturation(points[REFERENCE])
    limit_ms = next(p["median_tpot_ms"] for p in points[REFERENCE] if p["rate"] == f"{rate:.3f}")
    times, at_once = sustained(points[OURS], limit_ms) / rate, saturation(points[OURS]) / rate
    yield (
        f"vLLM's server saturates at {_number(rate)} requests a second, where half of them take {_number(limit_ms)} ms "
        f"a token; jpaged's keeps to that up to {times:.2f} times the rate, and answers {at_once:.2f} times as many "
        "when all come at once."
    )
    yield f"- {SERVE}: {_moment(row)}"


def timed(row: Mapping) -> dict[str, Timed]:
    """Returns what each peer of a row took; those without a run are left out."""
    entries = {name: entry for name, entry in row["peers"].items() if entry.get("wall_s")}
    return {name: Timed(entry["wall_s"], entry.get("processor_s", ())) for name, entry in entries.items()}


def limits(shape: Shape, record: Mapping, taken: Mapping[str, Mapping[str, Timed]]) -> dict[str, float]:
    """Returns the least seconds by workload at the core's rates; nothing where the core's rates were not measured.

    Memory is read as quickly as PyTorch reads it, or as any peer's one stream reads the weights if that is quicker.
    """
    if not (measured := record.get("rates")):
        return {}
    reads = [measured["read_bytes_s"]]
    for one in taken.get("W5", {}).values():
        num_steps = make(shape.name, "W5")[0].max_tokens
        reads.append(num_steps * shape.num_parameters_read * shape.bytes_per_value / one.own_s)
    rates = Rates(max(reads), measured["flops"][shape.dtype])
    return {name: least_s(shape, make(shape.name, name), rates) for name in taken if name != START}


def _title(workload: str, row: Mapping) -> str:
    tokens = f", {row['num_output_tokens']} tokens" if "num_output_tokens" in row else ""
    return f"{workload}: {ABOUT[workload]}{tokens}" if workload != START else ABOUT[START]


def _seconds(timed: Timed | None) -> str:
    if timed is None:
        return NOTHING
    spread = timed.wall
    mark = "*" if timed.is_disturbed else ""
    return f"{_number(spread.median)}{mark} ({_number(spread.least)} to {_number(spread.most)})"


def _ratios(taken: Mapping[str, Timed], others: Sequence[str]) -> list[str]:
    clock, processor = ratios(taken), ratios(taken, of_processor=True)
    return [_ratio(clock.get(name), processor.get(name)) for name in others]


def _ratio(clock: float | None, processor: float | None) -> str:
    if clock is None:
        return NOTHING
    return f"{clock:.2f}" if processor is None else f"{clock:.2f} ({processor:.2f})"


def _against_best(taken: Mapping[str, Timed], least: float | None) -> list[str]:
    name = best(taken)
    if name is None or OURS not in taken:
        return [NOTHING, NOTHING]
    most = NOTHING if least is None else f"{taken[name].own_s / least:.2f}"
    return [f"{ratios(taken)[name]:.2f} ({name})", most]


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _notes(rows: Mapping[str, Mapping], taken: Mapping[str, Mapping[str, Timed]]) -> Iterator[str]:
    same = []
    for workload, row in rows.items():
        for name, entry in row["peers"].items():
            if agreed := entry.get("agreement"):
                same.append([workload, name, f"{agreed['num_equal']} of {agreed['num_sequences']}", _share(agreed)])
    if same:
        yield "Greedy tokens beside jpaged's: sequences that are the same, and tokens before the first that differs."
        yield _table(["workload", "peer", "same sequences", "tokens"], same)
    if any(one.is_disturbed for cells in taken.values() for one in cells.values()):
        yield "\\* the core was not the peer's alone: the ratio by processor time says more."
    lines = [
        f"- {name}, {workload}: {entry['missing']}"
        for workload, row in rows.items()
        for name, entry in row["peers"].items()
        if "missing" in entry
    ]
    if lines:
        yield "Not measured, or not as often as asked for:"
        yield "\n".join(dict.fromkeys(lines))
    yield "\n".join(_versions(rows))


def _share(agreed: Mapping[str, int]) -> str:
    return f"{agreed['num_before']} of {agreed['num_tokens']}"


def _versions(rows: Mapping[str, Mapping]) -> Iterator[str]:
    """Yields when, of which commit, on which machine, with which versions."""
    for workload, row in rows.items():
        yield f"- {workload}: {_moment(row)}"
    about = {
        key: value for row in rows.values() for entry in row["peers"].values() for key, value in entry["about"].items()
    }
    yield "- versions: " + ", ".join(f"{key} {value}" for key, value in about.items())


def _moment(row: Mapping) -> str:
    machine = row["machine"]
    return (
        f"{row['date']}, commit {row['commit']}, {machine['processor']}, {machine['num_cpus']} cores, "
        f"load {machine['load_average']}"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
