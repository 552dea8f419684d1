"""Tries what an interpreter or its jax can break on every other Python of this machine, as a fresh clone would.

    python -m tests.compat

Every `python3.N` on PATH and of pyenv counts, from the oldest that the package allows; this environment's own runs the
whole suite and is left out. Each gets a copy of the sources and in it `make test-compat demo`, so that its environment
comes from the Makefile, with the jax that constraints.txt has for it. What cannot be tried is named: an interpreter
without wheels of jaxlib, one without its venv module, a pinned line of jax that no interpreter here takes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIES = ROOT / ".venv-compat"
_PROBE = "import ensurepip, venv, sys; print(sys.version.split()[0])"
_JAX = "from importlib.metadata import version; print(version('jax'))"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """One Python; `version` is None where it does not run or has no venv module."""

    minor: int
    path: Path
    version: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an interpreter; `jax` is None where nothing was tried."""

    interpreter: Interpreter
    text: str
    jax: str | None = None
    is_failed: bool = False


def oldest_minor(root: Path = ROOT) -> int:
    """N of the oldest 3.N that pyproject.toml allows."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return int(project["requires-python"].removeprefix(">=3."))


def pinned_jax(root: Path = ROOT) -> list[str]:
    """The versions of jax in constraints.txt, oldest first."""
    found = re.findall(r"^jax==([\d.]+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def line_of(version: str) -> str:
    """0.12.0.1 -> 0.12."""
    return ".".join(version.split(".")[:2])


def find_interpreters(folders: Sequence[Path], oldest: int) -> list[Interpreter]:
    """One of each minor version: the first that runs and makes environments, or else the first."""
    found: dict[int, Interpreter] = {}
    for folder in folders:
        for path in sorted(folder.glob("python3.*")):
            match = re.fullmatch(r"python3\.(\d+)", path.name)
            minor = int(match.group(1)) if match else -1
            if minor < oldest or (minor in found and found[minor].version):
                continue
            one = Interpreter(minor, path, _version(path))
            if one.version or minor not in found:
                found[minor] = one
    return [found[minor] for minor in sorted(found)]


def _version(path: Path) -> str | None:
    try:
        done = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def folders_of(environment: Mapping[str, str]) -> list[Path]:
    """Where interpreters lie: PATH, then pyenv's versions."""
    pyenv = Path(environment.get("PYENV_ROOT") or Path.home() / ".pyenv")
    on_path = [Path(folder) for folder in environment.get("PATH", "").split(os.pathsep) if folder]
    return [*on_path, *sorted(pyenv.glob("versions/*/bin"))]


def copy_sources(target: Path) -> None:
    """What git has or would add, as it is now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def try_one(interpreter: Interpreter, jobs: int) -> Outcome:
    """Makes an environment and runs `make test-compat demo` in it; what was printed is in `log` beside the sources."""
    if interpreter.version is None:
        return Outcome(interpreter, f"NOT TRIED: {interpreter.path} does not run, or has no venv module")
    folder, begin = COPIES / f"3.{interpreter.minor}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_sources(folder)
    # What make was told on its command line is for this environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(*command: str | Path) -> int:
        with (folder / "log").open("a") as log:
            return subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode

    python = folder / ".venv/bin/python"
    if run(interpreter.path, "-m", "venv", ".venv"):
        return Outcome(interpreter, "FAILED to make an environment", is_failed=True)
    dry = ("install", "--dry-run", "--no-deps", "--only-binary=:all:", "--constraint", "constraints.txt", "jaxlib")
    if run(python, "-m", "pip", *dry):
        return Outcome(interpreter, "NOT TRIED: there is no jaxlib for it that constraints.txt allows")
    words = ("make", "--no-print-directory", f"PYTHON={interpreter.path}", f"JOBS={jobs}", "test-compat", "demo")
    code = run(*words)
    jax = subprocess.run([python, "-c", _JAX], capture_output=True, text=True, check=False).stdout.strip()
    text = f"{'FAILED' if code else 'passed'} after {time.monotonic() - begin:.0f} s"
    return Outcome(interpreter, text, jax or None, is_failed=code != 0)


def main() -> int:
    """Tries them side by side, prints a line each, and returns 1 when one failed, whose environment then stays."""
    found = find_interpreters(folders_of(os.environ), oldest_minor())
    others = [one for one in found if one.minor != sys.version_info.minor]
    num_cores = len(os.sched_getaffinity(0))
    jobs = num_cores // max(1, min(len(others), num_cores))
    with ThreadPoolExecutor(num_cores) as pool:
        outcomes = list(pool.map(lambda one: try_one(one, jobs if jobs > 1 else 0), others))
    own = subprocess.run([sys.executable, "-c", _JAX], capture_output=True, text=True, check=True).stdout.strip()
    print(f"Python {sys.version.split()[0]:<8} jax {own:<9} this environment, which runs the whole suite")
    for outcome in outcomes:
        name = outcome.interpreter.version or f"3.{outcome.interpreter.minor}"
        print(f"Python {name:<8} jax {outcome.jax or '-':<9} {outcome.text}")
    tried = {line_of(version) for version in (own, *(outcome.jax for outcome in outcomes)) if version}
    for version in pinned_jax():
        if line_of(version) not in tried:
            print(f"jax {line_of(version)}: NOT TRIED, for no interpreter here takes the {version} of constraints.txt")
    failed = [outcome.interpreter for outcome in outcomes if outcome.is_failed]
    for one in failed:
        print(f"\n--- Python {one.version}\n{(COPIES / f'3.{one.minor}/log').read_text(errors='replace')}")
    if not failed:
        shutil.rmtree(COPIES, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
