"""New weights between two steps: no request samples from a mixture, and no prefix of other weights is found."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine, check_version
from jpaged.engine.kv_cache.blocks import SequenceBlocks, root_block_hash
from jpaged.engine.sequence import Sequence
from jpaged.errors import InvalidArgument, Unavailable, Unsupported
from jpaged.testing import (
    ByteTokenizer,
    FakeAdapter,
    FakeExecutor,
    FakeUpdate,
    SeveralStepsExecutor,
    expected_tokens,
    with_adapters,
)
from jpaged.types import FinishReason, LoadedAdapter, WeightVersionRun
from tests.engine.data_parallel.fleet import Fleet
from tests.engine.harness import Harness
from tests.engine.kv_cache.offload.disks import Server

PROMPT = list(range(10, 24))


def updated(h: Harness, update: FakeUpdate, **options: Any) -> str:
    """Replaces the weights; steps until that is done."""
    future = h.engine.update_weights(update, **options)
    for _ in range(100):
        h.engine.step()
        if future.done():
            break
    assert update.is_closed
    version: str = future.result(0)
    return version


def continued(prompt: list[int], known: list[int], num_tokens: int, weight: int) -> list[int]:
    """What a request generates that has these tokens when its weights are replaced."""
    return known + expected_tokens(prompt + known, num_tokens - len(known), weight=weight)


@pytest.mark.parametrize("num_host_blocks", [0, 20], ids=["device", "host"])
def test_kept_requests_are_computed_again_and_continue_with_the_new_weights(num_host_blocks: int) -> None:
    mode = "swap" if num_host_blocks else "recompute"
    h = Harness(executor=SeveralStepsExecutor(num_host_blocks=num_host_blocks), preemption_mode=mode)
    h.submit("a", PROMPT, max_tokens=20)
    for _ in range(4):
        h.step()
    known = h.tokens("a")
    assert 0 < len(known) < 20
    assert updated(h, FakeUpdate(7)) == "1" == h.engine.weight_version
    known = h.tokens("a")[: max(len(known), 1)]
    h.submit("b", PROMPT, max_tokens=6)
    h.run()
    (first, second) = h.last("a").weight_versions
    assert (first.version, second.version, first.num_tokens + second.num_tokens) == ("0", "1", 20)
    assert h.tokens("a") == continued(PROMPT, h.tokens("a")[: first.num_tokens], 20, 7)
    assert h.tokens("a")[: first.num_tokens] == expected_tokens(PROMPT, first.num_tokens)
    assert h.tokens("b") == expected_tokens(PROMPT, 6, weight=7)
    assert h.last("b").weight_versions == (WeightVersionRun("1", 6),)
    assert h.last("b").usage.cached_tokens == 13  # computed for "a" with the same weights


def test_a_swapped_request_does_not_read_blocks_of_other_weights() -> None:
    h = Harness(
        executor=FakeExecutor(num_blocks=12, num_host_blocks=40, max_num_seqs=4), preemption_mode="swap", overlap=False
    )
    for index in range(3):
        h.submit(str(index), PROMPT[index:], max_tokens=24)
    while not h.engine._loop.scheduler.queues.swapped:
        assert h.engine.step()
    updated(h, FakeUpdate(5))
    h.run()
    for index in range(3):
        first = h.last(str(index)).weight_versions[0].num_tokens
        assert h.tokens(str(index)) == continued(PROMPT[index:], h.tokens(str(index))[:first], 24, 5)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_end_before_an_update_that_does_not_keep_them(mode: Any) -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=5)
    h.step()
    future = h.engine.update_weights(FakeUpdate(3), mode)
    if mode == "wait":
        h.step()
        with pytest.raises(Unavailable, match="the weights are being updated"):
            h.submit("b", PROMPT, max_tokens=2)
    h.run()
    assert future.result(0) == "1"
    h.submit("b", PROMPT, max_tokens=2)
    h.run()
    finish = h.last("a").finish
    assert finish is not None and finish.reason is (FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH)
    assert [run.version for run in h.last("a").weight_versions] == ["0"]
    assert h.tokens("a") == expected_tokens(PROMPT, len(h.tokens("a")))
    assert h.tokens("b") == expected_tokens(PROMPT, 2, weight=3)


@pytest.mark.parametrize("sampling", [{"n": 2}, {"n": 1, "best_of": 3}, {"beam_width": 2, "temperature": 0.0}])
def test_every_sequence_of_a_request_reports_its_versions(sampling: dict[str, Any]) -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=9, **{"temperature": 1.0, **sampling})
    for _ in range(5):
        h.step()
    updated(h, FakeUpdate(2), version="second")
    h.run()
    ends = [event for event in h.events["a"] if event.finish is not None]
    assert len(ends) == sampling.get("n", 2 if "beam_width" in sampling else 1) or "beam_width" in sampling
    for event in ends:
        assert sum(run.num_tokens for run in event.weight_versions) == len(h.tokens("a", event.index))
        assert event.weight_versions[-1].version == "second"
    assert any(len(event.weight_versions) == 2 for event in ends)


def test_a_forked_beam_reports_the_versions_of_the_tokens_before_its_fork() -> None:
    sequence = Sequence(0, [1, 2, 3], SequenceBlocks(4, None))
    sequence.token_ids += [4, 5, 6]
    twin = sequence.branch(1)
    twin.end_version("0", root_block_hash(""))
    twin.token_ids.append(7)
    assert twin.count_versions("1") == (WeightVersionRun("0", 3), WeightVersionRun("1", 1))


@pytest.mark.parametrize(
    ("eos_token_ids", "sampling"),
    [
        ({6, 66, 126}, {"beam_width": 3, "n": 3}),
        ({1, 61, 121}, {"n": 1, "best_of": 2, "temperature": 1.0, "seed": 3}),
    ],
    ids=["beams", "samples"],
)
def test_sequences_that_were_ranked_with_those_of_other_versions_name_them(
    eos_token_ids: set[int], sampling: dict[str, Any]
) -> None:
    h = Harness(eos_token_ids=frozenset(eos_token_ids))
    h.submit("a", PROMPT, max_tokens=12, **sampling)
    for _ in range(5):
        h.step()
    (group,) = h.engine._loop.groups.values()
    updated(h, FakeUpdate(2))
    h.run()
    early = [event for event in h.events["a"] if event.finish and len(h.tokens("a", event.index)) < 4]
    assert early and group.num_sampled_tokens > 4
    for event in early:
        num_tokens = len(h.tokens("a", event.index))
        assert event.weight_versions == (WeightVersionRun("0", num_tokens), WeightVersionRun("1", 0))


def test_a_prefix_is_found_only_with_the_weights_that_computed_it() -> None:
    h = Harness(executor=FakeExecutor(num_host_blocks=20))
    for number, name in enumerate(["a", "b", "a"]):  # a name that returns is of other weights
        for index in range(2):
            request = f"{number}-{index}"
            h.submit(request, PROMPT, max_tokens=3)
            h.run()
            assert h.last(request).usage.cached_tokens == (13 if index else 0)
        updated(h, FakeUpdate(number + 1), version=name)


def test_the_version_is_part_of_every_block_key() -> None:
    roots = {
        root_block_hash("salt", tenant, adapter, weights)
        for tenant in ("", "t")
        for adapter in (b"", b"a" * 32)
        for weights in (b"", b"v" * 32, b"w" * 32)
    }
    assert len(roots) == 12
    h = Harness()
    keys = set()
    for number in range(3):
        h.submit(str(number), PROMPT, max_tokens=2)
        h.step()
        (group,) = h.engine._loop.groups.values()
        keys.add(group.sequences[0].kv.root)
        h.run()
        updated(h, FakeUpdate(1), version="same")
    assert len(keys) == 3 and root_block_hash("") in keys


def test_log_probabilities_of_a_prompt_are_all_of_one_version() -> None:
    prompt = [n % 100 for n in range(40)]
    told = []
    for num_steps in (0, 2):  # before the update; a step computes 16 tokens
        h = Harness()
        if not num_steps:
            updated(h, FakeUpdate(6))
        h.submit("a", prompt, max_tokens=3, prompt_logprobs=1)
        for _ in range(num_steps):
            h.step()
        if num_steps:
            updated(h, FakeUpdate(6))
        h.run()
        assert h.tokens("a") == expected_tokens(prompt, 3, weight=6)
        told.append([position for event in h.events["a"] for position in event.prompt_logprobs])
    assert len(told[0]) == 39 and told[0] == told[1]


def test_an_adapter_stays_loaded() -> None:
    h = Harness(executor=with_adapters(2)())
    adapter = LoadedAdapter("a", "", 1, FakeAdapter(5))
    h.submit("a", PROMPT, adapter=adapter, max_tokens=8)
    h.step()
    updated(h, FakeUpdate(10), mode="wait")
    h.submit("b", PROMPT, adapter=adapter, max_tokens=8)
    h.run()
    assert h.tokens("a") == expected_tokens(PROMPT, 8, weight=5)
    assert h.tokens("b") == expected_tokens(PROMPT, 8, weight=15)


@pytest.mark.parametrize("level", [1, 2])
def test_an_adapter_is_loaded_again_after_an_update_of_weights_that_sleep(level: int) -> None:
    h = Harness(executor=with_adapters(2)())
    adapter = LoadedAdapter("a", "", 1, FakeAdapter(5))
    h.submit("a", PROMPT, adapter=adapter, max_tokens=8)
    h.run()
    asleep = h.engine.sleep(level)
    h.engine.step()
    asleep.result(0)
    updated(h, FakeUpdate(10))
    awake = h.engine.wake_up()
    h.engine.step()
    awake.result(0)
    h.submit("b", PROMPT, adapter=adapter, max_tokens=8)
    h.run()
    assert h.tokens("b") == expected_tokens(PROMPT, 8, weight=15)


def test_weights_sleep_after_an_update_that_failed() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=20)
    h.step()
    h.step()
    with pytest.raises(InvalidArgument, match="weights: tensor w is not finite; the weights are asleep until"):
        updated(h, FakeUpdate(3, fails=True))
    num_steps = h.executor.num_steps
    assert h.engine.asleep == {"weights"} and h.engine.is_paused and h.engine.weight_version == "0"
    with pytest.raises(Unavailable, match="asleep"):
        h.submit("b", PROMPT, max_tokens=2)
    with pytest.raises(InvalidArgument, match="must be complete"):
        updated(h, FakeUpdate(4, is_complete=False))
    h.engine.step()
    assert h.executor.num_steps == num_steps
    assert updated(h, FakeUpdate(4)) == "1"
    assert not h.engine.asleep and not h.engine.is_paused
    h.submit("b", PROMPT, max_tokens=2)
    h.run()
    first = h.last("a").weight_versions[0].num_tokens
    assert h.tokens("a") == continued(PROMPT, h.tokens("a")[:first], 20, 4)
    assert h.tokens("b") == expected_tokens(PROMPT, 2, weight=4)


def test_waking_up_after_a_failed_update_reads_the_files_which_are_another_version() -> None:
    h = Harness()
    updated(h, FakeUpdate(3))
    with pytest.raises(InvalidArgument):
        updated(h, FakeUpdate(4, fails=True))
    awake = h.engine.wake_up()
    h.engine.step()
    assert awake.result(0) is True
    h.submit("b", PROMPT, max_tokens=2)
    h.run()
    assert h.tokens("b") == expected_tokens(PROMPT, 2)
    assert h.last("b").weight_versions == (WeightVersionRun("2", 2),)


def test_an_update_during_a_pause_or_a_sleep_does_not_resume() -> None:
    h = Harness()
    h.engine.pause("keep")
    h.submit("a", PROMPT, max_tokens=3)
    updated(h, FakeUpdate(1))
    assert h.engine.is_paused
    h.engine.sleep(2, "keep")
    updated(h, FakeUpdate(2))
    assert h.engine.asleep == {"kv_cache"} and h.engine.is_paused
    h.engine.wake_up()
    h.run()
    assert h.tokens("a") == expected_tokens(PROMPT, 3, weight=2)
    assert h.last("a").weight_versions == (WeightVersionRun("2", 3),)


def test_what_cannot_be_is_refused_before_requests_are_ended() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=4)
    unknown: Any = "stop"
    for call, problem in (
        (lambda: h.engine.update_weights("other", "abort"), "is not a FakeUpdate"),
        (lambda: h.engine.update_weights(FakeUpdate(1), unknown), "mode: 'stop' is not one of"),
        (lambda: h.engine.update_weights(FakeUpdate(1), version="a\n"), "version: .* printable"),
        (lambda: h.engine.update_weights(FakeUpdate(1), version=True), "version"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            call()
    first = h.engine.update_weights(FakeUpdate(1))
    with pytest.raises(Unavailable, match="another update of the weights is running"):
        h.engine.update_weights(FakeUpdate(2))
    h.run()
    assert first.result(0) == "1" and h.tokens("a") == expected_tokens(PROMPT, 4, weight=1)

    class Fixed(FakeExecutor):
        sleeper = None  # type: ignore[assignment]

    with pytest.raises(Unsupported, match="not supported with several processes, a draft model or EPLB"):
        Harness(executor=Fixed()).engine.update_weights(FakeUpdate(1))
    config = EngineConfig().replace(enable_lora=True, enable_dora=True)
    scaled = Engine(with_adapters(1)(), ByteTokenizer(), config)
    with pytest.raises(Unsupported, match="--enable-dora"):
        scaled.update_weights(FakeUpdate(1))


def test_replicas_are_updated_together_or_not_at_all() -> None:
    fleet = Fleet(2)

    def settle() -> None:
        for _ in range(5):
            fleet.replicas.step()
        fleet.run()

    for name in "ab":
        fleet.place(name, PROMPT, max_tokens=30)
    for _ in range(5):
        fleet.replicas.step()
    future = fleet.replicas.update_weights(FakeUpdate(9))
    settle()
    assert future.result(0) == "1" == fleet.replicas.weight_version
    for name in "ab":
        first, _ = fleet.last(name).weight_versions
        assert fleet.tokens(name) == continued(PROMPT, fleet.tokens(name)[: first.num_tokens], 30, 9)

    broken: Any = fleet.engines[1]._executor

    def fail(update: FakeUpdate) -> None:
        broken.discard()
        raise InvalidArgument("weights", "tensor w is not finite")

    works, broken.update = broken.update, fail
    failed = fleet.replicas.update_weights(FakeUpdate(3))
    settle()
    with pytest.raises(InvalidArgument, match="not finite"):
        failed.result(0)
    assert [engine.asleep for engine in fleet.engines] == [{"weights"}] * 2
    broken.update = works
    again = fleet.replicas.update_weights(FakeUpdate(3))
    settle()
    again.result(0)
    fleet.submit("c", PROMPT)
    fleet.run()
    assert fleet.tokens("c") == expected_tokens(PROMPT, 4, weight=3)


@pytest.mark.parametrize(("num_requests", "num_updates"), [(40, 5), pytest.param(10_000, 50, marks=pytest.mark.long)])
def test_no_answer_mixes_versions_while_many_requests_run(num_requests: int, num_updates: int) -> None:
    h = Harness(executor=SeveralStepsExecutor(max_num_seqs=8), num_scheduler_steps=2, max_num_queued_reqs=num_requests)
    between, num_tokens = num_requests // num_updates, 6
    h.engine.start()
    try:
        updates: list[Future[str]] = []
        for number in range(num_requests):
            h.submit(str(number), PROMPT[number % 7 :], max_tokens=num_tokens)
            if number % between == between // 2:
                if updates:
                    updates[-1].result(60)
                updates.append(h.engine.update_weights(FakeUpdate(number)))
        assert [update.result(60) for update in updates] == [str(n + 1) for n in range(num_updates)]
        assert h.engine.drain(600)
    finally:
        h.engine.stop()
    weights = {"0": 0, **{str(n + 1): n * between + between // 2 for n in range(num_updates)}}
    seen: dict[tuple[object, ...], list[int]] = {}
    for number in range(num_requests):
        tokens, prompt, begin = h.tokens(str(number)), PROMPT[number % 7 :], 0
        for version, count in h.last(str(number)).weight_versions:
            key = (number % 7, *tokens[:begin], weights[version], count)
            wanted = seen.setdefault(
                key, expected_tokens(prompt + tokens[:begin], count, weight=weights[version]) if key not in seen else []
            )
            assert tokens[begin : begin + count] == wanted
            begin += count
        assert begin == num_tokens


def test_a_store_has_the_blocks_of_each_version_for_itself(tmp_path: Path) -> None:
    prompt = [n % 100 for n in range(26)]

    def run(weights: list[int]) -> list[int]:
        """One life of a server; what each request finds, with the first weights and after each update."""
        server = Server(tmp_path)
        found = [server.ask("0", prompt)]
        for number, weight in enumerate(weights, start=1):
            updated(server.h, FakeUpdate(weight))
            found.append(server.ask(str(number), prompt, weight=weight))
            server.run()
        assert server.h.engine.drain(60)
        server.stop()
        return found

    assert run([3]) == [0, 0]
    first, second, again = run([4, 3])  # "1" was of other weights in the first life, and so was "2"
    assert first > 0 and (second, again) == (0, 0)
    assert run([3])[1] > 0  # the same name of the same weights


@pytest.mark.parametrize("call", ["update", "pause", "sleep"])
def test_requests_that_a_sleep_keeps_cannot_be_waited_for(call: str) -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=9)
    h.step()
    h.engine.sleep(1, "keep")
    calls: dict[str, Any] = {
        "update": lambda: h.engine.update_weights(FakeUpdate(3), "wait"),
        "pause": lambda: h.engine.pause("wait"),
        "sleep": lambda: h.engine.sleep(2, "wait"),
    }
    future = calls[call]()
    for _ in range(3):
        h.engine.step()
    with pytest.raises(Unavailable, match="cannot end during a sleep: call wake_up, or choose another mode"):
        future.result(0)
    assert h.engine.is_paused and h.engine.weight_version == "0"
    h.engine.wake_up()
    h.run()
    assert h.tokens("a") == expected_tokens(PROMPT, 9)


@pytest.mark.parametrize("call", ["pause", "sleep"])
def test_a_pause_during_an_update_lasts(call: str) -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=9)
    h.step()
    update = h.engine.update_weights(FakeUpdate(3))
    paused = h.engine.pause("keep") if call == "pause" else h.engine.sleep(0, "keep")
    for _ in range(3):
        h.engine.step()
    assert update.result(0) == "1" and paused.result(0) is None and h.engine.is_paused
    h.engine.resume()
    h.run()
    assert h.last("a").weight_versions[-1].version == "1"
    updated(h, FakeUpdate(4))
    assert not h.engine.is_paused


def test_an_update_that_keeps_requests_ends_a_wait_for_their_end_with_an_error() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=9)
    h.step()
    asleep = h.engine.sleep(1, "wait")
    h.step()
    updated(h, FakeUpdate(3))
    with pytest.raises(Unavailable, match="generation was paused before all requests had ended"):
        asleep.result(0)
    h.run()
    assert len(h.tokens("a")) == 9 and not h.engine.asleep and not h.engine.is_paused


def test_replicas_count_their_versions_alike_after_one_has_failed() -> None:
    fleet = Fleet(2)
    broken: Any = fleet.engines[1]._executor

    def fail(update: FakeUpdate) -> None:
        broken.discard()
        raise InvalidArgument("weights", "tensor w is not finite")

    works, broken.update = broken.update, fail
    failed = fleet.replicas.update_weights(FakeUpdate(3))
    for engine in fleet.engines:
        engine.step()
    fleet.engines[0].resume()  # too early: the other replica has not failed yet, but will
    for _ in range(5):
        fleet.replicas.step()
    with pytest.raises(InvalidArgument, match="not finite"):
        failed.result(0)
    assert [engine.asleep for engine in fleet.engines] == [{"weights"}] * 2
    assert all(engine.is_paused for engine in fleet.engines)
    broken.update = works
    fleet.replicas.wake_up()
    fleet.run()
    assert [engine.weight_version for engine in fleet.engines] == ["2", "2"]


@pytest.mark.parametrize(
    ("given", "name"), [(None, None), (7, "7"), (-1, "-1"), (np.int64(7), "7"), ("é" * 128, "é" * 128)]
)
def test_versions_are_numbers_or_short_printable_texts(given: Any, name: str | None) -> None:
    assert check_version(given) == name


@pytest.mark.parametrize("given", ["", "a\nb", "\ud800", True, 1.5, b"x"])
def test_other_versions_are_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"version: .* must be a number or a printable text of at most 128"):
        check_version(given)


def test_long_versions_are_refused() -> None:
    for given in ("x" * 129, 10**128, -(10**5000)):
        with pytest.raises(InvalidArgument, match=r"version: .* must be a number or a printable text of at most 128"):
            check_version(given)


def test_tokens_that_are_dropped_belong_to_no_version() -> None:
    sequence = Sequence(0, [1, 2, 3], SequenceBlocks(8, None))
    for token_id in (4, 5, 6):
        sequence.append_forced([token_id])
    sequence.end_version("0", b"1" * 32)
    sequence.rewind(4)
    sequence.append_forced([7, 8])
    assert sequence.count_versions("1") == (WeightVersionRun("0", 1), WeightVersionRun("1", 2))


def test_blocks_that_a_store_is_reading_are_not_taken_for_those_of_other_weights(tmp_path: Path) -> None:
    prompt = [n % 60 for n in range(26)]
    first = Server(tmp_path)
    first.ask("0", prompt)
    assert first.h.engine.drain(60)
    first.stop()
    server = Server(tmp_path)
    server.readers.hold()
    server.submit("a", prompt, weight=4)
    server.submit("b", prompt, weight=4)  # waits for the same blocks
    server.h.engine.step()
    assert len(server.queues.pending_fetch) == 2
    updated(server.h, FakeUpdate(4))
    server.readers.release()
    server.run()
    for name in "ab":
        assert server.h.tokens(name) == expected_tokens(prompt, 3, weight=4, vocab_size=61)
    assert server.h.engine.drain(60)
    server.stop()


def test_prefixes_stay_pinned_in_replicas_that_were_resumed_too_early() -> None:
    fleet = Fleet(2)
    replicas = fleet.replicas
    pinned = replicas.pin_prefix("p", PROMPT)
    fleet.run()
    assert pinned.result(0) == 12
    fleet.submit("a", PROMPT, max_tokens=9)
    future = replicas.update_weights(FakeUpdate(3), "wait")
    replicas.step()
    replicas.resume()
    fleet.run()
    with pytest.raises(Unavailable, match="resumed"):
        future.result(0)
    assert replicas.unpin_prefix("p") and not replicas.unpin_prefix("p")
    again = replicas.pin_prefix("p", PROMPT)
    fleet.run()
    assert again.result(0) == 12
    future = replicas.update_weights(FakeUpdate(3))
    for _ in range(5):
        replicas.step()
    assert future.result(0) == "1" and not replicas.unpin_prefix("p")
