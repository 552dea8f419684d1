"""Who goes first, who yields, and that everybody's turn comes."""

from typing import get_args

import pytest

from jpaged.config import Policy
from jpaged.engine.scheduler import policies
from jpaged.engine.scheduler.policies import (
    MAX_OVERTAKES,
    OUTPUT_TOKEN_WEIGHT,
    PROMPT_TOKEN_WEIGHT,
    ByPriority,
    FairByTenant,
)
from jpaged.engine.sequence import SequenceGroup
from jpaged.testing import FakeExecutor, expected_tokens
from jpaged.types import Request, SamplingParams
from tests.engine.harness import Harness


def make(policy, max_num_seqs=1, **pool):
    executor = FakeExecutor(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, **pool)
    return Harness(executor=executor, policy=policy, max_num_queued_reqs=1024)


def is_over(h, name):
    return bool(h.events[name]) and h.events[name][-1].is_last


def order_of_ends(h, names):
    ended = []
    while h.step():
        ended += [name for name in names if is_over(h, name) and name not in ended]
    return ended


def test_first_come_first_served():
    h = make("fcfs", max_num_seqs=2)
    names = [f"r{i}" for i in range(8)]
    for i, name in enumerate(names):
        h.submit(name, [i], max_tokens=4, priority=-i)
    assert order_of_ends(h, names) == names


def test_lower_numbers_go_first_and_equal_ones_in_order_of_arrival():
    h = make("priority")
    for name, priority in {"five": 5, "zero": 0, "minus": -1, "zero too": 0}.items():
        h.submit(name, [1, 2], max_tokens=3, priority=priority)
    assert order_of_ends(h, ["five", "zero", "minus", "zero too"]) == ["minus", "zero", "zero too", "five"]


@pytest.mark.parametrize("urgent", [0, 5, 6])
def test_a_running_request_yields_to_a_lower_number_alone(urgent):
    h = make("priority")
    h.submit("low", [1, 2], max_tokens=20, priority=5)
    for _ in range(5):
        h.step()
    h.submit("urgent", [3], max_tokens=3, priority=urgent)
    yields = urgent < 5
    assert order_of_ends(h, ["low", "urgent"]) == (["urgent", "low"] if yields else ["low", "urgent"])
    assert h.engine.load().num_preemptions == yields
    assert h.tokens("low") == expected_tokens([1, 2], 20)


def test_a_lower_number_takes_blocks_as_well_as_rows():
    h = make("priority", max_num_seqs=4, num_blocks=6, block_size=4)
    h.submit("low", [1, 2], max_tokens=18, priority=5)
    for _ in range(12):
        h.step()
    h.submit("urgent", list(range(16)), max_tokens=4, priority=0)
    assert order_of_ends(h, ["low", "urgent"]) == ["urgent", "low"]
    assert h.tokens("low") == expected_tokens([1, 2], 18)


@pytest.mark.long
def test_nobody_is_overtaken_for_ever_by_lower_numbers():
    h = make("priority")
    h.submit("unloved", [1], max_tokens=3, priority=100)
    num_overtakers = 0
    while not is_over(h, "unloved"):
        if h.engine.load().num_waiting < 3:
            h.submit(f"r{num_overtakers}", [2], max_tokens=1, priority=0)
            num_overtakers += 1
        h.step()
        assert num_overtakers < 2 * MAX_OVERTAKES
    assert num_overtakers >= MAX_OVERTAKES
    assert h.tokens("unloved") == expected_tokens([1], 3)


def group_of(arrival, *, priority=0, tenant=""):
    return SequenceGroup(Request("r", (1,), SamplingParams(priority=priority), tenant=tenant), arrival, 0.0, print, 4)


def test_of_equal_priority_nobody_yields():
    order, earlier, later = ByPriority(), group_of(0, priority=3), group_of(1, priority=3)
    assert order.first_waiting([later, earlier]) is earlier
    assert not order.can_preempt(later, earlier)
    assert not order.can_preempt(earlier, later)


def test_those_who_were_overtaken_too_often_go_first_in_order_of_arrival():
    order, high, low, new = ByPriority(), group_of(1, priority=1), group_of(0, priority=9), group_of(2, priority=0)
    low.num_overtaken = high.num_overtaken = MAX_OVERTAKES
    assert sorted([new, high, low], key=order.running_key) == [low, high, new]
    assert not order.can_preempt(low, new)
    assert not order.can_preempt(low, high)
    low.num_overtaken -= 1
    assert order.can_preempt(low, new)


def test_a_tenant_that_comes_begins_with_the_least_served_who_waits():
    order, waiting = FairByTenant(), [group_of(0, tenant="a"), group_of(1, tenant="b")]
    for i, group in enumerate(waiting):
        order.arrived(group, waiting[: i + 1])
    for group, num_tokens in zip(waiting, (100, 10), strict=True):
        order.served(group, num_tokens, 0)
    late, later = group_of(2, tenant="c"), group_of(3, tenant="d")
    order.arrived(late, [*waiting, late])
    order.served(late, 0, 1)  # now 12, between the 10 of "b" and the 100 of "a"
    assert [order.first_waiting(others) for others in ([*waiting, late], [waiting[0], late])] == [waiting[1], late]
    # Where nobody waits, with the one that was served most: the others' pauses have saved nothing up.
    order.arrived(later, [later])
    assert order.first_waiting([waiting[0], later]) is waiting[0]
    order.served(waiting[0], 1, 0)
    assert order.first_waiting([waiting[0], later]) is later


def test_a_tenant_that_comes_back_keeps_what_it_was_served():
    order, few, many = FairByTenant(), group_of(1, tenant="few"), group_of(0, tenant="many")
    order.served(many, 100, 0)
    order.served(few, 10, 0)
    order.arrived(many, [few, many])
    assert order.first_waiting([many, few]) is few


def test_who_was_served_least_is_forgotten_and_counts_as_the_most_served_of_them(monkeypatch):
    monkeypatch.setattr(policies, "MAX_TENANTS", 2)
    order, waits = FairByTenant(), group_of(0, tenant="a")
    for i, tenant in enumerate("abcd"):
        order.served(group_of(i, tenant=tenant), 10 * (i + 1), 0)
    order.arrived(group_of(4, tenant="e"), [waits])
    assert sorted(order._served) == ["a", "c", "d", "e"]
    assert [order._counter(tenant) for tenant in "abcdef"] == [10, 20, 30, 40, 10, 20]


def test_who_is_computed_again_is_not_charged_again():
    # Three samples need two copies where one block is free: "b" leaves, and comes back when they have ended.
    executor = FakeExecutor(block_size=4, num_blocks=5)
    h = Harness(executor=executor, policy="fair", overlap=False, enable_prefix_caching=False)
    h.submit("a", [1, 9], max_tokens=2, n=3, temperature=1.0, seed=5, tenant="a")
    h.submit("b", [2] * 9, max_tokens=2, tenant="b")
    h.run()
    assert h.engine.load().num_preemptions == 1
    served = {
        "a": 2 * PROMPT_TOKEN_WEIGHT + 6 * OUTPUT_TOKEN_WEIGHT,
        "b": 9 * PROMPT_TOKEN_WEIGHT + 2 * OUTPUT_TOKEN_WEIGHT,
    }
    order = h.engine._loop.scheduler._policy
    assert isinstance(order, FairByTenant)
    assert order._served == served


def test_only_who_came_before_is_overtaken():
    h = make("priority")
    for name, priority in {"first": 0, "second": 5, "third": 0, "fourth": 9}.items():
        h.submit(name, [1], max_tokens=2, priority=priority)
    while not is_over(h, "third"):
        h.step()
    assert [h.engine._loop.groups[name].num_overtaken for name in ("second", "fourth")] == [1, 0]
    h.run()


@pytest.mark.parametrize("policy", get_args(Policy))
def test_under_every_policy_a_lone_request_ends_among_a_flood_of_others(policy):
    h = make(policy, max_num_seqs=2)
    for i in range(50):
        h.submit(f"before{i}", [1, 2, 3], max_tokens=4, tenant="flood")
    h.submit("lone", [7], max_tokens=4, tenant="lone")
    num_after = 0
    while not is_over(h, "lone"):
        h.submit(f"after{num_after}", [1, 2, 3], max_tokens=4, tenant="flood")
        num_after += 1
        h.step()
        assert num_after < 200
    assert h.tokens("lone") == expected_tokens([7], 4)


def service(h, tenants):
    """Weighted tokens that each tenant was served: prompts that were begun, and every sampled token."""
    served = dict.fromkeys(tenants.values(), 0)
    for name, events in ((name, events) for name, events in h.events.items() if events):
        prompt_tokens = events[0].usage.prompt_tokens
        num_sampled = sum(len(event.token_ids) for event in events)
        served[tenants[name]] += PROMPT_TOKEN_WEIGHT * prompt_tokens + OUTPUT_TOKEN_WEIGHT * num_sampled
    return served


@pytest.mark.long
def test_two_tenants_with_different_loads_are_served_alike_while_both_wait():
    h = make("fair", max_num_seqs=4, num_blocks=128)
    tenants: dict[str, str] = {}
    # "many" sends four times as many requests, with long prompts and short answers; "few" the other way round.
    for i in range(400):
        tenant = "few" if i % 5 == 0 else "many"
        shape = ([i % 200] * 4, 24) if tenant == "few" else ([i % 200] * 40, 4)
        tenants[f"r{i}"] = tenant
        h.submit(f"r{i}", shape[0], max_tokens=shape[1], tenant=tenant, use_prefix_cache=False)
    while sum(is_over(h, name) for name in tenants if tenants[name] == "few") < 60:
        h.step()
    served = service(h, tenants)
    assert 0.9 < served["few"] / served["many"] < 1.1


@pytest.mark.long
def test_a_tenant_that_was_away_has_saved_nothing_up():
    h = make("fair", max_num_seqs=2, num_blocks=128)
    tenants: dict[str, str] = {}

    def send(tenant, count):
        for _ in range(count):
            name = f"r{len(tenants)}"
            tenants[name] = tenant
            h.submit(name, [1, 2], max_tokens=8, tenant=tenant, use_prefix_cache=False)

    send("away", 1)
    send("busy", 200)
    while sum(is_over(h, name) for name in tenants) < 100:
        h.step()
    before = service(h, tenants)
    send("away", 100)
    while sum(is_over(h, name) for name in tenants) < 160:
        h.step()
    gained = {tenant: tokens - before[tenant] for tenant, tokens in service(h, tenants).items()}
    assert 0.9 < gained["away"] / gained["busy"] < 1.15


def test_counters_of_tenants_are_bounded_and_who_was_forgotten_gains_nothing(monkeypatch):
    monkeypatch.setattr(policies, "MAX_TENANTS", 8)
    h = Harness(policy="fair")
    for number in range(100):
        h.submit(f"r{number}", [1] * (1 + number % 5), max_tokens=2, tenant=f"t{number}")
        if number % 3 == 0:
            h.run()
    h.run()
    order = h.engine._loop.scheduler._policy
    assert isinstance(order, FairByTenant)
    assert len(order._served) <= 16 + 3
    highest = max(order._served.values())
    h.submit("back", [1], max_tokens=1, tenant="t0")
    assert all(h.last(f"r{number}").finish.reason.value == "length" for number in range(100))
    h.run()
    assert order._served["t0"] >= highest
