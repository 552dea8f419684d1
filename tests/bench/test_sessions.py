"""Conversations and traces: what is sent when, what a turn begins with, and what is told of each turn."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from jpaged.bench import load_generator
from jpaged.bench.cli.flags import print_turns
from jpaged.bench.datasets import DatasetOptions, Sample
from jpaged.bench.load_generator import conversations, drive, recorded_times_s
from jpaged.bench.metrics import Trace, cached_keys, details, summarize, turn_table
from jpaged.bench.results import draw
from jpaged.cli.main import main
from jpaged.errors import InvalidArgument, Unavailable
from tests.bench.sse_server import DONE, SseServer, running
from tests.bench.words import Letters

MULTI_TURN: dict[str, Any] = {
    "dataset_name": "multi_turn",
    "num_prompts": 3,
    "multi_turn_num_turns": 4,
    "multi_turn_prefix_len": 10,
    "multi_turn_input_len": 5,
    "multi_turn_output_len": 2,
    "multi_turn_delay": 0.5,
}


def made(**options: Any) -> list[Sample]:
    return DatasetOptions(**options).make(Letters())


def test_turns_of_random_conversations_add_to_the_ones_before() -> None:
    samples = made(**MULTI_TURN)
    assert [(s.session, s.turn) for s in samples[:5]] == [
        *(("conversation 0", turn) for turn in range(4)),
        ("conversation 1", 0),
    ]
    assert [(len(s.prompt), s.output_len, s.delay_s) for s in samples[:4]] == [(15, 2, 0.0)] + 3 * [(5, 2, 0.5)]
    assert all(s.adds for s in samples)
    assert {s.prompt[:10] for s in samples if not s.turn} == {samples[0].prompt[:10]}
    assert len({s.prompt for s in samples}) == 12
    assert made(**MULTI_TURN) == samples != made(**{**MULTI_TURN, "seed": 1})
    assert conversations(samples) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(isinstance(s.prompt, str) for s in made(**MULTI_TURN, prompt_format="text"))


def trace_of(folder: Path, *records: Any, **options: Any) -> list[Sample]:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return made(dataset_name="trace", dataset_path=path, **{"trace_block_size": 4, **options})


def mooncake(timestamp: float | None, input_length: int, *hash_ids: int, **fields: Any) -> dict[str, Any]:
    timed = {} if timestamp is None else {"timestamp": timestamp}
    return {**timed, "input_length": input_length, "output_length": 3, "hash_ids": [*hash_ids], **fields}


def test_a_mooncake_trace_is_sent_at_its_times_with_its_shared_blocks(tmp_path: Path) -> None:
    samples = trace_of(
        tmp_path,
        mooncake(3000, 10, 1, 2, 3),
        mooncake(1000, 12, 1, 2, 4),
        mooncake(2000, 9, 5),
        mooncake(2500, 3, 1, 9, output_length=0),
    )
    assert [s.start_s for s in samples] == [0.0, 1.0, 1.5, 2.0]
    assert [s.prompt_len for s in samples] == [12, 9, 3, 10]
    assert [s.output_len for s in samples] == [3, 3, 1, 3]
    first, other, short, last = (s.prompt for s in samples)
    assert last[:8] == first[:8] and last[8:] != first[8:10]
    assert short == first[:3]
    assert other[:4] != first[:4] and len(set(other)) > 1
    assert conversations(samples) == [[0], [1], [2], [3]]
    times_s = recorded_times_s(samples)
    assert times_s is not None and times_s.tolist() == [0.0, 1.0, 1.5, 2.0]
    assert all(3 <= int(token) < 128 for s in samples for token in s.prompt)


def test_a_trace_can_be_shortened_and_limited(tmp_path: Path) -> None:
    records = [mooncake(1000 * n, 4 + n, n, output_length=50) for n in range(6)]
    fast = trace_of(tmp_path, *records, trace_speedup=10.0, trace_max_output_len=8, trace_max_input_len=8)
    assert [s.start_s for s in fast] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert {s.output_len for s in fast} == {8}
    assert len(trace_of(tmp_path, *records, num_prompts=2)) == 2
    text = trace_of(tmp_path, *records, prompt_format="text")
    assert all(isinstance(s.prompt, str) for s in text) and [s.start_s for s in text] == [0, 1, 2, 3, 4, 5]


def test_sessions_of_aiperf_add_turns_after_delays(tmp_path: Path) -> None:
    samples = trace_of(
        tmp_path,
        mooncake(0, 8, 1, 2, session_id="a"),
        mooncake(100, 4, 3, session_id=7),
        mooncake(None, 4, 4, session_id="a", delay=2000),
        mooncake(None, 4, 5, session_id="a", delay=500),
        trace_speedup=2.0,
    )
    assert [(s.session, s.turn, s.delay_s, s.adds) for s in samples] == [
        ("a", 0, 0.0, True),
        ("a", 1, 1.0, True),
        ("a", 2, 0.25, True),
        ("7", 0, 0.0, True),
    ]
    times_s = recorded_times_s(samples)
    assert times_s is not None and times_s.tolist() == [0.0, 0.05]


AGENT = {
    "id": "session",
    "block_size": 4,
    "hash_id_scope": "local",
    "requests": [
        {"t": 10.0, "type": "n", "in": 8, "out": 5, "hash_ids": [0, 1], "api_time": 2.0},
        {
            "t": 13.0,
            "type": "subagent",
            "requests": [{"t": 13.5, "type": "s", "in": 6, "out": 1, "hash_ids": [0, 7]}],
        },
        {"t": 15.0, "type": "s", "in": 14, "out": 4, "hash_ids": [0, 1, 2, 3], "api_time": 1.0},
        {"t": 15.5, "type": "n", "in": 16, "out": 4, "hash_ids": [0, 1, 2, 3]},
        {"t": 90.0, "type": "n", "in": 17, "out": 4, "hash_ids": [0, 1, 2, 3], "think_time": 0.25},
    ],
}


def test_agents_of_a_weka_trace_are_sessions_of_whole_prompts(tmp_path: Path) -> None:
    samples = trace_of(tmp_path, AGENT)
    main = [s for s in samples if s.prompt_len != 6]
    (sub,) = [s for s in samples if s.prompt_len == 6]
    assert [(s.turn, s.prompt_len, s.output_len, s.adds) for s in main] == [
        (0, 8, 5, False),
        (1, 14, 4, False),
        (2, 16, 4, False),
        (3, 17, 4, False),
    ]
    assert [s.delay_s for s in main] == [0.0, 3.0, 0.0, 0.25]
    assert len({s.session for s in main}) == 1 and sub.session not in {main[0].session}
    assert (sub.start_s, sub.prompt[:4]) == (3.5, main[0].prompt[:4])
    assert [s.prompt[:14] for s in main[1:]] == [main[1].prompt] * 3
    assert main[1].prompt[:8] == main[0].prompt


def test_a_folder_has_a_session_in_each_file_with_blocks_of_its_own(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", "ignored.txt"):
        (tmp_path / name).write_text(json.dumps(AGENT, indent=1))
    samples = made(dataset_name="trace", dataset_path=tmp_path)
    assert len(samples) == 10
    assert len({s.session for s in samples}) == 4
    first = [s.prompt for s in samples if s.prompt_len == 8]
    assert first[0] != first[1]
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "a.jsonl").write_text("\n".join([json.dumps({**AGENT, "hash_id_scope": "global"})] * 2))
    assert len({s.prompt for s in made(dataset_name="trace", dataset_path=shared) if s.prompt_len == 8}) == 1


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: is not a JSON object"),
        ({"output_length": 1}, "line 2: input_length: None is not from 0 to 1048576"),
        (mooncake(0, 4, output_length="3"), "line 2: output_length: '3' is not from 0"),
        (mooncake(-1, 4), "line 2: timestamp: -1 is not a number from 0"),
        (mooncake(0, 4, delay=True), "line 2: delay: True is not a number from 0"),
        (mooncake(0, 4, hash_ids=[0.5]), "line 2: hash_ids: is not a list of numbers"),
        (mooncake(0, 4, session_id=[1]), r"line 2: session_id: \[1\] is neither text nor a number"),
        (mooncake(0, 4, messages=[]), "line 2: messages: is not supported"),
        ("[" * 100_000, "line 2: is not JSON"),
        (mooncake(10**400, 4), "line 2: timestamp: 1000* is not a number from 0"),
        ({"block_size": 4, "requests": 5}, "line 2: requests: is not a list"),
        ({"requests": []}, "line 2: block_size: None is not from 0"),
        ({"block_size": 4, "requests": [{"in": 1, "out": 1}]}, r"line 2: requests\[0\]: t: is missing"),
    ],
)
def test_a_trace_of_another_format_is_refused_with_its_line(tmp_path: Path, record: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^--dataset-path: .*trace.jsonl: {problem}"):
        trace_of(tmp_path, mooncake(0, 4), record)


def test_agents_are_nested_up_to_a_depth(tmp_path: Path) -> None:
    entry: dict[str, Any] = {"t": 0.0, "in": 1, "out": 1}
    for _ in range(32):
        entry = {"type": "subagent", "requests": [entry]}
    assert len(trace_of(tmp_path, {"block_size": 4, "requests": [entry]})) == 1
    deeper = {"type": "subagent", "requests": [entry]}
    with pytest.raises(InvalidArgument, match="requests: are nested deeper than the limit of 32"):
        trace_of(tmp_path, {"block_size": 4, "requests": [deeper]})


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no request that could be sent"):
        trace_of(tmp_path, mooncake(0, 400, 1), trace_max_input_len=10)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        made(dataset_name="trace", dataset_path=tmp_path / "missing")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dataset_name": "trace"}, "--dataset-path: is missing"),
        ({"dataset_name": "multi_turn", "dataset_path": Path("a")}, "--dataset-path: goes with a data set in a file"),
        ({"trace_speedup": 0.0}, "--trace-speedup: 0.0 is out of range: must be above 0"),
        ({"multi_turn_num_turns": 0}, "--multi-turn-num-turns: 0 is out of range: must be from 1"),
        ({"multi_turn_delay": -1.0}, "--multi-turn-delay: -1.0 is out of range: must be from 0 to 86400"),
    ],
)
def test_options_of_conversations_have_limits(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        DatasetOptions(**options)


class Echo:
    """A server that answers with two numbers or letters, and fails on demand."""

    def __init__(self, failing: int | None = None) -> None:
        self.sent: list[Sample] = []
        self._failing = failing

    async def send(self, sample: Sample, trace: Trace) -> None:
        if len(self.sent) == self._failing:
            self.sent.append(sample)
            raise Unavailable("no more")
        self.sent.append(sample)
        for word in "xy":
            trace.receive(word, [len(self.sent)])
        whole = sample.whole_prompt
        trace.count(len(whole), 2, len(whole) // 2)

    async def close(self) -> None:
        """Nothing is open."""


class Clock:
    """Time that only sleep advances."""

    def __init__(self) -> None:
        self.now_s, self.slept_s = 100.0, list[float]()

    def perf_counter(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.slept_s.append(round(seconds, 6))
            self.now_s += seconds
        await asyncio.sleep(0)


def driven(monkeypatch: pytest.MonkeyPatch, backend: Echo, samples: list[Sample], times_s: list[float]) -> Any:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    sleeping = replace_sleep(clock)
    monkeypatch.setattr(load_generator, "asyncio", sleeping)
    ended: list[Trace] = []
    run = drive(backend, samples, np.array(times_s), on_end=ended.append)
    return asyncio.run(run), clock, ended


def replace_sleep(clock: Clock) -> Any:
    class Module:
        """asyncio with another sleep."""

        sleep = staticmethod(clock.sleep)
        Semaphore, TaskGroup = asyncio.Semaphore, asyncio.TaskGroup

    return Module


def test_a_turn_begins_with_the_answer_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Echo()
    samples = made(**{**MULTI_TURN, "num_prompts": 1, "multi_turn_num_turns": 3})
    result, clock, ended = driven(monkeypatch, backend, samples, [0.0])
    whole = [sample.whole_prompt for sample in backend.sent]
    first, second, third = samples
    assert whole[0] == first.prompt
    assert whole[1] == (*first.prompt, 1, 1, *second.prompt)
    assert whole[2] == (*whole[1], 2, 2, *third.prompt)
    assert clock.slept_s == [0.5, 0.5]
    assert [trace.turn for trace in result.traces] == [0, 1, 2]
    assert len(ended) == 3
    texts = Echo()
    driven(monkeypatch, texts, [replace(s, prompt=f"<{s.turn}>") for s in samples], [0.0])
    assert [sample.whole_prompt for sample in texts.sent] == ["<0>", "<0>xy<1>", "<0>xy<1>xy<2>"]


def test_recorded_times_and_delays_both_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(number: int, **timing: Any) -> Sample:
        return Sample((5,), 1, 2, session="a", turn=number, **timing)

    samples = [turn(0, start_s=3.0), turn(1, start_s=9.0, delay_s=1.0), turn(2, start_s=9.5, delay_s=2.0)]
    _, clock, _ = driven(monkeypatch, Echo(), samples, [0.25])
    assert clock.slept_s == [0.25, 6.0, 2.0]


def test_a_conversation_ends_with_its_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Echo(failing=1)
    samples = made(**{**MULTI_TURN, "num_prompts": 1})
    result, _, ended = driven(monkeypatch, backend, samples, [0.0])
    assert len(backend.sent) == 2
    later = "an earlier turn of the conversation failed"
    assert [trace.error for trace in result.traces] == ["", "no more", later, later]
    assert len(ended) == 4
    numbers = summarize(result.traces, 1.0)
    assert (numbers["completed"], numbers["failed"]) == (1, 3)
    assert [(row["completed"], row["failed"]) for row in numbers["turns"]] == [(1, 0), (0, 1), (0, 1), (0, 1)]


def turn_trace(turn: int, prompt_len: int, cached_len: int | None, ttft_s: float = 0.1) -> Trace:
    return Trace(prompt_len, 4, 0.0, 1.0, 1.0 + ttft_s, 1.5, turn=turn, cached_len=cached_len)


def test_turns_are_told_with_their_cached_share_first_tokens_and_cost() -> None:
    traces = [turn_trace(0, 10, 0), turn_trace(1, 20, 15, 0.2), turn_trace(0, 30, 10, 0.3), turn_trace(1, 20, 5, 0.4)]
    first, second = turn_table(traces, (50.0,))
    assert (first["turn"], first["cached_share"], first["mean_computed_tokens"]) == (1, 0.25, 19.0)
    assert (second["turn"], second["cached_share"], second["mean_computed_tokens"]) == (2, 0.5, 14.0)
    assert (second["mean_input_tokens"], second["mean_output_tokens"]) == (20.0, 4.0)
    assert second["median_ttft_ms"] == second["p50_ttft_ms"] == pytest.approx(300.0)
    assert cached_keys(traces) == {"total_cached_tokens": 30, "cached_share": 30 / 80}
    assert summarize(traces, 1.0)["cached_share"] == 30 / 80


def test_what_a_server_does_not_report_is_left_out() -> None:
    traces = [turn_trace(0, 10, None), turn_trace(1, 20, None)]
    assert cached_keys(traces) == {}
    assert all("cached_share" not in row and "median_ttft_ms" in row for row in turn_table(traces))
    assert turn_table(traces[:1]) == turn_table([]) == []
    assert "turns" not in summarize(traces[:1], 1.0)


def test_turns_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = turn_table([turn_trace(turn, 10 * (turn + 1), 5 * turn) for turn in range(40)])
    print_turns(Console(width=200), {"turns": rows})
    shown = capsys.readouterr().out
    assert "TTFT, ms" in shown and "computed tokens" in shown and "8 more turns" in shown
    print_turns(Console(), {})
    assert capsys.readouterr().out == ""


def test_turns_are_drawn_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))

    def run(rate: float, num_turns: int = 3) -> dict[str, Any]:
        turns = turn_table([turn_trace(turn, 10 * (turn + 1), 5 * turn) for turn in range(num_turns)])
        speed = {"request_rate": rate, "request_throughput": 1.0, "output_throughput": 2.0, "median_ttft_ms": 3.0}
        return {**speed, "turns": turns}

    draw({"ours": [run(1.0), run(2.0)]}, tmp_path / "a.png", "turns")
    ttft, cached, computed = saved[0].axes[2:]
    assert [ax.get_ylabel() for ax in (ttft, cached, computed)] == [
        *("median TTFT, ms", "cached share of the prompt", "computed tokens"),
    ]
    assert [(str(line.get_label()), np.asarray(line.get_xdata()).tolist()) for line in cached.lines] == [
        *(("1.0 requests/s", [1, 2, 3]), ("2.0 requests/s", [1, 2, 3])),
    ]
    assert np.asarray(cached.lines[0].get_ydata()).tolist() == pytest.approx([0.0, 0.25, 1 / 3])
    draw({"a": [run(1.0)], "b": [run(1.0, 1)]}, tmp_path / "b.png", "turns")
    assert [line.get_label() for line in saved[1].axes[2].lines] == ["a, 1.0/s", "b, 1.0/s"]


def test_details_have_turns_and_cached_tokens() -> None:
    found = details([turn_trace(0, 10, 0), turn_trace(1, 20, 15)])
    assert (found["request_turns"], found["cached_lens"]) == ([1, 2], [0, 15])


@pytest.mark.parametrize("dataset", ["multi_turn", "trace"])
def test_only_a_server_is_sent_conversations(dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ["--dataset-path", str(tmp_path)] if dataset == "trace" else []
    assert main(["bench", "throughput", "--dataset-name", dataset, *path]) == 2
    assert f"{dataset} works only with jpaged bench serve" in capsys.readouterr().err


async def test_chats_grow_by_answers(tmp_path: Path) -> None:
    counted = {"usage": {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}}
    server = SseServer([{"choices": [{"delta": {"content": "ab"}}]}, counted, DONE])
    async with running(server):
        words = ["--backend", "openai-chat", "--base-url", server.url, "--model", "theirs", "--hardware", "none"]
        words += ["--dataset-name", "multi_turn", "--num-prompts", "1", "--multi-turn-num-turns", "3"]
        words += ["--multi-turn-input-len", "2", "--output-len", "1", "--num-warmups", "0", "--tokenizer", "demo"]
        assert await asyncio.to_thread(main, ["bench", "serve", *words]) == 2
        words += ["--prompt-format", "text", "--output-json", f"{tmp_path}/a.json"]
        assert await asyncio.to_thread(main, ["bench", "serve", *words]) == 0
    sent = [[one["role"] for one in body["messages"]] for _, body in server.requests]
    assert sent == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
    last = server.requests[-1][1]["messages"]
    assert [one["content"] for one in last if one["role"] == "assistant"] == ["ab", "ab"]
    assert last[:3] == server.requests[1][1]["messages"]
    result = json.loads((tmp_path / "a.json").read_text())
    assert [row["cached_share"] for row in result["turns"]] == pytest.approx([1 / 3] * 3)
    assert result["workload"]["multi_turn_num_turns"] == 3 and "trace_block_size" not in result["workload"]
