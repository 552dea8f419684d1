"""The folder for a machine without a network, and the comparison with the plan."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.first_contact import checks, driver, estimates, pack
from benchmarks.first_contact.__main__ import main
from benchmarks.first_contact.cells import append_line
from benchmarks.first_contact.driver import CELLS, Settings
from jpaged.hardware import HARDWARE
from jpaged.plan.cost import ASSUMED
from jpaged.plan.known_models import KNOWN_MODELS

H200 = {"check": "device", "cell": "devices", "status": "ok", "kind": "NVIDIA H200", "hardware": "h200"}


def test_wheels_are_unpacked_into_one_folder(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name, files in {"a": ["google/rpc/x.py"], "b": ["google/y.py", "b-1.data/purelib/z.py"]}.items():
        with zipfile.ZipFile(wheels / f"{name}-1-py3-none-any.whl", "w") as archive:
            for file in files:
                archive.writestr(file, "x = 1\n")
    pack.unpack(wheels, site)
    found = {path.relative_to(site).as_posix() for path in site.rglob("*.py")}
    assert found == {"google/rpc/x.py", "google/y.py", "z.py"}
    assert pack.folder_bytes(site) == 3 * len("x = 1\n")


def test_the_source_leaves_room_for_the_packages(tmp_path: Path) -> None:
    pack.copy_source(tmp_path)
    assert (tmp_path / "benchmarks/first_contact/driver.py").is_file()
    assert (tmp_path / "jpaged/demo/checkpoint/model.safetensors").is_file()
    assert list(tmp_path.rglob("*.pyc")) == []
    assert pack.folder_bytes(tmp_path) < pack.MAX_BYTES / 2


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("")
    assert main(["--pack", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x", "--seconds", "5"], "--seconds 5 is below the minimum of 30"),
        (["--out", "x", "--seconds", "nan"], "--seconds nan is below the minimum of 30"),
        (["--out", "x", "--checks", "magic"], "--checks: 'magic' is not one of device, mosaic"),
        ([], "one of the arguments --out --pack --compare is required"),
        (["--out", "x", "--compare", "y"], "not allowed with argument"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_every_check_exists_and_the_limits_fit_the_run() -> None:
    assert len({check.name for check in checks.CHECKS}) == len(checks.CHECKS)
    for check in checks.CHECKS:
        module, _, function = check.target.partition(":")
        path = Path(driver.__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
        assert f"def {function}(cells: Cells, size: str)" in path.read_text()
    assert sum(check.limit_s for check in checks.CHECKS[:-1]) <= 460


def test_measured_values_are_compared_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / CELLS
    append_line(path, H200)
    limits = {"copy_bytes_per_s": 4.32e12, "product_flops_per_s": None}
    append_line(path, {"check": "decode", "cell": "limits", "status": "ok", **limits})
    append_line(path, {"check": "decode", "cell": "64 x 1024", "status": "ok", "decode_bytes_per_s": 3.36e12})
    append_line(path, {"check": "llama", "cell": "decode, 64 rows", "status": "ok", "step_s": 0.012, "planned_s": 0.01})
    assert main(["--compare", str(tmp_path)]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == "NVIDIA H200, estimates for h200"
    assert columns.split() == ["cell", "value", "measured", "estimated", "deviation"]
    assert [row.split()[-4:] for row in rows] == [
        ["copy_bytes_per_s", "4.32e+12", "4.8e+12", "-10%"],
        ["decode_bytes_per_s", "3.36e+12", "3.36e+12", "+0%"],
        ["step_s", "0.012", "0.01", "+20%"],
    ]


def test_a_device_that_the_plan_does_not_know_has_no_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_line(tmp_path / CELLS, {**H200, "kind": "abacus", "hardware": None})
    assert main(["--compare", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "abacus is not in the table of jpaged plan: there are no estimates\n"


def test_full_sizes_end_after_the_first_check_on_a_cpu(tmp_path: Path) -> None:
    """The check of the device is planted; the others are never started."""
    device = driver.Check("device", "tests.first_contact.planted:is_a_cpu", 60)
    other = driver.Check("good", "tests.first_contact.planted:good", 60)
    assert driver.run([device, other], Settings(tmp_path, 100, "full", "cpu")) == 1
    lines = [json.loads(line) for line in (tmp_path / CELLS).read_text().splitlines()]
    assert {line.get("check") for line in lines} == {None, "device"}
    assert driver.run([device, other], Settings(tmp_path, 100, "tiny", "cpu")) == 0


@pytest.mark.parametrize("name", ["h200", "tpu-v6e"])
def test_steps_of_llama_are_estimated_as_by_the_plan(name: str) -> None:
    """On a GPU by a roofline; on a TPU its attention takes longer than the bytes alone."""
    config, hardware = KNOWN_MODELS["llama-3-8b"].config, HARDWARE[name]
    times = estimates.step_times(config, hardware, 32)
    step = estimates.decode_step(times, 64, 1024)
    kv_bytes = 64 * 1024 * 32 * 2 * 1024 * 2
    assert step["bytes"] == pytest.approx(2 * (8.03e9 - 128_256 * 4096) + kv_bytes, rel=0.01)
    at_peak_s = step["bytes"] / hardware.hbm_bytes_per_s
    assert step["planned_s"] > at_peak_s
    if name == "h200":
        assert step["planned_s"] == pytest.approx(at_peak_s / ASSUMED.bandwidth_efficiency)
    prefill = estimates.prefill_step(times, 2048, 512)
    assert prefill["planned_s"] > prefill["flops"] / hardware.flops
