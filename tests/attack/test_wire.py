"""Fuzzed calls on every RPC. The quick test attacks a fake engine in this process; the long ones a real server."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client import Client
from jpaged.server_load import LoadTotals
from jpaged.types import SamplingParams
from tests.attack.attacker import CUT_SHORT, METHODS, Attacker, Verdict
from tests.attack.messages import Names
from tests.processes import Process, load_at_rest
from tests.server.harness import eventually, running

NUM_SHOTS = 6_000
"""At each of the two servers; a fifth of them before the memory is first looked at."""
MAX_GROWTH_BYTES = 128 << 20
"""Anonymous memory that allocators may keep. A leak of 28 kB per request is above it."""


def hold(verdict: Verdict) -> None:
    """Nothing was wrong, and every method was reached, refused something and did something.

    Whether a call meets something that another one left (a request to abort, a prefix to unpin) is up to the machine:
    that it looked for it is enough here.
    """
    assert not verdict.faults, f"{len(verdict.faults)} faults\n" + "\n".join(verdict.faults[:20])
    for method in METHODS:
        name = method.path.rpartition("/")[2]
        statuses = verdict.statuses_of(name)
        if name == "NoSuchMethod":
            assert "UNIMPLEMENTED" in statuses, (name, statuses)
            continue
        done = {CUT_SHORT} if name == "Watch" else {"OK"}  # a watch has no end of its own
        if name in ("Abort", "UnpinPrefix"):
            done.add("NOT_FOUND")
        if "Adapter" in name or name in ("UpdateWeights", "SendWeights"):  # which neither server takes
            done.add("UNIMPLEMENTED")
        assert "INVALID_ARGUMENT" in statuses, (name, statuses)
        assert done & statuses, (name, statuses)


def is_at_rest(load: LoadTotals) -> bool:
    return (load.num_running, load.num_waiting, load.num_blocks_free) == (0, 0, load.num_blocks)


def test_every_method_of_our_services_is_attacked():
    services = [*inference_pb2.DESCRIPTOR.services_by_name.values(), *control_pb2.DESCRIPTOR.services_by_name.values()]
    paths = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert paths <= {method.path for method in METHODS}


@pytest.mark.long
async def test_a_server_over_a_fake_engine_keeps_its_word(caplog):
    async with running(served_model_name="fake") as harness:
        verdict = await Attacker(harness.target, seed=1, names=Names(model="fake")).fire(2000)
        await eventually(lambda: harness.num_open_calls == 0 and is_at_rest(harness.serving.engine.load()))
        hold(verdict)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@dataclass(frozen=True, slots=True)
class Victim:
    """A server that is a process of its own."""

    process: Process
    target: str

    @property
    def resident_bytes(self) -> int:
        """The anonymous memory of the process: the kernel may reclaim pages of files, and read them again."""
        status = Path(f"/proc/{self.process.popen.pid}/status").read_text()
        match = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        assert match is not None
        return int(match.group(1)) << 10


@pytest.fixture(params=[1, 2], ids=["one server", "two replicas"])
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    """`jpaged serve demo` with a pool that is small for what comes."""
    words = ["--data-parallel-size", str(request.param), "--num-blocks", "160", "--max-num-seqs", "16"]
    words += ["--max-num-batched-tokens", "128", "--max-num-queued-reqs", "8", "--swap-space", "0.05"]
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={request.param}"}
    process = Process(("-m", "jpaged", "serve", "demo", "--port", "0", "--wait-for-all-programs", *words), environment)
    try:
        yield Victim(process, process.wait_for(r"^ready on (.*)$").group(1))
    finally:
        if process.popen.poll() is None:
            process.end(signal.SIGKILL)


def story(target: str) -> tuple[int, ...]:
    """Tokens that are the same whatever else the server does."""
    with Client(target) as client:
        completion = client.complete("Once upon a time", SamplingParams(max_tokens=24, seed=3))
    return completion.outputs[0].token_ids


@pytest.mark.long
def test_a_server_loses_nothing_under_fuzzed_requests(victim):
    before = story(victim.target)
    attacker = Attacker(victim.target, seed=20)
    asyncio.run(attacker.fire(NUM_SHOTS // 5))
    settled_bytes = victim.resident_bytes
    verdict = asyncio.run(attacker.fire(NUM_SHOTS - NUM_SHOTS // 5))
    hold(verdict)
    assert verdict.num_requests == NUM_SHOTS
    assert story(victim.target) == before
    with Client(victim.target) as client:
        load = load_at_rest(client)
    assert (load.num_blocks_used, load.num_blocks_free) == (0, load.num_blocks)
    assert load.num_compiles_after_warm_up == 0
    assert victim.resident_bytes - settled_bytes < MAX_GROWTH_BYTES
    assert victim.process.end(signal.SIGTERM) == 0
    assert not [line for line in victim.process.lines if re.search("Traceback|ERROR|Exception", line)]
