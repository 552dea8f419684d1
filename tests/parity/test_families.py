"""One checkpoint of each family, served in every way: what transformers answered is what comes out of each.

Alone, in company and in chunks, after preemption of both kinds, behind a cached prefix, as a search, and all of that on
one device, on two or on four; on the other numbers of devices where `make test-deep` asks. What is meant to happen is
counted, so that no test passes because nothing happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jpaged.device.executor import JaxExecutor
from jpaged.models.config import ModelConfig
from jpaged.models.hf_config import from_hf
from jpaged.types import SamplingParams
from tests.e2e.rig import random_prompts
from tests.e2e.sharing_rig import Rig, make_executor
from tests.parity import cases
from tests.parity.cases import FAMILY_SEARCH, Found, check_search

NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
STRANGERS = random_prompts([30, 17, 41, 9], seed=1)

NUM_DEVICES = (1, 2, 4)


def places() -> Iterator[Any]:
    """Every family on every number of devices; of each family one is long, and the others are deep."""
    for i, name in enumerate(cases.FAMILIES):
        for j, num in enumerate(NUM_DEVICES):
            is_long = i % len(NUM_DEVICES) == j
            yield pytest.param((name, num), marks=pytest.mark.long if is_long else pytest.mark.deep)


@dataclass(frozen=True, slots=True)
class Served:
    """An executor of a model, and what transformers answered."""

    executor: JaxExecutor
    config: ModelConfig
    golden: dict[str, Any]

    @property
    def limits(self) -> dict[str, Any]:
        return {"max_cached_tokens": self.config.max_prefix_len, "outgrown_len": self.config.outgrown_len}

    def rig(self, **options: Any) -> Rig:
        return Rig(self.executor, **self.limits, **options)


@pytest.fixture(scope="module", params=[*places()], ids=str)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, quick_programs: None
) -> Iterator[Served]:
    """The family's checkpoint on so many devices, and the golden answers."""
    name, num_devices = request.param
    folder: Path = tmp_path_factory.mktemp(name)
    executor = make_executor(cases.MODELS[name], folder, tensor_parallel_size=num_devices, max_model_len=128)
    yield Served(executor, from_hf(cases.MODELS[name].config), cases.read(name))
    executor.shutdown()


def test_the_golden_text_comes_alone_and_in_company(served: Served) -> None:
    """In steps of 11 tokens every prompt is cut, and by four strangers the steps are shared."""
    golden = served.golden
    rig = served.rig(max_num_batched_tokens=11, max_num_seqs=5)
    assert rig.answer(golden["prompt"], GREEDY).sequences == [golden["tokens"][:NUM_TOKENS]]
    answers = [rig.submit(prompt, GREEDY) for prompt in (*STRANGERS[:2], golden["prompt"], *STRANGERS[2:])]
    rig.run()
    assert answers[2].sequences == [golden["tokens"][:NUM_TOKENS]]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_does_not_show(served: Served, mode: str) -> None:
    """Memory has room for one request and a part of another; of windows alone nobody has to leave, who hold no more."""
    golden = served.golden
    prompt, windows = golden["prompt"], served.executor.geometry.windows
    most = served.executor.geometry.num_blocks_alone(max(len(prompt), 41), NUM_TOKENS, 1)
    num_blocks = most + 2 if windows == (None,) else most * 7 // 4
    rig = served.rig(num_blocks=num_blocks, num_host_blocks=5 * most, preemption_mode=mode)
    answers = [rig.submit(tokens, GREEDY) for tokens in (*STRANGERS, prompt)]
    load = rig.run()
    assert load.num_preemptions > 0 or None not in windows
    assert answers[-1].sequences == [golden["tokens"][:NUM_TOKENS]]


def test_a_cached_prefix_does_not_show(served: Served) -> None:
    golden = served.golden
    rig = served.rig(enable_prefix_caching=True)
    for is_again in (False, True):
        answer = rig.answer(golden["prompt"], GREEDY)
        assert answer.sequences == [golden["tokens"][:NUM_TOKENS]]
        assert (answer.num_cached_tokens > 0) == is_again


def test_a_search_finds_what_transformers_found(served: Served) -> None:
    found = [Found(**sequence) for sequence in served.golden["beams"]]
    check_search(served.executor, FAMILY_SEARCH, found, **served.limits)
