"""What has to be in a release: `python -m tests.release.contents dist` looks into the distributions of a folder."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from jpaged.version import __version__

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "jpaged/kernels/cpu/libjpaged_cpu.so"
_ELF = b"\x7fELF"


def package_files() -> set[str]:
    """The files of the package that git has; what is written for readers of the sources stays there."""
    listing = subprocess.run(["git", "ls-files", "jpaged"], cwd=ROOT, check=True, capture_output=True, text=True)
    cards = {"jpaged/demo/MODEL_CARD.md"}
    return {path for path in listing.stdout.split() if not path.endswith(".md") or path in cards}


def wheel_problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel: nothing, for one that may be released but for its tag."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        problems = [f"{path} is missing" for path in sorted(package_files() - names)]
        foreign = {name.partition("/")[0] for name in names} - {"jpaged", f"jpaged-{__version__}.dist-info"}
        problems += [f"{name} is no part of the package" for name in sorted(foreign)]
        if KERNELS not in names:
            problems.append(f"{KERNELS} is missing: no compiler was there when the wheel was built")
        elif archive.read(KERNELS)[:4] != _ELF:
            problems.append(f"{KERNELS} is no library")
        metadata = Parser().parsestr(archive.read(f"jpaged-{__version__}.dist-info/METADATA").decode())
    if metadata["Version"] != __version__:
        problems.append(f"version {metadata['Version']} is not that of jpaged/version.py, {__version__}")
    return problems


def sdist_problems(sdist: Path) -> list[str]:
    """What is wrong with a source distribution."""
    prefix = f"jpaged-{__version__}/"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(prefix) for name in archive.getnames()}
    wanted = package_files() | {"pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "LICENSE"}
    problems = [f"{path} is missing" for path in sorted(wanted - names)]
    return problems + [f"{path} was built: it is not a source" for path in names if path.endswith(".so")]


def is_portable(wheel: Path) -> bool:
    """Return True if the name of a wheel promises that it runs on every Linux since 2018."""
    return "manylinux_2_28" in wheel.name and wheel.name.startswith(f"jpaged-{__version__}-py3-none-")


def main(folder: Path) -> int:
    """Say what is wrong with the distributions of a folder; return the exit status."""
    (wheel,), (sdist,) = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    problems = [f"{wheel.name}: {problem}" for problem in wheel_problems(wheel)]
    problems += [f"{sdist.name}: {problem}" for problem in sdist_problems(sdist)]
    if not is_portable(wheel):
        problems.append(f"{wheel.name}: is tagged for this machine alone")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
