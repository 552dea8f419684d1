"""Copies of the model on devices of their own change no token, and each device holds its part of one copy alone."""

from __future__ import annotations

import signal
import threading
import urllib.request
from collections import Counter
from pathlib import Path

import jax
import pytest

from jpaged.client import Client
from jpaged.device.compilation import memory_plan
from jpaged.device.compilation.lowering import ServerPrograms
from jpaged.device.executor import JaxExecutor
from jpaged.engine.data_parallel import DataParallelEngine
from jpaged.errors import InvalidArgument, QueueFull
from jpaged.llm import LLM
from jpaged.types import Prompt, SamplingParams
from tests.e2e.rig import assert_same, generate, open_llm, random_prompts, write_model
from tests.e2e.sharing_rig import cold_executors
from tests.e2e.test_sharing import CHECKS
from tests.e2e.test_tensor_parallel import CASES, MOVES, check_same
from tests.processes import Process, load_at_rest

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.mark.long
def test_two_copies_sample_what_one_device_samples(tmp_path: Path) -> None:
    check_same(CASES["llama3_tied"], [(2, 1)], ["cached"], tmp_path)


@pytest.mark.parametrize(
    ("name", "copies", "size", "checks"),
    [
        pytest.param("qwen3_tied", 2, 4, [*CHECKS], marks=pytest.mark.long),
        pytest.param("opt", 4, 2, MOVES, marks=pytest.mark.deep),
        pytest.param("llama3_tied", 8, 1, MOVES, marks=pytest.mark.deep),
    ],
)
def test_any_number_of_copies_samples_what_one_device_samples(
    name: str, copies: int, size: int, checks: list[str], tmp_path: Path
) -> None:
    check_same(CASES[name], [(copies, size)], checks, tmp_path)


def bytes_of_devices(one: JaxExecutor) -> dict[int, int]:
    """Device -> bytes of parameters, pool and last tokens that it holds."""
    held: Counter[int] = Counter()
    for leaf in jax.tree.leaves((one._runner._params, one._pool._array, one._runner._last_tokens)):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return dict(held)


@pytest.mark.long
def test_a_device_holds_its_part_of_one_copy(tmp_path: Path) -> None:
    """As much as one of the four that share the only copy, on devices that no other copy has."""
    case, pool = CASES["qwen3_tied"], {"num_blocks": 20}
    (one,) = cold_executors(case, tmp_path, **pool)
    (whole,) = bytes_of_devices(one).values()
    (split,) = cold_executors(case, tmp_path, tensor_parallel_size=4, **pool)
    (part,) = set(bytes_of_devices(split).values())
    assert part < 0.3 * whole
    copies = cold_executors(case, tmp_path, tensor_parallel_size=4, data_parallel_size=2, **pool)
    held = [bytes_of_devices(copy) for copy in copies]
    assert [sorted(one) for one in held] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [set(one.values()) for one in held] == [{part}, {part}]


@pytest.mark.long
def test_the_option_copies_a_served_model(tmp_path: Path) -> None:
    """Through the front door: who brings no seed gets the same, wherever it runs, and prefixes are found."""
    folder = write_model("llama3_tied", tmp_path)
    params = SamplingParams(temperature=0.9, max_tokens=8, logprobs=0)
    prompts = random_prompts([5, 9, 40, 17, 33, 6])
    with open_llm(folder, num_blocks=40) as llm:
        want = [generate(llm, prompts, params) for _ in range(2)]
    with open_llm(folder, data_parallel_size=2, num_blocks=40) as llm:
        engine = llm._serving.engine
        assert isinstance(engine, DataParallelEngine)
        assert llm._serving.backend.num_devices == 2
        for one in want:
            assert_same(generate(llm, prompts, params), one)
        first, second = engine.replica_loads()
        assert min(first.num_requests_ended, second.num_requests_ended) >= 4
        # 39, 16 and 32 tokens of the prompts of 40, 17 and 33 are full blocks or parts, and are where they were.
        assert engine.load().num_prefix_hit_tokens >= 39 + 16 + 32
        assert engine.load().num_blocks == 80


@pytest.mark.long
def test_the_host_s_memory_is_that_of_all_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is what limits the pools: two copies get about half of the blocks each, and the same number."""
    folder = write_model("llama3_tied", tmp_path)
    available = [1 << 21, 1 << 21, 1 << 20]  # for the only pool; for the first of two, and what that leaves
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: available.pop(0))
    # They would take more than there is. The default pool is a quarter of it.
    monkeypatch.setattr(ServerPrograms, "memory", lambda *programs: memory_plan.ProgramMemory())
    with open_llm(folder, swap_space=0.01) as llm:
        one = llm._serving.engine.geometry
    with open_llm(folder, data_parallel_size=2, swap_space=0.01) as llm:
        two = llm._serving.engine.geometry
        assert llm.config.cache.num_blocks == two.num_blocks
        assert {load.num_blocks for load in llm._serving.engine.replica_loads()} == {two.num_blocks}
    assert available == []
    assert 16 < two.num_blocks <= one.num_blocks // 2 < 128
    assert two.num_host_blocks == one.num_host_blocks // 2 > 0


@pytest.mark.long
def test_the_queue_s_limit_is_that_of_all_copies(tmp_path: Path) -> None:
    folder = write_model("llama3_tied", tmp_path)
    with open_llm(folder, data_parallel_size=2, max_num_queued_reqs=3) as llm:
        engine, make = llm._serving.engine, llm._serving.input_processor.make_request
        params = SamplingParams(max_tokens=1)
        go = threading.Event()

        def hold() -> None:
            """Let no request end before all are there."""
            go.wait()

        held = engine.call_soon(hold)
        try:
            for i in range(19):
                engine.submit(
                    make(request_id=f"r{i}", sampling=params, prompt=Prompt(token_ids=[i + 3])), lambda event: None
                )
            assert engine.is_full
            with pytest.raises(QueueFull, match="19 requests are in flight, the limit of 2 replicas"):
                engine.submit(
                    make(request_id="one more", sampling=params, prompt=Prompt(token_ids=[3])), lambda event: None
                )
        finally:
            go.set()
        held.result()
        assert len(generate(llm, random_prompts([5] * 30), params)) == 30


@pytest.mark.parametrize(
    ("copies", "size", "message"),
    [
        (
            3,
            4,
            r"data_parallel_size: 3 copies of the model on 4 devices each \(tensor_parallel_size\) require 12 devices; "
            "cpu has 8",
        ),
        (9, 1, r"data_parallel_size: 9 copies of the model on 1 devices each .* require 9 devices; cpu has 8"),
        (2, 16, "tensor_parallel_size: requires 16 devices; cpu has 8"),
        (0, 1, "data_parallel_size: 0 is below the limit of 1"),
    ],
)
def test_more_copies_than_devices_are_refused(copies: int, size: int, message: str, tmp_path: Path) -> None:
    folder = write_model("llama3_tied", tmp_path)
    with pytest.raises(InvalidArgument, match=message):
        LLM(str(folder), data_parallel_size=copies, tensor_parallel_size=size)


KINDS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=12),
    SamplingParams(beam_width=3, n=3, max_tokens=12),
]


@pytest.mark.long
def test_a_server_of_two_copies_answers_as_one(tmp_path: Path) -> None:
    """A process, over gRPC: many at once, on threads that share nothing but the host."""
    folder = write_model("llama3_tied", tmp_path)
    prompts = random_prompts([20, 25, 30, 35, 40, 45])
    requests = [(prompt, KINDS[i % 3]) for i, prompt in enumerate(prompts)]
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "num_blocks": 40, "dtype": "float32"}
    with open_llm(folder, **options) as llm:
        outputs = llm.generate(prompts, [kind for _, kind in requests])
        want = [[one.token_ids for one in output.outputs] for output in outputs]
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2, **options}
    flags = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    process = Process(("-m", "jpaged", "serve", str(folder), "--port", "0", "--metrics-port", "0", *flags))
    try:
        address = process.wait_for(r"^ready on (.*)$").group(1)
        process.wait_for(r"^  4 x cpu in 2 replicas, attention ")
        process.wait_for(r"replica 1: compiled: ")
        with Client(address) as client:
            assert client.server_info().num_devices == 4
            assert client.server_info().options["data-parallel-size"] == "2"
            client.pin_prefix("system", prompt_token_ids=random_prompts([16], seed=5)[0])
            streams = [
                client.generate(prompt_token_ids=prompt, sampling=kind) for prompt, kind in requests for _ in range(2)
            ]
            got = []
            for stream in streams:
                sequences: dict[int, list[int]] = {}
                for chunk in stream:
                    sequences.setdefault(chunk.index, []).extend(chunk.token_ids)
                got.append([tuple(token_ids) for _, token_ids in sorted(sequences.items())])
            assert got[::2] == got[1::2] == want
            load = load_at_rest(client)
            assert [replica.num_blocks for replica in load.replicas] == [40, 40]
            assert all(replica.num_generation_tokens > 0 for replica in load.replicas)
            assert all(replica.num_blocks_used == 1 for replica in load.replicas)
            assert load.num_generation_tokens == sum(replica.num_generation_tokens for replica in load.replicas)
            assert load.num_compiles_after_warm_up == 0
        url = process.wait_for(r"^metrics on (.*)$").group(1)
        with urllib.request.urlopen(url, timeout=60) as answer:
            page = answer.read().decode()
        for replica in range(2):
            assert f'replica="{replica}"}} 1.0' in page
        assert process.end(signal.SIGTERM) == 0
        assert not any("Traceback" in line for line in process.lines)
    finally:
        if process.popen.poll() is None:
            process.end(signal.SIGKILL)
