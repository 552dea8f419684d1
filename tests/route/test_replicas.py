"""Where a prompt goes among servers that somebody else calls: it is offered in order, and counts where it was taken."""

import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.route.prefix_table import PromptPrefix, ReplicaPlacement, parse_prompt_prefix

IDLE = {"a": 0, "b": 0, "c": 0}
SYSTEM = "You are a helpful assistant of few words. " * 10


@pytest.fixture
def replicas() -> ReplicaPlacement:
    made = ReplicaPlacement(10_000)
    made.update(IDLE)
    return made


def chain(text: str, owner: bytes = b"") -> PromptPrefix:
    made = parse_prompt_prefix(inference_pb2.GenerateRequest(text=text), owner)
    assert made is not None
    return made


def call(replicas: ReplicaPlacement, key: PromptPrefix) -> str:
    """A call that the first takes, and that has ended before the next one."""
    first, *_ = replicas.order(key, IDLE)
    replicas.sent("call", key, first)
    replicas.ended("call", first)
    return first


def test_a_conversation_stays_where_it_began_and_new_ones_are_shared_out(replicas):
    where = {i: call(replicas, chain(f"{i}: " + "hello " * 40)) for i in range(60)}
    assert set(where.values()) == set(IDLE)
    assert [call(replicas, chain(f"{i}: " + "hello " * 200)) for i in range(60)] == [where[i] for i in range(60)]


def test_all_are_offered_a_prompt_each_once_and_the_others_by_how_busy_they_are(replicas):
    key = chain(SYSTEM)
    first = call(replicas, key)
    rest = sorted(set(IDLE) - {first})
    assert replicas.order(key, {first: 1, rest[0]: 2, rest[1]: 1}) == [first, rest[1], rest[0]]


def test_what_another_took_is_looked_for_there(replicas):
    key = chain(SYSTEM)
    first, second, _ = replicas.order(key, IDLE)
    replicas.ended("one", first)  # which was full
    replicas.sent("one", key, second)
    replicas.ended("one", second)
    assert replicas.order(key, IDLE)[0] == second != first


def test_one_that_is_far_ahead_is_not_first_whoever_counts_its_calls(replicas):
    key = chain(SYSTEM)
    first = call(replicas, key)
    assert replicas.order(key, IDLE | {first: 2})[0] == first
    assert replicas.order(key, IDLE | {first: 5})[0] != first
    for i in range(5):  # what it was sent itself counts, too, when nobody has told yet
        replicas.sent(str(i), key, first)
    assert replicas.order(key, IDLE)[0] != first
    replicas.ended("9", first)  # it was not taken
    for _ in range(3):
        replicas.ended("0", first)
    assert replicas.order(key, IDLE)[0] != first
    for i in (1, 2, 3):
        replicas.ended(str(i), first)
    assert replicas.order(key, IDLE)[0] == first


def test_calls_without_a_prompt_count_and_are_remembered_nowhere(replicas):
    key = chain(SYSTEM)
    first = call(replicas, key)
    for i in range(5):
        replicas.sent(str(i), None, first)
    assert replicas.order(key, IDLE)[0] != first


def test_owners_do_not_share(replicas):
    firsts = {call(replicas, chain(SYSTEM, b"tenant%d" % i)) for i in range(40)}
    assert firsts == set(IDLE)


def test_one_that_is_gone_has_nothing_when_it_comes_again(replicas):
    key = chain(SYSTEM)
    first = call(replicas, key)
    other = next(name for name in IDLE if name != first)
    for i in range(5):  # open when it goes
        replicas.sent(str(i), key, first)
    replicas.update(set(IDLE) - {first})
    replicas.sent("other", key, other)
    replicas.ended("other", other)
    replicas.update(IDLE)
    assert replicas.order(key, IDLE)[0] == other
    replicas.ended("0", first)
    replicas.sent("again", key, first)
    assert replicas.order(key, IDLE | {other: 2})[0] == first  # none of its calls is open but the last


def test_of_some_that_may_take_it_only_those_are_offered_it(replicas):
    key = chain(SYSTEM)
    first = call(replicas, key)
    assert set(replicas.order(key, {name: 0 for name in IDLE if name != first})) == set(IDLE) - {first}
    assert replicas.order(key, {}) == []


def test_a_server_that_nobody_told_of_is_not_counted(replicas):
    replicas.sent("call", chain(SYSTEM), "d")
    replicas.ended("call", "d")
    assert set(replicas.order(chain(SYSTEM), IDLE)) == set(IDLE)
