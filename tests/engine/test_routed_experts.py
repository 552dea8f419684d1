"""Experts of tokens that the engine reads as sequences end: those of the same requests alone, in an empty memory."""

from collections import defaultdict

import numpy as np
import pytest

from jpaged.engine.output import processor
from jpaged.errors import InvalidArgument
from jpaged.outputs import new_completions
from jpaged.testing import FakeExecutor, SeveralStepsExecutor, seeing
from jpaged.types import SamplingParams
from tests.engine.harness import Harness


def keeping(kind=FakeExecutor, windows=(None,), **sizes):
    """An executor that keeps routes."""
    executor = seeing(windows, kind)(**{"max_num_batched_tokens": 8, "block_size": 3, "max_model_len": 64, **sizes})
    executor.keeps_routes = True
    return executor


ALONE = Harness(keeping(max_num_batched_tokens=64))


def experts(harness, request_id):
    """The experts of each sequence, joined from its events."""
    found = defaultdict(list)
    for event in harness.events[request_id]:
        if event.routed_experts is not None:
            found[event.index].append(event.routed_experts)
    return {index: np.concatenate(parts) for index, parts in sorted(found.items())}


def alone(prompt, tokens):
    """The experts of a sequence that is computed in one step, as a prompt."""
    token_ids, request_id = [*prompt, *tokens], str([*prompt, *tokens])
    if request_id not in ALONE.events:
        ALONE.submit(request_id, token_ids, max_tokens=1, use_prefix_cache=False)
        ALONE.run()
    return experts(ALONE, request_id)[0][: len(token_ids) - 1]


def check(harness, request_id, prompt):
    """The experts of every sequence are those of the sequence alone; return the number of sequences."""
    found = experts(harness, request_id)
    for index, ids in found.items():
        assert not ids[:, 0].any()
        np.testing.assert_array_equal(ids, alone(prompt, harness.tokens(request_id, index)))
    return len(found)


PROMPTS = [[7, 8, 9, 10, 11, 12, 13], [7, 8, 9, 10, 11, 12, 13, 20, 21], [7, 8, 9, 4], [30, 31]]


@pytest.mark.parametrize("kind", [FakeExecutor, SeveralStepsExecutor])
@pytest.mark.parametrize("windows", [(None,), (None, 5)], ids=str)
def test_requests_that_share_prefixes(kind, windows):
    harness = Harness(keeping(kind, windows), num_scheduler_steps=1 if kind is FakeExecutor else 4)
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            harness.submit(f"{turn}-{number}", prompt, max_tokens=9, n=1 + number % 3, temperature=1.0, seed=number)
        harness.run()
    assert harness.engine.load().num_prefix_hit_tokens > 0
    for turn in range(2):
        assert [check(harness, f"{turn}-{number}", prompt) for number, prompt in enumerate(PROMPTS)] == [1, 2, 3, 1]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests(mode):
    harness = Harness(keeping(num_blocks=14, num_host_blocks=14), preemption_mode=mode)
    for number, prompt in enumerate(PROMPTS):
        harness.submit(str(number), prompt, max_tokens=12, is_whole=bool(number % 2))
    harness.run()
    load = harness.engine.load()
    assert load.num_preemptions > 0
    assert load.num_blocks_swapped_in > 0 or mode == "recompute"
    for number, prompt in enumerate(PROMPTS):
        assert check(harness, str(number), prompt) == 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_stop_tokens_of_preempted_requests(mode):
    """A step in flight may end a sequence whose blocks are free already."""
    harness = Harness(keeping(num_blocks=11, num_host_blocks=14), preemption_mode=mode)
    for number, prompt in enumerate(PROMPTS):
        sampling = {"temperature": 1.0, "seed": 4 + number, "stop_token_ids": [*range(1, 257, 16)]}
        harness.submit(str(number), prompt, max_tokens=14, **sampling)
    harness.run()
    assert harness.engine.load().num_preemptions > 0
    assert [check(harness, str(number), prompt) for number, prompt in enumerate(PROMPTS)] == [1, 1, 1, 1]


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_best_of_several(is_whole):
    harness, prompt = Harness(keeping()), PROMPTS[1]
    harness.submit("best", prompt, max_tokens=7, n=2, best_of=4, temperature=1.0, seed=3, is_whole=is_whole)
    harness.run()
    assert check(harness, "best", prompt) == 2


@pytest.mark.parametrize("is_whole", [False, True])
def test_aborted_requests(is_whole):
    """Those of computed tokens, and none if the request has not run."""
    harness, prompt = Harness(keeping()), PROMPTS[1]
    harness.submit("never", prompt, max_tokens=20, is_whole=is_whole)
    harness.engine.abort("never")
    harness.run()
    assert experts(harness, "never") == {}
    harness.submit("half", prompt, max_tokens=20, is_whole=is_whole)
    for _ in range(6):
        harness.step()
    harness.engine.abort("half")
    harness.run()
    tokens = harness.tokens("half")
    assert 0 < len(tokens) < 20
    assert check(harness, "half", prompt) == 1


def test_large_arrays_are_sent_in_parts(monkeypatch):
    monkeypatch.setattr(processor, "_MAX_EXPERT_BYTES", 30)
    harness, prompt = Harness(keeping()), PROMPTS[0]
    harness.submit("parts", prompt, max_tokens=6)
    harness.run()
    parts = [event.routed_experts for event in harness.events["parts"] if event.routed_experts is not None]
    assert [len(part) for part in parts] == [5, 5, 2]
    assert check(harness, "parts", prompt) == 1
    completions = new_completions(SamplingParams())
    for event in harness.events["parts"]:
        completions.add(event)
    (one,) = completions.output("parts", None, tuple(prompt)).outputs
    np.testing.assert_array_equal(one.routed_experts, np.concatenate(parts))


def test_prompt_start_and_its_limit():
    harness, prompt = Harness(keeping()), PROMPTS[0]
    for start in range(len(prompt) + 1):
        harness.submit(str(start), prompt, max_tokens=4, routed_experts_prompt_start=start)
    harness.run()
    whole = experts(harness, "0")[0]
    for start in range(len(prompt) + 1):
        np.testing.assert_array_equal(experts(harness, str(start))[0], whole[start:])
    with pytest.raises(InvalidArgument, match="routed_experts_prompt_start: 8 is over the 7 tokens of the prompt"):
        harness.submit("over", prompt, routed_experts_prompt_start=8)
    with pytest.raises(InvalidArgument, match="routed_experts_prompt_start"):
        SamplingParams(routed_experts_prompt_start=-1)


def test_beams_are_refused():
    harness = Harness(keeping())
    harness.submit("beams", PROMPTS[0], beam_width=2, n=2, max_tokens=3)
    harness.run()
    error = harness.last("beams").error
    assert isinstance(error, InvalidArgument)
    assert error.field == "sampling.beam_width"


def test_nothing_is_returned_unless_the_executor_keeps_routes():
    harness = Harness(FakeExecutor())
    harness.submit("plain", PROMPTS[0], max_tokens=4)
    harness.run()
    assert experts(harness, "plain") == {}
