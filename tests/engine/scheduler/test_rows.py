"""Rows that decode are edited: what is packed of them is what their sequences say, and a step names none of them."""

import numpy as np
import pytest

from jpaged.engine.executor import SamplingInputs
from jpaged.engine.scheduler.output import build_sampling_inputs, build_step_inputs
from jpaged.errors import InternalError
from jpaged.testing import FakeExecutor, expected_tokens
from tests.engine.harness import Harness

EOS = frozenset({5})


class Watching(FakeExecutor):
    """Keeps every step's inputs, the tables as they were."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inputs, self.samplings = [], []

    def forward(self, inputs):
        self.inputs.append(inputs)
        return super().forward(inputs)

    def sample(self, hidden, inputs):
        self.samplings.append(inputs)
        return super().sample(hidden, inputs)


def make(*, overlap=True, **options):
    executor = Watching(**{"max_num_batched_tokens": 32, "num_blocks": 200, "max_num_seqs": 8} | options)
    return Harness(executor=executor, overlap=overlap, eos_token_ids=EOS)


def rows_of(h):
    return h.engine._loop.scheduler.rows


MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 2**33 + 1, "top_k": 5},
    {"temperature": 0.9, "seed": 3, "n": 2, "min_tokens": 9, "logprobs": 2},
    {"temperature": 0.0, "beam_width": 2},
]


@pytest.mark.parametrize("overlap", [False, True])
def test_edited_rows_are_packed_as_if_they_were_written_out(overlap, monkeypatch):
    """The same lives with rows for nobody: the same steps, row for row."""

    def lived():
        h = make(overlap=overlap)
        for i, sampling in enumerate(MIXED):
            h.submit(f"r{i}", list(range(20 + i, 27 + 3 * i)), max_tokens=12 + i, **sampling)
            h.step()
        h.submit("short", [9], max_tokens=2)
        h.run()
        return h

    edited = lived()
    monkeypatch.setattr("jpaged.engine.scheduler.scheduler._decodes", lambda row: False)
    written = lived()
    assert edited.events.keys() == written.events.keys()
    for name in edited.events:
        for index in range(2):
            assert edited.tokens(name, index) == written.tokens(name, index)
        assert edited.last(name).usage == written.last(name).usage
    steps = [list(map(row_contents, h.executor.inputs, h.executor.samplings)) for h in (edited, written)]
    assert steps[0] == steps[1]


def row_contents(inputs, sampling):
    """What a step does in each of its rows, whatever their order; blocks by how many there are."""
    contents = []
    for row in range(inputs.num_rows):
        begin, end = inputs.query_starts_s1[row : row + 2]
        tokens = slice(begin, end)
        parts = (inputs.positions_t, inputs.rope_lens_t, inputs.is_prev_sampled_t)
        known = np.where(inputs.is_prev_sampled_t, 0, inputs.token_ids_t)[tokens].tolist()
        num_blocks = np.count_nonzero(inputs.block_tables_gsm[0, row])
        record = sampling.rows_r[row].tobytes()
        contents.append((*(part[tokens].tolist() for part in parts), known, num_blocks, record))
    return sorted(contents), inputs.num_rows, inputs.num_tokens, sampling.detail


def test_a_step_of_rows_that_decode_writes_none_of_them_out(monkeypatch):
    h = make()
    for i in range(4):
        h.submit(f"r{i}", [i, 9], max_tokens=40)
    for _ in range(3):
        h.step()
    written = []
    scheduler = h.engine._loop.scheduler
    decide = scheduler.schedule

    def schedule(*asked):
        made = decide(*asked)
        written.append((len(made.decodes), len(made.rows)))
        return made

    monkeypatch.setattr(scheduler, "schedule", schedule)
    for _ in range(10):
        h.step()
    assert written == [(4, 0)] * 10


def test_the_last_row_takes_the_place_of_one_that_leaves():
    h = make()
    lengths = {"a": 20, "b": 5, "c": 20, "d": 9, "e": 20}
    for name, max_tokens in lengths.items():
        h.submit(name, [ord(name)] * 3, max_tokens=max_tokens)
    while len(rows_of(h)) < 5:
        h.step()
    order = [sequence.token_ids[0] for sequence in rows_of(h)._sequences]
    assert order == [*b"abcde"]
    while len(rows_of(h)) > 4:
        h.step()
    assert [sequence.token_ids[0] for sequence in rows_of(h)._sequences] == [*b"aecd"]
    h.engine.drop("a")
    h.step()
    assert [sequence.token_ids[0] for sequence in rows_of(h)._sequences] == [*b"dec"]
    h.run()
    for name in "bcde":
        assert h.tokens(name) == expected_tokens([ord(name)] * 3, lengths[name])
    assert len(rows_of(h)) == 0 and not rows_of(h).fully_batched_groups


def test_a_group_is_settled_while_all_its_live_sequences_have_rows():
    h = make()
    h.submit("a", [1, 2, 3], max_tokens=12, n=3, temperature=1.0, seed=4)
    while len(rows_of(h)) < 3:
        h.step()
    (group,) = rows_of(h).fully_batched_groups
    h.engine._loop.scheduler.finish_sequence(group, group.sequences[1])
    assert (len(rows_of(h)), rows_of(h).fully_batched_groups) == (2, {group})
    rows_of(h).remove(group.sequences[0])
    assert (len(rows_of(h)), rows_of(h).fully_batched_groups) == (1, set())
    assert rows_of(h).others([group]) == group.sequences[:2]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_runs_for_its_tokens_and_not_once_more(overlap):
    h = make(overlap=overlap)
    h.submit("a", [1, 2, 3], max_tokens=7)
    h.run()
    assert len(h.tokens("a")) == h.executor.num_steps == 7


def test_blocks_that_rows_are_about_to_take_are_not_given_away():
    """After the fourth step the row has filled its block, and three are free: two asked for, one spare, one owed."""
    h = make(overlap=False, num_blocks=4)
    h.submit("a", [1], max_tokens=8)
    for _ in range(3):
        h.step()
    h.submit("b", list(range(8)), max_tokens=1)
    while len(h.tokens("a")) < 8:
        h.step()
        assert h.engine.load().num_waiting == 1 or len(h.tokens("a")) == 8
    h.run()
    assert h.tokens("b") == expected_tokens(list(range(8)), 1)
    assert h.engine.load().num_preemptions == 0


def test_rows_that_may_not_end_yet_are_written_out_until_they_may():
    h = make()
    h.submit("a", [1, 2, 3], max_tokens=20, min_tokens=6, stop_token_ids=[7])
    neutral = SamplingInputs.neutral(1).rows_r[0]
    while len(rows_of(h)) == 0:
        h.step()
    assert len(h.executor.samplings) == 6
    assert all(sampling.rows_r[0] != neutral for sampling in h.executor.samplings)
    h.step()
    assert h.executor.samplings[-1].rows_r[0] == neutral


def test_a_block_that_a_row_fills_is_found_by_the_next_request():
    h = make()
    h.submit("a", [1, 2, 3], max_tokens=40)
    while len(h.tokens("a")) < 20:
        h.step()
    told = h.tokens("a")
    h.submit("b", [1, 2, 3, *told], max_tokens=1)
    h.run()
    assert h.last("b").usage.cached_tokens == (3 + len(told) - 1) // 4 * 4


@pytest.mark.parametrize(("column", "wrong"), [("_starts_s", 7), ("_num_left_s", 7), ("_block_tables_gsm", 7)], ids=str)
def test_a_row_that_is_not_its_sequence_s_is_an_error(column, wrong):
    h = make()
    h.submit("a", [1, 2, 3], max_tokens=40)
    while len(rows_of(h)) == 0:
        h.step()
    rows_of(h).check()
    getattr(rows_of(h), column)[0] += wrong
    with pytest.raises(InternalError, match="row 0"):
        rows_of(h).check()


def test_the_device_s_order_is_kept_by_every_array():
    """Rows in another order than they were entered in, rows that decode among them."""
    h = make()
    for i in range(3):
        h.submit(f"r{i}", [i, 9], max_tokens=40, temperature=1.0, seed=i)
    for _ in range(3):
        h.step()
    h.submit("new", list(range(30, 37)), max_tokens=4)
    scheduler, geometry = h.engine._loop.scheduler, h.executor.geometry
    h.engine._thread._drain_inbox()
    schedule = scheduler.schedule()
    assert (len(schedule.decodes), len(schedule.rows)) == (3, 1)
    plain = (
        build_step_inputs(schedule, geometry),
        build_sampling_inputs(schedule, geometry, EOS, scheduler.rows.logits_processors),
    )
    schedule.reorder([3, 1, 0, 2])
    moved = (
        build_step_inputs(schedule, geometry),
        build_sampling_inputs(schedule, geometry, EOS, scheduler.rows.logits_processors),
    )
    assert row_contents(*plain) == row_contents(*moved)
    assert np.array_equal(moved[0].block_tables_gsm[0, :4], plain[0].block_tables_gsm[0, [3, 1, 0, 2]])
    assert moved[0].query_starts_s1.tolist()[:5] == [0, 7, 8, 9, 10]
    assert np.array_equal(moved[1].rows_r[:4], plain[1].rows_r[[3, 1, 0, 2]])
    assert [sequence.in_flight_row for sequence in schedule.sequences] == [2, 1, 3, 0]
    tokens, beams = schedule.live_tokens()
    assert (tokens.rows, beams.rows) == ([2, 1, 3, 0], [])
    for place, row in enumerate(tokens.rows):
        assert schedule.row_at(row).sequence is schedule.sequences[place]
        assert schedule.row_at(row).output_index == tokens.sequences[place].num_output_tokens - 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sample_that_ends_leaves_the_rows_to_the_others(overlap):
    prompt, seed = [3, 1, 4], 4
    first, second = (expected_tokens(prompt, 20, seed=seed, sequence_index=i) for i in range(2))
    place = next(i for i in range(3, 20) if first[i] not in (*first[:i], *second, 5))
    h = make(overlap=overlap)
    h.submit("a", prompt, n=2, temperature=1.0, seed=seed, max_tokens=20, stop_token_ids=[first[place]])
    h.run()
    assert (h.tokens("a", 0), h.tokens("a", 1)) == (first[: place + 1], second)
    alone = [inputs.num_rows for inputs in h.executor.inputs[1:]].index(1)
    assert place <= alone <= place + 1
    assert all(inputs.num_rows == 1 for inputs in h.executor.inputs[alone + 1 :])
