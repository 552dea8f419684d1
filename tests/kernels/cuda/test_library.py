"""Building and choosing the CUDA library, with a script in the place of nvcc."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from jpaged.kernels import cuda_library
from jpaged.kernels.cpu import build
from jpaged.kernels.cpu.build import BuildError
from jpaged.kernels.cuda_library import SOURCES, compile_library, find_nvcc, list_sources, unbuilt_reason


def script(folder: Path, lines: str) -> str:
    """A compiler that keeps its arguments."""
    path = folder / "nvcc"
    path.write_text(f'#!/bin/sh\necho "$*" > {folder}/arguments\n{lines}\n')
    path.chmod(0o755)
    return str(path)


COPIES_ITS_LAST_SOURCE = 'while [ "$1" != -o ]; do last="$1"; shift; done; cp "$last" "$2"; echo done; echo note >&2'


def test_the_library_is_built_for_each_architecture_and_names_its_sources(tmp_path: Path) -> None:
    library = tmp_path / "built" / "library.so"
    library.parent.mkdir()
    nvcc, headers = script(tmp_path, COPIES_ITS_LAST_SOURCE), tmp_path / "headers"
    assert compile_library(library, nvcc, headers, ("80", "90"), ("-lineinfo",)) == "done\nnote\n"
    arguments = (tmp_path / "arguments").read_text().split()
    codes = [one for one in arguments if one.startswith("-gencode")]
    assert codes == [
        f"-gencode=arch=compute_{a},code={b}" for a, b in (("80", "sm_80"), ("90", "sm_90"), ("80", "compute_80"))
    ]
    assert {str(source) for source in SOURCES.values()} <= {*arguments}
    assert arguments[arguments.index("-isystem") + 1] == str(headers) and "-lineinfo" in arguments
    described = library.read_text()
    assert build.digest_sources(list_sources()) in described and "80 90" in described
    assert list(library.parent.iterdir()) == [library]


@pytest.mark.parametrize(
    ("lines", "timeout_s", "problem"),
    [
        (COPIES_ITS_LAST_SOURCE + "; exit 3", 60, "exit status 3 .*\ndone\nnote"),
        ("exec sleep 60", 0.01, "took more than"),
    ],
)
def test_a_build_that_fails_leaves_the_library_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, timeout_s: float, problem: str
) -> None:
    monkeypatch.setattr(cuda_library, "_TIMEOUT_S", timeout_s)
    library = tmp_path / "built" / "library.so"
    library.parent.mkdir()
    library.write_text("older")
    with pytest.raises(BuildError, match=problem):
        compile_library(library, script(tmp_path, lines), tmp_path)
    assert [path.read_text() for path in library.parent.iterdir()] == ["older"]


def test_nvcc_is_the_given_one_or_that_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cu13" / "bin"
    folder.mkdir(parents=True)
    packaged = script(folder, "exit 0")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert find_nvcc() == packaged
    given = script(tmp_path, "exit 0")
    assert find_nvcc(given) == given
    with pytest.raises(BuildError, match="nvcc was not found"):
        find_nvcc(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("built", "capability", "is_built"),
    [
        ("80 90", "8.0", True),
        ("80 90", "8.9", True),  # which runs that of 8.0
        ("80 90", "12.0", True),  # which compiles the PTX
        ("80 90", "7.5", False),
        ("86 90", "8.0", False),
        ("90 80", "8.6", True),
        ("90 86", "8.0", False),
    ],
)
def test_devices_need_code_of_their_version_or_an_older_ptx(
    monkeypatch: pytest.MonkeyPatch, built: str, capability: str, is_built: bool
) -> None:
    monkeypatch.setattr(cuda_library, "_load", object)
    monkeypatch.setattr(cuda_library, "read_symbol", lambda library, name: built)
    reason = unbuilt_reason(capability)
    assert (reason is None) is is_built
    if reason is not None:
        number = capability.replace(".", "")
        assert built.replace(" ", ", ") in reason and f"--architectures {number}" in reason
