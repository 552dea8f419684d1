"""docs/http.md names every field that a body may have, and every status."""

import re
from pathlib import Path

from jpaged.http.errors import _STATUSES
from jpaged.openai import bodies

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def test_every_field_of_a_body_is_on_the_page() -> None:
    known = bodies._OF_COMPLETIONS | bodies._OF_CHATS | bodies._NEUTRAL_COMPLETIONS.keys() | bodies._NEUTRAL_CHAT.keys()
    hinted = {name for name in bodies._HINTS if not name.startswith("guided_")} | {"guided_json"}
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert (known | hinted) - named == set()


def test_every_status_is_on_the_page() -> None:
    told = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE) for code in row.split(", ")}
    unseen = 499  # of clients that have gone
    assert {status for status, _ in _STATUSES.values()} - told == {unseen}
