"""Servers of both roles as processes of their own, with the demo model: the same tokens, also when one is killed.

With data ports too: split over devices and blocked in other ways, killed, and paused.
"""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from jpaged.client import Client
from jpaged.errors import Unavailable
from jpaged.structured import StructuredOutputs
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import random_prompts
from tests.models.adapters import TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint
from tests.processes import Process

TALE = "Once upon a time there was a wood, and in the wood a fox. " * 12
ALWAYS = ("--prefill-min-tokens", "32", "--prefill-policy", "always")
PROMPTS = [f"{name} was a little fox. {TALE}" for name in "ABCD"]
SAMPLINGS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.9, seed=8, n=3, logprobs=2),
    SamplingParams(max_tokens=16, temperature=0.0, presence_penalty=1.0, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.0, cache_salt="salt", ignore_eos=True),
    SamplingParams(max_tokens=24, seed=9, structured_outputs=StructuredOutputs(regex="[a-z]{3}(, [a-z ]{4,8}){2,5}")),
    SamplingParams(max_tokens=24, temperature=0.9, seed=9, stop=["e", "fo"], n=2),
]


@contextmanager
def serving(*words: str, model: str = "demo") -> Iterator[tuple[Process, str]]:
    """A server of the demo or another model, and its address."""
    common = ("--port", "0", "--dtype", "float32", "--max-num-seqs", "8", "--swap-space", "0.1")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if "--tensor-parallel-size" in words:
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    process = Process(["-m", "jpaged", "serve", model, *common, *words], environment)
    try:
        port = process.wait_for(r"^ready on \S*:(\d+)")[1]
        yield process, f"127.0.0.1:{port}"
    finally:
        if process.popen.poll() is None:
            process.end(signal.SIGKILL)


def told(output: RequestOutput) -> list[tuple[object, ...]]:
    """What was told of each sequence."""
    return [(one.index, one.token_ids, one.text, one.logprobs, one.finish_reason) for one in output.outputs]


def answers(target: str) -> list[list[tuple[object, ...]]]:
    with Client(target) as client:
        return [told(client.complete(prompt, sampling)) for sampling in SAMPLINGS for prompt in PROMPTS]


@pytest.mark.long
def test_tokens_are_those_of_one_server_until_the_other_is_killed_and_after() -> None:
    with serving() as (_, both):
        wanted = answers(both)
    with serving("--role", "prefill") as (first, prefill):
        options = ("--role", "decode", "--prefill-target", prefill, *ALWAYS)
        with serving(*options, "--metrics-port", "0") as (_, decode):
            assert answers(decode) == wanted
            with Client(decode) as client, Client(prefill) as other:
                assert (client.server_info().role, other.server_info().role) == ("decode", "prefill")
                load = client.load()
                assert load.num_blocks_swapped_in >= 8  # on a busy machine some prompts are computed here instead
                stream = client.generate(PROMPTS[0] + "killed", SamplingParams(max_tokens=64, temperature=0.0))
                next(iter(stream))
                first.end(signal.SIGKILL)
                rest = list(stream)
                assert rest[-1].is_last
            fresh = [prompt.replace("little", "young") for prompt in PROMPTS]
            with Client(decode) as client:
                alone = [told(client.complete(prompt, SAMPLINGS[1])) for prompt in fresh]
            with serving() as (_, again), Client(again) as client:
                assert [told(client.complete(prompt, SAMPLINGS[1])) for prompt in fresh] == alone


DATA_PORT = '{"kv_connector": "jax", "kv_connector_extra_config": {"address": "127.0.0.1:0", "pull_timeout": 20}}'
PORT = ("--kv-transfer-config", DATA_PORT, "--metrics-port", "0")


def counted(process: Process) -> dict[str, float]:
    """The counters of transfers of a server."""
    url = process.wait_for(r"metrics on (\S+)")[1]
    text = urllib.request.urlopen(url).read().decode()
    found = re.findall(r"^jpaged:((?:pull|blocks)\w*)_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


@contextmanager
def with_ports(
    first: tuple[str, ...], second: tuple[str, ...], model: str = "demo"
) -> Iterator[tuple[Process, Process, str]]:
    """A prefill and a decode server with data ports, and the address of the latter."""
    with serving("--role", "prefill", *PORT, "--prefill-hold", "5", *first, model=model) as (prefill, target):
        options = ("--role", "decode", "--prefill-target", target, *ALWAYS, *PORT)
        limits = ("--prefill-timeout", "20", "--transfer-timeout", "20")
        with serving(*options, *limits, *second, model=model) as (decode, address):
            yield prefill, decode, address


def without_logprobs(found: list[list[tuple[object, ...]]]) -> list[list[tuple[object, ...]]]:
    return [[(*one[:3], one[4]) for one in answer] for answer in found]


KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "equal": ((), (), ()),
    "int8": (("--kv-cache-dtype", "int8"), (), ()),
    "two devices there": ((), ("--tensor-parallel-size", "2"), ()),
    "two devices here": ((), (), ("--tensor-parallel-size", "2")),
    "larger blocks there": ((), ("--block-size", "32"), ("--block-size", "16")),
    "smaller blocks there": ((), ("--block-size", "16"), ("--block-size", "32")),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_pulled_however_servers_are_laid_out(kind: str) -> None:
    both, first, second = KINDS[kind]
    with serving(*both) as (_, single):
        wanted = answers(single)
    with with_ports((*both, *first), (*both, *second)) as (_, decode, address):
        found_answers = answers(address)
        if first or second:  # other layouts change the last bits of log-probabilities
            wanted, found_answers = without_logprobs(wanted), without_logprobs(found_answers)
        assert found_answers == wanted
        found = counted(decode)
        assert found["pulls"] >= len(PROMPTS)
        assert found["pulls_failed"] == 0


def of_adapters(target: str, prompts: Sequence[Sequence[int]], names: Sequence[str]) -> list[object]:
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=5, n=2, logprobs=1, ignore_eos=True)
    with Client(target) as client:
        return [
            told(client.complete(prompt_token_ids=prompt, sampling=sampling, adapter=name))
            for prompt in prompts
            for name in names
        ]


@pytest.mark.long
def test_blocks_of_adapters_are_pulled(tmp_path: Path) -> None:
    case = tiny_case("llama_gqa_bias")
    model = str(write_checkpoint(case, tmp_path / "base"))
    adapters = [f"{name}={TinyAdapter(case, name, 2, 7.0).write(tmp_path / name)}" for name in "ab"]
    options = ("--max-model-len", "128", "--block-size", "4", "--lora", adapters[0], "--lora", adapters[1])
    prompts, names = random_prompts([70, 90, 81]), ["", "a", "b"]
    with serving(*options, model=model) as (_, single):
        wanted = of_adapters(single, prompts, names)
    assert wanted[0] != wanted[1] != wanted[2]
    with with_ports(options, options, model) as (_, decode, address):
        assert of_adapters(address, prompts, names) == wanted
        found = counted(decode)
        assert (found["pulls"], found["pulls_failed"]) == (len(wanted), 0)


SPECULATION = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')


@pytest.mark.long
@pytest.mark.parametrize("first", [(), SPECULATION], ids=["here", "on both"])
def test_drafts_follow_blocks_that_were_pulled(first: tuple[str, ...]) -> None:
    with serving() as (_, single):
        wanted = without_logprobs(answers(single))
    with with_ports(first, SPECULATION) as (_, decode, address):
        assert without_logprobs(answers(address)) == wanted
        found = counted(decode)
        assert found["pulls"] >= len(PROMPTS)
        assert found["pulls_failed"] == 0


@pytest.mark.long
def test_servers_with_data_ports_are_paused_and_killed() -> None:
    """No token is wrong, no request is lost, and other servers continue."""
    prompts = [f"{number} {PROMPTS[0]}" for number in range(12)]
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with serving() as (_, single), Client(single) as client:
        wanted = [told(client.complete(prompt, sampling)) for prompt in prompts]
    with (
        with_ports((), ("--prefill-timeout", "1", "--transfer-timeout", "1")) as (prefill, _, address),
        Client(address) as client,
    ):
        for number, prompt in enumerate(prompts):
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(client.complete, prompt, sampling)
                if number in (3, 5):
                    time.sleep(0.02 * number)
                    prefill.popen.send_signal(signal.SIGSTOP)
                if number == 9:
                    prefill.end(signal.SIGKILL)
                assert told(answer.result()) == wanted[number]
            if number in (3, 5):
                prefill.popen.send_signal(signal.SIGCONT)


@pytest.mark.long
def test_a_prefill_server_survives_decode_servers_that_are_killed() -> None:
    with (
        with_ports((), ()) as (prefill, decode, address),
        Client(address) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        calls = [threads.submit(client.complete, f"{number} {PROMPTS[0]}", SAMPLINGS[0]) for number in range(4)]
        time.sleep(0.1)
        decode.end(signal.SIGKILL)
        for call in calls:
            assert call.exception() is None or isinstance(call.exception(), Unavailable)
        target = prefill.wait_for(r"^ready on \S*:(\d+)")[1]
        with Client(f"127.0.0.1:{target}") as other:
            until_s = time.monotonic() + 60
            while other.load().num_running and time.monotonic() < until_s:
                time.sleep(0.1)
            output = other.complete(PROMPTS[1], SamplingParams(max_tokens=1, temperature=0.0))
            assert len(output.outputs[0].token_ids) == 1
