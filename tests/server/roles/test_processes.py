"""Servers of both roles as processes of their own, with the demo model: the same tokens, also when one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jpaged.client import Client
from jpaged.structured import StructuredOutputs
from jpaged.types import RequestOutput, SamplingParams
from tests.processes import Process

TALE = "Once upon a time there was a wood, and in the wood a fox. " * 12
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
def serving(*words: str) -> Iterator[tuple[Process, str]]:
    """A server of the demo, and its address."""
    common = ("--port", "0", "--dtype", "float32", "--max-num-seqs", "8", "--swap-space", "0.1")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = Process(["-m", "jpaged", "serve", "demo", *common, *words], environment)
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
        options = ("--role", "decode", "--prefill-target", prefill, "--prefill-min-tokens", "32")
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
