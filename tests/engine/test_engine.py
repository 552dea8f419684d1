"""The loop over the fake executor: right tokens whatever the company, one last event each, every block back."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.engine import engine
from jpaged.engine.engine import EngineThread
from jpaged.errors import AlreadyExists, DeadlineExceeded, InternalError, QueueFull, RequestTooLong, Unavailable
from jpaged.testing import ByteTokenizer, FakeExecutor, Faults, expected_tokens
from jpaged.types import FinishReason, Prompt, Request, RequestTimes, SamplingParams
from tests.engine.harness import Harness


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request):
    return request.param


def make(overlap, **kwargs):
    loop = {name: kwargs.pop(name) for name in ("max_num_queued_reqs",) if name in kwargs}
    eos = kwargs.pop("eos_token_ids", frozenset())
    return Harness(executor=FakeExecutor(**kwargs), overlap=overlap, eos_token_ids=eos, **loop)


def test_a_request_gets_the_tokens_that_its_context_says(overlap):
    h = make(overlap)
    h.submit("a", [5, 6, 7], max_tokens=10)
    h.run()
    assert h.tokens("a") == expected_tokens([5, 6, 7], 10)
    last = h.last("a")
    assert last.finish is not None and last.finish.reason is FinishReason.LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 10)
    assert h.engine.load().num_blocks_used == 0


@pytest.mark.thinned(5)
@pytest.mark.parametrize("max_num_batched_tokens", [8, 13, 64])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_tokens_do_not_depend_on_chunks_blocks_or_company(overlap, block_size, max_num_batched_tokens):
    h = make(
        overlap,
        block_size=block_size,
        num_blocks=400 // block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    prompts = {f"r{i}": [(i * 37 + j * 11) % 256 for j in range(1 + 7 * i)] for i in range(12)}
    for name, prompt in prompts.items():
        h.submit(name, prompt, max_tokens=20)
    h.run()
    for name, prompt in prompts.items():
        assert h.tokens(name) == expected_tokens(prompt, 20), name


def test_a_pool_that_is_too_small_preempts_and_recomputes_the_same_tokens(overlap):
    h = make(overlap, num_blocks=10, block_size=2, max_model_len=20)
    prompts = {f"r{i}": [i, i + 1, i + 2] for i in range(6)}
    for name, prompt in prompts.items():
        h.submit(name, prompt, max_tokens=16)
    h.run()
    assert h.engine.load().num_preemptions > 0
    for name, prompt in prompts.items():
        assert h.tokens(name) == expected_tokens(prompt, 16), name
    assert h.engine.load().num_blocks_used == 0


def test_the_latest_arrival_yields_and_first_tokens_come_in_order_of_arrival(overlap):
    h = make(overlap, num_blocks=6, block_size=2, max_model_len=12, max_num_seqs=3)
    for i in range(3):
        h.submit(f"r{i}", [i + 1, i + 2], max_tokens=10)
    finished = []
    while h.step():
        finished += [name for name, events in h.events.items() if events[-1].is_last and name not in finished]
    assert finished == ["r0", "r1", "r2"]
    assert h.engine.load().num_preemptions > 0


def test_seeded_noise_depends_on_seed_and_position_alone(overlap):
    h = make(overlap, num_blocks=12, block_size=2, max_model_len=24)
    for i in range(5):
        h.submit(f"r{i}", [9, 8, 7], max_tokens=14, temperature=0.7, seed=i % 2 + 2**40)
    h.run()
    assert h.engine.load().num_preemptions > 0
    for i in range(5):
        assert h.tokens(f"r{i}") == expected_tokens([9, 8, 7], 14, seed=i % 2 + 2**40)


def test_end_of_sequence_ends_and_its_text_is_not_sent(overlap):
    eos = expected_tokens([1, 2], 6)[4]
    h = make(overlap, eos_token_ids=frozenset({eos}))
    h.submit("a", [1, 2], max_tokens=30)
    h.submit("b", [1, 2], max_tokens=6, ignore_eos=True)
    h.run()
    assert h.tokens("a") == expected_tokens([1, 2], 30, eos_token_ids=frozenset({eos}))
    assert h.last("a").finish.reason is FinishReason.STOP
    assert h.text("a") == ByteTokenizer().decode(h.tokens("a")[:-1])
    assert h.tokens("b") == expected_tokens([1, 2], 6)


def test_min_tokens_forbids_every_ending_token_until_then(overlap):
    plain = expected_tokens([1, 2], 8)
    h = make(overlap, eos_token_ids=frozenset({plain[1]}))
    h.submit("a", [1, 2], max_tokens=8, min_tokens=5, stop_token_ids=(plain[3],))
    h.run()
    tokens = h.tokens("a")
    assert plain[1] not in tokens[:5] and plain[3] not in tokens[:5]
    assert len(tokens) >= 5


def test_a_stop_token_ends_and_is_named(overlap):
    stop = expected_tokens([4], 9)[5]
    h = make(overlap)
    h.submit("a", [4], max_tokens=30, stop_token_ids=(stop,))
    h.run()
    assert h.tokens("a")[-1] == stop
    assert h.last("a").finish.matched_stop == stop


def test_logprobs_come_with_each_token_and_add_up(overlap):
    h = make(overlap)
    h.submit("a", [4], max_tokens=5, logprobs=3)
    h.submit("b", [4], max_tokens=5, logprobs=0)
    h.submit("c", [4], max_tokens=5)
    h.run()
    for event in h.events["a"]:
        (position,) = event.logprobs
        assert position.chosen.token_id == event.token_ids[0]
        assert [top.rank for top in position.top] == [1, 2, 3]
        assert position.top[0].token_id == position.chosen.token_id
    assert all(event.logprobs[0].top == () for event in h.events["b"])
    assert all(event.logprobs == () for event in h.events["c"])
    assert h.last("a").cumulative_logprob == h.last("b").cumulative_logprob == pytest.approx(5 * -0.125)
    assert h.last("c").cumulative_logprob is None


def test_abort_ends_with_one_event_and_gives_the_blocks_back_within_a_step(overlap):
    h = make(overlap)
    h.submit("a", [1, 2, 3], max_tokens=50)
    for _ in range(4):
        h.step()
    assert h.engine.abort("a")
    h.step()
    assert h.last("a").finish.reason is FinishReason.ABORT
    assert h.engine.load().num_blocks_used == 0
    assert not h.engine.abort("a")
    h.run()


def test_a_dropped_request_is_silent_from_then_on(overlap):
    h = make(overlap)
    h.submit("a", [1, 2, 3], max_tokens=50)
    for _ in range(4):
        h.step()
    seen = len(h.events["a"])
    h.engine.drop("a")
    h.run()
    assert len(h.events["a"]) == seen
    assert h.engine.load().num_blocks_used == 0


WHOLE = [{}, {"n": 3}, {"n": 2, "best_of": 3}, {"n": 2, "beam_width": 3}]


@pytest.mark.parametrize("sampling", [*WHOLE, {"stop": ("x",), "logprobs": 2}], ids=str)
def test_a_request_that_nobody_reads_along_is_told_in_one_event_a_sequence(overlap, sampling):
    sampling = {"temperature": 0.0 if "beam_width" in sampling else 1.0, "max_tokens": 30, **sampling}
    h = make(overlap)
    for name in ("step by step", "whole"):
        h.submit(name, [1, 2, 3], is_whole=name == "whole", seed=None if "beam_width" in sampling else 5, **sampling)
    while h.step():
        assert not h.events["whole"] or h.events["whole"][-1].is_last
    num_sequences = sampling.get("n", 1)
    assert [event.index for event in h.events["whole"]] == list(range(num_sequences))
    for index, event in enumerate(h.events["whole"]):
        parts = [part for part in h.events["step by step"] if part.index == index]
        assert event.text == "".join(part.text for part in parts)
        assert event.token_ids == tuple(token_id for part in parts for token_id in part.token_ids)
        assert event.logprobs == tuple(position for part in parts for position in part.logprobs)
        assert (event.finish, event.cumulative_logprob) == (parts[-1].finish, parts[-1].cumulative_logprob)
    assert h.last("whole").usage == h.last("step by step").usage


@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_an_abort_tells_what_there_is_of_a_request_that_nobody_reads_along(overlap, num_steps):
    h = make(overlap)
    prompt = [ord(letter) for letter in "hello"]
    h.submit("a", prompt, is_whole=True, n=2, max_tokens=30, stop=("never",), temperature=1.0, seed=5)
    for _ in range(num_steps):
        h.step()
    h.engine.abort("a")
    h.run()
    assert [(event.index, event.finish.reason) for event in h.events["a"]] == [(i, FinishReason.ABORT) for i in (0, 1)]
    for index in (0, 1):
        told = h.tokens("a", index)
        assert told == expected_tokens(prompt, 30, seed=5, sequence_index=index)[: len(told)]
        assert len(told) == max(0, num_steps - overlap)
        assert h.text("a", index) == h.tokenizer.decode(told)
    assert h.engine.load().num_blocks_used == 0


def test_a_waiting_request_can_be_aborted(overlap):
    h = make(overlap, max_num_seqs=1, num_blocks=16)
    h.submit("a", [1], max_tokens=40)
    h.submit("b", [1], max_tokens=40)
    h.step()
    assert h.engine.load().num_waiting == 1
    h.engine.abort("b")
    h.step()
    assert h.tokens("b") == [] and h.last("b").finish.reason is FinishReason.ABORT
    h.run()
    assert h.tokens("a") == expected_tokens([1], 40)


def test_deadlines_end_running_and_waiting_requests(overlap):
    h = make(overlap, max_num_seqs=1, num_blocks=16)
    h.submit("a", [1], max_tokens=40, deadline_s=5.0)
    h.submit("b", [1], max_tokens=40, deadline_s=4.0)
    h.submit("c", [1], max_tokens=4, deadline_s=100.0)
    h.step()
    h.clock.advance(6.0)
    h.step()
    for name in "ab":
        assert isinstance(h.last(name).error, DeadlineExceeded)
    h.run()
    assert h.tokens("c") == expected_tokens([1], 4)


def test_the_deadline_of_an_ended_request_does_not_hit_a_later_one_with_its_id(overlap):
    h = make(overlap)
    h.submit("a", [1], max_tokens=1, deadline_s=5.0)
    h.run()
    h.submit("a", [2], max_tokens=30)
    h.step()
    h.clock.advance(6.0)
    h.run()
    assert h.events["a"][-1].error is None


def test_an_id_in_flight_is_refused_and_free_again_afterwards(overlap):
    h = make(overlap)
    h.submit("a", [1], max_tokens=3)
    with pytest.raises(AlreadyExists, match="'a'"):
        h.submit("a", [1], max_tokens=3)
    h.run()
    h.submit("a", [1], max_tokens=3)
    h.run()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("end", ["length", "abort", "deadline", "error"])
@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"n": 1, "best_of": 3}, {"beam_width": 3}], ids=str)
def test_who_sees_a_request_end_finds_it_counted_and_its_id_and_its_place_free(overlap, sampling, end):
    faults = Faults(nan_token_ids=frozenset({100}) if end == "error" else frozenset())
    h = make(overlap, faults=faults, max_num_seqs=8, max_num_queued_reqs=0)
    seen = []

    def receive(event):
        if event.is_last and event.request_id == "r0":
            seen.append((h.engine.num_ended_by_reason()[end], "r0" in h.engine.in_flight, h.engine.is_full))

    for i in range(8):
        request = h.input_processor.make_request(
            request_id=f"r{i}",
            sampling=SamplingParams(temperature=0.0, max_tokens=8 + i, **sampling),
            prompt=Prompt(token_ids=[100 + i]),
            deadline_s=5.0 if end == "deadline" and i == 0 else None,
        )
        h.engine.submit(request, receive)
    assert h.engine.is_full
    h.step()
    if end == "abort":
        h.engine.abort("r0")
    h.clock.advance(6.0)
    h.run()
    assert seen == [(1, False, False)]


def test_a_full_queue_says_when_to_come_back():
    h = make(True, max_num_seqs=8, max_num_queued_reqs=2)
    for i in range(10):
        h.submit(f"r{i}", [1], max_tokens=3)
    with pytest.raises(QueueFull, match="limit is 10") as error:
        h.submit("late", [1], max_tokens=3)
    assert error.value.retry_after_s > 0
    h.run()
    h.submit("late", [1], max_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "sampling", "problem"),
    [
        ([1] * 100, {"max_tokens": 29}, r"129, over max_model_len \(128\)"),
        ([1] * 30, {"max_tokens": 35}, r"over the whole pool \(64: 16 blocks of 4\)"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(prompt, sampling, problem):
    h = make(True, num_blocks=16)
    with pytest.raises(RequestTooLong, match=problem):
        h.submit("a", prompt, **sampling)
    h.submit("fits", [1] * 30, max_tokens=34)
    h.run()
    assert len(h.tokens("fits")) == 34


@pytest.mark.parametrize("fail_at_step", [0, 3])
def test_a_device_fault_fails_every_request_once_and_the_engine_says_so(overlap, fail_at_step):
    h = make(overlap, faults=Faults(fail_at_step=fail_at_step), max_num_seqs=2)
    for i in range(4):
        h.submit(f"r{i}", [i], max_tokens=20)
    h.engine.start()
    assert h.engine.drain(timeout_s=30.0)
    for i in range(4):
        error = h.last(f"r{i}").error
        assert isinstance(error, InternalError) and "injected fault" in str(error)
    assert h.engine.failure is not None
    with pytest.raises(Unavailable):
        h.submit("late", [1])
    h.engine.stop()


def test_an_idle_engine_checks_its_blocks_and_fails_if_one_is_lost(monkeypatch):
    h = Harness()
    is_checked = threading.Event()

    def check():
        is_checked.set()
        raise InternalError("a block is lost")

    monkeypatch.setattr(h.engine._loop, "check", check)
    h.engine.start()
    assert is_checked.wait(60)
    h.engine.stop()
    assert "a block is lost" in str(h.engine.failure)


def test_commands_run_while_the_device_has_steps_to_do():
    has_stepped = [threading.Event(), threading.Event()]

    def step():
        has_stepped[has_stepped[0].is_set()].set()
        return True

    loop: Any = SimpleNamespace(
        step=step,
        idle_budget_s=60.0,
        observers=SimpleNamespace(on_dispatched=[]),
        arrivals=SimpleNamespace(reset=lambda: None),
        fail_all=lambda error: None,
    )
    thread = EngineThread(loop)
    thread.start(None)
    assert has_stepped[0].wait(60)
    assert not has_stepped[1].wait(0.02)  # the device has 60 s to do
    thread.call_soon(lambda: None)
    assert has_stepped[1].wait(60)
    assert thread.stop()


def test_drain_refuses_new_requests_and_waits_for_the_running_ones():
    faults = Faults()
    h = make(True, faults=faults)
    h.engine.start()
    h.submit("a", [1, 2], max_tokens=10)
    faults.gate.clear()
    drained = []
    waiter = threading.Thread(target=lambda: drained.append(h.engine.drain(timeout_s=30.0)))
    waiter.start()
    while True:
        try:
            h.submit("late", [1], max_tokens=1)
            h.engine.abort("late")
        except Unavailable:
            break
        except AlreadyExists:
            pass
    faults.gate.set()
    waiter.join(30.0)
    assert drained == [True]
    assert h.tokens("a") == expected_tokens([1, 2], 10)
    h.engine.stop()


def test_drain_gives_up_after_its_time_and_stop_ends_the_rest():
    faults = Faults()
    h = make(True, faults=faults)
    faults.gate.clear()
    h.submit("a", [1, 2], max_tokens=100)
    h.engine.start()
    assert not h.engine.drain(timeout_s=0.01)
    stopper = threading.Thread(target=h.engine.stop)
    stopper.start()
    faults.gate.set()
    stopper.join(30.0)
    assert isinstance(h.last("a").error, Unavailable)


def test_a_stop_that_a_step_reads_from_the_inbox_ends_the_loop():
    engine = make(overlap=True).engine
    engine._thread.call_soon(engine._thread._stopping.set)
    engine.start()
    engine._thread._thread.join(timeout=60)
    assert not engine._thread._thread.is_alive()
    engine.stop()


def test_a_reset_of_the_prefix_cache_ends_with_the_engine():
    h = make(True)
    h.engine.start()
    h.engine.fail(RuntimeError("a fault"))
    h.engine._thread._thread.join(timeout=60)
    with pytest.raises(Unavailable, match="the engine has ended"):
        h.engine.reset_prefix_cache().result(timeout=0)


def test_overlap_reaches_the_device_before_the_last_results_are_read():
    order = []

    class Recording(FakeExecutor):
        def forward(self, inputs):
            order.append("forward")
            return super().forward(inputs)

        def sample(self, hidden, inputs):
            order.append("sample")
            return super().sample(hidden, inputs)

        def collect(self, handle):
            order.append("collect")
            return super().collect(handle)

    for overlap, want in (
        (False, ["forward", "sample", "collect"] * 3),
        (True, ["forward", "sample"] * 2 + ["collect"]),
    ):
        order.clear()
        h = Harness(executor=Recording(), overlap=overlap)
        h.submit("a", [1], max_tokens=3)
        h.run()
        assert order[: len(want)] == want


def test_slot_use_counts_stored_tokens_over_reserved_slots():
    h = make(False, block_size=4)
    h.submit("a", [1, 2, 3], max_tokens=2)
    h.step()
    assert h.engine.load().slot_use == pytest.approx(3 / 4)


def test_sampling_without_a_seed_repeats_with_the_engines_seed():
    runs = []
    for _ in range(2):
        h = make(True)
        for i in range(3):
            h.submit(f"r{i}", [1, 2], max_tokens=8, temperature=1.0)
        h.run()
        runs.append([h.tokens(f"r{i}") for i in range(3)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert SamplingParams().seed is None


@pytest.mark.thinned(5)
@pytest.mark.parametrize("kv_policy", ["paged", "reserve-max", "reserve-pow2", "reserve-oracle"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("overlap", [False, True])
def test_beams_are_the_same_under_every_baseline_and_leave_nothing_behind(kv_policy, batching, overlap):
    def search(**options):
        executor = FakeExecutor(num_blocks=256, max_num_batched_tokens=16)
        harness = Harness(executor=executor, overlap=overlap, **options)
        harness.submit("a", [3, 1, 4, 1, 5], beam_width=4, n=4, max_tokens=9)
        harness.submit("b", [2, 7], beam_width=3, n=1, max_tokens=20)
        harness.run()
        assert harness.engine.load().num_blocks_free == 256
        return [harness.tokens("a", index) for index in range(4)], harness.tokens("b")

    assert search(kv_policy=kv_policy, batching=batching) == search()


def test_the_last_event_tells_when_the_request_got_where(overlap):
    h = make(overlap, num_blocks=4, block_size=4)
    h.clock.advance(1.0)
    h.submit("a", [5, 6, 7], max_tokens=4, n=2, temperature=1.0)
    h.submit("b", [1] * 9, max_tokens=2)  # finds no room beside the first
    times: dict[str, tuple[int, Any]] = {}
    for now in range(2, 40):
        h.clock.advance(1.0)
        h.step()
        times |= {name: (now, h.events[name][-1].times) for name in "ab" if name not in times and h.ended(name)}
        if len(times) == 2:
            break
    (end_a, a), (end_b, b) = times["a"], times["b"]
    assert (a.arrival_s, a.first_scheduled_s) == (1.0, 2.0)
    assert a.first_token_s == 2.0 + overlap
    assert a.last_token_s == end_a == a.first_token_s + 3
    assert b.arrival_s == 1.0
    assert b.first_scheduled_s >= end_a
    assert b.first_scheduled_s < b.last_token_s == end_b
    assert b.last_token_s == b.first_token_s + 1
    for name in "ab":
        assert [event.times for event in h.events[name][:-1]] == [None] * (len(h.events[name]) - 1)


def test_a_request_that_never_ran_has_only_arrived(overlap):
    h = make(overlap)
    h.clock.advance(3.0)
    h.submit("a", [5, 6, 7], max_tokens=4, deadline_s=4.0)
    h.clock.advance(5.0)
    h.step()
    assert h.last("a").times == RequestTimes(arrival_s=3.0)


def test_tokens_without_text_are_the_same_tokens(overlap):
    h = make(overlap, eos_token_ids=frozenset({ByteTokenizer.EOS}))
    for name, detokenize in (("text", True), ("ids", False)):
        h.submit(name, [104, 105], max_tokens=30, n=2, temperature=1.0, seed=3, detokenize=detokenize)
    h.run()
    for index in range(2):
        assert h.tokens("ids", index) == h.tokens("text", index)
        assert h.text("text", index)
        assert not h.text("ids", index)
    assert h.last("ids").finish == h.last("text").finish


def test_a_step_that_hangs_is_seen_though_all_its_requests_were_dropped():
    """Who asked has gone between the dispatch of a step and its end: there is still something that ought to come."""
    h = Harness()
    h.submit("a", [1, 2, 3], max_tokens=9)
    h.engine.step()
    h.executor.faults.gate.clear()
    h.engine.drop("a")
    step = threading.Thread(target=h.engine.step)
    step.start()
    until_s = time.monotonic() + 60
    while "a" in h.engine.in_flight or h.engine._loop.stall_detector._awaited_s is None:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    h.clock.advance(7.0)
    assert h.engine.load().seconds_since_progress == 7.0
    h.executor.faults.release()
    step.join()
    assert h.engine.load().seconds_since_progress == 0.0


def test_the_end_waits_for_a_step_that_takes_long(monkeypatch):
    monkeypatch.setattr(engine, "_JOIN_S", 0.01)
    monkeypatch.setattr(engine, "_ABANDONED_JOIN_S", 0.0)
    h = Harness(executor=FakeExecutor())
    h.executor.faults.hold_after(1)
    is_held = threading.Event()
    h.engine.start()
    h.engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=9)), lambda event: is_held.set())
    assert is_held.wait(60)
    releases = []
    monkeypatch.setattr(h.executor, "shutdown", lambda: releases.append(h.executor.faults.gate.is_set()))
    threading.Timer(0.1, h.executor.faults.release).start()
    h.engine.stop()
    assert releases == [True]
