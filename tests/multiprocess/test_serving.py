"""Two and four real processes on CPUs: one endpoint, the tokens of one process, and one end for all."""

from __future__ import annotations

import json
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from jpaged.client import Client
from jpaged.client.channel import check_health
from jpaged.errors import JpagedError, Unavailable
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import open_llm
from tests.models.tiny import tiny_case, write_checkpoint
from tests.multiprocess.rig import (
    SIZES,
    Group,
    ask,
    assert_same,
    assert_told_alike,
    changed_questions,
    prompt,
    questions,
    running,
    write_model,
)
from tests.processes import WAIT_S

pytestmark = pytest.mark.usefixtures("quick_programs")

ENDLESS = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
SWAPS = (*SIZES, "--num-blocks", "40", "--preemption-mode", "swap")
RECOMPUTES = (*SIZES, "--num-blocks", "40", "--swap-space", "0")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes of these tests may keep compiled programs."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: str) -> list[RequestOutput]:
    """What one process answers, on one device and with room for all."""
    options = {"block_size": 8, "max_num_batched_tokens": 16, "num_blocks": 200}
    many = questions()
    with open_llm(model, **options) as llm:
        return llm.generate([tokens for tokens, _ in many], [params for _, params in many])


class Streams:
    """Clients in the middle of their streams."""

    def __init__(self, target: str, count: int) -> None:
        self._client = Client(target)
        self._begun = threading.Semaphore(0)
        self.ends: list[JpagedError | int] = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=WAIT_S)

    def _run(self, seed: int) -> None:
        num_tokens = 0
        try:
            for chunk in self._client.generate(prompt_token_ids=prompt(5, seed), sampling=ENDLESS):
                if num_tokens == 0:
                    self._begun.release()
                num_tokens += len(chunk.token_ids)
            self.ends.append(num_tokens)
        except JpagedError as error:
            self.ends.append(error)

    def join(self) -> list[JpagedError | int]:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        self._client.close()
        return self.ends


def kill_one(group: Group, process: int) -> None:
    """While three clients are in their streams: all of them and all processes hear of it."""
    streams = Streams(group.target, 3)
    group.signal(process, signal.SIGKILL)
    ends = streams.join()
    assert [type(end) for end in ends] == [Unavailable] * 3, group.log()
    codes = group.codes()
    assert codes[process] == -signal.SIGKILL
    others = [code for i, code in enumerate(codes) if i != process]
    assert others == [4] * len(others), (codes, group.log())
    if process != 0:
        assert group.members[0].find(f"process {process} of {len(codes)} is lost"), group.log()


def check_tokens(group: Group, want: list[RequestOutput], *, swaps: bool) -> None:
    with Client(group.target) as client:
        assert_same(ask(client, questions()), want)
        again = ask(client, questions()[:4])
        assert_same(again, want[:4])
        load = client.load()
        assert load.num_prefix_hit_tokens > 0
        assert load.num_preemptions > 0
        assert (load.num_blocks_swapped_in > 0) is swaps
        assert swaps or load.num_recomputed_tokens > 0
        assert load.num_compiles_after_warm_up == 0


@pytest.mark.long
def test_two_processes_sample_what_one_samples_and_end_together(
    model: str, alone: list[RequestOutput], programs: Path
) -> None:
    """The whole story once: tokens of every kind, shared, swapped; then one is killed."""
    with running(2, (model, *SWAPS), programs) as group:
        check_tokens(group, alone, swaps=True)
        assert not any(member.find("listening on") for member in group.members[1:])
        kill_one(group, 1)


@pytest.mark.long
def test_two_processes_edit_and_tell_what_one_does(model: str, tmp_path: Path) -> None:
    """With few blocks, so that sequences lose their rows and are counted anew; twice, as programs may be kept."""
    many, options = changed_questions(), {"max_logprobs": -1, "enable_prefix_caching": False}
    sizes = {"block_size": 8, "max_num_batched_tokens": 16, "num_blocks": 200}
    with open_llm(model, **sizes, **options) as llm:
        want = llm.generate([tokens for tokens, _ in many], [params for _, params in many])
    words = (model, *SIZES, "--num-blocks", "30", "--max-logprobs", "-1", "--no-enable-prefix-caching")
    num_preemptions = 0
    for _ in range(2):
        with running(2, words, tmp_path) as group, Client(group.target) as client:
            got = ask(client, many)
            assert_same(got, want)
            assert_told_alike(got, want)
            load = client.load()
            num_preemptions += load.num_preemptions
            assert load.num_compiles_after_warm_up == 0
            group.signal(0, signal.SIGTERM)
            assert group.codes() == [0, 0], group.log()
    assert num_preemptions > 0


@pytest.mark.deep
@pytest.mark.parametrize("process", [0, 2])
def test_four_processes_sample_what_one_samples_and_end_together(
    process: int, model: str, alone: list[RequestOutput], programs: Path
) -> None:
    with running(4, (model, *(SWAPS if process else RECOMPUTES)), programs) as group:
        check_tokens(group, alone, swaps=process != 0)
        kill_one(group, process)


@pytest.mark.parametrize(
    "kv_cache_dtype", [pytest.param("auto", marks=pytest.mark.long), pytest.param("int8", marks=pytest.mark.deep)]
)
def test_processes_may_have_several_devices(
    kv_cache_dtype: str, model: str, alone: list[RequestOutput], programs: Path
) -> None:
    """Two of two devices, and a drain that the leader is asked for."""
    words = (model, *SWAPS, "--kv-cache-dtype", kv_cache_dtype, "--tensor-parallel-size", "4")
    with running(2, words, programs, num_devices=2) as group:
        if kv_cache_dtype == "auto":
            check_tokens(group, alone, swaps=True)
        streams = Streams(group.target, 2)
        assert group.members[0].find(r"^  4 x cpu")
        group.signal(0, signal.SIGTERM)
        assert streams.join() == [300, 300]
        assert group.codes() == [0, 0], group.log()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--context-parallel-size", "4"), id="contexts"),
        pytest.param(("--context-parallel-size", "2", "--tensor-parallel-size", "2"), id="contexts and heads"),
        pytest.param(("--pipeline-parallel-size", "2"), id="layers and heads"),
        pytest.param(("--pipeline-parallel-size", "2", "--context-parallel-size", "2"), id="layers and contexts"),
    ],
)
def test_processes_may_split_contexts_and_layers(
    options: tuple[str, ...], model: str, alone: list[RequestOutput], programs: Path
) -> None:
    """Over two processes of two devices, with blocks that are swapped out; then one is killed."""
    with running(2, (model, *SWAPS, *options), programs, num_devices=2) as group:
        check_tokens(group, alone, swaps=True)
        assert group.members[0].find(r"^  4 x cpu")
        kill_one(group, 1)


@pytest.mark.long
@pytest.mark.parametrize("process", [0, 1])
def test_each_process_may_have_a_replica(
    process: int, model: str, alone: list[RequestOutput], programs: Path, tmp_path: Path
) -> None:
    """Process 0 serves both; the tokens of either are those of one device, also what is told of them."""
    words = (model, *SWAPS, "--data-parallel-size", "2", "--max-logprobs", "-1")
    with running(2, words, programs, num_devices=2) as group, Client(group.target) as client:
        assert_same(ask(client, questions()), alone)
        many = changed_questions()
        with open_llm(model, block_size=8, max_num_batched_tokens=16, num_blocks=200, max_logprobs=-1) as llm:
            want = llm.generate([tokens for tokens, _ in many], [params for _, params in many])
        got = ask(client, many)
        assert_same(got, want)
        assert_told_alike(got, want)
        assert group.members[0].find(r"^  4 x cpu")
        kill_one(group, process)


@pytest.mark.deep
def test_replicas_may_each_have_several_processes(model: str, alone: list[RequestOutput], programs: Path) -> None:
    with running(4, (model, *SWAPS, "--data-parallel-size", "2"), programs) as group:
        with Client(group.target) as client:
            assert_same(ask(client, questions()), alone)
        streams = Streams(group.target, 4)
        group.signal(3, signal.SIGTERM)
        assert streams.join() == [300] * 4
        assert group.codes() == [0] * 4, group.log()


@pytest.mark.long
def test_processes_may_have_whole_experts(tmp_path: Path) -> None:
    model = str(write_checkpoint(tiny_case("mixtral"), tmp_path / "model"))
    many = questions()
    with open_llm(model, block_size=8, max_num_batched_tokens=16, num_blocks=200) as llm:
        want = llm.generate([tokens for tokens, _ in many], [params for _, params in many])
    with running(2, (model, *SWAPS, "--enable-expert-parallel"), tmp_path / "programs", num_devices=2) as group:
        check_tokens(group, want, swaps=True)
        group.signal(0, signal.SIGTERM)
        assert group.codes() == [0, 0], group.log()


@pytest.mark.long
def test_a_signal_to_any_process_drains_all(model: str, programs: Path) -> None:
    """As Kubernetes ends pods: all of them, in any order, some twice."""
    with running(2, (model, *SIZES, "--num-blocks", "80"), programs) as group:
        streams = Streams(group.target, 2)
        group.signal(1, signal.SIGTERM)
        group.signal(1, signal.SIGTERM)
        assert streams.join() == [300, 300]
        assert group.codes() == [0, 0], group.log()


@pytest.mark.long
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_is_silent_is_missed_and_all_end(process: int, model: str, programs: Path) -> None:
    """A stopped process keeps its connections open, as a host does that is gone without a word."""
    words = (model, *SIZES, "--num-blocks", "80", "--heartbeat-timeout", "5", "--probe-port", "0")
    with running(2, words, programs) as group:
        streams = Streams(group.target, 2)
        probes = [member.wait_for(r"^health on (.*)$").group(1) for member in group.members]
        for target in probes:
            for service in ("liveness", "readiness"):
                assert check_health(target, service=service, timeout_s=WAIT_S) == "SERVING"
        group.signal(process, signal.SIGSTOP)
        other = group.members[1 - process]
        assert other.wait() == 4, group.log()
        assert other.find(rf"process {process}( of 2)? is lost: no message for 5 s"), group.log()
        group.signal(process, signal.SIGCONT)
        assert group.members[process].wait() == 4, group.log()
        assert [type(end) for end in streams.join()] == [Unavailable] * 2, group.log()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("token", r"step \d+: the program or tokens of process 1 differ from those of process 0"),
        ("step", r"process 1 of 2 failed: RuntimeError: a fault was planted here"),
    ],
)
def test_a_process_that_differs_or_fails_ends_all(fault: str, message: str, model: str, programs: Path) -> None:
    with running(2, (model, *SIZES, "--num-blocks", "80"), programs, planted={1: fault}) as group:
        streams = Streams(group.target, 2)
        assert all(isinstance(end, JpagedError) for end in streams.join())
        codes = group.codes()
        assert all(code > 0 for code in codes), (codes, group.log())
        assert group.members[0].find(message), group.log()


@pytest.mark.long
@pytest.mark.parametrize(
    ("planted", "extra", "message"),
    [
        ({1: "version"}, {}, r"jpaged version: is \S+ in process 0 and 0\.0\.0 in process 1"),
        ({}, {1: ("--block-size", "16")}, "block_size: is 8 in process 0 and 16 in process 1"),
    ],
)
def test_processes_that_are_not_alike_do_not_start(
    planted: dict[int, str], extra: dict[int, tuple[str, ...]], message: str, model: str, programs: Path
) -> None:
    words = (model, *SIZES, "--join-timeout", "30")
    with running(2, words, programs, planted=planted, extra=extra) as group:
        codes = group.codes()
        assert all(code > 0 for code in codes), (codes, group.log())
        assert all(member.find(message) for member in group.members), group.log()


@pytest.mark.long
def test_a_process_that_never_comes_is_named(model: str, programs: Path) -> None:
    words = (model, *SIZES, "--join-timeout", "3")
    with running(1, words, programs, extra={0: ("--num-processes", "3")}) as group:
        (code,) = group.codes()
        assert code > 0
        assert group.members[0].find(r"processes 1, 2 of 3 did not join within 3 s \(join_timeout\)"), group.log()


@pytest.mark.long
def test_processes_that_know_one_secret_serve_together_and_one_that_does_not_is_kept_out(
    model: str, programs: Path, tmp_path: Path
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.write_text("the secret of a cluster")
    other.write_text("the secret of another")
    words, option = (model, *SIZES, "--num-blocks", "80"), "--cluster-secret-file"
    with running(2, (*words, option, str(mine)), programs) as group:
        with Client(group.target) as client:
            assert len(client.complete(prompt_token_ids=prompt(9), sampling=SamplingParams(max_tokens=4)).outputs) == 1
        group.signal(0, signal.SIGTERM)
        assert group.codes() == [0, 0], group.log()
    extra = {0: (option, str(mine), "--join-timeout", "20"), 1: (option, str(other))}
    with running(2, words, programs, extra=extra) as group:
        codes = group.codes()
        assert all(code > 0 for code in codes), (codes, group.log())
        assert group.members[1].find("it does not have the secret"), group.log()
        assert group.members[0].find("refused a connection"), group.log()


@pytest.mark.long
def test_processes_have_the_latents_of_their_own_sequences(tmp_path: Path, programs: Path) -> None:
    """Data-parallel attention over processes: rows go to the experts of others, and tokens are those of one process."""
    model = str(write_checkpoint(tiny_case("deepseek_v3"), tmp_path))
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    kinds = [greedy, replace(greedy, n=2, temperature=0.9, seed=4)]
    many = [(prompt(5 + 7 * i, i), kinds[i % 2]) for i in range(6)]
    with open_llm(model, block_size=8, max_model_len=64, num_blocks=64) as llm:
        want = llm.generate([tokens for tokens, _ in many], [params for _, params in many])
    words = (model, *SIZES, "--num-blocks", "64", "--max-model-len", "64")
    with running(2, (*words, "--enable-expert-parallel", "--enable-dp-attention"), programs) as group:
        with Client(group.target) as client:
            assert_same(ask(client, many), want)
        group.signal(0, signal.SIGTERM)
        assert group.codes() == [0, 0], group.log()


@pytest.mark.long
def test_processes_move_experts_after_the_same_steps(tmp_path: Path, programs: Path) -> None:
    """Each process decides for itself: tokens stay those of one process, and all see the same balancedness."""
    model = str(write_checkpoint(tiny_case("deepseek_v3"), tmp_path))
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    kinds = [greedy, replace(greedy, n=2, temperature=0.9, seed=4)]
    many = [(prompt(5 + 7 * i, i), kinds[i % 2]) for i in range(5)]
    with open_llm(model, block_size=8, max_model_len=64, num_blocks=64) as llm:
        want = llm.generate([tokens for tokens, _ in many], [params for _, params in many])
    words = (model, *SIZES, "--num-blocks", "64", "--max-model-len", "64", "--enable-expert-parallel")
    config = {"num_redundant_experts": 2, "step_interval": 5, "window_size": 3, "log_balancedness": True}
    balanced = ("--enable-dp-attention", "--enable-eplb", "--eplb-config", json.dumps(config))
    with running(2, (*words, *balanced), programs) as group:
        with Client(group.target) as client:
            assert_same(ask(client, many), want)
        group.signal(0, signal.SIGTERM)
        assert group.codes() == [0, 0], group.log()
        seen = [re.findall(r"balancedness of experts: (\S+)", "".join(member.lines)) for member in group.members]
    assert len(seen[0]) >= 2 and seen[0] == seen[1], seen
