"""What the assembler says of the Triton kernels that XLA has compiled: it says nothing itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

_ENTRY = re.compile(r"^\s*\.visible \.entry ((?:paged_attention|grouped_product)\w*)\(", re.MULTILINE)


def report(folder: Path) -> str:
    """For each of the kernels in XLA's dump: its launch and code, the assembler's report, and what nvdisasm reads.

    Raises:
        FileNotFoundError: there is no ptxas or nvdisasm beside jax's CUDA packages.
        CalledProcessError: it does not take the code.
    """
    codes = {
        name: code for path in folder.glob("*.ptx") for code in [path.read_text()] for name in _ENTRY.findall(code)
    }
    launches = "\n".join(path.read_text() for path in sorted(folder.glob("*.thunk_sequence.txt")))
    texts = []
    for name in sorted(codes):
        (target,) = re.findall(r"^\.target (\w+)", codes[name], re.MULTILINE)
        shared = re.findall(rf" {name} grid: .* shared_memory: \d+ bytes", launches)
        with tempfile.TemporaryDirectory() as made:
            source, binary = Path(made, "code.ptx"), Path(made, "code.cubin")
            source.write_text(codes[name])
            assembled = _run("ptxas", "-v", f"-arch={target}", str(source), "-o", str(binary))
            texts += [*shared[:1], codes[name], assembled, _run("nvdisasm", "-c", str(binary))]
    return "\n".join(texts)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_path(tool)), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _path(tool: str) -> Path:
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    paths = [path for folder in folders for path in sorted(Path(folder).glob(f"*/bin/{tool}"))]
    if not paths:
        raise FileNotFoundError(f"{tool}, of the packages nvidia-cuda-nvcc and nvidia-cuda-nvdisasm")
    return paths[0]
