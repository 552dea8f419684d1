"""What is asked of prompts and samples besides tokens: each position once, in chunks, whatever happens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from jpaged.engine.executor import TOP_WIDTH
from jpaged.engine.executor.aux_io import Truncation, compute_entropy
from jpaged.engine.scheduler.decode_batch import PromptLogprobBudget
from jpaged.engine.sequence import Sequence
from jpaged.errors import InvalidArgument
from jpaged.testing import FakeExecutor, expected_tokens
from jpaged.testing.fake_executor import LOGPROB_STEP
from jpaged.types import PositionLogprobs, Prompt, SamplingParams, TokenLogprob
from tests.engine.harness import Harness

VOCAB = 257


def told(context: list[int], token_id: int, num_top: int) -> PositionLogprobs:
    """What the fake says of a token behind a context."""
    (following,) = expected_tokens(context, 1)
    distance = (token_id - following) % VOCAB
    num_top = VOCAB if num_top < 0 else num_top
    top = [((following + i) % VOCAB, (i + 1) * LOGPROB_STEP, i + 1) for i in range(num_top)]
    return PositionLogprobs(
        TokenLogprob(token_id, (distance + 1) * LOGPROB_STEP, distance + 1), tuple(TokenLogprob(*one) for one in top)
    )


def told_prompt(prompt: list[int], num_top: int, first: int = 1) -> list[PositionLogprobs]:
    return [told(prompt[:i], prompt[i], num_top) for i in range(first, len(prompt))]


def prompt_logprobs(h: Harness, name: str) -> list[PositionLogprobs]:
    return [position for event in h.events[name] for position in event.prompt_logprobs]


def a_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("num_top", [0, 3, 20, TOP_WIDTH + 1, -1])
def test_every_token_of_a_prompt_is_told_before_the_first_that_is_sampled(num_top: int, overlap: bool) -> None:
    h = Harness(executor=FakeExecutor(max_num_batched_tokens=16, max_num_seqs=2), overlap=overlap)
    prompt = a_prompt(50)
    h.submit("a", prompt, max_tokens=5, prompt_logprobs=num_top)
    h.run()
    assert prompt_logprobs(h, "a") == told_prompt(prompt, num_top)
    assert h.tokens("a") == expected_tokens(prompt, 5)
    kinds = ["prompt" if event.prompt_logprobs else "token" for event in h.events["a"]]
    assert kinds == sorted(kinds)
    assert not any(event.token_ids for event in h.events["a"] if event.prompt_logprobs)


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    h = Harness()
    h.submit("a", [5], max_tokens=3, prompt_logprobs=2)
    h.run()
    assert prompt_logprobs(h, "a") == []
    assert h.tokens("a") == expected_tokens([5], 3)


def test_a_step_tells_of_no_more_than_it_may() -> None:
    h = Harness(executor=FakeExecutor(max_num_batched_tokens=32))
    most = h.executor.geometry.num_aux
    seen, forward = [], h.executor.forward

    def counted(inputs: Any) -> Any:
        seen.append(len(set(inputs.aux_tokens_q[inputs.aux_tokens_q > 0].tolist())))
        return forward(inputs)

    h.executor.forward = counted  # type: ignore[method-assign]
    prompts = [a_prompt(40, seed) for seed in range(3)]
    for i, prompt in enumerate(prompts):
        h.submit(f"r{i}", prompt, max_tokens=3, prompt_logprobs=1)
    h.run()
    for i, prompt in enumerate(prompts):
        assert prompt_logprobs(h, f"r{i}") == told_prompt(prompt, 1)
    assert max(seen) == most == 8


def test_cached_prefixes_are_read_up_to_what_is_told() -> None:
    h = Harness()
    prompt = a_prompt(41)
    h.submit("first", prompt, max_tokens=1)
    h.run()
    h.submit("told", prompt, max_tokens=1, prompt_logprobs=1)
    h.run()
    assert prompt_logprobs(h, "told") == told_prompt(prompt, 1)
    assert h.last("told").usage.cached_tokens == 0
    request = h.input_processor.make_request(
        request_id="end",
        sampling=SamplingParams(max_tokens=1),
        prompt=Prompt(token_ids=prompt, prompt_logprobs_start=33),
    )
    h.engine.submit(request, h.receive)
    h.run()
    assert prompt_logprobs(h, "end") == told_prompt(prompt, 0, first=33)
    assert h.last("end").usage.cached_tokens == 32


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("seed", range(4))
def test_every_mix_in_a_short_memory(seed: int, mode: str) -> None:
    rng = random.Random(seed)
    h = Harness(
        executor=FakeExecutor(
            num_blocks=26, block_size=2, max_num_batched_tokens=12, num_host_blocks=40, max_num_seqs=6
        ),
        overlap=bool(seed % 2),
        preemption_mode=mode,
    )
    want = {}
    for i in range(20):
        prompt = a_prompt(rng.randint(1, 14), rng.randrange(3))
        num_top = rng.choice([None, 0, 2, -1])
        n = rng.choice([1, 1, 2])
        h.submit(f"r{i}", prompt, max_tokens=rng.randint(1, 12), prompt_logprobs=num_top, n=n)
        want[f"r{i}"] = [] if num_top is None else told_prompt(prompt, num_top)
        for _ in range(rng.randint(0, 4)):
            h.step()
    h.run()
    assert h.engine.load().num_preemptions > 0
    for name, positions in want.items():
        assert prompt_logprobs(h, name) == positions, name
    assert not h.engine._loop._output.aux_outputs._prompts and not h.engine._loop._output.aux_outputs.ready


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("kind", [{"logprobs": -1}, {"logprobs": 40}, {"logprob_token_ids": [3, 250, 9]}], ids=str)
def test_more_is_told_of_samples(kind: dict[str, Any], overlap: bool) -> None:
    h = Harness(executor=FakeExecutor(max_num_seqs=16), overlap=overlap)
    for i in range(12):
        h.submit(f"r{i}", [5, i], max_tokens=7, **kind)
        h.submit(f"plain{i}", [6, i], max_tokens=7)
    h.run()
    for i in range(12):
        context, positions = [5, i], [position for event in h.events[f"r{i}"] for position in event.logprobs]
        assert len(positions) == 7
        for position, token in zip(positions, expected_tokens([5, i], 7), strict=True):
            if "logprobs" in kind:
                assert position == told(context, token, kind["logprobs"])
            else:
                assert position.chosen.token_id == token
                want = [told(context, one, 0).chosen.logprob for one in kind["logprob_token_ids"]]
                assert [(one.token_id, one.logprob) for one in position.asked] == list(
                    zip((3, 250, 9), want, strict=True)
                )
            context.append(token)


def probabilities(logprobs: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution that a token is sampled from, one rule after the other."""
    shares = np.exp(logprobs / temperature)
    order = np.argsort(-shares)
    is_kept = shares >= min_p * shares.max()
    is_kept[order[top_k or len(order) :]] = False
    total, so_far = shares[is_kept].sum(), 0.0
    for token in order:
        is_kept[token] &= so_far < top_p * total
        so_far += shares[token] if is_kept[token] else 0.0
    return np.where(is_kept, shares, 0) / shares[is_kept].sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 99])
@pytest.mark.parametrize("top_p", [0.1, 0.8, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_log_probabilities_after_truncation(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal(40) * 2
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    want = probabilities(logprobs.astype(np.float64), temperature, top_k, top_p, min_p)
    truncation = Truncation(temperature, top_k, top_p, min_p)
    for token in np.flatnonzero(want).tolist():
        assert truncation.compute_logprob(logprobs, token) == pytest.approx(np.log(want[token]), abs=1e-9)
    assert compute_entropy(logprobs) == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), abs=1e-5)
    assert Truncation(0.0, 0, 1.0, 0.0).compute_logprob(logprobs, int(logprobs.argmax())) == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("kind", [{}, {"logprobs": 3}, {"logprobs": -1}, {"logprob_token_ids": [9, 3]}], ids=str)
def test_samples_have_log_probabilities_of_their_distribution(kind: dict[str, Any], overlap: bool) -> None:
    h = Harness(executor=FakeExecutor(max_num_seqs=16), overlap=overlap)
    fields = {"seed": 3, "max_tokens": 5, "sampling_logprobs": True, **kind}
    for name, temperature in (("neutral", 1.0), ("warm", 2.0), ("greedy", 0.0)):
        h.submit(name, [5, 6], temperature=temperature, **fields)
    h.run()
    logprobs = np.arange(1, VOCAB + 1) * LOGPROB_STEP
    for name in ("neutral", "warm", "greedy"):
        context, positions = [5, 6], [position for event in h.events[name] for position in event.logprobs]
        assert len(positions) == 5
        for position, token in zip(positions, h.tokens(name), strict=True):
            want = told(context, token, kind.get("logprobs", 0))
            context.append(token)
            assert (position.chosen, position.top) == (want.chosen, want.top)
            assert [one.token_id for one in position.asked] == kind.get("logprob_token_ids", [])
            assert position.entropy == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), rel=1e-5)
            scaled = {
                "neutral": want.chosen.logprob,
                "warm": want.chosen.logprob / 2 - np.log(np.exp(logprobs / 2).sum()),
                "greedy": 0.0,
            }
            assert position.sampling_logprob == pytest.approx(scaled[name], rel=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("presence_penalty", 0.5), ("typical_p", 0.5), ("logit_bias", {3: 1.0}), ("min_tokens", 2), ("beam_width", 2)],
)
def test_log_probabilities_of_other_distributions_are_refused(field: str, value: Any) -> None:
    name = "sampling_logprobs" if field == "beam_width" else field
    with pytest.raises(InvalidArgument, match=f"^{name}: "):
        SamplingParams(sampling_logprobs=True, **{field: value})


def test_errors_show_a_part_of_large_values() -> None:
    schema = {"properties": {f"a{number}": {"type": "string"} for number in range(500)}}
    with pytest.raises(InvalidArgument, match=r"structured_outputs: .* must be None with sampling_logprobs") as caught:
        SamplingParams(sampling_logprobs=True, structured_outputs={"json": schema})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states_are_pooled(pooling: Any, is_whole: bool) -> None:
    h = Harness(executor=FakeExecutor(max_num_batched_tokens=16))
    prompt = a_prompt(37)
    request = h.input_processor.make_request(
        request_id="a",
        sampling=SamplingParams(max_tokens=1),
        prompt=Prompt(token_ids=prompt, pooling=pooling),
        is_whole=is_whole,
    )
    h.engine.submit(request, h.receive)
    h.run()
    (embedding,) = [event.embedding for event in h.events["a"] if event.embedding]
    each = [(token, i + 1, sum(prompt[: i + 1]) % 1000) for i, token in enumerate(prompt)]
    want = each[-1] if pooling == "last" else [sum(column) / len(each) for column in zip(*each, strict=True)]
    assert embedding == pytest.approx(want, rel=1e-6)


def test_what_a_budget_leaves_is_cut_off_at_what_is_told() -> None:
    budget, sequence = PromptLogprobBudget(5), Sequence(0, list(range(40)), None)  # type: ignore[arg-type]
    sequence.request_prompt_logprobs(range(10, 20))
    assert budget.within(sequence, 8) == 8  # none of which is told of
    assert budget.within(sequence, 30) == 15
    assert budget.within(sequence, 30) == 10
    budget.begin_step()
    sequence.set_num_computed_tokens(18)
    assert budget.within(sequence, 22) == 22  # two of them
    assert sequence.take_logprob_positions(18, 40) == range(18, 20)
    assert budget.within(sequence, 22) == 22
