"""What the command line tells of itself: groups, words, widths."""

import re

import pytest

from jpaged.cli.help import get_commands
from jpaged.cli.main import main, make_parser
from jpaged.cli.options import to_flag
from jpaged.config import SECTIONS, iter_options, section_help


def told(capsys, *words, code=0):
    assert main(list(words)) == code
    said = capsys.readouterr()
    return said.err if code else said.out


@pytest.mark.parametrize("section", SECTIONS)
def test_a_group_of_the_help_is_a_section_of_the_options(capsys, section):
    said = told(capsys, "serve", f"--help={section}")
    flags = {to_flag(name) for name, mine, _ in iter_options() if mine == section}
    assert said.splitlines()[0] == f"{section}:"
    assert set(re.findall(r"^  (--[a-z0-9-]+)", said, re.MULTILINE)) == flags
    assert section_help(section)
    assert " ".join(section_help(section).split()) in " ".join(said.split())


def test_the_whole_help_has_the_groups_in_the_order_of_the_sections(capsys):
    titles = re.findall(r"^(\w+):$", told(capsys, "serve", "--help"), re.MULTILINE)
    assert titles == ["options", *SECTIONS]


def test_a_word_finds_the_options_that_have_it(capsys):
    said = told(capsys, "serve", "--help=max_num")
    flags = {to_flag(name) for name, _, _ in iter_options() if "max_num" in name}
    assert set(re.findall(r"^  (--[a-z0-9-]+)", said, re.MULTILINE)) == flags
    assert "--swap-space" in told(capsys, "serve", "--help", "SWAP")


@pytest.mark.parametrize("word", ["nothing-like-it", ""])
def test_a_word_that_finds_nothing_is_refused_with_the_groups(capsys, word):
    assert "the groups are positional arguments, options, model, cache" in told(
        capsys, "serve", f"--help={word}", code=2
    )


def test_help_leads_to_commands_groups_and_options(capsys):
    assert told(capsys, "help") == told(capsys, "--help")
    assert told(capsys, "help", "bench", "serve") == told(capsys, "bench", "serve", "--help")
    assert told(capsys, "help", "serve", "cache") == told(capsys, "serve", "--help=cache")
    assert "'fly' is not one of serve, route, generate" in told(capsys, "help", "fly", code=2)
    assert "'a b': only one word may follow a command" in told(capsys, "help", "serve", "a", "b", code=2)


def test_every_command_is_in_the_list_with_a_sentence(capsys):
    listed = re.findall(r"^    ([a-z]+)\s+\S", told(capsys, "help"), re.MULTILINE)
    assert listed == list(get_commands(make_parser()))


@pytest.mark.parametrize("command", ["serve", "generate", "batch", "plan"])
@pytest.mark.parametrize(("columns", "width"), [(100, 98), (300, 110)])
def test_no_line_is_wider_than_the_terminal_or_than_is_read(capsys, monkeypatch, command, columns, width):
    monkeypatch.setenv("COLUMNS", str(columns))
    said = told(capsys, command, "--help")
    assert max(len(line) for line in said.splitlines() if not line.startswith(" ")) <= width
    wide = [line for line in said.splitlines() if len(line) > width]
    assert [line for line in wide if not re.match(r"^ +(jpaged|--)", line)] == []  # examples and choices stay whole


def test_a_usage_of_many_options_is_one_line_with_what_has_to_be_given(capsys):
    assert told(capsys, "serve", "--help").startswith("usage: jpaged serve [OPTION ...] [MODEL]\n")
    assert told(capsys, "plan", "--help").startswith("usage: jpaged plan [OPTION ...] --topology T[,T...] [MODEL]\n")
    assert told(capsys, "demo", "--help").startswith("usage: jpaged demo [-h [WORD]] [--num-prompts N]")
