"""Version, changelog, protos and what is said of releases agree."""

import re
import tomllib
from datetime import date
from pathlib import Path

import pytest

from jpaged.server.servicer import API_VERSION
from jpaged.version import __version__

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
ENTRY = re.compile(r"^## \[(?P<name>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def entries():
    """The entries of the changelog, the newest first: name -> (date, text)."""
    found = list(ENTRY.finditer(CHANGELOG))
    ends = [match.start() for match in found[1:]] + [len(CHANGELOG)]
    return {m["name"]: (m["date"], CHANGELOG[m.end() : end]) for m, end in zip(found, ends, strict=True)}


def test_the_version_has_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jpaged.version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)


def test_the_changelog_begins_with_what_is_not_released_and_then_this_version():
    names = list(entries())
    assert names[:2] == ["Unreleased", __version__]
    versions = [tuple(int(number) for number in name.split(".")) for name in names[1:]]
    assert versions == sorted(versions, reverse=True)


@pytest.mark.parametrize("name", [name for name in entries() if name != "Unreleased"])
def test_an_entry_has_a_date_and_says_what_is_new_in_the_known_kinds(name):
    day, text = entries()[name]
    assert date.fromisoformat(day).isoformat() == day
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert kinds
    assert set(kinds) <= KINDS
    for part in re.split(r"^### .+$", text, flags=re.MULTILINE)[1:]:
        assert part.strip().startswith("- ")


def test_the_entry_of_this_version_names_the_grpc_api_that_is_served():
    packages = {
        re.search(r"^package (jpaged\.v\d+);$", proto.read_text(), re.MULTILINE)[1]  # type: ignore[index]
        for proto in (ROOT / "protos" / "jpaged").glob("v*/*.proto")
    }
    assert packages == {f"jpaged.{API_VERSION}"}
    named = set(re.findall(r"`(jpaged\.v\d+)`", entries()[__version__][1]))
    assert named == packages


def test_the_way_of_a_release_names_targets_that_are_there():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make ([a-z-]+)`", (ROOT / "docs" / "releasing.md").read_text())
    assert {"check", "test", "test-long", "test-deep", "dist", "docs"} <= set(targets)
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
