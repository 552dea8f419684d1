"""A request whose logits are not finite ends alone: others go on, its blocks come back, nobody finds its prefix."""

import logging

import pytest

from jpaged.engine.kv_cache.blocks import block_key, root_block_hash
from jpaged.engine.sequence import Status
from jpaged.errors import InternalError
from jpaged.testing import FakeExecutor, Faults, expected_tokens
from jpaged.types import FinishReason
from tests.engine.harness import Harness

BAD = 200
"""A token whose keys and values are NaN."""
PREFIX = list(range(1, 13))
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "top_logprobs": {"logprobs": 3},
    "samples": {"n": 3, "temperature": 1.0, "seed": 5},
    "best of": {"n": 1, "best_of": 3, "temperature": 1.0, "seed": 5},
    "beams": {"beam_width": 3},
}


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request):
    return request.param


def make(overlap, *, num_host_blocks=0, num_blocks=64, **options):
    faults = Faults(nan_token_ids=frozenset({BAD}))
    executor = FakeExecutor(
        max_num_batched_tokens=16, num_blocks=num_blocks, num_host_blocks=num_host_blocks, faults=faults
    )
    return Harness(executor, overlap=overlap, **options)


def fails(h, request_id):
    """The request's one last event is the error."""
    error = h.last(request_id).error
    assert isinstance(error, InternalError)
    return str(error)


def is_whole(h, request_id, prompt, num_tokens):
    assert h.last(request_id).finish.reason is FinishReason.LENGTH
    assert h.tokens(request_id) == expected_tokens(prompt, num_tokens)


def num_used(h):
    h.engine.step()  # counts are of a step's end
    return h.engine.load().num_blocks_used


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_it_ends_alone_with_its_cause_and_gives_its_blocks_back(overlap, way, caplog):
    h = make(overlap)
    h.submit("before", PREFIX, max_tokens=9)
    h.submit("bad", [*PREFIX, BAD, 7], max_tokens=9, **way)
    h.submit("after", [3, *PREFIX], max_tokens=9, n=2, temperature=1.0, seed=1)
    with caplog.at_level(logging.ERROR):
        h.run()
    context = f"no token 1 can be sampled for sequence 0, after {len(PREFIX) + 2} tokens of context"
    assert fails(h, "bad") == f"the model's logits are not finite: {context}"
    assert all(event.token_ids == () for event in h.events["bad"])
    is_whole(h, "before", PREFIX, 9)
    assert [h.tokens("after", i) for i in range(2)] == [
        expected_tokens([3, *PREFIX], 9, seed=1, sequence_index=i) for i in range(2)
    ]
    assert num_used(h) == 0
    load = h.engine.load()
    assert (load.num_nonfinite_requests, load.num_requests_ended) == (1, 3)
    assert h.engine.num_ended_by_reason()["error"] == 1
    assert [record.exc_info for record in caplog.records] == [None]


def test_it_keeps_what_was_sound_before(overlap):
    tokens = expected_tokens(PREFIX, 9)
    h = make(overlap)
    h.executor.faults.nan_token_ids = frozenset({tokens[4]})
    h.submit("a", PREFIX, max_tokens=9)
    h.run()
    assert h.tokens("a") == tokens[:5]
    assert fails(h, "a").endswith(
        f"no token 6 can be sampled for sequence 0, after {len(PREFIX) + 5} tokens of context"
    )


def test_many_of_them_are_told_once_and_counted(overlap, caplog):
    h = make(overlap)
    with caplog.at_level(logging.WARNING):
        for i in range(20):
            h.submit(f"bad{i}", [i, BAD], max_tokens=4)
        h.run()
    assert h.engine.load().num_nonfinite_requests == 20
    assert len(caplog.records) == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_nobody_finds_what_it_computed(overlap, way):
    """Once the cause is gone, the same prompt is computed anew; blocks of NaN would fail it again."""
    h = make(overlap)
    prompt = [*PREFIX, BAD, *range(30, 50)]
    h.submit("bad", prompt, max_tokens=9, **way)
    h.run()
    fails(h, "bad")
    h.executor.faults.nan_token_ids = frozenset()
    h.submit("again", prompt, max_tokens=9)
    h.run()
    is_whole(h, "again", prompt, 9)
    assert h.last("again").usage.cached_tokens == 0


@pytest.mark.parametrize("end", ["abort", "drop"])
def test_nobody_finds_what_one_that_was_ended_meanwhile_computed(end):
    """Its blocks were cached when it ended; only then its last step came back."""
    h = make(overlap=True)
    prompt = [*PREFIX, BAD, 31, 32, 33]
    h.submit("bad", prompt, max_tokens=9)
    h.step()
    getattr(h.engine, end)("bad")
    h.executor.faults.nan_token_ids = frozenset()
    h.run()
    assert h.engine.load().num_nonfinite_requests == 0
    h.submit("again", [*prompt, 34], max_tokens=9)
    h.run()
    is_whole(h, "again", [*prompt, 34], 9)


def test_nobody_finds_it_in_host_memory(overlap):
    h = make(overlap, num_blocks=16, num_host_blocks=32)
    prompt = [*PREFIX, *range(30, 46)]
    h.executor.faults.nan_token_ids = frozenset({expected_tokens(prompt, 2)[0]})
    h.submit("first", prompt, max_tokens=1)
    h.run()
    for i in range(3):  # until every block has been given to somebody else
        h.submit(f"other{i}", [100 + i] * 50, max_tokens=4)
        h.run()
    assert h.engine.load().num_blocks_swapped_out > 0
    h.submit("bad", prompt, max_tokens=4)
    h.run()
    fails(h, "bad")
    parent = root_block_hash("")
    for begin in range(0, len(prompt), 4):
        parent = block_key(parent, prompt[begin : begin + 4])
        assert not h.engine.prefixes.has_prefix(parent)


def test_who_shares_its_blocks_goes_on_and_a_pinned_prefix_stays(overlap):
    h = make(overlap)
    pinned = h.engine.pin_prefix("system", PREFIX)
    h.run()
    assert pinned.result() == 12
    h.submit("good", [*PREFIX, 20], max_tokens=20)
    h.step()
    h.submit("bad", [*PREFIX, BAD], max_tokens=9)
    h.run()
    fails(h, "bad")
    is_whole(h, "good", [*PREFIX, 20], 20)
    h.submit("later", [*PREFIX, 21], max_tokens=5)
    h.run()
    is_whole(h, "later", [*PREFIX, 21], 5)
    assert h.last("later").usage.cached_tokens == 12


def test_a_prefix_of_nan_is_not_pinned(overlap):
    h = make(overlap)
    pinned = h.engine.pin_prefix("system", [*PREFIX, BAD, 5, 6, 7])
    h.run()
    with pytest.raises(InternalError, match="logits are not finite"):
        pinned.result()
    assert num_used(h) == 0


def test_whether_it_fails_does_not_depend_on_how_its_prompt_is_cut(overlap):
    """Only the last part of a prompt samples; NaN in what an earlier part has computed is in the logits of the last."""
    for others in (0, 3):
        h = make(overlap)
        for i in range(others):
            h.submit(f"other{i}", [i + 1] * 40, max_tokens=3)
        h.submit("bad", [BAD, *range(1, 60)], max_tokens=3)
        h.run()
        assert fails(h, "bad").endswith("after 60 tokens of context")
        assert h.engine.load().num_nonfinite_requests == 1


def note_finishes(scheduler, statuses, monkeypatch):
    """Adds the status that each group has when it is finished."""
    finish = scheduler.finish

    def noted(group):
        statuses.add(group.status)
        finish(group)

    monkeypatch.setattr(scheduler, "finish", noted)


@pytest.mark.parametrize(("mode", "status"), [("recompute", Status.WAITING), ("swap", Status.SWAPPED)])
@pytest.mark.long
def test_it_may_have_been_preempted_before_word_of_it_came(mode, status, monkeypatch):
    """Each of its tokens in turn is the one, so that one is sampled in the step before it has to leave."""
    tokens = expected_tokens([9, 8, 7], 30)
    found: set[Status] = set()
    for token_id in tokens[:-1]:
        h = make(overlap=True, num_blocks=12, num_host_blocks=40, preemption_mode=mode)
        h.executor.faults.nan_token_ids = frozenset({token_id})
        h.submit("a", [1, 2, 3], max_tokens=30)
        h.submit("b", [9, 8, 7], max_tokens=30)
        note_finishes(h.engine._loop.scheduler, found, monkeypatch)
        h.run()
        fails(h, "b")
        assert num_used(h) == 0
    assert status in found
