"""Commands that need no model import neither jax nor the server: they start in the time of a shell command.

`jpaged --help` and `--version` need no package at all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from jpaged.cli.help import get_commands
from jpaged.cli.main import COMMANDS, load, main, make_parser
from jpaged.version import __version__
from tests.server.harness import running

WITHOUT_MODEL = [
    ["--help"],
    ["health", "127.0.0.1:1", "--timeout", "0.1"],
    ["batch", "-i", "missing.jsonl", "-o", "out.jsonl", "--target", "127.0.0.1:1"],
    ["route", "--help"],
    ["top", "--help"],
    ["serve", "--help"],
    ["completion", "bash"],
]
HEAVY = (
    *("jax", "jaxlib", "flax", "transformers", "tokenizers", "llguidance", "starlette", "uvicorn"),
    *("jpaged.server.lifecycle", "jpaged.device"),
)
RUN = f"""
import contextlib, io, sys
from jpaged.cli.main import main
commands = {WITHOUT_MODEL!r}
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    codes = [main(words) for words in commands]
assert all(code in (0, 1, 2) for code in codes), codes
found = [name for name in {HEAVY!r} if name in sys.modules]
assert not found, found
"""


def test_commands_without_a_model_import_neither_jax_nor_a_server(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


IMPORTED = """
import sys
from jpaged.__main__ import run
sys.argv = ["jpaged", *{words!r}]
code = run()
print("imported", *sys.modules)
sys.exit(code)
"""
PACKAGES = {"jax", "jaxlib", "numpy", "grpc", "google", "rich", "prometheus_client", "transformers", "starlette"}


def imported_by(*words: str) -> set[str]:
    """Return the modules that a command line imports."""
    program = [sys.executable, "-c", IMPORTED.format(words=words)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    line = done.stdout.splitlines()[-1]
    assert line.startswith("imported ")
    return set(line.split())


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"], ["help"], ["completion", "bash"]])
def test_the_help_and_the_version_import_no_package_and_no_command(words: list[str]) -> None:
    imported = imported_by(*words)
    assert {name.partition(".")[0] for name in imported} & PACKAGES == set()
    own = {"jpaged", "jpaged.version", "jpaged.__main__", "jpaged.errors"}
    own |= {f"jpaged.{name}" for name in ("cli", "cli.main", "cli.help", "cli.completion")}
    assert {name for name in imported if name.partition(".")[0] == "jpaged"} <= own


def test_the_help_of_a_server_imports_neither_jax_nor_grpc() -> None:
    imported = imported_by("serve", "--help")
    assert "jpaged.cli.serve" in imported
    assert {name.partition(".")[0] for name in imported} & (PACKAGES - {"numpy"}) == set()
    assert {name for name in imported if name.startswith("jpaged.cli.")} <= {
        f"jpaged.cli.{name}" for name in ("main", "help", "serve", "options", "startup")
    }


def test_jpaged_itself_imports_no_package() -> None:
    program = "import sys, jpaged; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} & PACKAGES == set()


@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_a_command_whose_package_is_missing_ends_with_a_sentence(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, f"jpaged.cli.{command}", None)
    assert main([command]) == 1
    ended = capsys.readouterr()
    text = ended.out if command == "doctor" else ended.err
    assert "a required package cannot be imported: ModuleNotFoundError" in text


def test_every_command_of_the_table_has_its_module() -> None:
    for name in COMMANDS:
        module = load(name)
        assert module.DESCRIPTION
        assert callable(module.add_arguments)
        assert callable(module.run)


class TestOptionalParts:
    @pytest.fixture(autouse=True)
    def without_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("jpaged.bench.cli", "jpaged.inspector.cli", "jpaged.inspector.dashboard"):
            monkeypatch.setitem(sys.modules, name, None)

    def test_the_command_of_a_missing_part_names_its_extra(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The full package, that is: an extra has none of its own modules."""
        assert main(["bench", "serve"]) == 1
        assert capsys.readouterr().err == (
            "jpaged bench: this installation was built without `jpaged bench`; for the full package: "
            f"pip install --force-reinstall --no-deps jpaged=={__version__}\n"
        )

    def test_the_help_lists_every_command_and_completion_those_that_are_installed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--help"]) == 0
        assert "    bench " in capsys.readouterr().out
        assert list(get_commands(make_parser())) == [name for name in COMMANDS if name not in ("bench", "top")]

    async def test_a_server_has_every_path_except_those_of_the_dashboard(self) -> None:
        async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
            assert [(await client.get(path)).status_code for path in ("/health", "/", "/page/frame")] == [200, 404, 404]


def test_a_missing_package_of_an_extra_is_named() -> None:
    program = "import sys; sys.modules['httpx2'] = None\nfrom jpaged.cli.main import main\n"
    program += "sys.exit(main(['bench', 'serve', '--backend', 'openai', '--target', '127.0.0.1:1']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    expected = "jpaged bench: httpx2 is not installed: pip install 'jpaged[bench]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_a_command_names_the_missing_part_that_it_needs() -> None:
    program = "import sys; sys.modules['jpaged.plan'] = None\nfrom jpaged.cli.main import main\n"
    program += "sys.exit(main(['bench', 'simulate']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("jpaged bench: this installation was built without `jpaged plan`; for the full")
