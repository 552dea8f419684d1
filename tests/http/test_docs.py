"""docs/http.md names every field that a body may have, and every status."""

import re
from pathlib import Path

from jpaged.openai import request
from jpaged.openai.lines import STATUSES
from jpaged.openai.request import EVERYWHERE

DOCS = Path(__file__).parents[2] / "docs"
PAGE, SAMPLING = (DOCS / "http.md").read_text(), (DOCS / "sampling.md").read_text()


def test_every_field_of_a_body_is_on_the_page() -> None:
    known = request.OF_COMPLETIONS | request.OF_CHATS | EVERYWHERE.keys()
    named = set(re.findall(r"`(\w+)`", PAGE + SAMPLING))
    assert known - named == set()


def test_every_status_is_on_the_page() -> None:
    told = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE) for code in row.split(", ")}
    unseen = 499  # of clients that have gone
    assert {status for status, _ in STATUSES.values()} - told == {unseen}
