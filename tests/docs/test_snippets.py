"""Python in the README and in docs/ runs as it is pasted: each page defines the names that it uses."""

import re
import subprocess
import sys
from pathlib import Path

from docs.site.links import ROOT


def undefined_names(pages: dict[str, str], folder: Path) -> list[tuple[str, str]]:
    """Return the names that the Python of each page uses and neither imports nor defines, and errors of syntax."""
    for name, page in pages.items():
        (folder / f"{name}.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    command = (sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise")
    done = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    found = re.finditer(r"^.*/(\w+\.py:\d+):\d+: (.*)$", done.stdout, re.MULTILINE)
    return [(one[1], one[2]) for one in found]


def test_the_python_of_every_page_defines_what_it_uses(tmp_path):
    pages = {path.stem: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    assert undefined_names(pages, tmp_path) == []


def test_a_planted_name_is_found(tmp_path):
    pages = {"a": "```python\nx = 1\n```\n\n```python\nprint(x, y)\n```", "b": "```python\nx = (\n```"}
    found = undefined_names(pages, tmp_path)
    assert ("a.py:3", "F821 Undefined name `y`") in found
    assert any(place.startswith("b.py") and problem.startswith("invalid-syntax") for place, problem in found)
