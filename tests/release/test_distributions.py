"""A release as a user gets it: built in isolation, installed in an environment without sources, run from elsewhere."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from jpaged.version import __version__
from tests.release.contents import KERNELS, ROOT, is_portable, sdist_problems, wheel_problems

pytestmark = pytest.mark.long
TOOLS = Path(sys.prefix) / "release"
"""What `make test-long` installs of the extra `release`."""


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    """The output of a command, which has to succeed and knows nothing of these sources."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**kept, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Distributions:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Both of them, as `make dist` makes them, of the files that git has."""
    folder = tmp_path_factory.mktemp("release")
    sources, built = folder / "sources", folder / "built"
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for path in filter(None, listing.split("\0")):
        if path.split("/")[0] not in ("tests", "benchmarks", "docs", "deploy"):
            (sources / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, sources / path)
    path = os.pathsep.join((str(TOOLS / "bin"), str(TOOLS / "ziglang"), os.environ["PATH"]))
    compiler = str(ROOT / "tests" / "release" / "manylinux-c++")
    run(sys.executable, "-m", "build", "--outdir", built, sources, cwd=folder, PATH=path, CXX=compiler)
    (linux,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    oldest = f"manylinux_2_28_{platform.machine()}"
    repair = ("-m", "auditwheel", "repair", "--plat", oldest, "--wheel-dir", folder / "wheels", linux)
    run(sys.executable, *repair, cwd=folder, PATH=path, PYTHONPATH=str(TOOLS))
    (wheel,) = (folder / "wheels").glob("*.whl")
    return Distributions(sdist, wheel)


@pytest.fixture(params=["wheel", "sdist"])
def jpaged(request: pytest.FixtureRequest, distributions: Distributions, tmp_path: Path) -> Path:
    """The command `jpaged` of an environment in which one of the two was installed.

    What it depends on is lent by the environment of the tests: installing it anew takes minutes and is pip's part. A
    path in a .pth file lends packages, and no .pth file beside them, so that no editable install comes along. The
    sources were built in isolation before.
    """
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    (own,) = venv.glob("lib/python*/site-packages")
    lent = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (own / "lent.pth").write_text("\n".join(lent))
    chosen = getattr(distributions, request.param)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-build-isolation",
        chosen,
        cwd=tmp_path,
    )
    return venv / "bin" / "jpaged"


def test_the_wheel_is_whole_and_for_any_recent_linux(distributions: Distributions) -> None:
    assert wheel_problems(distributions.wheel) == []
    assert is_portable(distributions.wheel)


def test_the_source_distribution_is_whole(distributions: Distributions) -> None:
    assert sdist_problems(distributions.sdist) == []


def test_a_wheel_without_its_kernels_is_noticed(distributions: Distributions, tmp_path: Path) -> None:
    poorer = tmp_path / distributions.wheel.name
    with zipfile.ZipFile(distributions.wheel) as whole, zipfile.ZipFile(poorer, "w") as rest:
        for name in whole.namelist():
            if name != KERNELS:
                rest.writestr(name, whole.read(name))
    assert wheel_problems(poorer) == [f"{KERNELS} is missing: no compiler was there when the wheel was built"]


def test_a_source_distribution_without_a_header_is_noticed(distributions: Distributions, tmp_path: Path) -> None:
    poorer = tmp_path / distributions.sdist.name
    with tarfile.open(distributions.sdist) as whole, tarfile.open(poorer, "w:gz") as rest:
        for member in whole.getmembers():
            if not member.name.endswith("kernels/cpu/vector.h"):
                rest.addfile(member, whole.extractfile(member) if member.isfile() else None)
    assert sdist_problems(poorer) == ["jpaged/kernels/cpu/vector.h is missing"]


def test_what_is_installed_serves_the_embedded_model_with_its_kernels(jpaged: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run(jpaged, "--version", cwd=elsewhere) == f"jpaged {__version__}\n"
    told = json.loads(run(jpaged, "doctor", "--json", "--port", "0", "--timeout", "600", cwd=elsewhere))
    found = {one["name"]: one["value"] for one in told["findings"]}
    assert told["ok"]
    assert found["CPU kernels"] == str(next(jpaged.parents[1].glob(f"lib/python*/site-packages/{KERNELS}")))
    assert (found["attention_backend"], found["linear_backend"]) == ("cpu", "cpu")
    assert f"{__version__}, in {jpaged.parents[1]}" in found["jpaged"]
    words = ["generate", "demo", "--prompt", "Once upon a time", "--max-tokens", "8", "--seed", "1", "--json"]
    answer = json.loads(run(jpaged, *words, cwd=elsewhere))
    assert len(answer["outputs"][0]["token_ids"]) == 8
    said = run(jpaged, "demo", "--num-prompts", "2", cwd=elsewhere)
    assert "2 streams," in said
    assert list(elsewhere.iterdir()) == []
