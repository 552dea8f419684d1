"""`jpaged route` as a process: what it prints, refuses and ends with."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from jpaged.cli.help import get_commands
from jpaged.cli.main import main, make_parser
from jpaged.cli.options import config_from
from jpaged.client import Client
from jpaged.route.cli import options_from
from jpaged.types import SamplingParams
from tests.processes import Process

FAKE = ("-m", "tests.cli.fake_jpaged", "serve", "fake-model", "--port", "0")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--target: is missing"),
        (("--target", "nowhere"), "--target: 'nowhere' is not HOST:PORT"),
        (("--target", "a:1", "--target", "a:1"), "--target: names a:1 twice"),
        (("--targets-file", "/nothing"), "--targets-file: /nothing cannot be read"),
        (("--target", "a:1", "--resume-within", "-1"), "--resume-within: -1.0 is not from 0 to 86400"),
        (("--target", "a:1", "--max-known-prefixes", "-1"), "--max-known-prefixes: -1 is not from 0"),
        (("--target", "a:1", "--max-calls", "0"), "--max-calls: 0 is not from 1"),
        (("--target", "a:1", "--port", "70000"), "--port: 70000 is above the limit of 65535"),
        (("--target", "a:1", "--target-tls-ca", "/nothing"), "--target-tls-ca: cannot be read"),
        (("--target", "a:1", "--target-api-key-file", "/nothing"), "--target-api-key-file: cannot be read"),
        (("--target", "a:1", "--tls-cert", "/nothing"), "--tls-key: is missing"),
        (("--target", "a:1", "--host", "192.0.2.1"), "--host: '192.0.2.1' is not an address of this machine"),
    ],
)
def test_a_command_line_that_is_wrong_is_refused_by_name(capsys, words, problem):
    assert main(["route", "--port", "0", *words]) == 2
    assert problem in capsys.readouterr().err


def test_the_page_of_a_router_shows_the_options_that_are_set():
    arguments = make_parser().parse_args(["route", "--target", "a:1", "--max-calls", "7", "--resume-within", "5"])
    shown = options_from(arguments, config_from(arguments)).shown_options
    values = {name: value for name, value, _ in shown}
    assert (values["target"], values["max-calls"], values["resume-within"]) == ("a:1", "7", "5 s")
    assert "None" not in values.values() and "targets-file" not in values


@pytest.mark.parametrize("flag", ["--served-model-name", "--pin-prefix", "--tenant-max-n", "--max-num-seqs", "--model"])
def test_what_is_a_servers_own_affair_is_no_option_here(capsys, flag):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["route", "--target", "a:1", flag, "1"])
    assert flag in capsys.readouterr().err


def flags_of(command: str, begin: str = "--") -> set[str]:
    """The flags of a command that begin like this."""
    actions = get_commands(make_parser())[command]._actions
    return {flag for action in actions for flag in action.option_strings if flag.startswith(begin)}


def test_the_page_has_every_flag_of_a_router_and_none_that_is_not():
    text = (Path(__file__).resolve().parents[2] / "docs" / "route.md").read_text()
    told = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--kustomize"}  # kubectl's
    own = flags_of("route") - flags_of("serve")
    assert {"--target", "--max-calls", "--target-tls-key"} <= own <= told
    assert told <= flags_of("route") | flags_of("serve")


@pytest.mark.long
def test_it_says_where_it_listens_passes_calls_on_and_drains():
    servers = [Process(FAKE) for _ in range(2)]
    targets: list[Any] = [one.wait_for(r"^ready on (127\.0\.0\.1:\d+)$").group(1) for one in servers]
    words = [word for target in targets for word in ("--target", target)]
    router = Process(("-m", "jpaged", "route", "--port", "0", "--metrics-port", "0", "--probe-port", "0", *words))
    target = router.wait_for(r"^listening on (127\.0\.0\.1:\d+), routing to ").group(1)
    for line in (r"^metrics on http://127\.0\.0\.1:\d+/metrics$", r"^health on 127\.0\.0\.1:\d+$"):
        assert router.find(line)
    with Client(target) as client:
        client.wait_until_ready(60)
        for i in range(8):
            assert len(client.complete(f"prompt {i}", GREEDY).outputs[0].token_ids) == 8
        info = client.server_info()
        assert {info.options[f"target {one}"] for one in targets} == {"accepts calls"}
        assert info.options["resume-within"] == "60 s"
        assert info.options["max-request-size"] == "1.0 MiB"
        assert not {"pin-prefix", "targets-file", "tls-cert"} & info.options.keys()
    assert router.end(signal.SIGTERM) == 0
    assert router.find("^stopped$")
    for one in servers:
        one.end(signal.SIGTERM)
