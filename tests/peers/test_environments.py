"""Installing peers: what is run, what is said when it cannot be, and that it is run once."""

import shutil
import subprocess
import sys

import pytest

from benchmarks.peers import environments
from benchmarks.peers.environments import LLAMA_CPP, TORCH, VLLM, CannotInstall, Home, install, reason


@pytest.fixture
def commands(monkeypatch):
    """The commands of an installation, none of which is run."""
    ran: list[list[str]] = []

    def note(command, **options):
        ran.append(list(command))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", note)
    return ran


def test_an_environment_is_made_once(tmp_path, commands):
    said: list[str] = []
    home = Home(tmp_path)
    (tmp_path / "venvs" / "hf").mkdir(parents=True)
    install(home, "hf", said.append)
    num_commands = len(commands)
    install(home, "hf", said.append)
    assert len(commands) == num_commands > 0
    assert len(said) == 1


def test_another_version_is_installed_again(tmp_path, commands, monkeypatch):
    home = Home(tmp_path)
    (tmp_path / "venvs" / "hf").mkdir(parents=True)
    install(home, "hf", lambda line: None)
    num_commands = len(commands)
    monkeypatch.setattr(environments, "TORCH", "2.14.0")
    install(home, "hf", lambda line: None)
    assert len(commands) > num_commands
    assert any("torch==2.14.0" in command for command in commands)


def test_versions_are_pinned_and_no_index_is_named(tmp_path, commands, monkeypatch):
    home = Home(tmp_path)
    for environment in ("hf", "vllm", "lcpp"):
        (tmp_path / "venvs" / environment).mkdir(parents=True)
    (tmp_path / "src" / f"llama_cpp_python-{LLAMA_CPP}").mkdir(parents=True)
    (tmp_path / "dl").mkdir()
    (tmp_path / "dl" / f"llama_cpp_python-{LLAMA_CPP}.tar.gz").touch()
    monkeypatch.setattr(environments, "tcmalloc", lambda home: tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    for environment in ("hf", "vllm", "lcpp"):
        install(home, environment, lambda line: None)
    installed = [
        word for command in commands if "install" in command for word in command[command.index("install") + 1 :]
    ]
    assert {f"torch=={TORCH}", f"torch=={TORCH}+cpu", VLLM} <= set(installed)
    unpinned = [word for word in installed if "==" not in word and not word.startswith("-") and "/" not in word]
    assert unpinned == ["numpy", "numpy"]  # any that the pinned ones take
    assert not any("://" in word for command in commands for word in command)


def test_without_a_compiler_llama_cpp_is_refused_before_anything_is_fetched(tmp_path, commands, monkeypatch):
    (tmp_path / "venvs" / "lcpp" / "bin").mkdir(parents=True)
    (tmp_path / "venvs" / "lcpp" / "bin" / "python").touch()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CannotInstall, match=r"none of c\+\+, g\+\+, clang\+\+ was found: install g\+\+"):
        install(Home(tmp_path), "lcpp", lambda line: None)
    assert commands == []
    assert not (tmp_path / "venvs" / "lcpp" / ".installed").exists()


def test_a_command_that_fails_is_refused_with_its_last_error(tmp_path, monkeypatch):
    (tmp_path / "venvs" / "hf").mkdir(parents=True)
    (tmp_path / "venvs" / "hf" / "bin").mkdir()
    (tmp_path / "venvs" / "hf" / "bin" / "python").symlink_to(sys.executable)
    fails = [sys.executable, "-c", "import sys; print('ERROR: no network'); print('a hint'); sys.exit(2)"]
    monkeypatch.setattr(environments, "_pip_command", lambda home, environment: fails)
    with pytest.raises(CannotInstall, match=r"ERROR: no network \(all of it: .*install_hf\.log\)"):
        install(Home(tmp_path), "hf", lambda line: None)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Collecting torch\nERROR: No matching distribution found for torch==9\n\nhint: look\n", "ERROR: No matching"),
        ("a.cpp:3:1: error: expected ';'\nninja: build stopped\n", "a.cpp:3:1: error: expected ';'"),
        ("Traceback\n  File x\nValueError: too small\n", "ValueError: too small"),
        ("", "it ended with 3 and said nothing"),
    ],
)
def test_the_reason_is_the_last_line_that_is_an_error(output, expected):
    assert reason(output, 3).startswith(expected)


def test_a_long_reason_is_cut():
    assert len(reason("x" * 1000, 1)) == environments.MAX_REASON_CHARS + 3
