"""vLLM's own tests of its HTTP server, run against jpaged's and compared with `expected.toml`: `make vllm-tests`.

    source package    pip download vllm==VERSION, which has the tests; none of them is in this repository
    FOLDER/tests      a copy of its tests, with two files replaced: utils.py starts jpaged, conftest.py the served model
    pytest            in an environment with vLLM's CPU build, which the tests import
    expected.toml     the files, and the tests that fail with the reason of each

The result is 0 if exactly the expected tests fail. The model is small, and stands in for every model that a test names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.toml"
TESTS = "tests/entrypoints"
_KEPT = ("tests/entrypoints/", "tests/models/", "tests/ci_envs.py")
"""Parts of the source package that the tests import."""
_TEST_TIMEOUT_S = 300
_BY_CHANCE = "depends on the model"
"""Beginning of the reasons of tests that may also pass, because they sample."""
_PASSED, _FAILED, _SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Expected:
    """What `expected.toml` says.

    Attributes:
        version: version of vLLM.
        failures: by file below `tests/entrypoints`, the names of the tests that fail, and why. A name without its
            parameters stands for the test with any.
        not_run: by file or folder with a slash at the end, why it does not run.
    """

    version: str
    failures: Mapping[str, Mapping[str, str]]
    not_run: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = EXPECTED) -> Expected:
        """Read a file.

        Raises:
            ValueError: it has a file or a failure without a reason.
        """
        value = tomllib.loads(path.read_text())
        failures: dict[str, Mapping[str, str]] = {}
        for file, rows in value["files"].items():
            failures[file] = {name: reason for reason, names in rows.items() for name in names}
            if not all(failures[file].values()):
                raise ValueError(f"{path.name}: {file} has a failure without a reason")
        not_run = {name: reason for reason, names in value.get("not_run", {}).items() for name in names}
        return cls(value["version"], failures, not_run)

    def reason(self, file: str, name: str) -> str:
        """Return why a test is expected to fail; "" if it should pass."""
        rows = self.failures.get(file, {})
        return rows.get(name) or rows.get(name.partition("[")[0], "")


def compare_files(expected: Expected, files: Iterable[str]) -> list[str]:
    """Return a line for each test file that `expected.toml` does not have, and for each of its entries without one."""
    files = set(files)
    folders = tuple(name for name in expected.not_run if name.endswith("/"))
    known = expected.failures.keys() | expected.not_run.keys()
    found = [f"not listed: {file}" for file in sorted(files - known) if not file.startswith(folders)]
    for name in sorted(known - files):
        if not (name.endswith("/") and any(file.startswith(name) for file in files)):
            found.append(f"not in vLLM: {name}")
    return found


def compare(expected: Expected, outcomes: Mapping[tuple[str, str], str]) -> list[str]:
    """Return the differences between outcomes by file and test and the expected ones, one line each."""
    found = []
    for (file, name), outcome in sorted(outcomes.items()):
        reason = expected.reason(file, name)
        if outcome == _FAILED and not reason:
            found.append(f"failed, and should pass: {file}::{name}")
        elif outcome == _PASSED and reason and not reason.startswith(_BY_CHANCE):
            found.append(f"passed, and is expected to fail: {file}::{name}")
    ran = {(file, name.partition("[")[0]) for file, name in outcomes}
    files = {file for file, _ in outcomes}
    for file, rows in expected.failures.items():
        for name in rows if file in files else ():
            if (file, name.partition("[")[0]) not in ran:
                found.append(f"did not run: {file}::{name}")
    return found


def read_outcomes(path: Path) -> dict[tuple[str, str], str]:
    """Return the outcome of each test of pytest's JUnit report, by file below `tests/entrypoints` and name."""
    outcomes: dict[tuple[str, str], str] = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        tags = {one.tag for one in case}
        outcome = _FAILED if tags & {"failure", "error"} else _SKIPPED if "skipped" in tags else _PASSED
        file = case.get("file") or f"{case.get('classname', '').replace('.', '/')}.py"
        name = case.get("name", "")
        key = (file.removeprefix(f"{TESTS}/"), name)
        outcomes[key] = _FAILED if outcomes.get(key) == _FAILED else outcome
    return outcomes


def summary(files: Sequence[str], outcomes: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield a line for each file, and one for all."""
    for file in [*files, ""]:
        counts = Counter(outcome for (one, _), outcome in outcomes.items() if file in (one, ""))
        yield f"{counts[_PASSED]:4} passed {counts[_FAILED]:4} failed {counts[_SKIPPED]:4} skipped  {file or 'in all'}"


def fetch(python: str, version: str, folder: Path) -> Path:
    """Return the source package of vLLM, downloaded by pip if it is not in the folder."""
    path = folder / f"vllm-{version}.tar.gz"
    if not path.exists():
        command = [python, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--no-binary", "vllm", "--dest", str(folder), f"vllm=={version}"]
        variables = {"VLLM_VERSION_OVERRIDE": version, "VLLM_TARGET_DEVICE": "empty"}
        subprocess.run(command, check=True, env={**os.environ, **variables})
    return path


def lay_out(source: Path, folder: Path) -> None:
    """Unpack the tests of a source package into an empty folder, with jpaged's server in place of vLLM's."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(source) as archive:
        for member in archive:
            member.name = member.name.partition("/")[2]
            if member.isfile() and member.name.startswith(_KEPT):
                archive.extract(member, folder, filter="data")
    (folder / "tests" / "__init__.py").touch()
    shutil.copy(HERE / "server_stand_in.py", folder / "tests" / "utils.py")
    shutil.copy(HERE / "conftest_stand_in.py", folder / "tests" / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")


def run(python: str, folder: Path, files: Sequence[str], model: Path) -> dict[tuple[str, str], str]:
    """Run test files and return the outcomes."""
    report = folder / "report.xml"
    python = os.path.abspath(shutil.which(python) or python)  # the folder changes, and a link to it must stay
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=native", "-o", "junit_family=xunit1"]
    command += [
        f"--timeout={_TEST_TIMEOUT_S}",
        "-o",
        "timeout_func_only=true",
        f"--junitxml={report}",
        *(f"{TESTS}/{file}" for file in files),
    ]
    variables = {
        "JPAGED_COMMAND": f"{sys.executable} -m jpaged",
        "JPAGED_PYTHONPATH": str(HERE.parents[2]),
        "JPAGED_MODEL": str(model.resolve()),
        "JPAGED_LOG": str(folder / "server.log"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": "", **variables}, check=False)
    return read_outcomes(report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the files of `expected.toml`, or those named; return 0 if exactly the expected tests fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files below tests/entrypoints (default: all of expected.toml)")
    parser.add_argument("--python", required=True, help="interpreter of the environment with vLLM and pytest")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder of the model")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the source package and the tests")
    options = parser.parse_args(arguments)
    expected = Expected.read()
    files = options.files or list(expected.failures)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lay_out(fetch(options.python, expected.version, folder), folder / "run")
    tests = folder / "run" / TESTS
    there = (path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py"))
    differences = [] if options.files else compare_files(expected, there)
    outcomes = run(options.python, folder / "run", files, options.model)
    print("\n".join(summary(files, outcomes)))
    differences += compare(expected, outcomes)
    print("\n".join(differences) or "as expected")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
