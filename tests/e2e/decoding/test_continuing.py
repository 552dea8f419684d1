"""Requests of the demo model that go on behind what was generated elsewhere, wherever they were cut."""

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue

import pytest

from jpaged import LLM, SamplingParams
from jpaged.client.routing.resumable_stream import Progress
from jpaged.outputs import new_completions
from jpaged.service.input_processor import move_grammars
from jpaged.structured import StructuredOutputs
from jpaged.types import OutputEvent, PriorOutput, Prompt, RequestOutput

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "color": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "color"],
    "additionalProperties": False,
}
HOT = SamplingParams(max_tokens=40, seed=3)
SHAPES: dict[str, SamplingParams] = {
    "greedy": replace(HOT, temperature=0.0),
    "three": replace(HOT, n=3, top_p=0.9),
    "stop": replace(HOT, stop=["the", "and "], min_tokens=4),
    "penalties": replace(HOT, n=2, frequency_penalty=1.0, repetition_penalty=1.3, bad_words=["she"]),
    "told": replace(HOT, n=2, logprobs=3),
    "json": replace(HOT, temperature=1.5, structured_outputs=StructuredOutputs(json=PERSON)),
    "complete": replace(HOT, structured_outputs=StructuredOutputs(json=PERSON, always_complete=True)),
}
CUTS_OF = 7
"""One in so many places of a stream is tried."""
WAIT_S = 300.0
"""For the next event of any request; a busy machine takes seconds."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256) as llm:
        yield llm


def run(llm: LLM, asked: dict[str, tuple[SamplingParams, tuple[PriorOutput, ...]]]) -> dict[str, list[OutputEvent]]:
    """Requests of one prompt, all at once: what is sent of each."""
    serving, sent = llm._serving, SimpleQueue[OutputEvent]()
    for name, (sampling, generated) in asked.items():
        prompt = Prompt(text="Once upon a time", generated=generated)
        request = serving.input_processor.make_request(request_id=name, sampling=sampling, prompt=prompt)
        if serving.grammars is not None:
            request = serving.grammars.bind_now(request)
        serving.engine.submit(move_grammars(request), sent.put)
    events = {name: list[OutputEvent]() for name in asked}
    running = set(asked)
    while running:
        event = sent.get(timeout=WAIT_S)
        events[event.request_id].append(event)
        if event.is_last:
            running.discard(event.request_id)
    return events


def folded(events: list[OutputEvent], sampling: SamplingParams) -> RequestOutput:
    completions = new_completions(sampling)
    for event in events:
        completions.add(event)
    output = completions.output("", None, ())
    return replace(output, times=None, usage=replace(output.usage, cached_tokens=0))


def without_logprobs(output: RequestOutput) -> tuple[RequestOutput, list[float]]:
    """An output, and apart its log-probabilities: their last bits may differ where a context is computed again."""
    found: list[float] = []
    for one in output.outputs:
        found += [] if one.cumulative_logprob is None else [one.cumulative_logprob]
        for position in one.logprobs or ():
            found += [position.chosen.logprob, *(token.logprob for token in position.top)]
    outputs = [replace(one, cumulative_logprob=None, logprobs=None) for one in output.outputs]
    return replace(output, outputs=tuple(outputs)), found


@pytest.mark.long
def test_a_request_that_was_cut_goes_on_as_if_it_had_not_been(llm: LLM) -> None:
    sent = run(llm, {name: (sampling, ()) for name, sampling in SHAPES.items()})
    cuts: dict[str, tuple[SamplingParams, tuple[PriorOutput, ...]]] = {}
    for name, events in sent.items():
        progress = Progress()
        for number, event in enumerate(events[:-1]):
            progress.add(event, event.finish is not None)
            if number % CUTS_OF == len(cuts) % CUTS_OF:
                cuts[f"{name}/{number}"] = SHAPES[name], progress.generated()
    for cut, rest in run(llm, cuts).items():
        name, _, place = cut.partition("/")
        whole = [*sent[name][: int(place) + 1], *rest]
        output, logprobs = without_logprobs(folded(whole, SHAPES[name]))
        expected, expected_logprobs = without_logprobs(folded(sent[name], SHAPES[name]))
        assert output == expected, cut
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4), cut
    assert {cut.partition("/")[0] for cut in cuts} == SHAPES.keys()
    assert llm.load().num_blocks_used == 0
    llm._serving.engine.check()
