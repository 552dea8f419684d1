"""The results as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

RPA_V3 = {"compute_per_mib": 418, "issue_per_block": 17}
"""The ragged paged attention of tpu-inference at b8692ff, as counted on v6e with pages of 128 and libtpu 0.0.50, for
8 key/value heads of 128 in bfloat16."""
RPA_V3_FLOPS = 1.55
"""Its FLOPs a cycle of prefill, in those of the first kernel of this project (43.5 thousand)."""

Numbers = Mapping[str, Any]


def decode_table(numbers: Sequence[Numbers], version: str) -> Table:
    """One row per case: cycles a MiB of keys and values, beside the memory's."""
    title = f"Decode, libtpu {version}: cycles; share of the bandwidth with 64 rows of 2048 tokens. RPA v3 (8x4x128, "
    title += f"bfloat16, pages of 128, v6e) computes {RPA_V3['compute_per_mib']} a MiB and issues in "
    shown = Table(title=title + f"{RPA_V3['issue_per_block']} a page")
    columns = {
        "compute/MiB": "compute_per_mib",
        "issue/block": "issue_per_block",
        "wait/chunk": "wait_per_chunk",
        "row": "per_row",
        "all/MiB": "cycles_per_mib",
        "memory/MiB": "memory_per_mib",
        "chunk KiB": "chunk_bytes",
        "fills": "num_fills",
        "spills": "num_spills",
    }
    shown.add_column("case", no_wrap=True)
    for name in (*columns, "share"):
        shown.add_column(name, justify="right")
    for one in numbers:
        if one["kind"] == "decode":
            values = [one[key] // 1024 if key == "chunk_bytes" else one[key] for key in columns.values()]
            shown.add_row(_short(one), *(f"{value:,.0f}" for value in values), f"{one['share']:.1%}")
    return shown


def prefill_table(numbers: Sequence[Numbers], version: str) -> Table:
    """One row per case: cycles for 256 queries of one head with 256 keys, and their share of the peak."""
    shown = Table(title=f"Prefill, libtpu {version}: chunks of 2048 tokens")
    columns = {"256x256 a head": "per_256x256_head", "FLOPs/cycle": "flops_per_cycle", "2k prompt": "prompt_cycles"}
    shown.add_column("case", no_wrap=True)
    for name in (*columns, "fills", "spills", "of the peak", "stalled"):
        shown.add_column(name, justify="right")
    for one in numbers:
        if one["kind"] == "prefill":
            values = [one[key] for key in (*columns.values(), "num_fills", "num_spills")]
            shares = f"{one['peak_share']:.1%}", f"{one['stalled_share']:.1%}"
            shown.add_row(_short(one), *(f"{value:,.0f}" for value in values), *shares)
    return shown


def page_tables(
    before: Mapping[str, Mapping[str, Numbers]], now: Mapping[str, Mapping[str, Numbers]], pinned: str
) -> str:
    """Both tables as docs/performance.md has them.

    Args:
        before: of the kernels that were replaced, by libtpu's version and by the case.
        now: alike.
        pinned: the version beside which the others stand.
    """
    others = sorted(version for version in now if version != pinned)
    sources = [before.get(pinned, {}), now[pinned], *(now[version] for version in others)]
    names = ["before", "now", *(f"now, {version}" for version in others)]
    return "\n\n".join(
        (
            _page_table("decode", {"cycles_per_mib": ",.0f", "num_spills": ",.0f", "share": ".0%"}, sources, names),
            "Prefill, chunks of 2048 tokens: cycles for 256 queries of a head with 256 keys, and the share of the "
            "matrix\nunits' peak.",
            _page_table(
                "prefill", {"per_256x256_head": ",.0f", "num_spills": ",.0f", "peak_share": ".1%"}, sources, names
            ),
        )
    )


_HEADINGS = {
    "cycles_per_mib": "cycles a MiB",
    "num_spills": "spills",
    "share": "of the bandwidth",
    "per_256x256_head": "cycles",
    "peak_share": "of the peak",
}


def _page_table(
    kind: str, columns: Mapping[str, str], sources: Sequence[Mapping[str, Numbers]], names: Sequence[str]
) -> str:
    has_memory = "cycles_per_mib" in columns
    heads = [
        "case",
        *(["memory's"] if has_memory else []),
        *(f"{_HEADINGS[key]}: {name}" for key in columns for name in names),
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in sorted(case for case, one in sources[1].items() if one["kind"] == kind):
        values = ((source.get(case), key, form) for key, form in columns.items() for source in sources)
        cells = ("-" if one is None else format(one[key], form) for one, key, form in values)
        memory = [format(sources[1][case]["memory_per_mib"], ",.0f")] if has_memory else []
        lines.append(f"| {' | '.join((_short(sources[1][case]), *memory, *cells))} |")
    return "\n".join(lines)


def _short(one: Numbers) -> str:
    return str(one["case"]).replace(f"/{one['kind']}/", " ")
