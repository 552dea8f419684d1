"""The files that one request enters are few, and docs/architecture.md names them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILES = {"generate": 25, "chat": 36}
FEATURES = (
    "access/quotas.py",
    "engine/lora.py",
    "engine/deadlines.py",
    "engine/structured_output.py",
    "engine/kv_cache/events.py",
    "engine/kv_cache/eviction",
    "engine/kv_cache/pinned.py",
    "engine/kv_cache/swapper.py",
    "engine/kv_cache/offload",
    "engine/output/beam.py",
    "engine/scheduler/logits_processors.py",
    "engine/scheduler/policies.py",
    "engine/scheduler/cascade.py",
    "engine/speculative",
    "engine/inspector.py",
    "pool.py",
    "service/chat",
    "service/structured_output",
    "service/handoff.py",
    "service/kv_protocol.py",
    "service/kv_transfer.py",
    "service/roles.py",
    "service/score_embed.py",
    "structured",
    "telemetry",
)
"""Files and folders that a request must not enter if it does not use their feature."""


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
    assert [file for file in paths["generate"] if file.startswith(FEATURES)] == []
    for name, most in MAX_FILES.items():
        assert len(paths[name]) <= most, name


def test_every_feature_has_files() -> None:
    assert [name for name in FEATURES if not (ROOT / "jpaged" / name).exists()] == []


def named_files() -> set[str]:
    """The files in the table of a request's path; one without a folder lies in the folder of the one before it."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("## One request's way")[2].partition("## ")[0]
    named, folder = set(), ""
    for cell in re.findall(r"^\| \d+ \| ([^|]+) \|", section, re.MULTILINE):
        for file in cell.split(", "):
            folder = file.rpartition("/")[0] if "/" in file else folder
            named.add(f"{folder}/{file.rpartition('/')[2]}".removeprefix("jpaged/"))
    return named
