"""Requests that go on behind what was generated elsewhere: wherever they are cut, the rest is what would have come."""

import random
from dataclasses import replace
from typing import Any

import pytest

from jpaged.client.routing.resumable_stream import Progress
from jpaged.errors import InvalidArgument
from jpaged.outputs import new_completions
from jpaged.testing import ByteTokenizer, FakeExecutor, FedExecutor, SeveralStepsExecutor, seeing
from jpaged.testing.fake_model import FakeGrammar
from jpaged.types import OutputEvent, PriorOutput, RequestOutput, SamplingParams
from tests.engine.harness import Harness

V, EOS = 257, ByteTokenizer.EOS

WAYS: dict[str, dict[str, Any]] = {
    "overlapping": {},
    "in turn": {"overlap": False},
    "few blocks": {"num_blocks": 34},
    "few blocks, swapped": {"num_blocks": 34, "num_host_blocks": 64, "preemption_mode": "swap"},
    "small chunks": {"max_num_batched_tokens": 9},
    "static": {"batching": "static"},
    "reserved": {"kv_policy": "reserve-max", "num_blocks": 256},
    "no prefixes": {"enable_prefix_caching": False},
    "several steps": {"num_scheduler_steps": 4, "executor": SeveralStepsExecutor},
    "several steps, fed": {"num_scheduler_steps": 4, "executor": FedExecutor},
    "windows": {"executor": seeing((None, 6)), "num_blocks": 128},
    "long_rope": {"outgrown_len": 18},
    "drafts": {"num_speculative_tokens": 5, "max_num_seqs": 32},
}


def harness(**fields: Any) -> Harness:
    executor = fields.pop("executor", FakeExecutor)(
        vocab_size=V,
        num_blocks=fields.pop("num_blocks", 64),
        max_num_seqs=fields.pop("max_num_seqs", 12),
        num_host_blocks=fields.pop("num_host_blocks", 0),
        max_num_batched_tokens=fields.pop("max_num_batched_tokens", 32),
    )
    return Harness(executor=executor, eos_token_ids=frozenset({EOS}), max_num_queued_reqs=4096, **fields)


SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "several": {"temperature": 1.0, "n": 3},
    "whole": {"temperature": 1.0, "n": 2, "is_whole": True},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": -1.0, "repetition_penalty": 1.5},
    "biased": {"temperature": 1.0, "logit_bias": {7: 3.0, 9: -100.0}, "bad_words": ("a", "bc")},
    "told": {"temperature": 1.0, "n": 2, "logprobs": 2, "prompt_logprobs": 1},
    "asked of": {"temperature": 1.0, "logprob_token_ids": (3, 5)},
    "at least": {"temperature": 1.0, "min_tokens": 5},
    "grammar": {"temperature": 1.0, "grammar": 9},
    "grammars": {"temperature": 1.0, "n": 3, "grammar": 12},
    "grammar told": {"temperature": 1.0, "logprobs": 0, "grammar": 9},
}


def request_of(shape: str, rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A random prompt and what is asked of it; half of them stop at tokens or texts that come."""
    prompt = [rng.randrange(1, 256) for _ in range(rng.randrange(1, 16))]
    fields = {"max_tokens": rng.randrange(6, 13), "seed": rng.randrange(2**32), **SHAPES[shape]}
    if "grammar" in fields:
        fields["grammar"] = FakeGrammar(V, EOS, rng.randrange(2, 14), salt=rng.randrange(99))
    h = harness()
    h.submit("first", prompt, **fields)
    h.run()
    tokens, text = h.tokens("first"), h.text("first")
    kind = rng.randrange(4)
    if kind == 1 and len(tokens) > 2:
        fields["stop_token_ids"] = [rng.choice(tokens[1:])]
    elif kind == 2 and len(text) > 3:
        at = rng.randrange(1, len(text) - 2)
        fields["stop"] = (text[at : at + rng.randrange(1, 4)], text[:2] + "no")
    return prompt, fields


def run(way: str, requests: dict[str, tuple[list[int], dict[str, Any]]]) -> Harness:
    """All of them in one engine, some while others run."""
    h = harness(**WAYS[way])
    for number, (name, (prompt, fields)) in enumerate(requests.items()):
        h.submit(name, prompt, **fields)
        if number % 3 == 2:
            h.step()
    h.run()
    h.engine.check()
    assert h.engine.load().num_blocks_used == 0
    assert h.engine._loop._output._ending_ids.any.size == 0
    return h


def folded(events: list[OutputEvent], fields: dict[str, Any]) -> RequestOutput:
    """What a caller has of it in the end; what the cache had is not the request's."""
    sampling = SamplingParams(**{name: value for name, value in fields.items() if name in SamplingParams.__slots__})
    completions = new_completions(sampling)
    for event in events:
        completions.add(event)
    output = completions.output("", None, ())
    # Versions of the weights are those of the tokens that are sampled here.
    output = replace(output, outputs=tuple(replace(one, weight_versions=()) for one in output.outputs))
    return replace(output, usage=replace(output.usage, cached_tokens=0), times=None)


def cut_everywhere(name: str, events: list[OutputEvent], request: tuple[list[int], dict[str, Any]]) -> dict[str, Any]:
    """The request once for each place where it may have been cut, with what had come by then."""
    found, progress, (prompt, fields) = {}, Progress(), request
    for number, event in enumerate(events[:-1]):
        progress.add(event, event.finish is not None)
        if generated := progress.generated():
            found[f"{name}/{number}"] = (prompt, {**fields, "generated": generated})
    return found


def check_cuts(way: str, seed: int, shapes: list[str]) -> None:
    """Requests of these shapes, cut wherever they can be, go on as they would have without the cut."""
    rng, sent, cuts = random.Random(seed), dict[str, list[OutputEvent]](), dict[str, Any]()
    alone = "windows" if way == "windows" else "in turn"  # which is another model
    requests = {shape: request_of(shape, rng) for shape in shapes}
    for name, (prompt, fields) in requests.items():
        sent[name] = run(alone, {name: (prompt, {**fields, "is_whole": False})}).events[name]
        cuts.update(cut_everywhere(name, sent[name], requests[name]))
    resumed = run(way, cuts)
    for cut in cuts:
        name, _, number = cut.partition("/")
        before, after, fields = sent[name][: int(number) + 1], resumed.events[cut], requests[name][1]
        assert folded([*before, *after], fields) == folded(sent[name], fields), (cut, cuts[cut])
        usages = [before[-1].usage.completion_tokens, *(event.usage.completion_tokens for event in after)]
        assert usages == sorted(usages)
        assert not any(event.prompt_logprobs for event in after)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.thinned(39)
def test_a_request_that_was_cut_goes_on_as_if_it_had_not_been(way, seed):
    check_cuts(way, seed, list(SHAPES))


def refused(**fields: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        harness().submit("r", [1, 2, 3], **{"max_tokens": 8, **fields})
    return str(caught.value)


def test_what_nobody_can_have_generated_is_refused_by_its_field():
    one = PriorOutput(0, (5, 6))
    assert refused(generated=(one,), beam_width=2).startswith(
        "generated_token_ids: must be left out with sampling.beam"
    )
    assert "sampling.best_of" in refused(generated=(one,), best_of=2, seed=1)
    assert refused(generated=(one,), temperature=1.0).startswith("sampling.seed: must be set")
    assert "2 sequences are over sampling.n (1)" in refused(generated=(one, one))
    assert "generated_token_ids[1].index: 0 is given twice" in refused(generated=(one, one), n=2)
    assert "generated_token_ids[0].index: 1 is not from 0 to 0" in refused(generated=(PriorOutput(1, (5,)),))
    assert "generated_token_ids[0].ids: 0 tokens are not from 1 to 7" in refused(generated=(PriorOutput(0, ()),))
    assert "8 tokens are not from 1 to 7: max_tokens is 8" in refused(generated=(PriorOutput(0, (5,) * 8),))
    ended = PriorOutput(0, (5,) * 9, has_finished=True)
    assert "9 tokens are not from 1 to 8" in refused(generated=(ended,), n=2)
    assert "all 1 sequences have finished" in refused(generated=(PriorOutput(0, (5,), has_finished=True),))
    assert "generated_token_ids[0].ids: 257 is not a token id" in refused(generated=(PriorOutput(0, (5, 257)),))
    for wrong in (float("nan"), float("-inf"), 0.5):
        assert "[0].cumulative_logprob" in refused(generated=(PriorOutput(0, (5,), wrong),))


def test_tokens_behind_an_end_are_refused():
    assert "ids: token 2, 256, ends the sequence (stop)" in refused(generated=(PriorOutput(0, (5, EOS, 6)),))
    stopped = refused(generated=(PriorOutput(0, tuple(b"so it is")[:7]),), stop=("it",))
    assert "ids: token 5, 116, ends the sequence (stop)" in stopped
    grammar = FakeGrammar(V, EOS, 9, salt=3)
    wrong = next(token for token in range(V) if token not in grammar.allowed_after([]) and token != EOS)
    assert "token 1" in refused(generated=(PriorOutput(0, (wrong,)),), grammar=grammar)


def test_what_the_prefix_cache_holds_of_generated_tokens_is_not_of_the_prompt():
    h = harness()
    prompt, fields = list(range(1, 11)), {"max_tokens": 24, "ignore_eos": True}
    h.submit("before", prompt, **fields)
    h.run()
    tokens = h.tokens("before")
    h.submit("after", prompt, generated=(PriorOutput(0, tuple(tokens[:20])),), **fields)
    h.run()
    assert h.tokens("after") == tokens[20:]
    assert h.last("after").usage.cached_tokens == len(prompt)
    load = h.engine.load()
    assert load.num_prefix_hit_tokens <= load.num_prefix_query_tokens == 2 * len(prompt)


def test_a_request_ends_early_with_what_was_held_back_of_both_its_parts():
    h = harness()
    given = PriorOutput(0, tuple(b"so i"))
    h.submit("r", [1, 2, 3], generated=(given,), stop=("ice",), max_tokens=40)
    h.engine.abort("r")
    h.run()
    assert h.text("r") == "i"
    assert h.last("r").usage.completion_tokens == 4
