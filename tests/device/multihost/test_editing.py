"""Edits, counts and tells between processes: said before they run, run as they were said, and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from jpaged.device.executor import JaxExecutor
from jpaged.device.multihost.channel import MessageKind
from jpaged.device.multihost.executor import MultiHostExecutor, decode, follow, get_sizes, pack_words, parse_sampling
from jpaged.device.multihost.handshake import Follower, Leader
from jpaged.engine.executor import Detail, SamplingInputs
from jpaged.engine.executor.aux_io import AuxInputs, AuxKind
from jpaged.engine.executor.io import ANY_TOKEN, LogitsProcessorInputs, TokenCountReset, no_masks, no_singles
from jpaged.errors import InternalError, JpagedError, Unavailable
from tests.device import tiny_model
from tests.device.driver import Driver, Row

VOCAB_SIZE = tiny_model.CONFIG.vocab_size
TELL_SIZES = {AuxKind.LOGPROBS: 64, AuxKind.ALL_LOGPROBS: 8, AuxKind.HIDDEN: 64}


class Line:
    """Both ends of what process 0 and one other say: first all of the one, then what the other makes of it."""

    num_processes = 2

    def __init__(self) -> None:
        self.said: list[tuple[MessageKind, bytearray]] = []
        self.failures: list[JpagedError] = []
        self._on_digest: Callable[[int, bytearray], None] = lambda process, payload: None

    @property
    def failure(self) -> JpagedError | None:
        return self.failures[0] if self.failures else None

    def take_digests(self, on_digest: Callable[[int, bytearray], None], processes: Iterable[int]) -> None:
        assert tuple(processes) == (1,)
        self._on_digest = on_digest

    def wait_for_failure(self, timeout_s: float) -> JpagedError | None:
        return self.failure

    def fail(self, error: JpagedError) -> None:
        self.failures.append(error)

    def send(self, kind: MessageKind, *parts: bytes, to: Iterable[int] | None = None) -> None:
        assert to is None or tuple(to) == (1,)
        payload = bytearray(b"".join(parts))
        if kind is MessageKind.DIGEST:
            self._on_digest(1, payload)
        else:
            self.said.append((kind, payload))

    def follow(self) -> Iterator[tuple[MessageKind, bytearray]]:
        yield from [*self.said, (MessageKind.END, bytearray())]


@pytest.fixture(scope="module")
def executors() -> Iterator[list[JaxExecutor]]:
    executors = [tiny_model.warm_executor() for _ in range(2)]
    yield executors
    for executor in executors:
        executor.shutdown()


def edits_of(slot: int, tokens: list[int], **changes: Any) -> LogitsProcessorInputs:
    """A penalty for the first row, and whatever else is asked for."""
    edits = LogitsProcessorInputs.neutral(8)
    edits.rows_r["slots_r"][0], edits.rows_r["frequency_r"][0] = slot, 2.5
    return dataclasses.replace(edits, due=(TokenCountReset(slot, tokens, 3),), **changes)


def serve(executor: JaxExecutor, line: Line) -> list[tuple[SamplingInputs, AuxInputs]]:
    """Steps of one sequence: with a penalty, with single tokens, with a mask; told of in each way."""
    leader = MultiHostExecutor(executor, cast(Leader, line))
    driver = Driver(leader)
    sequence = driver.sequence([5, 6, 7, 8, 9], temperature=0.8, seed=3)
    singles, masks = no_singles(8), no_masks(8, VOCAB_SIZE)
    singles[0, 1] = (11, ANY_TOKEN, 3.5)
    masks[0, 0] = 0b1011
    steps = [
        (edits_of(2, [5, 6, 7, 8]), AuxKind.LOGPROBS),
        (edits_of(2, [5, 6, 7, 8, 9] * 60, singles_rx=singles), AuxKind.HIDDEN),
        (edits_of(4, [1], singles_rx=singles, mask_rw=masks), AuxKind.ALL_LOGPROBS),
    ]
    done = []
    for edits, tell in steps:
        row = Row(sequence, len(sequence.tokens) - sequence.num_computed)
        hidden = leader.forward(driver.inputs([row]))
        asked = AuxInputs.padded(tell, [0], [[3, 4]], TELL_SIZES[tell])
        collect = leader.compute_aux(hidden, asked)
        inputs = dataclasses.replace(driver.sampling([row], detail=Detail.LOGPROBS), edits=edits)
        outputs = leader.collect(leader.sample(hidden, inputs))
        collect()
        sequence.num_computed += row.num_tokens
        sequence.tokens.append(outputs.token_ids_rn.item(0, 0))
        done.append((inputs, asked))
    return done


@pytest.mark.long
def test_another_process_counts_edits_and_tells_as_it_was_said(executors: list[JaxExecutor]) -> None:
    first, second = executors
    line = Line()
    done = serve(first, line)
    kinds = [kind for kind, _ in line.said]
    assert kinds == [
        MessageKind.STEP,
        MessageKind.TELL,
        MessageKind.COUNT,
        MessageKind.SAMPLE,
        MessageKind.COLLECT,
    ] * len(done)
    follow(second, cast(Follower, line))
    assert line.failures == [], "every digest is the same"
    counts = [np.asarray(executor._runner._counts.counts_pv) for executor in executors]
    assert counts[0][2].any()
    assert counts[0][4].any()
    np.testing.assert_array_equal(counts[0], counts[1])
    last_tokens = [np.asarray(executor._runner._counts.last_tokens_p) for executor in executors]
    np.testing.assert_array_equal(last_tokens[0], last_tokens[1])


def test_what_is_said_of_a_sample_is_all_of_it(executors: list[JaxExecutor]) -> None:
    line = Line()
    for inputs, asked in serve(executors[0], line):
        sizes, words = get_sizes(inputs), pack_words(inputs)
        assert inputs.edits is not None
        again = parse_sampling(inputs.detail, sizes, words, inputs.edits.due)
        assert again.edits is not None
        np.testing.assert_array_equal(again.words, inputs.words)
        np.testing.assert_array_equal(again.edits.words, inputs.edits.words)
        for name in ("singles_rx", "mask_rw"):
            one, other = getattr(again.edits, name), getattr(inputs.edits, name)
            assert (one is None) == (other is None)
            assert one is None or (one == other).all()
        assert again.edits.due == inputs.edits.due
        told = AuxInputs.of_words(asked.kind, asked.words, asked.num_rows)
        np.testing.assert_array_equal(told.ids_rk, asked.ids_rk)
        np.testing.assert_array_equal(told.places_r, asked.places_r)


def test_each_forward_has_its_own_number(executors: list[JaxExecutor]) -> None:
    line = Line()
    done = serve(executors[0], line)
    numbers = [decode(kind, payload)[0][0] for kind, payload in line.said if kind is MessageKind.STEP]
    assert numbers == list(range(1, len(done) + 1))


@pytest.mark.parametrize("kind", [MessageKind.COUNT, MessageKind.TELL])
def test_a_process_that_heard_something_else_is_found_out(executors: list[JaxExecutor], kind: MessageKind) -> None:
    """One token of what is counted, or one that is asked of."""
    line = Line()
    serve(executors[0], line)
    _, payload = next(said for said in line.said if said[0] is kind)
    payload[-4] ^= 1
    follow(executors[1], cast(Follower, line))
    assert any("differ from those of process 0" in str(failure) for failure in line.failures)
    assert all(isinstance(failure, InternalError) for failure in line.failures)


def test_a_tell_of_a_step_that_did_not_run_last_is_refused(executors: list[JaxExecutor]) -> None:
    line = Line()
    serve(executors[0], line)
    tell = next(payload for kind, payload in line.said if kind is MessageKind.TELL)
    (number, _, _), _ = decode(MessageKind.TELL, tell)
    line.said = [said for said in line.said if said[0] is not MessageKind.STEP]
    with pytest.raises(Unavailable, match=rf"process 0 refers to step {number}, which was not the last to run"):
        follow(executors[1], cast(Follower, line))
