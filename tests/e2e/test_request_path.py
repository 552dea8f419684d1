"""The files that one request enters are few, and docs/architecture.md names them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILES = {"generate": 40, "chat": 49}


def test_one_request_enters_the_files_that_the_architecture_says() -> None:
    command = [sys.executable, "-m", "tests.request_path"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths: dict[str, set[str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        if line.startswith(" "):
            paths[name].add(line.strip())
        else:
            name = line.partition(":")[0]
            paths[name] = set()
    assert paths["generate"] == named_files()
    for name, most in MAX_FILES.items():
        assert len(paths[name]) <= most, name


def named_files() -> set[str]:
    """The files in the table of a request's path; one without a folder lies in the folder of the one before it."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("## One request's way")[2].partition("## ")[0]
    named, folder = set(), ""
    for cell in re.findall(r"^\| \d+ \| ([^|]+) \|", section, re.MULTILINE):
        for file in cell.split(", "):
            folder = file.rpartition("/")[0] if "/" in file else folder
            named.add(f"{folder}/{file.rpartition('/')[2]}".lstrip("/"))
    return named
