"""Packages that are broken or of another version: what commands, `--version` and `doctor` do with them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from types import ModuleType

import pytest

from jpaged.__main__ import run
from jpaged.version import __version__

_SHOW_IMPORTS = """
import sys
from jpaged.__main__ import run
sys.argv = ["jpaged", *{words!r}]
code = run()
roots = {{name.partition(".")[0] for name in sys.modules}}
sys.stderr.write(repr(sorted(roots & {{"grpc", "numpy", "jax", "rich", "packaging"}})))
sys.exit(code)
"""


class Broken(ModuleType):
    """A command line whose import fails as it does with a protobuf that is too old."""

    def __getattr__(self, name: str) -> object:
        error = type("VersionError", (Exception,), {"__module__": "google.protobuf.runtime_version"})
        raise error("gencode 7.35.1 runtime 6.33.6\nand more")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jpaged.cli.main", Broken("jpaged.cli.main"))


@pytest.mark.usefixtures("broken")
def test_a_package_that_cannot_be_imported_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jpaged", "health"])
    assert run() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "VersionError: gencode 7.35.1 runtime 6.33.6 (`jpaged doctor`" in line


@pytest.mark.usefixtures("broken")
def test_the_version_needs_no_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["jpaged", "--version"])
    assert run() == 0
    assert capsys.readouterr().out == f"jpaged {__version__}\n"


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("has_all", [True, False])
def test_doctor_reports_packages_that_are_broken_or_too_old(
    has_all: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = "2" if has_all else "3"
    monkeypatch.setattr(metadata, "requires", lambda name: [f"protobuf>={wanted}"])
    monkeypatch.setattr(metadata, "version", lambda name: __version__ if name == "jpaged" else "2.5")
    monkeypatch.setattr(sys, "argv", ["jpaged", "doctor", "--json"])
    assert run() == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    assert said["findings"][0]["state"] == "stop"
    assert ("VersionError" if has_all else "required: protobuf>=3") in said["findings"][0]["note"]
    monkeypatch.setattr(sys, "argv", ["jpaged", "doctor"])
    assert run() == 1
    assert ("VersionError" if has_all else "-> pip install 'protobuf>=3'") in capsys.readouterr().out


def test_an_error_of_our_own_is_not_taken_for_a_broken_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise NameError(name)

    monkeypatch.setitem(sys.modules, "jpaged.cli.main", Wrong("jpaged.cli.main"))
    monkeypatch.setattr(sys, "argv", ["jpaged", "health"])
    with pytest.raises(NameError):
        run()


def test_the_version_imports_no_required_package() -> None:
    command = [sys.executable, "-c", _SHOW_IMPORTS.format(words=["--version"])]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == (f"jpaged {__version__}\n", "[]")
