"""A beam search's rules, by cases small enough to work out by hand."""

import pytest

from jpaged.engine.output.beam import Beam, BeamSearch
from jpaged.testing import FakeExecutor
from jpaged.types import PositionLogprobs, SamplingParams, TokenLogprob
from tests.engine.groups import num_swapped_blocks
from tests.engine.harness import Harness
from tests.engine.kv_cache.oracle import expected_beams

EOS = 9


def search(width=2, max_tokens=8, min_tokens=0, ending_ids=(EOS,), length_penalty=1.0, early_stopping=False):
    sampling = SamplingParams(
        beam_width=width, max_tokens=max_tokens, min_tokens=min_tokens, early_stopping=early_stopping
    )
    object.__setattr__(sampling, "length_penalty", length_penalty)  # also one that no request may ask for
    return BeamSearch(sampling, frozenset(ending_ids))


def top(*pairs):
    """A beam's likeliest tokens, as (token, log-probability)."""
    return [PositionLogprobs(TokenLogprob(token_id, logprob)) for token_id, logprob in pairs]


def tokens(beams):
    return [beam.token_ids for beam in beams]


def test_the_best_continuations_of_all_beams_become_the_new_beams():
    s = search()
    s.advance([top((1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0))])
    assert tokens(s.beams) == [(1,), (2,)]
    chosen = s.advance([top((1, -3.0), (2, -4.0)), top((5, -0.5), (6, -1.0))])
    assert [(candidate.parent, candidate.token_id) for candidate in chosen] == [(1, 5), (1, 6)]
    assert tokens(s.beams) == [(2, 5), (2, 6)]
    assert [beam.cumulative_logprob for beam in s.beams] == [-2.5, -3.0]


def test_of_equal_candidates_the_earlier_beam_and_the_earlier_token_come_first():
    s = search()
    s.advance([top((1, -1.0), (2, -1.0), (3, -1.0), (4, -1.0))])
    assert tokens(s.beams) == [(1,), (2,)]
    s.advance([top((7, -1.0), (8, -1.0)), top((5, -1.0), (6, -1.0))])
    assert tokens(s.beams) == [(1, 7), (1, 8)]


def test_an_end_among_the_best_is_kept_and_its_place_goes_to_the_next():
    s = search()
    s.advance([top((EOS, -1.0), (1, -2.0), (2, -3.0), (3, -4.0))])
    assert tokens(s.beams) == [(1,), (2,)]
    assert tokens(s.best(2)) == [(EOS,)]
    assert not s.is_done


def test_an_end_below_the_best_is_dropped():
    s = search()
    s.advance([top((1, -1.0), (2, -2.0), (EOS, -3.0), (3, -4.0))])
    assert s.best(2) == []
    assert tokens(s.beams) == [(1,), (2,)]


def ended_twice(early_stopping, length_penalty=1.0):
    """Two ends with scores -2 and -2.5 after two tokens; the running beams stand at -2.75 and worse."""
    s = search(early_stopping=early_stopping, length_penalty=length_penalty, max_tokens=6)
    s.advance([top((1, -1.0), (2, -1.5), (3, -8.0), (4, -9.0))])
    s.advance([top((EOS, -1.0), (5, -1.75)), top((EOS, -1.0), (6, -4.0))])
    assert tokens(s.best(2)) == [(1, EOS), (2, EOS)]
    assert tokens(s.beams) == [(1, 5), (2, 6)]
    return s


def test_early_stopping_ends_with_enough_finished_sequences():
    assert ended_twice(True).is_done


def test_without_it_the_search_ends_when_the_best_beam_is_behind_at_its_length():
    s = ended_twice(False)
    # Finished: -2 / 2 and -2.5 / 2 = -1.25. Running: -2.75 / 2 = -1.375, which is no better.
    assert s.is_done


def test_never_goes_on_while_a_longer_sequence_could_still_win():
    s = ended_twice("never")
    # -2.75 over six tokens would be -0.46, above -1.25.
    assert not s.is_done
    s.advance([top((7, -6.0), (8, -7.0)), top((7, -6.0), (8, -7.0))])
    # -8.75 over six tokens is -1.46: no longer.
    assert s.is_done
    assert tokens(s.best(2)) == [(1, EOS), (2, EOS)]


def test_never_does_not_look_ahead_when_length_counts_for_nothing():
    assert ended_twice("never", length_penalty=0.0).is_done


@pytest.mark.parametrize(
    ("length_penalty", "best", "score"),
    [
        (0.0, (EOS,), -1.0),
        (1.0, (1, EOS), -0.75),
        (2000.0, (1, EOS), 0.0),  # no float holds 2 ** 2000
        (-2000.0, (EOS,), -1.0),
    ],
)
def test_the_length_penalty_decides_between_short_and_long(length_penalty, best, score):
    s = search(length_penalty=length_penalty, early_stopping=True)
    s.advance([top((EOS, -1.0), (1, -1.0), (2, -5.0), (3, -6.0))])
    s.advance([top((EOS, -0.5), (4, -3.0)), top((5, -3.0), (6, -4.0))])
    # Log-probabilities -1.0 and -1.5; over their lengths -1.0 and -0.75.
    assert s.is_done
    assert s.best(1)[0].token_ids == best
    assert s.score(s.best(1)[0]) == score


def test_a_better_end_replaces_the_worst_of_the_finished():
    s = search(early_stopping="never", max_tokens=4)
    s.advance([top((EOS, -3.0), (1, -3.25), (2, -3.5), (3, -9.0))])
    s.advance([top((EOS, -3.0), (4, -0.25)), top((5, -9.0), (6, -9.5))])
    assert [s.score(beam) for beam in s.best(2)] == [-3.0, -3.125]
    s.advance([top((EOS, -0.25), (7, -8.0)), top((8, -8.0), (6, -9.0))])
    assert tokens(s.best(3)) == [(1, 4, EOS), (EOS,)]


def test_before_min_tokens_no_sequence_ends():
    s = search(min_tokens=2)
    s.advance([top((EOS, -0.1), (1, -1.0), (2, -2.0), (3, -3.0))])
    assert s.best(2) == [] and tokens(s.beams) == [(1,), (2,)]
    s.advance([top((EOS, -0.1), (1, -1.0)), top((EOS, -0.1), (1, -1.0))])
    assert s.best(2) == []
    s.advance([top((EOS, -0.1), (1, -1.0)), top((EOS, -0.1), (1, -1.0))])
    assert tokens(s.best(2)) == [(1, 1, EOS)]


def test_at_max_tokens_the_beams_end_as_they_are():
    s = search(max_tokens=2)
    s.advance([top((1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0))])
    assert s.advance([top((5, -1.0), (6, -1.5)), top((7, -0.25), (8, -9.0))]) == []
    assert s.is_done
    assert tokens(s.best(2)) == [(1, 5), (2, 7)]
    assert [s.score(beam) for beam in s.best(2)] == [-1.0, -1.125]


def test_every_ending_token_widens_what_is_ranked():
    assert search(width=3, ending_ids=()).num_candidates == 6
    assert search(width=3, ending_ids=(1, 2, 3)).num_candidates == 12


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_beams_in_the_engine_are_those_of_plain_lists(num_blocks, overlap):
    executor = FakeExecutor(num_blocks=num_blocks, block_size=4, max_model_len=24, max_num_batched_tokens=8)
    h = Harness(executor=executor, overlap=overlap)
    expected = {}
    for i in range(3):
        request = h.submit(f"r{i}", [i, 3, 5], max_tokens=5, beam_width=3, n=3, length_penalty=float(i))
        expected[f"r{i}"] = expected_beams([i, 3, 5], request.sampling)
    h.run()
    for name, beams in expected.items():
        assert [h.tokens(name, index) for index in range(3)] == beams
        assert h.last(name).usage.completion_tokens == sum(map(len, beams))
    assert h.engine.load().num_copies_on_write > 0


@pytest.mark.parametrize(("preemption_mode", "is_forked"), [("recompute", False), ("swap", True)])
def test_beams_that_left_with_their_first_tokens_in_flight_share_their_prompt_again(preemption_mode, is_forked):
    # One step computes both prompts. In the next, decided before the first beam has become two, the samples need two
    # copies where one block is free.
    executor = FakeExecutor(num_blocks=5, block_size=4, max_model_len=12, num_host_blocks=8)
    h = Harness(executor=executor, preemption_mode=preemption_mode)
    h.submit("samples", [1, 2, 3, 4, 5, 6], max_tokens=2, n=3, temperature=1.0, seed=5)
    request = h.submit("beams", list(range(8)), max_tokens=2, beam_width=2, n=2)
    h.step()
    h.step()
    group = h.engine._loop.groups["beams"]
    assert (group.num_preemptions, len(group.live), group.is_forked) == (1, 2, is_forked)
    assert num_swapped_blocks(h.engine._loop.memory) == (2 if preemption_mode == "swap" else 0)
    h.run()
    assert [h.tokens("beams", i) for i in range(2)] == expected_beams(list(range(8)), request.sampling)


@pytest.mark.parametrize("length_penalty", [100, 100.0, -100, -100.0])
def test_a_penalty_whose_power_no_float_holds_ends_no_search(length_penalty):
    s = search(width=1, max_tokens=5000, ending_ids=(1,), length_penalty=length_penalty)
    s.beams = [Beam(token_ids=(2,) * 4000, cumulative_logprob=-5.0)]
    s.advance([top((1, -2.0), (2, -3.0))])
    assert [found.cumulative_logprob for found in s.best(1)] == [-7.0]
