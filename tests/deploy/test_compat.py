"""What `make compat` finds to try, and that it tries what the package says it runs on."""

import re
import tomllib
from pathlib import Path

import pytest

from tests import compat

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """On PATH a shim that does not run and an interpreter; behind it pyenv's."""
    scripts = {
        "path/python3.12": "exit 127",
        "path/python3.13": "echo 3.13.1",
        "path/python3.9": "echo 3.9.18",
        "path/python3.13-config": "echo no",
        "pyenv/python3.12": "echo 3.12.1",
        "pyenv/python3.13": "echo 3.13.0",
        "pyenv/python3.14": "exit 1",
    }
    for name, text in scripts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return [tmp_path / "missing", tmp_path / "path", tmp_path / "pyenv"]


def test_each_minor_version_is_found_once_where_it_runs_and_is_named_where_it_does_not(folders: list[Path]) -> None:
    found = compat.find_interpreters(folders, 11)
    assert [(one.minor, one.path.parent.name, one.version) for one in found] == [
        (12, "pyenv", "3.12.1"),
        (13, "path", "3.13.1"),
        (14, "pyenv", None),
    ]
    assert compat.try_one(found[-1], 0).text.startswith("NOT TRIED: ")


def test_path_comes_before_pyenv(tmp_path: Path) -> None:
    (tmp_path / "versions/3.13.0/bin").mkdir(parents=True)
    environment = {"PATH": "/one:/two", "PYENV_ROOT": str(tmp_path)}
    assert compat.folders_of(environment) == [Path("/one"), Path("/two"), tmp_path / "versions/3.13.0/bin"]


def test_the_oldest_and_the_newest_line_of_jax_that_are_allowed_are_pinned() -> None:
    (bounds,) = (line for line in PROJECT["dependencies"] if re.match(r"jax\W", line))
    limits = re.fullmatch(r"jax>=0\.(\d+),<0\.(\d+)", bounds)
    assert limits is not None, bounds
    low, above = limits.groups()
    lines = [compat.line_of(version) for version in compat.pinned_jax()]
    assert (lines[0], lines[-1]) == (f"0.{low}", f"0.{int(above) - 1}")


def test_the_classifiers_begin_with_the_oldest_python() -> None:
    minors = [int(text.rpartition(".")[2]) for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert minors == list(range(compat.oldest_minor(), minors[-1] + 1))


def test_what_is_tried_is_there() -> None:
    (block,) = re.findall(r"^COMPAT := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    paths = [word.partition("::")[0] for word in block.replace("\\\n", " ").split()]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
