"""`jpaged bench` itself: every benchmark is listed and has help, and none is imported before it is asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from jpaged.bench.cli import BENCHMARKS
from jpaged.cli.main import main
from tests.processes import ROOT


def test_every_benchmark_is_listed(capsys):
    assert main(["bench", "--help"]) == 0
    told = capsys.readouterr().out
    assert [name for name, text in BENCHMARKS.items() if name not in told or text not in told] == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_describes_itself_and_its_flags(name, capsys):
    assert main(["bench", name, "--help"]) == 0
    told = capsys.readouterr().out
    assert f"usage: jpaged bench {name}" in told
    described = import_module(f"jpaged.bench.cli.{name}").DESCRIPTION.strip().splitlines()[0]
    assert described in " ".join(told.split())  # lines are wrapped


@pytest.mark.long
def test_a_server_that_starts_imports_no_benchmark():
    program = (
        "import sys, jpaged.cli.main; jpaged.cli.main.make_parser().parse_args(['serve', 'demo']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert "jpaged.cli.serve" in imported
    assert {name for name in imported if name.startswith("jpaged.bench.cli")} == set()
