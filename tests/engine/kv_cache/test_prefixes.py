"""Prefixes are found again: as chains, in the order of last use, in parts of blocks; and by nobody who should not."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.executor.io import WindowSpec
from jpaged.engine.kv_cache.blocks import SequenceBlocks, _run_keys, block_key, block_keys, root_block_hash
from jpaged.engine.kv_cache.prefix_cache import BlockHashIndex
from jpaged.engine.sequence import SequenceGroup
from jpaged.testing import FakeExecutor, expected_tokens, with_embeds
from jpaged.types import PackedTokens, Request, SamplingParams
from tests.engine.groups import computed, group_of, paged_memory
from tests.engine.harness import Harness

PROMPT = list(range(100, 110))


def make(num_blocks=12, num_host_blocks=0, **options):
    executor = FakeExecutor(
        block_size=4,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_batched_tokens=32,
        max_model_len=44,
    )
    return Harness(executor=executor, **options)


def serve(h, name, prompt, **sampling):
    """Runs a request to its end; how many of its tokens were cached."""
    sampling = {"max_tokens": 1} | sampling
    h.submit(name, prompt, **sampling)
    h.run()
    assert h.tokens(name) == expected_tokens(prompt, sampling["max_tokens"])
    return h.last(name).usage.cached_tokens


def chain(tokens, block_size, salt=""):
    keys: list[bytes] = []
    for i in range(len(tokens) // block_size):
        keys.append(
            block_key(keys[-1] if keys else root_block_hash(salt), tokens[i * block_size : (i + 1) * block_size])
        )
    return keys


# --- the index ------------------------------------------------------------------------------------------------------


def test_a_chain_is_matched_up_to_its_first_gap():
    cache, tokens = BlockHashIndex([WindowSpec(2)], 200), [1, 2, 3, 4, 5, 6, 7]
    keys = chain(tokens, 2)
    for block_id, i in ((7, 0), (9, 2)):
        cache.insert(block_id, keys[i - 1] if i else root_block_hash(""), keys[i], tokens[2 * i : 2 * i + 2])
    assert cache.match(root_block_hash(""), keys, tokens).block_ids == ([7],)
    cache.insert(8, keys[0], keys[1], tokens[2:4])
    assert cache.match(root_block_hash(""), keys, tokens).block_ids == ([7, 8, 9],)


def test_equal_tokens_after_another_prefix_are_another_block():
    assert chain([1, 2, 3, 4], 2)[1] != chain([9, 2, 3, 4], 2)[1]
    assert chain([1, 2], 2, salt="a") != chain([1, 2], 2, salt="b")


def test_the_last_token_is_never_matched_since_it_must_run():
    cache, tokens = BlockHashIndex([WindowSpec(2)], 200), [1, 2, 3, 4]
    keys = chain(tokens, 2)
    cache.insert(5, root_block_hash(""), keys[0], [1, 2])
    cache.insert(6, keys[0], keys[1], [3, 4])
    match = cache.match(root_block_hash(""), keys, tokens)
    assert (match.block_ids, match.partial_block_ids, match.num_partial_tokens) == (([5],), [6], 1)


def test_the_newest_of_many_blocks_with_one_parent_is_matched_in_part():
    cache = BlockHashIndex([WindowSpec(2)], 200)
    for block_id in range(1, 100):
        (key,) = chain([block_id, 0], 2)
        cache.insert(block_id, root_block_hash(""), key, [block_id, 0])
    assert cache.match(root_block_hash(""), [], [99, 1]).partial_block_ids == [99]


def test_a_forgotten_block_is_not_found():
    cache, tokens = BlockHashIndex([WindowSpec(2)], 200), [1, 2, 3]
    (key,) = chain(tokens, 2)
    cache.insert(5, root_block_hash(""), key, [1, 2])
    assert cache.remove(5) == key
    assert cache.remove(5) is None
    assert cache.match(root_block_hash(""), [key], tokens).block_ids == ([],)
    assert list(cache.block_ids()) == []


# --- in the engine --------------------------------------------------------------------------------------------------


def test_full_blocks_are_shared_and_part_of_a_block_is_copied():
    h = make()
    assert serve(h, "first", PROMPT, max_tokens=8) == 0
    assert serve(h, "same", PROMPT) == 9  # two blocks, and one token of the third; the last has to run
    assert serve(h, "half", [*PROMPT[:6], 1, 2, 3]) == 6
    assert serve(h, "other", [1, *PROMPT[1:]]) == 0


def test_the_block_that_a_part_was_copied_to_is_found_when_it_is_full():
    h = make()
    serve(h, "first", PROMPT)
    fork = [*PROMPT[:6], 1, 2, 3, 4, 5, 6]
    assert serve(h, "fork", fork) == 6
    assert serve(h, "again", [*fork, 7]) == 12


@pytest.mark.parametrize("overlap", [False, True])
def test_generated_tokens_are_found_by_the_next_turn_of_a_chat(overlap):
    h = make(overlap=overlap)
    serve(h, "first", PROMPT, max_tokens=7)
    answer = h.tokens("first")
    # 17 tokens, of which the last was sampled but never written: four full blocks.
    assert serve(h, "second", [*PROMPT, *answer, 7, 8]) == 16


def test_what_each_sample_has_sampled_is_found_by_the_next_turn():
    h = make(num_blocks=20)
    h.submit("first", PROMPT, max_tokens=7, n=3, temperature=1.0, seed=5)
    h.run()
    answers = [h.tokens("first", i) for i in range(3)]
    assert len({answer[0] for answer in answers}) == 3
    assert [serve(h, f"next {i}", [*PROMPT, *answer, 7, 8]) for i, answer in enumerate(answers)] == [16] * 3


def test_the_block_that_was_used_longest_ago_is_evicted_first():
    h = make(num_blocks=6)
    serve(h, "a", [1] * 8)
    serve(h, "b", [2] * 8)
    assert serve(h, "a again", [1] * 8) == 7
    serve(h, "c", [3] * 16)
    assert serve(h, "b late", [2] * 8) == 0
    h = make(num_blocks=6)
    serve(h, "a", [1] * 8)
    serve(h, "b", [2] * 8)
    serve(h, "c", [3] * 16)
    assert serve(h, "b late", [2] * 8) > 0


def test_a_chain_is_evicted_from_its_tail():
    h = make(num_blocks=6)
    serve(h, "long", list(range(20)))
    serve(h, "small", [200, 201])  # takes the free block
    serve(h, "two", [210, 211, 212, 213, 214])  # takes the last two of the chain
    assert serve(h, "long again", list(range(20))) == 12


def test_two_salts_never_share():
    h = make()
    assert serve(h, "a", PROMPT, cache_salt="x") == 0
    assert serve(h, "b", PROMPT, cache_salt="y") == 0
    assert serve(h, "c", PROMPT) == 0
    assert serve(h, "d", PROMPT, cache_salt="x") == 8


@pytest.mark.parametrize(
    "shape",
    [{"n": 3, "temperature": 1.0}, {"best_of": 2, "temperature": 1.0}, {"beam_width": 2}],
    ids=["samples", "best of", "beams"],
)
def test_two_salts_never_share_however_many_sequences_sample(shape):
    h = make(num_blocks=24)
    cached = []
    for i, salt in enumerate(("x", "y", "", "x", "y")):
        h.submit(f"r{i}", PROMPT, cache_salt=salt, max_tokens=2, **shape)
        h.run()
        cached.append(h.last(f"r{i}").usage.cached_tokens)
    assert cached == [0, 0, 0, 8, 8]


def test_who_opts_out_neither_reads_nor_leaves_anything():
    h = make()
    assert serve(h, "leaves", PROMPT) == 0
    assert serve(h, "reads", PROMPT, use_prefix_cache=False) == 0
    assert serve(h, "left", list(range(8)), use_prefix_cache=False) == 0
    assert serve(h, "finds", [*range(8), 9]) == 0
    assert h.engine.load().num_prefix_query_tokens == len(PROMPT) + 9


def test_a_cache_that_is_off_finds_nothing():
    h = make(enable_prefix_caching=False)
    serve(h, "a", PROMPT)
    assert serve(h, "b", PROMPT) == 0
    assert h.engine.load().num_blocks_cached == 0


def test_beyond_max_cached_tokens_nothing_is_shared():
    h = make(max_cached_tokens=10)
    assert serve(h, "a", PROMPT[:9], max_tokens=12) == 0
    assert serve(h, "same", PROMPT[:9]) == 8
    # The prompt is longer than the limit: its keys would not be those of a shorter one.
    assert serve(h, "longer", [*PROMPT[:9], 1, 2]) == 0
    # What was generated from there on is not kept either: 8 of the 21 tokens are.
    assert h.engine.load().num_blocks_cached == 2


def test_of_a_prompt_that_is_too_long_nothing_is_kept():
    h = make(max_cached_tokens=10)
    assert serve(h, "longer", [*PROMPT[:9], 1, 2]) == 0
    assert h.engine.load().num_blocks_cached == 0
    assert serve(h, "short", PROMPT[:9]) == 0  # its keys are not those of the longer one


def test_who_computes_the_next_block_is_waited_for_whoever_runs_before():
    # A step has 32 tokens: "other" and half of "first", then the rest of it, beside which "second" would have room.
    h = make(num_blocks=24)
    shared = [7 * i % 50 for i in range(24)]
    h.submit("other", [60] * 20, max_tokens=9)
    h.submit("first", shared, max_tokens=9)
    h.submit("second", [*shared, 1, 2, 3], max_tokens=1)
    h.run()
    assert h.last("second").usage.cached_tokens == 24


def test_a_block_that_another_request_generates_is_not_waited_for():
    memory = paged_memory(12)
    running = computed(memory, group_of(6))  # one block of its prompt is full, and its first sample is 200
    running.live[0].token_ids.append(201)
    waiting = SequenceGroup(Request("w", (*range(6), 200, 201, 9), SamplingParams(max_tokens=1)), 0, 0.0, print, 8)
    prefixes = memory.prefixes
    assert prefixes is not None
    prefixes.register_full_blocks(running.live[0])
    assert prefixes.match(waiting).num_blocks == 1
    assert not prefixes.is_prefix_in_flight(waiting, [running])


@pytest.mark.parametrize("at_once", [False, True])
def test_a_prefix_of_many_requests_is_computed_once(at_once):
    executor = FakeExecutor(
        block_size=16, num_blocks=400, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=512
    )
    h = Harness(executor=executor)
    shared = [i % 97 for i in range(341)]
    for i in range(64):
        h.submit(f"r{i}", [*shared, 100 + i, 7], max_tokens=4)
        if not at_once:
            h.run()
    h.run()
    load = h.engine.load()
    assert load.num_prefix_query_tokens == 64 * 343
    cached = [h.last(f"r{i}").usage.cached_tokens for i in range(64)]
    # 21 full blocks are 336 tokens; the five that follow are in a block that can be copied once it is full.
    assert cached[0] == 0 and min(cached[1:]) >= 336
    assert load.num_prefix_hit_tokens == sum(cached)
    assert all(h.tokens(f"r{i}") == expected_tokens([*shared, 100 + i, 7], 4) for i in (0, 1, 31, 63))


def test_evicted_blocks_come_back_from_host_memory():
    h = make(num_blocks=6, num_host_blocks=20)
    serve(h, "a", PROMPT)
    for i in range(3):
        serve(h, f"noise{i}", [i] * 20)
    load = h.engine.load()
    assert load.num_blocks_swapped_out > 0
    assert serve(h, "a again", PROMPT) == 8
    assert h.engine.load().num_blocks_swapped_in == load.num_blocks_swapped_in + 2
    assert serve(h, "a once more", PROMPT) >= 8  # where they are now
    assert h.engine.load().num_blocks_swapped_in == load.num_blocks_swapped_in + 2


def test_a_block_that_came_back_is_found_in_its_place_alone():
    h = make(num_blocks=6, num_host_blocks=20)
    serve(h, "a", [1, 2, 3, 4, 9, 9, 9, 9, 5])
    for i in range(3):
        serve(h, f"noise{i}", [20 + i] * 20)
    assert serve(h, "a again", [1, 2, 3, 4, 9, 9, 9, 9, 5]) == 8
    assert serve(h, "another place", [9, 9, 9, 7, 7]) == 0
    assert serve(h, "its place", [1, 2, 3, 4, 9, 9, 9, 7, 7]) == 7


def test_who_is_computed_again_finds_what_it_has_sampled():
    memory = paged_memory(8)
    group = computed(memory, group_of(6))
    sequence = group.live[0]
    memory.grow(sequence, 6)
    sequence.token_ids += [201, 202, 203, 204, 205, 206]
    sequence.num_computed_tokens = 12
    memory.release(sequence)
    assert memory.admit(group) == 12


def test_a_prefix_without_host_memory_is_gone():
    h = make(num_blocks=6)
    serve(h, "a", PROMPT)
    for i in range(3):
        serve(h, f"noise{i}", [i] * 20)
    assert serve(h, "a again", PROMPT) == 0


def test_after_a_reset_nothing_of_earlier_requests_is_found():
    h = make(num_blocks=6, num_host_blocks=20)
    serve(h, "a", PROMPT)
    for i in range(3):
        serve(h, f"noise{i}", [i] * 20)  # the first prompt is in host memory now
    kept = h.engine.load().num_blocks_cached + len(h.engine.prefixes._host.blocks)
    assert kept > 6
    forgotten = h.engine.reset_prefix_cache()
    h.step()
    assert forgotten.result(timeout=0) == kept
    assert h.engine.load().num_blocks_cached == 0
    assert h.engine.load().num_blocks_empty == 6
    assert serve(h, "a again", PROMPT) == 0
    assert serve(h, "noise0 again", [0] * 20) == 0
    assert serve(h, "a once more", PROMPT) == 8  # what runs from here on is kept as ever


def test_a_reset_leaves_alone_what_runs_and_what_is_pinned():
    h = make(num_blocks=24)
    pinned = h.engine.pin_prefix("system", [1] * 8)
    serve(h, "gone", [2] * 9)
    h.submit("running", [3] * 9, max_tokens=12)
    h.step()
    h.step()
    forgotten = h.engine.reset_prefix_cache()
    h.step()
    assert (pinned.result(timeout=0), forgotten.result(timeout=0)) == (8, 2)
    assert serve(h, "pinned", [1] * 9) == 8
    assert h.tokens("running") == expected_tokens([3] * 9, 12)
    assert serve(h, "ran", [3] * 9) == 8
    assert serve(h, "gone again", [2] * 9) == 0


def test_a_reset_of_no_cache_forgets_nothing():
    h = make(enable_prefix_caching=False)
    forgotten = h.engine.reset_prefix_cache()
    h.step()
    assert forgotten.result(timeout=0) == 0


def test_a_fork_takes_no_keys_of_tokens_that_are_its_parents_own():
    """The parent was preempted and ran before: it knows keys of what it generated, and the child generates others."""
    shared, of_parent, of_child = [1, 2], [3, 4, 5, 6], [3, 9, 5, 6]
    parent = SequenceBlocks(4, root_block_hash(""))
    assert len(parent.keys([*shared, *of_parent], 3, 2)) == 3
    child = parent.new_like()
    child.share(parent, 1)
    own = SequenceBlocks(4, root_block_hash("")).keys([*shared, *of_child], 3, 2)
    assert child.keys([*shared, *of_child], 3, 2) == own
    assert child.keys([*shared, *of_child], 3, 2)[0] == parent.keys([*shared, *of_parent], 3, 2)[0]


@pytest.mark.parametrize("block_size", [1, 16, 100, 2000])
def test_hashes_of_many_blocks_are_those_of_each_block(block_size):
    root, tokens = root_block_hash("a salt"), [7 * i % 1013 for i in range(4100)]
    wanted = chain(tokens, block_size, "a salt")
    for num_tokens in (0, block_size - 1, block_size, 1024, 2048, 4100, 4100):
        assert block_keys(root, tokens[:num_tokens], block_size) == wanted[: num_tokens // block_size]
    assert block_keys(root_block_hash(""), tokens, block_size) == chain(tokens, block_size)
    half = len(wanted) // 2
    if half:
        assert block_keys(wanted[half - 1], tokens[half * block_size :], block_size) == wanted[half:]


def test_hashes_of_a_long_prefix_are_computed_once():
    root, tokens = root_block_hash("computed once"), list(range(5000))
    block_keys(root, tokens[:4096], 16)
    before = _run_keys.cache_info()
    block_keys(root, tokens, 16)
    after = _run_keys.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (4, 0)
    assert block_keys(root, [-1, *tokens[1:]], 16)[0] != block_keys(root, tokens, 16)[0]
    assert after.maxsize == 2048


@pytest.mark.parametrize("num_packed", [0, 17, 1041, 1200])
def test_hashes_of_a_growing_sequence_are_those_of_the_whole(num_packed):
    tokens = [i % 99 for i in range(1200)]
    kv = SequenceBlocks(600, root_block_hash(""), packed=PackedTokens(tokens[:num_packed]).packed)
    for num_blocks in (0, 3, 3, 4, 260, 261, 300):
        assert kv.keys(tokens[: num_blocks * 4], num_blocks, 4) == chain(tokens, 4)[:num_blocks]


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([7, 8, 2**31 - 1]), max_size=24),
    st.lists(st.sampled_from(["read", "append", "rewind", "branch"]), max_size=8),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_hashes_of_a_packed_prompt_are_those_of_its_tokens(prompt, steps, block_size, random):
    """A sequence that knows its prompt as bytes has the hashes of every token that it has, whatever happens to it."""
    tokens = list(prompt)
    kv = SequenceBlocks(64, root_block_hash("s"), packed=PackedTokens(prompt).packed)
    for step in [*steps, "read"]:
        if step == "append":
            tokens += random.choices([7, 9], k=random.randint(1, 9))
        elif step == "rewind":
            del tokens[random.randint(len(prompt), len(tokens)) :]
            kv.rewind(min(len(tokens), random.randint(0, 99)) // block_size)
        elif step == "branch":
            parent, kv = kv, kv.new_like()
            kv.share(parent, random.randint(0, len(tokens) // block_size))
        else:
            num_blocks = random.randint(0, len(tokens) // block_size)
            assert kv.keys(tokens, num_blocks, block_size)[:num_blocks] == chain(tokens, block_size, "s")[:num_blocks]
    assert kv.keys(tokens, len(tokens) // block_size, block_size) == chain(tokens, block_size, "s")


def test_packed_tokens_are_joined_with_their_bytes():
    parts = [PackedTokens([1, 2]), PackedTokens([]), PackedTokens([2**31 - 1])]
    joined = PackedTokens.join(parts)
    assert tuple(joined) == (1, 2, 2**31 - 1)
    assert joined.packed == PackedTokens(joined).packed
    assert pickle.loads(pickle.dumps(joined)).packed == joined.packed


def test_a_group_is_matched_once_until_a_cached_block_changes(monkeypatch):
    memory, asked = paged_memory(8), list[int]()
    match = BlockHashIndex.match

    def counted(*given):
        asked.append(1)
        return match(*given)

    monkeypatch.setattr(BlockHashIndex, "match", counted)
    assert memory.prefixes is not None
    for sequence in computed(memory, group_of(16)).live:
        memory.release(sequence)
    asked.clear()
    group = group_of(16)
    assert memory.can_admit(group, 0) and memory.prefixes.match(group).num_blocks == 3
    assert not memory.can_admit(group, 6)
    assert len(asked) == 1
    other = group_of(29, first=50)
    assert memory.can_admit(other, 0) and len(asked) == 2
    computed(memory, other)  # takes all blocks, and evicts the prefix
    assert memory.prefixes.match(group).num_blocks == 0 and len(asked) > 2


REASONING, ANSWER = [90, 91, 92, 93, 94, 95], [60, 61, 62]


@pytest.mark.parametrize("keeps", [True, False])
def test_turns_find_the_blocks_of_a_template_that_drops_reasoning(keeps):
    """All blocks up to the last answer are found, and the answer without its reasoning runs again."""
    h = Harness(executor=FakeExecutor(block_size=4, num_blocks=60, max_num_batched_tokens=64, max_model_len=120))
    history: list[int] = []
    first_changed = 0
    for turn in range(5):
        prompt = [*history, 7, 100 + turn, 8, 9]
        cached = serve(h, f"turn {turn}", prompt)
        assert cached == first_changed, turn
        generated = [*REASONING, *ANSWER]
        serve(h, f"answer {turn}", [*prompt, *generated])  # as if generated: blocks of the turn with its reasoning
        history = [*prompt, *(generated if keeps else ANSWER)]
        first_changed = len(history) // 4 * 4 if keeps else len(prompt)


def test_placeholders_of_embeddings_name_no_block():
    h = Harness(executor=with_embeds()(block_size=4, num_blocks=32, max_num_batched_tokens=16))
    for name, prompt, embedded in (
        ("embedded", [5] * 10, range(10)),
        ("tokens", [0] * 10, range(0)),
        ("longer", [0] * 6, range(0)),
        ("again", [5] * 10, range(10)),
        ("a part", [5] * 10, range(6)),
    ):
        h.submit(name, prompt, embedded=embedded, max_tokens=3)
        h.run()
        assert h.tokens(name) == expected_tokens(prompt, 3)
    assert [h.last(name).usage.cached_tokens for name in ("embedded", "tokens", "again", "a part")] == [0, 0, 8, 4]
