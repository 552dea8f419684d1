"""docs/structured.md: which library, why, and what passes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "structured.md"


def write(record: Mapping[str, Any]) -> None:
    """Write what was measured between the page's marks."""
    _put({"suite": _suite(record), "times": _times(record), "keywords": _keywords(record)})


def write_throughput(record: Mapping[str, Any]) -> None:
    """Write how fast batches with schemas are, in the same way."""
    lines = [
        "| on | schemas | tokens/s over rows as long without (range) | over the batch as the model likes (range) "
        "| processor time, as long | us a token with, without |",
        "|---|---|---|---|---|---|",
    ]
    for processors, cases in record["throughput"].items():
        for case, one in cases.items():
            ratios = " | ".join(
                f"{one[name]:.2f} ({one[f'{name}_range'][0]:.2f} to {one[f'{name}_range'][1]:.2f})"
                for name in ("as_long", "as_asked", "cpu")
            )
            lines.append(f"| {processors} | {case} | {ratios} | {one['with_us']:.0f}, {one['without_us']:.0f} |")
    processors, cases = next(iter(record["throughput"].items()))
    case, one = next(iter(cases.items()))
    lines += ["", f"| us a token ({processors}, {case}) | with | without |", "|---|---|---|"]
    lines += [f"| {phase} | {bound:.1f} | {plain:.1f} |" for phase, (bound, plain) in one["phases_us"].items()]
    _put({"throughput": lines})


def _put(texts: Mapping[str, list[str]]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in texts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        text = "\n".join(lines)
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(page, encoding="utf-8")


def _suite(record: Mapping[str, Any]) -> list[str]:
    lines = [
        "| library | draft | groups | right | refused | lets an invalid instance by | refuses a valid one |",
        "|---|---|---|---|---|---|---|",
    ]
    for library, drafts in record["suite"].items():
        for draft, keywords in drafts.items():
            total = {key: sum(one[key] for one in keywords.values()) for key in next(iter(keywords.values()))}
            lines.append(
                f"| {library} | {draft} | {total['groups']} | {total['right']} | {total['refused']} "
                f"| {total['let_by']} | {total['too_strict']} |"
            )
    return lines


def _times(record: Mapping[str, Any]) -> list[str]:
    lines = [
        "| tokens | grammar | library | compile ms | mask us, first text (p99) | later texts (p99) | accept us |",
        "|---|---|---|---|---|---|---|",
    ]
    for vocabulary, workloads in record["times"].items():
        for workload, libraries in workloads.items():
            for library, one in libraries.items():
                lines.append(
                    f"| {vocabulary} | {workload} | {library} | {one['compile_ms']:.2f} "
                    f"| {one['first_us']:.0f} ({one['first_p99_us']:.0f}) "
                    f"| {one['again_us']:.0f} ({one['again_p99_us']:.0f}) | {one['accept_us']:.1f} |"
                )
    return lines


def _keywords(record: Mapping[str, Any]) -> list[str]:
    drafts = record["suite"]["llguidance"]
    names = sorted({name for keywords in drafts.values() for name in keywords})
    lines = [f"| keyword | {' | '.join(drafts)} |", f"|---|{'---|' * len(drafts)}"]
    for name in names:
        cells = [_cell(keywords.get(name)) for keywords in drafts.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(one: Mapping[str, int] | None) -> str:
    if one is None:
        return ""
    rest = [f"{one[key]} {word}" for key, word in _WORDS.items() if one[key]]
    return f"{one['right']} of {one['groups']}" + (f": {', '.join(rest)}" if rest else "")


_WORDS = {"refused": "refused", "let_by": "too lax", "too_strict": "too strict"}
