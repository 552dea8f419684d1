"""A benchmark of a server needs neither jax nor the engine."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import pkgutil, sys
import jpaged.bench
for module in pkgutil.iter_modules(jpaged.bench.__path__):
    __import__(f"jpaged.bench.{module.name}")
ours = {name for name in sys.modules if name.startswith(("jpaged.engine", "jpaged.device", "jpaged.models"))}
print(sorted(ours | {"jax", "flax", "transformers", "matplotlib"} & sys.modules.keys()))
"""


def test_no_module_of_the_room_imports_them():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
