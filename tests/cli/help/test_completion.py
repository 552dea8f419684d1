"""The scripts that complete the command line, as bash runs them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.cli.completion import RECORD, SHELLS
from jpaged.cli.main import main
from jpaged.cli.options import to_flag
from jpaged.config import iter_options
from tests.cli.record_completion import record

BASH = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMPREPLY=()
_shtab_jpaged 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script of bash, as the program prints it."""
    path = tmp_path_factory.mktemp("completion") / "jpaged.bash"
    root = Path(__file__).resolve().parents[3]
    with path.open("w") as out:
        subprocess.run([sys.executable, "-m", "jpaged", "completion", "bash"], stdout=out, check=True, cwd=root)
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "some.txt").write_text("")
    (tmp_path / "somewhere").mkdir()
    return tmp_path


def completed(script, folder, *words):
    """What bash proposes for the last of the words, in a folder with one file and one folder."""
    command = [str(shutil.which("bash")), "-c", BASH, "bash", str(script), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["jpaged", "se"], {"serve"}),
        (["jpaged", "bench", "st"], {"startup"}),
        (["jpaged", "serve", "--dtype", "b"], {"bfloat16"}),
        (["jpaged", "serve", "demo", "--load-f"], {"--load-format"}),
        (["jpaged", "bench", "serve", "--request"], {"--request-rate"}),
        (["jpaged", "serve", "so"], {"some.txt", "somewhere"}),
        (["jpaged", "serve", "--pin-prefix", "so"], {"some.txt", "somewhere"}),
        (["jpaged", "serve", "--compiled", "so"], {"somewhere"}),
        (["jpaged", "serve", "--port", "so"], set()),
        (["jpaged", "convert", "demo", "so"], {"somewhere"}),
        (["jpaged", "batch", "-i", "so"], {"some.txt", "somewhere"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(script, folder, words, expected):
    assert completed(script, folder, *words) == expected


def test_bash_completes_every_option_of_serve(script, folder):
    flags = {to_flag(name) for name, _, _ in iter_options() if name != "model"}
    assert flags <= completed(script, folder, "jpaged", "serve", "--")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_with_the_commands(capsys, shell):
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert {"bash": "complete -o", "zsh": "#compdef jpaged", "tcsh": "complete jpaged"}[shell] in said
    assert "serve" in said


def test_the_recorded_arguments_are_those_of_the_commands():
    assert record() == RECORD.read_text(), "python -m tests.cli.record_completion"


def test_commands_of_missing_parts_are_not_completed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jpaged.bench", None)
    assert main(["completion", "zsh"]) == 0
    said = capsys.readouterr().out
    assert "jpaged_plan" in said and "jpaged_bench" not in said


def test_options_whose_help_tells_of_a_file_or_a_folder_say_so_to_shells():
    of_paths = re.compile(r"^((a|the) )?((text|TOML|JSON|PEM) )?(file|folder)\b|\bPEM\b")
    told = {name: spec.metadata["path"] for name, _, spec in iter_options() if of_paths.search(spec.metadata["help"])}
    assert told["pin_prefix"] == "file"
    assert told["compiled"] == "folder"
    assert [name for name, kind in told.items() if not kind] == []
