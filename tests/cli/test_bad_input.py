"""Every subcommand under bad input: one sentence that names what is wrong, an exit code by its class, no traceback."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jpaged.cli import health
from jpaged.cli.main import main
from jpaged.client.convert import sampling_message
from jpaged.demo import FOLDER
from jpaged.errors import InternalError
from jpaged.plan.simulator import simulation
from jpaged.types import SamplingParams
from tests.models.tiny import tiny_case, write_checkpoint
from tests.processes import ROOT, WAIT_S

BIG = str(10**30)
LONG = "9" * 5000
DEEP = '{"a":' * 200_000 + "1" + "}" * 200_000
_OF_CLOSED_LOOP = re.compile(
    r"^[^\n]* ERROR asyncio: Exception in callback PollerCompletionQueue\._handle_events.*?"
    r"^RuntimeError: Event loop is closed\n",
    re.MULTILINE | re.DOTALL,
)
REQUEST = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Bad files by their names, and one good batch."""
    folder: Path = tmp_path_factory.mktemp("bad")
    (folder / "noise").write_bytes(b"\xff\xfe\x00noise")
    (folder / "deep").write_text(DEEP)
    (folder / "digits").write_text(LONG)
    (folder / "good").write_text(REQUEST)
    (folder / "folder").mkdir()
    return folder


def told(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """What the command said at its end, when it ended with this code.

    gRPC logs where an event is for the closed loop of an earlier test in this process: see its completion_queue.pyx.
    """
    err = _OF_CLOSED_LOOP.sub("", capsys.readouterr().err)
    assert "Traceback" not in err, err
    assert code not in (0, 70), err
    return err


BATCH = ["batch", "--target", "h:1", "-i", "{}/good", "-o", "{}/out"]
SIMULATE, KERNELS = ["bench", "simulate"], ["bench", "kernels"]
SEVERAL = ["serve", "--num-processes", "2", "--process-id", "0", "--coordinator"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--api-keys", "{}/none"], "--api-keys: {}/none cannot be read: No such file or directory"),
        (["serve", "--api-keys", "{}/noise"], "--api-keys: {}/noise is not TOML"),
        (["serve", "--tls-cert", "{}/none"], "--tls-key: is missing: tls_cert ({}/none) requires it"),
        (
            [*SEVERAL, "127.0.0.1:0", "--cluster-secret-file", "{}/none"],
            "--cluster-secret-file: {}/none cannot be read: No such file or directory",
        ),
        ([*BATCH, "-i", "{}/folder"], "--input: {}/folder has no file whose name ends in .parquet"),
        ([*BATCH, "-i", "/dev/zero"], "--input: /dev/zero is not a file"),
        ([*BATCH, "-o", "{}/good"], "--output: {}/good is the input"),
        ([*BATCH, "-i", "\udcff"], "--input: \\udcff is not a file"),
        ([*BATCH, "-i", "{}/noise"], "line 1: is not UTF-8: byte 0xff"),
        ([*BATCH, "-i", "{}/deep"], "line 1: is nested deeper than the limit of 64"),
        ([*BATCH, "-i", "{}/digits"], "line 1: is not JSON"),
        ([*BATCH, "-o", "{}/folder"], "--output: {}/folder is not a regular file"),
        ([*BATCH, "-o", "{}/noise"], "{}/noise: line 1: is not a line of batch output"),
        ([*BATCH, "-o", "/dev/full"], "--output: /dev/full is not a regular file"),
        ([*BATCH, "-o", "/proc/out"], "--output: /proc/out cannot be opened"),
        ([*BATCH, "-o", "x" * 5000], "File name too long"),
        ([*BATCH, "--timeout", "nan"], "--timeout: nan s is not a number above 0"),
        ([*BATCH, "--timeout", "inf"], "--timeout: inf s is not a number above 0"),
        ([*BATCH, "--target", "h:99999"], "--target: 'h:99999' is not HOST:PORT with a port from 1 to 65535"),
        ([*BATCH, "--target", "\udcff:1"], "--target: is not UTF-8"),
        (["health", "127.0.0.1:99999"], "'127.0.0.1:99999' is not HOST:PORT with a port from 1 to 65535"),
        (["health", "ipv4:127.0.0.1:99999"], "is not HOST:PORT with a port from 1 to 65535"),
        (["health", "localhost"], "'localhost' is not HOST:PORT"),
        (["health", "--timeout", "nan"], "--timeout: nan is not a finite number above 0"),
        (["health", "--timeout", "inf"], "--timeout: inf is not a finite number above 0"),
        (["health", "--service", "\udcff", "h:1"], "--service: is not UTF-8"),
        ([*SIMULATE, "--trace", "{}/noise"], "trace: {}/noise "),
        ([*SIMULATE, "--trace", "{}/folder"], "Is a directory"),
        ([*SIMULATE, "--trace", "{}/deep"], "trace line 1: is not JSON"),
        ([*SIMULATE, "--trace", "{}/digits"], "trace line 1: is not JSON"),
        ([*SIMULATE, "--num-requests", BIG], f"--num-requests: {BIG} is out of range"),
        ([*SIMULATE, "--duration", "1e300"], "--duration: 1e+300 requests are above the limit"),
        ([*SIMULATE, "--rate", "1e-300"], "--rate: 1e-300 is out of range"),
        ([*SIMULATE, "--num-blocks", BIG], "--num-blocks: "),
        ([*SIMULATE, "--num-host-blocks", BIG], "--num-host-blocks: "),
        ([*SIMULATE, "--seed", BIG], "--seed: "),
        ([*KERNELS, "--max-gib", "nan"], "--max-gib: nan is not a finite number above 0"),
        ([*KERNELS, "--context", BIG], f"--context: {BIG} is out of range"),
        ([*KERNELS, "--json", "{}/nowhere/x"], "--json: {}/nowhere/x is a folder, or its folder does not exist"),
        ([*KERNELS, "--plot", "{}/folder"], "--plot: {}/folder is a folder"),
        (["convert", "demo", "{}/x", "--to", "orbax", "--max-shard-size", f"{LONG}GiB"], "--max-shard-size: "),
        (["convert", "demo", "{}/noise", "--to", "orbax"], "{}/noise exists and is not a folder"),
        (["convert", "{}/folder", "{}/x", "--to", "orbax"], "{}/folder has no config.json"),
        (["convert", "\udcff", "{}/x", "--to", "orbax"], "SOURCE: is not UTF-8: '\\udcff' at character 0"),
        (["convert", "demo", "x\udcff", "--to", "orbax"], "DESTINATION: is not UTF-8: '\\udcff' at character 1"),
        (["plan", "{}/noise", "--topology", "v6e:1x1"], "{}/noise: cannot be read as JSON"),
        (["plan", "{}/deep", "--topology", "v6e:1x1"], "{}/deep: is nested deeper than the limit of 64"),
        (["plan", "demo", "--topology", f"v6e:{LONG}x1"], "is not known"),
        (["demo", "--seed", "-1"], "--seed: -1 is out of range"),
        (["demo", "--seed", BIG], f"--seed: {BIG} is out of range"),
        (
            ["serve", "--port", "0", "--host", "no.such.host.invalid"],
            "--host: 'no.such.host.invalid' is not an address",
        ),
        (["serve", "--port", "0", "--host", "x" * 300], "--host: 'xxx"),
        (["serve", "--port", "0", "--host", "\udcff"], "--host: is not UTF-8: '\\udcff' at character 0"),
        (["serve", "--served-model-name", "\udcff"], "--served-model-name: is not UTF-8"),
        (["serve", ""], "MODEL: is empty"),
        (["serve", "\udcff"], "MODEL: is not UTF-8"),
        (["serve", "--port", "0", "--host", "192.0.2.1"], "--host: '192.0.2.1' is not an address of this machine"),
        (["serve", "--pin-prefix", "{}/folder"], "--pin-prefix: {}/folder cannot be read"),
        (["serve", "--max-num-seqs", LONG], "argument --max-num-seqs: invalid int value"),
        (["serve", "--memory-utilization", "nan"], "--memory-utilization: nan is below the limit"),
        ([*SEVERAL, "h:99999"], "--coordinator: 'h:99999' is not HOST:PORT with a port up to 65535"),
        ([*SEVERAL, f"h:{LONG}"], "--coordinator: "),
        (["generate", "--prompt", ""], "--prompt: is empty"),
        (["generate", "--prompt", "a\udcff"], "--prompt: is not UTF-8: '\\udcff' at character 1"),
        (["generate", "--prompt-token-ids", "-1"], "has an id that is not from 0 to 2147483647"),
        (["generate", "--prompt-token-ids", LONG], "is not a list of integers"),
        (["generate", "--prompt", "x", "--stop", "\udcff"], "--stop: is not UTF-8"),
        (["generate", "--prompt", "x", "--cache-salt", "\udcff"], "--cache-salt: is not UTF-8"),
        (["generate", "--prompt", "x", "--priority", str(-(2**31) - 1)], "--priority: -2147483649 is out of range"),
        (["generate", "--prompt", "x", "--temperature", "nan"], "--temperature: nan is out of range"),
        (["generate", "{}/noise", "--prompt", "x"], "folder {}/noise does not exist"),
        (["generate", "x" * 5000, "--prompt", "x"], "File name too long"),
    ],
    ids=lambda value: " ".join(value)[:60].encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(files, capsys, words, message):
    code = main([word.replace("{}", str(files)) for word in words])
    assert message.replace("{}", str(files)) in told(capsys, code).encode("ascii", "backslashreplace").decode()
    assert (files / "noise").read_bytes() == b"\xff\xfe\x00noise"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with the demo's tokenizer."""
    folder: Path = write_checkpoint(tiny_case("llama_mha"), tmp_path_factory.mktemp("model") / "whole")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder / name)
    return folder


BROKEN: dict[str, tuple[str, bytes | None, str]] = {
    "an empty tokenizer": ("tokenizer.json", b"{}", "tokenizer.json must hold a JSON object with fields"),
    "noise for a tokenizer": ("tokenizer.json", b"\xff\x00", "tokenizer.json cannot be read as JSON"),
    "a strange tokenizer": ("tokenizer.json", b'{"model": 5}', "the tokenizer cannot be loaded: "),
    "no tokenizer beside its config": ("tokenizer.json", None, "the tokenizer cannot be loaded: "),
    "noise for its config": ("tokenizer_config.json", b"noise", "tokenizer_config.json cannot be read as JSON"),
    "a list for its config": ("tokenizer_config.json", b"[1]", "tokenizer_config.json must hold a JSON object"),
    "a deep config of it": ("tokenizer_config.json", DEEP.encode(), "tokenizer_config.json is nested too deep"),
    "a deep config": ("config.json", DEEP.encode(), "config.json: is nested deeper than the limit of 64"),
    "noise for a config": ("config.json", b"\xff", "config.json: cannot be read as JSON"),
    "endless digits": ("config.json", b'{"vocab_size": %s}' % LONG.encode(), "config.json: cannot be read as JSON"),
    "a list of generation": ("generation_config.json", b"[]", "generation_config.json: must hold a JSON object"),
    "no weights": ("model.safetensors", None, "has neither model.safetensors nor"),
    "half of the weights": ("model.safetensors", b"\x10\x00", "is not a complete safetensors file"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_model_folder_is_one_sentence(checkpoint, tmp_path, capsys, what):
    name, data, message = BROKEN[what]
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / name).unlink(missing_ok=True)
    if data is not None:
        (folder / name).write_bytes(data)
    assert message in told(capsys, main(["generate", str(folder), "--prompt", "x"]))


@pytest.mark.parametrize(
    ("name", "value"), [("num_hidden_layers", 10**9), ("vocab_size", 2**40), ("head_dim", 10**400)]
)
def test_a_size_that_no_machine_holds_is_refused_before_anything_is_allocated(
    checkpoint, tmp_path, capsys, name, value
):
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    words = ["generate", str(tmp_path), "--load-format", "dummy", "--prompt", "x"]
    assert f"config.json {name}: is {str(value)[:20]}" in told(capsys, main(words))


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_every_32_bit_integer_is_a_priority(priority):
    assert sampling_message(SamplingParams(priority=priority)).priority == priority


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(28, "No space left on device", "/disk/file"), 1, "jpaged health: /disk/file: No space left on device"),
        (PermissionError(13, "Permission denied", b"/\xff"), 1, "Permission denied"),
        (OSError(), 1, "jpaged health: OSError"),
        (MemoryError(), 1, "is out of memory"),
        (InternalError("the device is at fault"), 1, "jpaged health: the device is at fault"),
        (InternalError("x" * 10_000), 1, "xxx ... xxx"),
        (ZeroDivisionError("division by zero"), 70, "a bug in jpaged: ZeroDivisionError: division by zero ("),
        (RecursionError(), 70, "a bug in jpaged: RecursionError (JPAGED_TRACEBACK=1 shows where)"),
        (KeyError("name\nof two lines"), 70, "a bug in jpaged: KeyError: 'name"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_nobody_foresaw_is_one_sentence_too(monkeypatch, capsys, error, code, message):
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(health, "run", fail)
    monkeypatch.delenv("JPAGED_TRACEBACK", raising=False)
    assert main(["health"]) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == (code != 130)
    assert said.out == ""
    monkeypatch.setenv("JPAGED_TRACEBACK", "1")
    assert main(["health"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code != 130)


@pytest.mark.long
def test_a_bug_in_a_benchmark_is_called_one(monkeypatch, capsys):
    monkeypatch.setattr(simulation, "Simulation", None)
    assert main(["bench", "simulate", "--num-requests", "2"]) == 70
    assert "jpaged bench: a bug in jpaged: TypeError" in capsys.readouterr().err


def run(*words: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The real program, with a pipe that somebody reads."""
    command = [sys.executable, "-m", "jpaged", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=WAIT_S, **options)


@pytest.mark.long
def test_bytes_that_are_no_utf_8_are_refused_by_the_program():
    done = run("generate", "--prompt", b"a\xff")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"jpaged generate: error: --prompt: is not UTF-8: '\\udcff' at character 1\n"


@pytest.mark.long
def test_a_pipe_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jpaged", "bench", "simulate", "--num-requests", "2", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=WAIT_S
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_streams_that_are_closed_are_no_error():
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "jpaged", "--version"]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=WAIT_S).returncode == 0


def test_a_locale_that_cannot_write_a_text_ends_no_command():
    words = "import sys; from jpaged.__main__ import run; sys.argv[1:] = ['--version']; run(); print('\u2014')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, b"\\u2014", b"")


@pytest.mark.long
def test_an_interrupt_is_quiet():
    # Whoever runs the tests in the background may ignore interrupts, and a child does what its parent did.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-m", "jpaged", "bench", "simulate", "--num-requests", "1000000"]
    command = [sys.executable, "-c", heed, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            while b"numpy" not in Path(f"/proc/{process.pid}/maps").read_bytes():  # else it has not begun
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.long
def test_a_file_size_limit_ends_a_batch_in_one_sentence_and_leaves_whole_lines(tmp_path):
    (tmp_path / "in").write_text(REQUEST + "".join(f"bad {i}\n" for i in range(40)))
    out = tmp_path / "out"
    out.write_text('{"id": "batch_req_0", "custom_id": "a", "response": {}, "error": null}\n')
    words = [sys.executable, "-m", "jpaged", "batch", "-i", str(tmp_path / "in"), "-o", str(out), "--target", "h:1"]
    command = ["sh", "-c", 'ulimit -f 4; exec "$@"', "sh", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"jpaged batch: --output: {out} cannot be written: File too large"
    assert out.read_bytes().endswith(b"\n")
    assert 1 < len(out.read_text().splitlines()) < 41
    again = run(*words[3:])
    assert again.returncode == 1
    assert b"0 succeeded, 40 failed, 1 kept from before" in again.stderr
    assert len(out.read_text().splitlines()) == 41
