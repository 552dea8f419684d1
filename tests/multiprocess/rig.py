"""Real processes that serve one tiny model together, and one that serves it alone, asked the same things.

Process 0 picks its ports and prints them; the others start when it has, so that no port is ever guessed. Every wait is
for a line or for an exit, with a bound that only a hang reaches.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from jpaged.client import Client
from jpaged.types import RequestOutput, SamplingParams
from tests.conftest import QUICK_XLA_FLAGS
from tests.models.tiny import TinyCase, tiny_case, write_checkpoint
from tests.processes import WAIT_S, Process

SERVE = ("-m", "jpaged", "serve")
PLANTED = ("-m", "tests.multiprocess.planted", "serve")
ALWAYS = ("--port", "0", "--shutdown-timeout", str(WAIT_S))
SIZES = ("--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--block-size", "8", "--dtype", "float32")


class Group:
    """Processes 0 to P - 1."""

    def __init__(self, members: list[Process]) -> None:
        self.members = members

    @property
    def target(self) -> str:
        """Where clients connect, once it is ready."""
        return self.members[0].wait_for(r"^ready on (.*)$").group(1)

    def signal(self, process: int, number: signal.Signals) -> None:
        self.members[process].popen.send_signal(number)

    def codes(self) -> list[int]:
        """The exit codes, once all have ended."""
        return [member.wait() for member in self.members]

    def log(self) -> str:
        return "".join(f"{i}: {line}" for i, member in enumerate(self.members) for line in member.lines)


@contextmanager
def running(
    num_processes: int,
    words: Sequence[str],
    folder: Path,
    *,
    num_devices: int = 1,
    planted: Mapping[int, str] | None = None,
    extra: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[Group]:
    """Starts them; whatever is left of them afterwards is killed.

    Args:
        words: the model and options, for all.
        folder: where compiled programs go.
        num_devices: of each process.
        planted: what is wrong with a process, see `tests.multiprocess.planted`.
        extra: more options for some.
    """
    members: list[Process] = []
    try:
        coordinator = "127.0.0.1:0"
        for i in range(num_processes):
            fault = (planted or {}).get(i)
            place = ["--coordinator", coordinator, "--num-processes", str(num_processes), "--process-id", str(i)]
            command = [*(PLANTED if fault else SERVE), *words, *place, *ALWAYS, *(extra or {}).get(i, ())]
            environment = _environment(folder, num_devices) | ({"PLANTED": fault} if fault else {})
            members.append(Process(command, environment))
            if i == 0:
                coordinator = members[0].wait_for(r"waits for the others at (\S+)").group(1)
        yield Group(members)
    finally:
        for member in members:
            if member.popen.poll() is None:
                member.popen.kill()
            member.wait()


def _environment(folder: Path, num_devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={num_devices} {QUICK_XLA_FLAGS}"
    return {**os.environ, "XLA_FLAGS": flags, "JPAGED_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu"}


def case() -> TinyCase:
    """Four heads of keys and values, so that up to four devices have some of their own."""
    return TinyCase(
        "llama_mha", {**tiny_case("llama_mha").config, "num_hidden_layers": 2, "max_position_embeddings": 2048}, 24
    )


def write_model(folder: Path) -> str:
    """The checkpoint, without a tokenizer: prompts are token ids."""
    return str(write_checkpoint(case(), folder))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, 131, length).tolist()


def questions() -> list[tuple[list[int], SamplingParams]]:
    """Every kind of request, and more tokens together than a small pool holds."""
    common = prompt(19)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.95, seed=2**40 + 3, max_tokens=80, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=16, ignore_eos=True),
        SamplingParams(beam_width=3, n=3, max_tokens=16),
        SamplingParams(temperature=1.2, top_k=7, seed=11, max_tokens=80, ignore_eos=True),
    ]
    return [
        ([*common, *prompt(3 + 2 * i, i)], kind if kind.beam_width else replace(kind, seed=50 + i))
        for i, kind in enumerate([*kinds, *kinds])
    ]


def changed_questions() -> list[tuple[list[int], SamplingParams]]:
    """What changes logits, with tokens that are counted, and what is told of prompts and of all tokens."""
    kinds = [
        SamplingParams(temperature=0.0, frequency_penalty=0.8, presence_penalty=0.5, max_tokens=40, logprobs=3),
        SamplingParams(temperature=0.9, repetition_penalty=1.3, typical_p=0.9, seed=5, max_tokens=40, n=2),
        SamplingParams(temperature=0.7, allowed_token_ids=[*range(20, 60)], seed=6, max_tokens=30),
        SamplingParams(temperature=0.8, logit_bias={9: 4.0, 30: -100.0}, top_n_sigma=1.5, seed=7, max_tokens=30),
        SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=3, logprob_token_ids=[3, 77]),
        SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=-1, logprobs=-1),
    ]
    return [(prompt(23 + 4 * i, 70 + i), replace(kind, ignore_eos=True)) for i, kind in enumerate([*kinds, *kinds[:4]])]


def assert_told_alike(got: Sequence[RequestOutput], want: Sequence[RequestOutput]) -> None:
    """What is told of each token of prompts and outputs, up to rounding; some tell of all tokens."""
    num_told = 0
    for a, b in zip(got, want, strict=True):
        pairs = [*zip(a.prompt_logprobs or (), b.prompt_logprobs or (), strict=True)]
        for one, other in zip(a.outputs, b.outputs, strict=True):
            pairs += zip(one.logprobs or (), other.logprobs or (), strict=True)
        for mine, theirs in pairs:
            assert (mine is None) == (theirs is None)
            if mine is None or theirs is None:
                continue
            num_told += len(mine.top)
            assert mine.chosen.token_id == theirs.chosen.token_id
            assert abs(mine.chosen.logprob - theirs.chosen.logprob) < 1e-3
            values = [[token.logprob for token in position.top] for position in (mine, theirs)]
            np.testing.assert_allclose(values[0], values[1], atol=1e-3)
    assert num_told > 131 * (30 + 8), "all tokens of the vocabulary, at every position"


def ask(client: Client, many: Sequence[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """All at once, in this order of arrival as far as threads have one."""
    answers: dict[int, RequestOutput] = {}

    def run(place: int, token_ids: list[int], params: SamplingParams) -> None:
        answers[place] = client.complete(prompt_token_ids=token_ids, sampling=params)

    threads = [threading.Thread(target=run, args=(i, *question)) for i, question in enumerate(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [answers[i] for i in range(len(many))]


def assert_same(got: Sequence[RequestOutput], want: Sequence[RequestOutput]) -> None:
    """The same tokens and ends; log-probabilities that differ by rounding alone."""
    assert len(got) == len(want)
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs], place
        assert [o.finish_reason for o in a.outputs] == [o.finish_reason for o in b.outputs]
        sums = [
            [math.nan if o.cumulative_logprob is None else o.cumulative_logprob for o in one.outputs] for one in (a, b)
        ]
        np.testing.assert_allclose(sums[0], sums[1], atol=1e-3)
