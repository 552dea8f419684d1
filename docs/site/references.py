"""Reference pages generated from the program: options, commands, metrics, protos."""

import argparse
import asyncio
import os
from collections.abc import Iterator
from dataclasses import Field
from typing import Any

from jpaged.cli.help import get_commands, help_about
from jpaged.cli.main import make_parser
from jpaged.cli.options import default_and_limits, to_flag
from jpaged.config import ENVIRONMENT, SECTIONS, iter_options, section_help
from jpaged.server_load import PER_POSITION, SpeculationLoad, get_metrics
from protos.generate import PROTOS
from protos.lint import compile_protos
from protos.reference import page_of, reference
from tests.deploy.metrics import scrape

_COLUMNS = "86"


def pages() -> dict[str, str]:
    """Return all reference pages: path in the site -> Markdown."""
    protos = reference(compile_protos(PROTOS))
    listed = "\n".join(f"- [{name}]({page_of(name)})" for name in protos)
    return {
        "reference/options.md": "\n".join(options()),
        "reference/commands.md": "\n".join(commands()),
        "reference/metrics.md": "\n".join(metrics(asyncio.run(scrape()))),
        "reference/protocol.md": f"{_PROTOCOL}\n{listed}\n",
        **{f"reference/{page_of(name)}": text for name, text in protos.items()},
    }


_PROTOCOL = """\
# gRPC

The protos are in `protos/`; comments document the meaning, unit, bounds and default of each field. Reflection
(`--enable-reflection`) and the standard health service are on. `jpaged.v1` is jpaged's own API and stays compatible;
the other packages are third-party protocols.
"""


def options() -> Iterator[str]:
    """Yield the page of every option of the configuration."""
    yield "# Options\n"
    yield (
        "Options of `jpaged serve` and of `LLM(...)`, which uses underscores instead of dashes. Other commands accept "
        "those that apply to them. `jpaged serve --help=GROUP` prints the same.\n"
    )
    for section in SECTIONS:
        yield f"## {section}\n\n{section_help(section)}\n"
        yield _table("option", "default, limits", "meaning")
        for _, mine, spec in iter_options():
            if mine == section:
                yield f"| `{to_flag(spec.name)}` | {_cell(default_and_limits(spec))} | {_cell(_help(spec))} |"
        yield ""
    yield f"## Environment\n\n{_table('variable', 'meaning')}"
    for name, text in ENVIRONMENT.items():
        yield f"| `{name}` | {_cell(text)} |"
    yield ""


def _table(*titles: str) -> str:
    return f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|"


def _help(spec: Field[Any]) -> str:
    choices = spec.metadata["choices"]
    text = str(spec.metadata["help"])
    return f"{text}; one of {', '.join(choices)}" if choices else text


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")


def commands() -> Iterator[str]:
    """Yield the page of every command: its description, and its flags except configuration options."""
    yield "# Commands\n"
    yield "Many commands also accept the [configuration options](options.md).\n"
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        for name, parser in get_commands(make_parser()).items():
            yield from _command(f"jpaged {name}", parser)
            for inner, nested in get_commands(parser).items():
                yield from _command(f"jpaged {name} {inner}", nested)
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if before is None else {"COLUMNS": before})


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {name}\n"
    titles = [str(group.title) for group in parser._action_groups if group._group_actions]
    parts = [parser.format_usage(), str(parser.description or "").strip()]
    parts += [help_about(parser, title) for title in titles if title not in SECTIONS]
    yield "```text\n" + "\n\n".join(part.strip() for part in parts if part.strip()) + "\n```\n"


def metrics(scraped: str) -> Iterator[str]:
    """Yield the page of every metric of a server, from a scrape."""
    yield "# Metrics\n"
    yield (
        "Prometheus metrics of a server, on `--metrics-port`. `vllm:*` metrics have the meaning of vLLM's metrics "
        "of that name; [the runbook](../runbook.md#what-to-watch) lists those to watch. Counters end in `_total`.\n"
    )
    yield _table("metric", "kind", "meaning")
    kinds, helps = _headers(scraped, "# TYPE "), _headers(scraped, "# HELP ")
    told = {name: (kinds[name], text) for name, text in helps.items() if not name.endswith("_created")}
    told |= {f"{one.name}_total": ("counter", one.help) for _, one in get_metrics("counter", SpeculationLoad)}
    told[f"{PER_POSITION.name}_total"] = ("counter", PER_POSITION.help)
    for name, (kind, text) in sorted(told.items()):
        yield f"| `{name}` | {kind} | {_cell(text)} |"
    yield ""


def _headers(scraped: str, prefix: str) -> dict[str, str]:
    lines = (line.removeprefix(prefix).partition(" ") for line in scraped.splitlines() if line.startswith(prefix))
    return {name: text for name, _, text in lines}
