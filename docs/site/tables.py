"""Tables of the site's pages on phones, where many columns do not fit next to each other.

style.css shows each row of a marked table as a block of lines. A cell then shows the name of its column, which this
module copies into it.
"""

import html
import re

_TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<t([dh])([^>]*)>(.*?)</t[dh]>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_MAX_CHARS = 40
"""Characters of a line of text on a phone, 390 CSS pixels wide, in a table."""


def mark_tables(page: str) -> str:
    """Return the HTML of a page with wide tables marked, and their cells labeled."""
    return _TABLE.sub(lambda match: _marked(match[0]) if _is_wide(match[1]) else match[0], page)


def _is_wide(table: str) -> bool:
    """Return True if the columns do not fit next to each other: names stay whole, and other text may wrap.

    Tables with cells that span columns stay as they are, as their rows have no labels for these.
    """
    rows = [[_text(cell[3]) for cell in _CELL.finditer(row[0])] for row in _ROW.finditer(table)]
    if len({len(row) for row in rows}) > 1:
        return False
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if len(widths) <= 2:
        return bool(widths) and widths[0] > _MAX_CHARS
    return sum(widths) > _MAX_CHARS


def _marked(table: str) -> str:
    head, *rows = _ROW.findall(table)
    labels = [html.escape(_text(cell[3])) for cell in _CELL.finditer(head)]
    marked = table.replace("<table>", "<table data-stacked>", 1)
    for row in dict.fromkeys(rows):
        marked = marked.replace(row, _labeled(row, labels))
    return marked


def _labeled(row: str, labels: list[str]) -> str:
    """Return a row whose cells have the labels of their columns, except the first one, and the second one of two."""
    places = iter(range(len(labels)))

    def label(cell: re.Match[str]) -> str:
        place = next(places)
        named = f' data-label="{labels[place]}"' if place and labels[place] and len(labels) > 2 else ""
        return f"<t{cell[1]}{cell[2]}{named}>{cell[3]}</t{cell[1]}>"

    return _CELL.sub(label, row)


def _text(cell: str) -> str:
    return html.unescape(_TAG.sub("", cell)).strip()
