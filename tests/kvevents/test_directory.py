"""A directory knows what servers told it, and nothing of what they do not hold any more."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest

from jpaged.kvevents import directory as directory_module
from jpaged.kvevents.directory import NOBODY, Directory
from jpaged.kvevents.encoding import Cleared, RemovedBlocks, StoredBlocks
from jpaged.pool import PrefixOwner

TEXT = list(range(100, 120))


def stored(hashes, parent, tokens, *, tier="device", size=4, owner=NOBODY, group=0):
    return StoredBlocks(tier, tuple(hashes), parent, tuple(tokens), size, owner, group)


def removed(*hashes, tier="device", group=0):
    return RemovedBlocks(tier, hashes, group)


def told(*events, server="a"):
    directory = Directory()
    directory.take(server, events)
    return directory


def held(directory, tokens=TEXT, owner=NOBODY, server="a"):
    return directory.num_tokens_held(tokens, owner).get(server, 0)


def test_a_prefix_is_held_as_far_as_its_blocks_are():
    directory = told(stored([1, 2], None, TEXT[:8]), stored([3], 2, TEXT[8:12]))
    assert held(directory) == 12
    assert held(directory, TEXT[:11]) == 8
    assert held(directory, [*TEXT[:5], 0, *TEXT[6:]]) == 4
    assert held(directory, [0, *TEXT[1:]]) == 0
    directory.take("a", [removed(2)])
    assert held(directory) == 4, "what is behind a gap is of no use"
    directory.take("a", [stored([2], 1, TEXT[4:8])])
    assert held(directory) == 12


def test_prefixes_of_others_are_not_found():
    mine = PrefixOwner("salt", "team", "sql")
    directory = told(stored([1], None, TEXT[:4], owner=mine))
    assert held(directory, owner=mine) == 4
    for other in (PrefixOwner(), mine._replace(salt=""), mine._replace(tenant="x"), mine._replace(adapter_name="")):
        assert held(directory, owner=other) == 0


def test_a_block_is_held_until_it_is_gone_from_every_tier():
    directory = told(stored([1], None, TEXT[:4]), stored([1], None, [], tier="host"), removed(1))
    assert held(directory) == 4
    directory.take("a", [stored([1], None, [], tier="disk"), removed(1, tier="host")])
    assert held(directory) == 4
    directory.take("a", [removed(1, tier="disk")])
    assert (held(directory), directory.num_blocks("a")) == (0, 0)


@pytest.mark.parametrize("gap", [0, 1, 7, 8, 9, 23, 24, 63, 99])
def test_a_long_prompt_is_held_up_to_its_first_gap(gap):
    text = list(range(401))
    directory = told(stored(range(100), None, text[:400]), stored(range(60), None, text[:240]), server="b")
    directory.take("a", [stored(range(100), None, text[:400]), removed(gap)])
    assert directory.num_tokens_held(text) == {"b": 400, **({"a": 4 * gap} if gap else {})}


def test_of_a_window_what_whoever_goes_on_sees_is_enough():
    """A window of 6 tokens sees 2 blocks of 4 before the one that a query is in."""
    blocks = stored([1, 2, 3, 4, 5], None, TEXT)
    directory = told(replace(blocks, window=6))
    assert held(directory) == 20
    directory.take("a", [removed(1), removed(2)])
    assert (held(directory), held(directory, TEXT[:16]), held(directory, TEXT[:12])) == (20, 16, 0)
    directory.take("a", [removed(4)])
    assert held(directory) == 0
    directory.take("a", [replace(stored([1, 2], None, TEXT[:8]), window=6), replace(stored([9], 2, [7] * 4), window=6)])
    assert held(directory) == 12
    assert held(directory, [0, *TEXT[1:]]) == 0


def test_where_first_tokens_are_kept_besides_a_window_they_count_too():
    """5 first tokens are in 2 blocks of 4; a window of 6 sees 2 before the one that a query is in."""
    text = list(range(40))
    blocks = replace(stored(range(1, 11), None, text), window=6, num_sink_tokens=5)
    directory = told(blocks)
    assert held(directory, text) == 40
    directory.take("a", [removed(*range(3, 9))])
    assert (held(directory, text), held(directory, text[:39])) == (40, 8)
    directory.take("a", [removed(2)])
    assert held(directory, text) == 4, "what is behind the first tokens is of no use without all of them"
    directory.take("a", [removed(1), replace(stored([2], 1, text[4:8]), window=6, num_sink_tokens=5)])
    assert held(directory, text) == 0


@pytest.mark.parametrize("num_sinks", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 5, 9, 100])
def test_behind_what_is_held_whoever_goes_on_sees_no_gap(window, num_sinks):
    """The longest prefix is the one that trying each finds."""
    choose = random.Random(window)
    text = list(range(24))
    num_seen = max(1, window - 1)
    for _ in range(50):
        has = [choose.random() < 0.7 for _ in text]
        blocks = stored(range(1, 25), None, text, size=1)
        directory = told(replace(blocks, window=window, num_sink_tokens=num_sinks))
        directory.take("a", [removed(*(place + 1 for place in text if not has[place]))])
        seen = [[*range(min(end, num_sinks)), *range(max(0, end - num_seen), end)] for end in range(25)]
        assert held(directory, text) == max(end for end in range(25) if all(has[place] for place in seen[end]))


class Counted:
    """Makes digests as `hashlib.blake2b` does, and counts them."""

    def __init__(self):
        self.num_made = 0
        self._make = hashlib.blake2b

    def __call__(self, *given, **more):
        self.num_made += 1
        return self._make(*given, **more)


@pytest.mark.parametrize("window", [None, 6])
def test_however_long_a_prompt_is_so_many_blocks_are_looked_for(monkeypatch, window):
    counted = Counted()
    text = list(range(65_536))
    directory = told(replace(stored(range(65_536), None, text, size=1), window=window))
    directory.take("b", [replace(stored(range(16_384), None, text), window=window)])
    monkeypatch.setattr(hashlib, "blake2b", counted)
    most = directory_module._MAX_KEYS
    assert directory.num_tokens_held(text, servers=["b"]) == {"b": 4 * most}
    assert counted.num_made <= most + 1
    counted.num_made = 0
    assert directory.num_tokens_held(text) == {"a": most // 2, "b": 4 * (most // 2)}
    assert counted.num_made <= most + 2


def test_of_a_prompt_whose_first_tokens_nobody_has_no_more_is_made(monkeypatch):
    directory = told(replace(stored(range(5), None, TEXT), window=6, num_sink_tokens=4))
    counted = Counted()
    monkeypatch.setattr(hashlib, "blake2b", counted)
    assert held(directory, [7] * 65_536) == 0
    assert counted.num_made == 2


def test_a_block_that_a_server_knows_by_two_names_is_held_until_the_last_is_gone():
    directory = told(stored([1], None, TEXT[:4]), stored([2], None, TEXT[:4]), removed(1))
    assert held(directory) == 4
    directory.take("a", [removed(2)])
    assert held(directory) == 0


def test_a_removal_that_names_no_tier_is_from_all():
    directory = told(stored([1], None, TEXT[:4]), stored([1], None, [], tier="host"), removed(1, tier=None))
    assert held(directory) == 0


def test_what_cannot_be_placed_is_passed_over():
    """Hashes without tokens, chains without a beginning, other block sizes, other KV groups, removals of nothing."""
    directory = told(
        stored([5], None, [], tier="host"),
        stored([6], 77, TEXT[:4]),
        removed(99),
        stored([1], None, TEXT[:4]),
        stored([7], 1, TEXT[4:6], size=2),
        stored([8], 1, TEXT[4:8], group=1),
        removed(1, group=1),
    )
    assert (held(directory), directory.num_blocks("a")) == (4, 1)


def test_a_name_that_comes_to_mean_other_tokens_means_them_alone():
    directory = Directory(max_blocks=2)
    for token in range(50):
        directory.take("a", [stored([1], None, [token] * 4)])
    assert held(directory, [49] * 4) == 4
    assert [held(directory, [token] * 4) for token in range(49)] == [0] * 49


def test_servers_are_told_apart_and_forgotten():
    directory = told(stored([1], None, TEXT[:4]))
    directory.take("b", [stored([9, 8], None, TEXT[:8])])
    directory.take("c", [stored([9], None, TEXT[:2], size=2)])
    assert directory.num_tokens_held(TEXT) == {"a": 4, "b": 8, "c": 2}
    assert directory.num_tokens_held(TEXT, servers=["c", "nobody"]) == {"c": 2}
    directory.take("b", [Cleared(), stored([9], None, TEXT[:4])])
    directory.forget("a")
    directory.forget("never seen")
    assert directory.num_tokens_held(TEXT) == {"b": 4, "c": 2}
    assert set(directory.servers) == {"b", "c"}


def test_a_directory_is_bounded():
    directory = Directory(max_blocks=2)
    directory.take("a", [stored([1, 2, 3], None, TEXT[:12])])
    assert (held(directory), directory.num_blocks("a")) == (8, 2)
    directory.take("a", [stored([1], None, TEXT[:4]), removed(2), stored([3], 1, TEXT[4:8])])
    assert held(directory) == 8


def test_a_name_that_is_given_to_other_tokens_is_of_those_alone():
    """A server that lies takes no more memory than one that does not."""
    directory = told(*(stored([1], None, [number] * 4) for number in range(50)))
    assert (held(directory, [0] * 4), held(directory, [49] * 4)) == (0, 4)
    assert len(directory._servers["a"].hashes) == len(directory._servers["a"].keys) == 1
    directory.take("a", [removed(1)])
    assert not directory._servers["a"].hashes


@pytest.mark.parametrize("seed", range(20))
def test_it_knows_what_a_set_of_chains_would(seed):
    """Random blocks of a tree of texts come and go in random tiers, of two servers."""
    choose = random.Random(seed)
    texts = [tuple(choose.choices((1, 2), k=12)) for _ in range(6)]
    numbers: dict[tuple, int] = {}
    directory = Directory()
    truth: dict[str, dict[tuple[int, ...], set[str]]] = {"a": {}, "b": {}}
    for _ in range(120):
        server, text = choose.choice("ab"), choose.choice(texts)
        place, tier = choose.randrange(4), choose.choice(["device", "host", "disk"])
        chain = text[: 3 * (place + 1)]
        one = numbers.setdefault(chain, len(numbers) + 1)
        mine = truth[server]
        if choose.random() < 0.4:
            directory.take(server, [removed(one, tier=tier)])
            mine.get(chain, set()).discard(tier)
        elif tier == "device":
            parent = numbers.get(chain[:-3]) if place else None
            if place and not mine.get(chain[:-3]):
                continue  # it would not be computed without what is in front of it
            directory.take(server, [stored([one], parent, chain[-3:], size=3)])
            mine.setdefault(chain, set()).add(tier)
        elif mine.get(chain):
            directory.take(server, [stored([one], None, [], tier=tier)])
            mine[chain].add(tier)
        for text in texts:
            for name, chains in truth.items():
                num_blocks = 0
                while num_blocks < 4 and chains.get(text[: 3 * (num_blocks + 1)]):
                    num_blocks += 1
                assert directory.num_tokens_held(text).get(name, 0) == 3 * num_blocks
