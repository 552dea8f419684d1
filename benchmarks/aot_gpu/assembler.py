"""What the assembler says of the Triton kernels that XLA has compiled: it says nothing itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path


def report(folder: Path) -> str:
    """The kernels' code out of XLA's dump, and the assembler's lines on registers and spills.

    Raises:
        FileNotFoundError: there is no ptxas beside jax's CUDA packages.
        CalledProcessError: it does not take the code.
    """
    texts = []
    for path in sorted(folder.glob("*.ptx")):
        code = path.read_text()
        if ".entry paged_attention" not in code:
            continue
        (target,) = re.findall(r"^\.target (\w+)", code, re.MULTILINE)
        command = [str(_assembler()), "-v", f"-arch={target}", str(path), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        texts += [code, done.stdout, done.stderr]
    return "\n".join(texts)


def _assembler() -> Path:
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    paths = [path for folder in folders for path in sorted(Path(folder).glob("*/bin/ptxas"))]
    if not paths:
        raise FileNotFoundError("ptxas, of the package nvidia-cuda-nvcc")
    return paths[0]
