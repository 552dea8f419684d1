"""Several servers share a batch: each line has one result, whoever is slow, full, lost, or of another model."""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from jpaged.client import batch
from jpaged.client.batch import BatchOptions, BatchSummary, BatchTargets, Lines, compute_window, run_batch, targets_in
from jpaged.errors import InvalidArgument, JpagedError, QueueFull, Unavailable, Unsupported
from jpaged.openai.lines import Line
from jpaged.server_load import Load
from jpaged.types import ModelInfo
from tests.client.test_batch import ignore, results, simple, write_input
from tests.server import harness as harness_module
from tests.server.harness import MODEL, eventually, running

Run = Callable[["FakeServer", Line], Awaitable[None]]


def load(**numbers: int) -> Load:
    return Load(**{"max_num_seqs": 4, **numbers}, replicas=())


class FakeServer:
    """A server with so many rows; `run` is what becomes of a line."""

    def __init__(self, run: Run, *, num_rows: int = 2, model: ModelInfo = MODEL, latency_s: float = 1.0) -> None:
        self.run = run
        self.latency_s = latency_s
        self.num_open = self.most_open = 0
        self._model = model
        self._num_rows = num_rows

    async def model_info(self) -> ModelInfo:
        return self._model

    async def load(self) -> Load:
        return load(max_num_seqs=self._num_rows, num_running=self.num_open)


class Tally:
    """Runs lines on fake servers, and keeps which server answered which."""

    def __init__(self, servers: dict[str, FakeServer], max_concurrency: int = 64) -> None:
        self.answered: dict[str, str] = {}
        self.failed: dict[str, JpagedError] = {}
        self.num_retries = 0
        self.targets = BatchTargets(servers, max_concurrency, self._retry)
        self._names = {id(server): name for name, server in servers.items()}

    async def run(self, num_lines: int) -> Counter[str]:
        await self.targets.meet()
        made = (Line(i, f"c{i}", "/v1/completions", {}) for i in range(num_lines))
        lines = Lines(made, num_lines)
        await asyncio.wait_for(self.targets.run(lines, self._answer, self._fail), 60)
        assert lines.is_done
        assert len(self.answered) + len(self.failed) == num_lines
        return Counter(self.answered.values())

    async def _answer(self, server: FakeServer, line: Line) -> bool:
        server.num_open += 1
        server.most_open = max(server.most_open, server.num_open)
        try:
            await server.run(server, line)
        finally:
            server.num_open -= 1
        assert line.custom_id not in self.answered
        self.answered[line.custom_id] = self._names[id(server)]
        return True

    def _fail(self, line: Line, error: JpagedError) -> None:
        assert line.custom_id not in self.answered.keys() | self.failed.keys()
        self.failed[line.custom_id] = error

    def _retry(self) -> None:
        self.num_retries += 1


class Clock:
    """Time that passes when everybody waits: the next line that is due is answered then."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def run(self, server: FakeServer, line: Line) -> None:
        due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._due, (self.now_s + server.latency_s, next(self._numbers), due))
        await due

    async def pass_while(self, task: asyncio.Task[Any]) -> None:
        while not task.done():
            for _ in range(20):  # turns of the loop in which all take what they can
                await asyncio.sleep(0)
            if self._due:
                self.now_s, _, due = heapq.heappop(self._due)
                due.set_result(None)


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr(batch, "_FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(batch, "_MAX_BACKOFF_S", 0.01)


async def at_once(server: FakeServer, line: Line) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("numbers", "num_open", "max_concurrency", "window"),
    [
        ({}, 0, 256, 8),
        ({}, 0, 5, 5),
        ({"num_running": 4, "num_waiting": 3}, 7, 256, 8),
        ({"num_running": 4, "num_waiting": 3}, 2, 256, 3),
        ({"num_running": 4, "num_waiting": 300}, 0, 256, 1),
        ({"num_running": 1}, 3, 256, 8),
        ({"max_num_seqs": 128}, 0, 256, 256),
    ],
)
def test_a_window_is_two_calls_a_row_less_those_of_others(numbers, num_open, max_concurrency, window):
    assert compute_window(load(**numbers), num_open, max_concurrency) == window


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["a:1"], ("a:1",)),
        (["a:1,b:2"], ("a:1", "b:2")),
        (["a:1, b:2", "c:3"], ("a:1", "b:2", "c:3")),
        (["dns:///a:1", "ipv4:10.0.0.1:1,10.0.0.2:1"], ("dns:///a:1", "ipv4:10.0.0.1:1,10.0.0.2:1")),
    ],
)
def test_targets_are_named_by_commas_and_by_options(texts, names):
    assert targets_in(texts) == names


def test_a_target_that_is_named_twice_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"^--target: a:1 is given twice"):
        BatchOptions(tmp_path / "in", tmp_path / "out", ["b:2,a:1", "a:1"])
    with pytest.raises(InvalidArgument, match=r"^--target: '' is not HOST:PORT"):
        BatchOptions(tmp_path / "in", tmp_path / "out", "a:1,")


def test_lines_that_come_back_are_taken_first_and_none_is_lost():
    lines = Lines((Line(i, f"c{i}", "", {}) for i in range(2)), 3)
    first = lines.take()
    assert first is not None
    assert (first.custom_id, lines.num_waiting) == ("c0", 2)
    lines.give_back(first)
    assert (lines.num_waiting, lines.take()) == (3, first)
    lines.finish()
    assert lines.take() is not None
    assert not lines.is_done
    assert (lines.take(), lines.num_waiting) == (None, 0)
    lines.finish()
    assert lines.is_done


async def test_a_server_that_is_ten_times_slower_gets_a_tenth_and_holds_up_nothing(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(batch, "_now_s", lambda: clock.now_s)
    servers = {"fast": FakeServer(clock.run, latency_s=1.0), "slow": FakeServer(clock.run, latency_s=10.0)}
    run = asyncio.create_task(Tally(servers).run(200))
    await clock.pass_while(run)
    shares = run.result()
    assert 10 <= shares["slow"] <= 20  # 4 lines a second and 0.4
    assert clock.now_s <= 50.0  # what the fast one would have taken alone
    assert servers["fast"].most_open == servers["slow"].most_open == 4


async def test_near_the_end_a_slow_server_takes_nothing_that_the_others_do_sooner(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(batch, "_now_s", lambda: clock.now_s)
    servers = {"fast": FakeServer(clock.run, latency_s=1.0), "slow": FakeServer(clock.run, latency_s=10.0)}
    run = asyncio.create_task(Tally(servers).run(50))
    await clock.pass_while(run)
    assert run.result()["slow"] == 2  # those that it took before anybody knew its speed
    assert clock.now_s <= 13.0


async def test_a_full_queue_is_left_alone_for_as_long_as_it_says_and_its_line_runs_elsewhere():
    calls_s: list[float] = []

    async def full_once(server: FakeServer, line: Line) -> None:
        calls_s.append(asyncio.get_running_loop().time())
        if len(calls_s) == 1:
            raise QueueFull("full", retry_after_s=0.2)

    async def until_it_is_back(server: FakeServer, line: Line) -> None:
        await eventually(lambda: len(calls_s) > 1 or line.custom_id == "c0")

    tally = Tally({"full": FakeServer(full_once, num_rows=1), "other": FakeServer(until_it_is_back, num_rows=1)}, 1)
    assert (await tally.run(6))["full"] >= 1
    assert calls_s[1] - calls_s[0] >= 0.8 * 0.2
    assert tally.num_retries == 1


async def test_a_line_that_ends_its_servers_fails_and_the_others_have_their_results():
    async def run(server: FakeServer, line: Line) -> None:
        if line.custom_id == "c3":
            raise Unavailable("gone")
        await asyncio.sleep(0)

    tally = Tally({"a": FakeServer(run), "b": FakeServer(run)})
    await tally.run(300)
    assert {name: str(error) for name, error in tally.failed.items()} == {"c3": "gone"}


async def test_a_server_without_a_load_has_as_many_calls_as_may_be():
    class Proxy(FakeServer):
        async def load(self) -> Load:
            raise Unsupported("no such method")

    proxy = Proxy(at_once)
    assert await Tally({"proxy": proxy}, max_concurrency=7).run(50) == {"proxy": 50}
    assert proxy.most_open == 7


async def test_what_is_no_failure_of_a_server_ends_the_run():
    async def broken(server: FakeServer, line: Line) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Tally({"a": FakeServer(broken), "b": FakeServer(at_once)}).run(10)


async def test_all_servers_are_met_before_anything_is_sent_and_must_serve_one_model(tmp_path, monkeypatch):
    source, target = write_input(tmp_path / "in", simple(4)), tmp_path / "out"
    async with running() as first:
        monkeypatch.setattr(harness_module, "MODEL", replace(MODEL, name="other", max_model_len=64))
        async with running() as second:
            options = BatchOptions(source, target, [first.target, second.target])
            with pytest.raises(InvalidArgument) as raised:
                await run_batch(options, ignore)
    differences = "name is 'other', not 'fake'; max_model_len is 64, not 128"
    assert str(raised.value) == (f"--target: {second.target} serves another model than {first.target}: {differences}")
    assert target.read_text() == ""


class Link:
    """A way to a server that can be cut, with all calls that go over it, and be there again."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._writers: list[asyncio.StreamWriter] = []
        self._port = 0

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return f"127.0.0.1:{self._port}"

    async def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


async def test_what_a_lost_server_had_is_run_by_the_others_once(tmp_path):
    source, target = write_input(tmp_path / "in", simple(60)), tmp_path / "out"
    async with running() as first, running() as second:
        second.faults.gate.clear()
        link = Link(second.port)
        options = BatchOptions(source, target, [first.target, await link.open()])
        run = asyncio.create_task(run_batch(options, ignore))
        await eventually(lambda: second.num_open_calls > 0)
        num_lost = second.num_open_calls
        await link.cut()
        summary = await asyncio.wait_for(run, 60)
        assert list(summary.num_answered.values()) == [60, 0]
    assert results(target).keys() == {f"c{i}" for i in range(60)}
    assert (summary.num_succeeded, summary.num_failed) == (60, 0)
    assert summary.num_retries >= num_lost > 0


@pytest.mark.long
async def test_a_server_that_comes_back_takes_part_again(tmp_path):
    source, target = write_input(tmp_path / "in", simple(60)), tmp_path / "out"
    seen: list[BatchSummary] = []
    async with running() as first, running() as second:
        first.faults.gate.clear()
        second.faults.gate.clear()
        link = Link(second.port)
        name = await link.open()
        run = asyncio.create_task(run_batch(BatchOptions(source, target, [first.target, name]), seen.append))
        await eventually(lambda: second.num_open_calls > 0 and first.num_open_calls > 0)
        await link.cut()
        second.faults.release()
        await eventually(lambda: seen[-1].num_retries > 0)  # the client's own tries were in vain: it counts as lost
        assert seen[-1].num_answered.get(name, 0) == 0
        await link.open()
        await eventually(lambda: seen[-1].num_answered.get(name, 0) > 0)  # the first has not answered anything yet
        first.faults.release()
        summary = await asyncio.wait_for(run, 60)
        await link.cut()
    assert summary.num_succeeded == sum(summary.num_answered.values()) == 60
    assert results(target).keys() == {f"c{i}" for i in range(60)}


async def test_a_server_that_is_not_there_at_the_start_is_done_without(tmp_path):
    source, target = write_input(tmp_path / "in", simple(5)), tmp_path / "out"
    async with running() as harness:
        summary = await run_batch(BatchOptions(source, target, ["127.0.0.1:1", harness.target]), ignore)
    assert summary.num_answered == {"127.0.0.1:1": 0, harness.target: 5}


@pytest.mark.long
async def test_results_do_not_depend_on_who_runs_a_line(tmp_path):
    bodies = simple(12, temperature=1.0) + simple(4, temperature=0.7, n=2) + simple(2, beam_width=2)
    source = write_input(tmp_path / "in", bodies)
    texts = []
    async with running() as first, running() as second:
        spreads = [first.target, [first.target, second.target], [second.target]]
        for i, spread in enumerate(spreads):
            await run_batch(BatchOptions(source, tmp_path / f"out{i}", spread, max_concurrency=3), ignore)
            found = results(tmp_path / f"out{i}")
            texts.append({name: line["response"]["body"]["choices"] for name, line in found.items()})
    assert texts[0] == texts[1] == texts[2]
    assert len({str(choices) for choices in texts[0].values()}) == len(bodies)
