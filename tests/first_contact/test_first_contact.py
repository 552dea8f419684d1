"""The whole first run with tiny sizes on a CPU, where the GPU kernels run in interpreters."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.first_contact import summary
from benchmarks.first_contact.__main__ import main
from benchmarks.first_contact.checks import CHECKS
from benchmarks.first_contact.driver import CELLS, LOG, SUMMARY
from tests.conftest import QUICK_XLA_FLAGS


@pytest.mark.long
def test_a_rehearsal_on_a_cpu_checks_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)  # nothing that it measures is of interest
    code = main(["--out", str(tmp_path), "--platform", "cpu", "--seconds", "3000"])
    text, lines = (tmp_path / SUMMARY).read_text(), summary.read(tmp_path / CELLS)
    assert code == 0, text
    assert {path.name for path in tmp_path.iterdir()} == {CELLS, LOG, SUMMARY}
    cells = {check.name: summary.cells_of(lines, check.name) for check in CHECKS}
    assert all(cells.values()), text
    assert {cell["status"] for of_one in cells.values() for cell in of_one.values()} == {"ok", "not on this platform"}
    assert all(cell["interpreted"] for cell in cells["mosaic"].values())
    elsewhere = [name for name, cell in cells["prefill"].items() if cell["status"] == "not on this platform"]
    assert elsewhere
    assert all(name.startswith("cuDNN") for name in elsewhere)
    assert cells["demo"]["swapped"]["num_blocks_swapped_out"] > 0
    assert cells["serve"]["demo"]["completed"] > 0
    assert cells["llama"]["decode, 4 rows"]["step_s"] != 0
    starts = [cell for name, cell in cells["serve"].items() if name.endswith("start")]
    assert len(starts) == 3
    assert [start["num_blocks"] for start in starts] == 3 * [starts[0]["num_blocks"]]
