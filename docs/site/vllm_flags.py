"""The tables of flags and variables in docs/from_vllm.md: `python -m docs.site.vllm_flags` writes them."""

from collections.abc import Iterator

from docs.site.links import ROOT
from jpaged.cli.vllm_flags import VllmFlag, read_flags, read_variables

PAGE = ROOT / "docs" / "from_vllm.md"
BEGIN, END = "<!-- flags: python -m docs.site.vllm_flags -->\n", "<!-- end of flags -->\n"
BEGIN_VARIABLES, END_VARIABLES = "<!-- variables: python -m docs.site.vllm_flags -->\n", "<!-- end of variables -->\n"


def tables() -> str:
    """Return the tables of every flag, one per outcome, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    flags = {outcome: [flag for flag in read_flags() if flag.outcome == outcome] for outcome in _TITLES}
    for outcome, (title, text) in _TITLES.items():
        yield f"\n### {title}\n\n{text}\n"
        if outcome == "same":
            yield "| flags | difference |\n|---|---|"
            yield f"| {', '.join(_names(flag) for flag in flags[outcome] if not flag.reason)} | none |"
            yield from (f"| {_names(flag)} | {_cell(flag.reason)} |" for flag in flags[outcome] if flag.reason)
        elif outcome == "alias":
            yield "| vLLM | here | note |\n|---|---|---|"
            yield from (f"| {_names(flag)} | {_option(flag)} | {_cell(flag.reason)} |" for flag in flags[outcome])
        else:
            yield "| flags | reason | see |\n|---|---|---|"
            groups: dict[tuple[str, str], list[VllmFlag]] = {}
            for flag in flags[outcome]:
                groups.setdefault((flag.reason, flag.option), []).append(flag)
            for (reason, option), rows in groups.items():
                names = ", ".join(_names(flag) + _accepted(flag) for flag in rows)
                yield f"| {names} | {_cell(reason)} | {f'`{option}`' if option else ''} |"


_EFFECTS = {"alias": "sets the option", "unnecessary": "no effect", "unsupported": "not read"}


def variables() -> str:
    """Return the table of every environment variable as Markdown, those that set options first."""
    rows = sorted(read_variables(), key=lambda row: [*_EFFECTS].index(row.outcome))
    lines = ["| variables | here | reason | see |", "|---|---|---|---|"]
    for row in rows:
        names, option = ", ".join(f"`{name}`" for name in row.names), f"`{row.option}`" if row.option else ""
        lines.append(f"| {names} | {_EFFECTS[row.outcome]} | {_cell(row.reason)} | {option} |")
    return "\n".join(lines) + "\n"


_TITLES = {
    "alias": ("Other names", "These flags work, and the log names the option."),
    "same": ("Same names", "These options have vLLM's name and meaning, with the differences in the table."),
    "unnecessary": (
        "No effect",
        "These flags are accepted: results do not depend on them. The log names each.",
    ),
    "unsupported": (
        "Not supported",
        "These flags are errors, unless they turn a feature off or have a value in parentheses.",
    ),
}


def _names(flag: VllmFlag) -> str:
    return ", ".join(f"`{name}`" for name in flag.names)


def _option(flag: VllmFlag) -> str:
    return f"`{flag.option.replace('!--', '--no-')}`"


def _accepted(flag: VllmFlag) -> str:
    return f" ({', '.join(f'`{value}`' for value in flag.values)})" if flag.values else ""


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def page() -> str:
    """Return docs/from_vllm.md with current tables."""
    text = PAGE.read_text(encoding="utf-8")
    for begin, content, end in ((BEGIN, tables(), END), (BEGIN_VARIABLES, "\n" + variables(), END_VARIABLES)):
        text = text.partition(begin)[0] + begin + content + "\n" + end + text.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
