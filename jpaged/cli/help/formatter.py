"""Layout of help: as wide as the terminal up to a readable width, with a usage of one line."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable

_MAX_WIDTH = 110
"""Longer lines are hard to read."""
_MAX_FLAG_COLUMNS = 30
_MAX_USAGE_FLAGS = 8
"""Maximum flags that the usage lists individually."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the width, keeps indented lines and tables, and shortens the usage."""

    def __init__(self, prog: str, indent_increment: int = 2, max_help_position: int = _MAX_FLAG_COLUMNS) -> None:
        width = max(40, min(_MAX_WIDTH, shutil.get_terminal_size().columns - 2))
        super().__init__(prog, indent_increment, min(max_help_position, width // 3), width)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """List all flags if there are few, otherwise only required ones."""
        listed = list(actions)
        needed = [action for action in listed if action.required or not action.option_strings]
        if usage is None and len(listed) - len(needed) > _MAX_USAGE_FLAGS:
            usage = " ".join(["%(prog)s", "[OPTION ...]", *(self._word(action) for action in needed)])
        super().add_usage(usage, listed, groups, prefix)

    def _word(self, action: argparse.Action) -> str:
        """Return an argument as the usage shows it."""
        shown = action.metavar or action.dest.upper()
        name = " ".join(shown) if isinstance(shown, tuple) else shown
        values = self._format_args(action, name).replace("%", "%%")
        return " ".join([*action.option_strings[-1:], values]).strip()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fill paragraphs that are neither indented nor tables; keep all others."""
        return "\n\n".join(
            paragraph
            if re.search(r"^\s|\S {2,}\S", paragraph, re.MULTILINE)
            else textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent)
            for paragraph in text.strip("\n").split("\n\n")
        )
