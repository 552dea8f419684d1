"""The comparison of policies of eviction: its traces, its bound, and that what is measured is what happened."""

import itertools
import json
import random
from argparse import Namespace

import pytest

from benchmarks.eviction import __main__ as command
from benchmarks.eviction import decisions
from benchmarks.eviction.hindsight import bound, chain
from benchmarks.eviction.rows import decision_table, gains, seconds_table, table
from benchmarks.eviction.serving import HINDSIGHT, chain_s, costs_of_device, serve
from benchmarks.eviction.traces import BLOCK_SIZE, TRACES, Coming, make_trace
from jpaged.engine.kv_cache.eviction.cost_aware import BlockCosts
from jpaged.engine.kv_cache.eviction.policies import EVICTION_POLICIES

COSTS = BlockCosts(first_s=1.0, further_s=0.25, fetch_s=0.1)


def coming(at_s, *texts, tenant=""):
    """A request whose prompt is whole blocks, named by letters, and one token more."""
    ids = [ord(letter) * 1000 + place for letter in "".join(texts) for place in range(BLOCK_SIZE)]
    return Coming(at_s, (*ids, 7), 1, tenant)


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_of_its_seed_and_begins_alike_where_it_says(name):
    trace = make_trace(name, 60.0, 1)
    assert trace == make_trace(name, 60.0, 1) != make_trace(name, 60.0, 2)
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
    assert {request.tenant for request in trace} == set(TRACES[name])
    keys = [key for request in trace for key in chain(request)]
    if name == "random":
        assert len(set(keys)) == len(keys)
    else:
        assert len(set(keys)) < 0.6 * len(keys)


def best_by_trying(trace, num_blocks, value):
    """The most that can be saved by keeping, of all blocks before each admission, any that fit beside its prompt."""
    needed = [chain(request)[: request.num_matchable_blocks] for request in trace]

    def most(index, kept):
        if index == len(trace):
            return 0.0
        usable = itertools.takewhile(kept.__contains__, needed[index])
        saved = sum(value(place) for place, _ in enumerate(usable))
        there = sorted(kept | set(chain(trace[index])))
        if index + 1 == len(trace):
            return saved
        room = num_blocks - -(-len(trace[index + 1].prompt_token_ids) // BLOCK_SIZE)
        wanted = {key for later in needed[index + 1 :] for key in later}
        there = [key for key in there if key in wanted]
        best = 0.0
        for size in range(len(there) + 1):
            for keep in itertools.combinations(there, size):
                if len(set(keep) - set(needed[index + 1])) <= room:
                    best = max(best, most(index + 1, frozenset(keep)))
        return saved + best

    return most(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_nothing_that_could_be_kept_saves_more_than_the_bound(seed):
    draw = random.Random(seed)
    trace = [coming(i, draw.choice(["ab", "cd", "e"]), draw.choice(["", "x", "y"])) for i in range(5)]
    for num_blocks in (4, 5, 7):
        for value in (COSTS.recompute_s, lambda index: 1.0):
            best, most = best_by_trying(trace, num_blocks, value), bound(trace, num_blocks, value)
            assert best <= most + 1e-6


def test_the_bound_is_what_can_be_had_where_room_is_for_one_of_two():
    trace = [coming(0, "ab"), coming(1, "cd"), coming(2, "ab"), coming(3, "cd")]
    assert bound(trace, 100, lambda index: 1.0) == pytest.approx(4.0)
    assert bound(trace, 5, lambda index: 1.0) == pytest.approx(4.0)  # three for the prompt that comes, two to keep
    assert bound(trace, 4, lambda index: 1.0) == pytest.approx(2.0)
    assert bound(trace, 3, lambda index: 1.0) == pytest.approx(0.0)
    assert bound([coming(0, "ab"), coming(1, "ab")], 3, COSTS.recompute_s) == pytest.approx(1.0 + 1.25)


@pytest.mark.parametrize("policy", ["worth", pytest.param(HINDSIGHT, marks=pytest.mark.long)])
@pytest.mark.long
def test_what_a_policy_saves_is_within_the_bound_and_all_of_it_where_all_fits(policy):
    trace = make_trace("mixed", 8.0, 0)
    costs, served = costs_of_device(), serve(trace, policy, 700)
    most = bound(trace, 700, costs.recompute_s)
    assert 0 < served.saved_s <= most + 1e-9
    assert served.saved_s == pytest.approx(
        served.num_hit_blocks * costs.first_s + served.sum_of_places * costs.further_s
    )
    assert served.num_hit_tokens == served.num_hit_blocks * BLOCK_SIZE
    assert served.prefill_s == pytest.approx(sum(chain_s(costs, request.num_matchable_blocks) for request in trace))
    assert bound(trace, 1 << 20, lambda index: 1.0) >= served.num_hit_blocks
    assert HINDSIGHT not in EVICTION_POLICIES  # no server has it


@pytest.mark.long
def test_who_knows_what_comes_saves_more_than_who_does_not():
    trace = make_trace("mixed", 150.0, 0)
    saved = {policy: serve(trace, policy, 2000).saved_s for policy in ("lru", *EVICTION_POLICIES, HINDSIGHT)}
    assert max(saved, key=saved.__getitem__) == HINDSIGHT
    assert saved["worth"] > saved["lru"]


def test_decisions_are_timed_of_every_policy():
    for policy in ("lru", *EVICTION_POLICIES):
        timed = decisions.measure(policy, 200, 400)
        assert 0 < timed.choice_us <= timed.longest_us and timed.turn_us > 0


def test_tables_say_the_mean_and_the_spread():
    about = {"trace": "chat", "num_blocks": 9}
    rows = [about | {"policy": policy, "saved_share": share} for policy, share in (("lru", 0.4), ("lru", 0.5))]
    rows += [about | {"policy": "worth", "saved_share": share} for share in (0.5, 0.56)]
    assert table(rows).splitlines()[2] == "| chat | 9 | 45.0 ± 5.0 | 53.0 ± 3.0 |"
    assert gains(rows, "worth") == [about | {"points": pytest.approx(8.0), "least": pytest.approx(6.0)}]
    assert table(rows[:1]).splitlines()[2] == "| chat | 9 | 40.0 |"
    hits = [about | {"policy": "lru", "num_hit_blocks": n, "sum_of_places": 10 * n} for n in (2, 4)]
    seconds = seconds_table([*hits, about | {"policy": "bound"}], {"first_s": 1.0, "further_s": 0.5})
    assert seconds.splitlines()[0] == "| trace | blocks | lru |" and seconds.splitlines()[2] == "| chat | 9 | 18.0 |"
    row = {"policy": "lru", "num_blocks": 1, "turn_us": 1.04, "choice_us": 2.0, "longest_us": 30.0}
    assert decision_table([row]).splitlines()[2] == "| lru | 1 | 1.0 | 2.0 | 30.0 |"


def test_a_run_that_was_ended_while_it_wrote_is_gone_on_with(tmp_path, monkeypatch):
    kept = tmp_path / "eviction.jsonl"
    given = {"traces": ["chat"], "seeds": 3, "blocks": [2000], "policies": ["lru"], "kept_only": False}
    arguments = Namespace(**given, seconds=1.0, host_blocks=0)
    num_measured = itertools.count(1)
    monkeypatch.setattr(command, "_measure", lambda *_: {"number": next(num_measured)})
    rows = list(command._all_rows(arguments, kept))
    whole = kept.read_bytes()
    for num_bytes in range(len(whole) - 1, whole.rfind(b"\n", 0, -1), -1):  # of its last line
        kept.write_bytes(whole[:num_bytes])
        assert [row["seed"] for row in command._all_rows(arguments, kept)] == [0, 1, 2]
        assert [*map(json.loads, kept.read_text().splitlines())][:2] == rows[:2]
        assert len(kept.read_text().splitlines()) == 3
    assert next(num_measured) == 4 + len(whole) - 1 - whole.rfind(b"\n", 0, -1)
