"""Where a prompt goes: to the longest beginning, unless that server is ahead of the others; else to the least busy."""

import random
from collections import Counter

import grpc

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client.routing.endpoints import Endpoint, Endpoints
from jpaged.route.prefix_table import PrefixTable, PromptPrefix, parse_prompt_prefix


class Rig:
    """Servers that are not there, and where calls to them would go."""

    def __init__(self, num_servers: int, max_entries: int = 10_000) -> None:
        self.directory = PrefixTable(max_entries)
        self.endpoints = Endpoints((), lambda *_: None, placement=self.directory, is_watched=True)
        self.all = [Endpoint(f"server{i}:1", grpc.insecure_channel("127.0.0.1:1")) for i in range(num_servers)]
        for one in self.all:
            self.directory.begin(one.name)
            self.endpoints.add(one)

    def enter(self, text: str) -> Endpoint:
        return self.endpoints.enter(beginning(text))

    def call(self, text: str) -> str:
        """Where a call goes that has ended before the next one begins."""
        endpoint = self.enter(text)
        self.endpoints.leave(endpoint)
        return endpoint.name


def beginning(text: str) -> PromptPrefix:
    made = parse_prompt_prefix(inference_pb2.GenerateRequest(text=text), b"")
    assert made is not None
    return made


def test_a_conversation_stays_where_it_began_and_new_ones_are_shared_out():
    rig = Rig(4)
    where = {i: rig.call(f"conversation {i}: " + "hello " * 40) for i in range(80)}
    assert len(set(where.values())) == 4
    for i, name in where.items():
        assert rig.call(f"conversation {i}: " + "hello " * 200) == name
    assert rig.directory.num_placed == 160
    assert rig.directory.num_hits == 80


def test_the_longest_beginning_wins_over_a_shorter_one_elsewhere():
    rig = Rig(3)
    system = "You are a helpful assistant. " * 20
    first = rig.enter(system + "one " * 100)  # is busy, so that the next goes elsewhere once it is ahead
    held = [first] + [rig.enter(system + "one " * 100) for _ in range(2)]
    second = rig.enter(system + "two " * 100)
    while second is first:
        held.append(second)
        second = rig.enter(system + "two " * 100)
    for one in (*held, second):
        rig.endpoints.leave(one)
    assert rig.call(system + "one " * 200) == first.name
    assert rig.call(system + "two " * 200) == second.name


def test_a_server_that_is_ahead_is_passed_over_and_the_next_has_the_beginning_then():
    rig = Rig(3)
    counts = Counter(rig.enter("the same beginning " * 30).name for _ in range(60))
    assert len(counts) == 3
    assert max(counts.values()) < 40
    assert rig.directory.num_passed_over > 0


def test_others_that_are_busy_by_what_they_tell_are_left_alone():
    rig = Rig(2)
    load = control_pb2.GetLoadResponse(num_running=9, num_waiting=3)
    rig.endpoints.handle_answer(rig.all[0], "load", load, None)
    assert {rig.call(f"prompt {i}") for i in range(10)} == {rig.all[1].name}


def test_a_server_that_has_started_again_holds_nothing():
    rig = Rig(2)
    prompt = "a long beginning " * 40
    name = rig.call(prompt)
    assert {rig.call(prompt) for _ in range(5)} == {name}
    hits = rig.directory.num_hits
    rig.directory.begin(name)
    rig.call(prompt)
    assert rig.directory.num_hits == hits


def test_routers_that_know_nothing_place_alike():
    one, other = Rig(5), Rig(5)
    other.all.reverse()
    assert [one.call(f"prompt {i}") for i in range(50)] == [other.call(f"prompt {i}") for i in range(50)]


def test_what_is_kept_is_bounded_and_the_shortest_beginnings_are_kept_longest():
    rig = Rig(2, max_entries=64)
    rng = random.Random(3)
    for _ in range(50):
        rig.call("shared system prompt " * 4 + "".join(rng.choices("abc", k=2000)))
        assert len(rig.directory) <= 64
    assert rig.directory.num_hits == 49  # of the system prompt, which each has


def test_nothing_is_kept_where_nothing_may_be():
    rig = Rig(2, max_entries=0)
    for _ in range(5):
        rig.call("a long beginning " * 40)
    assert len(rig.directory) == rig.directory.num_hits == 0
