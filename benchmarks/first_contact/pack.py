"""Source and packages for a machine without a network: one folder, which PYTHONPATH names.

    DIR/jpaged, DIR/benchmarks    the source, and the CPU kernels as built here
    DIR/site                      packages that the machine lacks, unpacked

The machine has Python 3.12, jax with its plugin, flax, Orbax, transformers, tokenizers, safetensors and rich. The other
packages come from wheels for Linux on x86-64, in the versions of constraints.txt.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MAX_BYTES = 60 << 20
PYTHON = "3.12"
PACKAGES = (
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "googleapis-common-protos", "protobuf"),
    *("llguidance", "gguf", "starlette", "uvicorn", "orjson", "httptools", "python-multipart", "smg-grpc-proto"),
    *("pyzmq", "msgpack", "shtab", "prometheus-client", "httpx2", "httpcore2", "truststore"),
    *("opentelemetry-sdk", "opentelemetry-api", "opentelemetry-proto", "opentelemetry-semantic-conventions"),
    *("opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-common"),
    "opentelemetry-exporter-otlp-common",
)
"""What jpaged imports beyond the machine's own packages. Newer gRPC and protobuf are among them: the generated code
refuses older ones.
"""
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
)
_ROOT = Path(__file__).parents[2]
_SOURCES = ("jpaged", "benchmarks/first_contact")
_FILES = ("benchmarks/__init__.py", "LICENSE")
_LEFT_OUT = ("__pycache__", "*.pyc")
RUN = 'cd {folder} && PYTHONPATH=$PWD:$PWD/site python3 -m benchmarks.first_contact --out "$OUT" --seconds 460'


def pack(folder: Path) -> int:
    """Write the folder, and print its size and the command that runs it.

    Returns:
        0; 1 if the folder is not empty, a wheel was not found, or the limit of 60 MiB is exceeded.
    """
    if folder.exists() and any(folder.iterdir()):
        print(f"--pack: {folder} is not empty", file=sys.stderr)
        return 1
    copy_source(folder)
    with tempfile.TemporaryDirectory() as wheels:
        if (code := _download(Path(wheels))) != 0:
            return code
        unpack(Path(wheels), folder / "site")
    num_bytes = folder_bytes(folder)
    print(f"{folder}: {num_bytes / 2**20:.1f} MiB; on the machine:\n  {RUN.format(folder=folder.name)}")
    if num_bytes > MAX_BYTES:
        print(f"--pack: {num_bytes} bytes are over the limit of {MAX_BYTES}", file=sys.stderr)
        return 1
    return 0


def copy_source(folder: Path) -> None:
    """Copy the package and this one, without bytecode."""
    for name in _SOURCES:
        shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for name in _FILES:
        shutil.copy2(_ROOT / name, folder / name)


def _download(folder: Path) -> int:
    """Download one wheel of each package, without dependencies; returns pip's exit code."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    target = ["--python-version", PYTHON, "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--constraint", str(_ROOT / "constraints.txt"), *target]
    return subprocess.run([*command, "--dest", str(folder), *PACKAGES], check=False).returncode


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack wheels into one folder; files of their `purelib` and `platlib` folders move to its top."""
    folder.mkdir(parents=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    for data in folder.glob("*.data"):
        for part in (data / "purelib", data / "platlib"):
            if part.is_dir():
                shutil.copytree(part, folder, dirs_exist_ok=True)
        shutil.rmtree(data)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
