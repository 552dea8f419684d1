"""`jpaged bench serve`: a server that is started for it or is there, of ours and of others."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from jpaged.bench.cli.serve import plot_title
from jpaged.bench.results import compare
from jpaged.cli import server_process
from jpaged.cli.main import main
from tests.bench.sse_server import DONE, SseServer, completion, running, usage
from tests.processes import ROOT

SMALL = ["--input-len", "6", "--output-len", "5", "--num-prompts", "6", "--hardware", "none"]
SERVE = ["bench", "serve", *SMALL]


@pytest.fixture
def fake_server(monkeypatch):
    """The server that is started is the fake."""

    def command(model: str, flags: list[str]) -> list[str]:
        return [sys.executable, "-m", "tests.cli.fake_jpaged", "serve", model, "--port", "0", *flags]

    monkeypatch.setattr(server_process, "command", command)
    monkeypatch.chdir(ROOT)


def test_a_plot_names_the_number_of_requests_that_were_sent():
    """A trace may have fewer than `--num-prompts`."""
    runs = [{"completed": 11, "failed": 1}, {"completed": 9, "failed": 0}]
    assert plot_title("m", "openai", runs[:1]) == "m over openai: 12 requests"
    assert plot_title("m", "jpaged", runs) == "m over jpaged: 12 requests per rate"


@pytest.mark.long
def test_a_sweep_of_rates_over_a_server_that_is_started_for_it(fake_server, tmp_path: Path, capsys):
    words = [*SERVE, "--model", "fake-model", "--request-rate", "200", "inf", "--goodput", "e2el:1e6", "ttft:1e6"]
    files = ["--output-json", f"{tmp_path}/all.json", "--plot", f"{tmp_path}/rates.png", "--save-result"]
    told = ["--result-dir", f"{tmp_path}/runs", "--metadata", "note=mine", "--save-detailed", "--label", "try"]
    assert main([*words, *files, *told, "--", "--max-num-seqs", "2"]) == 0
    whole = json.loads((tmp_path / "all.json").read_text())
    assert whole["seed"] == 0
    assert [run["request_rate"] for run in whole["runs"]] == [200.0, "inf"]
    for run in whole["runs"]:
        assert (run["completed"], run["failed"]) == (6, 0)
        assert (run["total_input_tokens"], run["total_output_tokens"]) == (36, 30)
        assert run["output_lens"] == [5] * 6
        assert all(len(gaps) < 5 for gaps in run["itls"])
        assert run["request_goodput"] == pytest.approx(run["request_throughput"])
        assert run["server"]["options"]["max-num-seqs"] == "2"
        assert run["server"]["options"]["wait-for-all-programs"] == "True"
        assert (run["model_id"], run["backend"], run["label"], run["note"]) == ("fake", "jpaged", "try", "mine")
        assert run["server_counts"]["num_prefix_query_tokens"] == 36
        assert run["server_counts"]["num_prefix_hit_tokens"] == 0
        assert run["server_counts"]["num_steps"] >= 15  # six streams of five tokens, two at a time
        assert run["limits"] == {"source": "disabled by --hardware none"}
        assert run["machine"]["python"] == sys.version.split()[0]
        assert 0 < run["p50_ttft_ms"] <= run["p99_e2el_ms"]
    assert whole["runs"][0]["workload"]["seed"] != whole["runs"][1]["workload"]["seed"]
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name.split("-fake-")[0] for path in (tmp_path / "runs").iterdir())
    assert names == ["try-200.0qps", "try-infqps"]
    shown = capsys.readouterr()
    assert shown.out.count("requests that succeeded") == 2
    assert "TPOT" in shown.out
    assert compare(whole, whole).differences == ()


@pytest.mark.long
def test_a_server_that_does_not_start_tells_why(fake_server, capsys):
    assert main([*SERVE, "--model", "broken"]) == 1
    assert "broken is not a folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_server_that_dies_under_the_load_is_told(fake_server, capsys):
    assert main([*SERVE, "--model", "dies", "--num-warmups", "0"]) == 1
    told = capsys.readouterr().err
    assert re.search(r"^\d failed: ", told, re.MULTILINE)
    assert "the server exited with code 1; its last output:" in told


def test_requests_that_fail_are_counted_told_and_an_exit_code(fake_server, tmp_path: Path, capsys):
    words = [*SERVE, "--model", "fake-model", "--input-len", "600", "--num-warmups", "0"]
    assert main([*words, "--output-json", f"{tmp_path}/a.json"]) == 1
    assert json.loads((tmp_path / "a.json").read_text())["failed"] == 6
    assert "6 failed: " in capsys.readouterr().err


async def test_a_server_of_others_is_measured_by_the_same_client(tmp_path: Path, capsys):
    tokens = [completion(letter) for letter in "abcde"]
    server = SseServer([*tokens, usage(6, 5), DONE])
    async with running(server):
        words = [*SERVE, "--backend", "openai", "--base-url", f"{server.url}/", "--model", "theirs"]
        load = ["--max-concurrency", "2", "--num-warmups", "1", "--extra-body", '{"top_k": 1}', "--header", "x-a=b"]
        known = ["--tokenizer", "demo", "--dtype", "bfloat16", "--hardware", "h200"]
        code = await asyncio.to_thread(main, [*words, *load, *known, "--output-json", f"{tmp_path}/a.json"])
    assert code == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (6, 36, 30)
    assert (result["model_id"], result["tokenizer_id"], result["max_concurrency"]) == ("theirs", "demo", 2)
    assert result["limits"] == {"bytes_per_s": 4800e9, "flops_per_s": 989e12, "source": "data sheet of h200"}
    assert 0 < result["mfu"] < 1
    assert server.most_open <= 2
    assert len(server.requests) == 7
    for path, body in server.requests:
        assert path == "/v1/completions"
        assert len(body["prompt"]) == 6
        assert all(0 < token < 3072 for token in body["prompt"])
        assert (body["max_tokens"], body["top_k"], body["ignore_eos"]) == (5, 1, True)


@pytest.mark.parametrize("flags", [["--backend", "vllm"], ["--endpoint-type", "openai"], []])
async def test_flags_of_vllm_name_the_server(flags: list[str], tmp_path: Path, capsys) -> None:
    server = SseServer([completion("a"), usage(6, 1), DONE])
    async with running(server):
        port = server.url.rpartition(":")[2]
        words = [*SERVE, *flags, "--host", "127.0.0.1", "--port", port, "--model", "m", "--served-model-name", "theirs"]
        more = ["--top-p", "0.5", "--top-k", "3", "--trust-remote-code", "--disable-tqdm", "--num-warmups", "0"]
        assert await asyncio.to_thread(main, [*words, *more]) == 0, capsys.readouterr().err
    for path, body in server.requests:
        assert (path, body["model"], body["top_p"], body["top_k"]) == ("/v1/completions", "theirs", 0.5, 3)


async def test_a_chat_is_sent_texts(tmp_path: Path):
    server = SseServer([{"choices": [{"delta": {"content": "a"}}]}, DONE])
    async with running(server):
        words = [*SERVE, "--backend", "openai-chat", "--base-url", server.url, "--model", "theirs", "--no-ignore-eos"]
        texts = ["--prompt-format", "text", "--tokenizer", "demo", "--output-json", f"{tmp_path}/a.json"]
        assert await asyncio.to_thread(main, [*words, *texts]) == 0
    assert all(isinstance(body["messages"][0]["content"], str) for _, body in server.requests)
    assert "the machine" not in json.loads((tmp_path / "a.json").read_text())["limits"]["source"]


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-rate", "0"], "--request-rate: 0.0 is not above the limit of 0"),
        (["--request-rate", "4", "1", "4"], "--request-rate: 4.0 is given more than once"),
        (["--burstiness", "nan"], "--burstiness: nan is not above"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-strategy: needs --ramp-up-start-rps"),
        (["--ramp-up-start-rps", "1"], "--ramp-up-start-rps: requires --ramp-up-strategy"),
        (
            ["--ramp-up-strategy=linear", "--ramp-up-start-rps=1", "--ramp-up-end-rps=2", "--request-rate=1"],
            "--ramp-up-strategy: replaces --request-rate",
        ),
        (["--max-concurrency", "0"], "--max-concurrency: 0 is out of range: must be from 1"),
        (["--num-warmups", "-1"], "--num-warmups: -1 is out of range"),
        (["--temperature", "-1"], "--temperature: -1.0 is out of range"),
        (["--goodput", "fast:3"], "--goodput: 'fast:3' is not NAME:MILLISECONDS"),
        (["--percentile-metrics", "x"], "--percentile-metrics: 'x' is not one of"),
        (["--metric-percentiles", "101"], "--metric-percentiles: '101' is not a number"),
        (["--metadata", "note"], "--metadata: 'note' is not KEY=VALUE"),
        (["--result-filename", "a", "--request-rate", "1", "2"], "--result-filename: names one file"),
        (
            ["--output-json", "/nowhere/a.json"],
            "--output-json: /nowhere/a.json is a folder, or its folder does not exist",
        ),
        (["--plot", "/nowhere/a.png"], "--plot: /nowhere/a.png is a folder, or in none"),
        (["--plot", "a.doc"], "--plot: a.doc does not end with one of .png"),
        (["--num-prompts", "0"], "--num-prompts: 0 is out of range"),
        (["--target", "nowhere"], "--target: 'nowhere' is not HOST:PORT"),
        (["--target", "h:1", "--", "--max-num-seqs", "2"], "--: works only with a server started by this benchmark"),
        (["--header", "a=b"], "--header: works only with an OpenAI backend"),
        (["--backend", "jpaged", "--base-url", "http://h:1"], "--base-url: works only with an OpenAI backend"),
        (["--target", "h:1", "--backend", "jpaged", "--port", "1"], "--port: conflicts with --target: give only one"),
        (["--base-url", "http://h:1", "--host", "h"], "--host: conflicts with --base-url: give only one"),
        (["--port", "70000"], "--port: 70000 is out of range"),
        (["--top-k", "3"], "--top-k: works only with an OpenAI backend"),
        (["--backend", "openai", "--target", "h:1"], "--target: works only with --backend jpaged"),
        (["--backend", "openai", "--base-url", "here"], "--base-url: 'here' is not http://HOST:PORT"),
        (["--backend", "openai", "--header", "a"], "--header: 'a' is not KEY=VALUE"),
        (["--extra-body", "[]"], "'[]' is not a JSON object"),
        (["--extra-body", "{"], "'{' is not JSON"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_started(words, message, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "command", lambda model, flags: ["/nowhere"])
    assert main([*SERVE, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SERVE, "--plot", "a.png"]) == 2
    told = "--plot: a plot requires matplotlib: pip install 'jpaged[bench]'"
    assert told in capsys.readouterr().err


@pytest.mark.long
def test_turns_of_conversations_find_the_ones_before_in_the_cache(fake_server, tmp_path: Path, capsys):
    """Blocks of the fake's 4 tokens: all full blocks of a turn and its answer are cached at the next one."""
    words = ["bench", "serve", "--model", "fake-model", "--hardware", "none", "--dataset-name", "multi_turn"]
    turns = ["--num-prompts", "3", "--multi-turn-num-turns", "3", "--multi-turn-input-len", "6", "--output-len", "5"]
    assert main([*words, *turns, "--save-detailed", "--output-json", f"{tmp_path}/a.json"]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["completed"], result["failed"]) == (9, 0)
    assert result["request_turns"] == [1, 2, 3] * 3
    assert result["input_lens"] == [6, 17, 28] * 3
    assert [row["mean_input_tokens"] for row in result["turns"]] == [6, 17, 28]
    first, second, third = (row["cached_share"] for row in result["turns"])
    assert first == 0.0 < second < third < 1.0
    assert (
        result["server_counts"]["num_prefix_hit_tokens"] == result["total_cached_tokens"] == sum(result["cached_lens"])
    )
    assert re.search(r"^turns", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.long
def test_a_trace_is_replayed_with_its_shared_prefixes(fake_server, tmp_path: Path):
    records = [
        {"timestamp": 10 * n, "input_length": 17, "output_length": 2, "hash_ids": [0, 1, 2, 3, 10 + n]}
        for n in range(4)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    words = ["bench", "serve", "--model", "fake-model", "--hardware", "none", "--num-warmups", "0"]
    trace = ["--dataset-name", "trace", "--dataset-path", str(path), "--trace-block-size", "4"]
    assert main([*words, *trace, "--save-detailed", "--output-json", f"{tmp_path}/a.json"]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["completed"], result["input_lens"], result["output_lens"]) == (4, [17] * 4, [2] * 4)
    assert result["cached_lens"] == [0, 16, 16, 16]
    assert result["start_times"] == sorted(result["start_times"])
    assert "turns" not in result
