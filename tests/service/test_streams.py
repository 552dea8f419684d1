"""Events become messages at a bounded rate: nothing is lost, late or out of order, and no first token waits."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from jpaged.service.calls import MAX_WAIT_S, OutputDispatcher, OutputStream
from jpaged.types import FinishReason, OutputEvent, PositionLogprobs, RequestTimes, SequenceFinish, TokenLogprob, Usage

STEP_S = 0.01


class FakeLoop:
    """What a bridge asks of an event loop, on a clock that stands still until it is told otherwise."""

    def __init__(self):
        self.now_s = 0.0
        self.num_wake_ups = 0
        self._due = []

    def time(self):
        return self.now_s

    def call_soon_threadsafe(self, callback):
        self.num_wake_ups += 1
        self.call_at(self.now_s, callback)

    def call_at(self, when_s, callback):
        timer = (when_s, callback)
        self._due.append(timer)
        return SimpleNamespace(cancel=lambda: self._due.remove(timer))

    async def advance(self, seconds):
        """Goes on, runs what is due, and lets the readers read."""
        self.now_s += seconds
        while due := [one for one in self._due if one[0] <= self.now_s]:
            self._due = [one for one in self._due if one not in due]
            for _, callback in due:
                callback()
        for _ in range(10):
            await asyncio.sleep(0)


class Reader:
    """A request whose messages are read as soon as there are any."""

    def __init__(self, bridge, **how):
        self.messages = []
        self._stream = OutputStream(bridge, **how)
        self._num_tokens = 0
        self._task = asyncio.create_task(self._read())

    @property
    def token_ids(self):
        """Those of each message."""
        return [list(message.token_ids) for message in self.messages]

    def sample(self, index=0, *, finishes=False, is_last=False):
        """Has the engine sample the request's next token: 1, then 2, and so on."""
        self._num_tokens += 1
        number = self._num_tokens
        self._stream.put(
            OutputEvent(
                "r",
                index,
                text=f"{number} ",
                token_ids=(number,),
                logprobs=(PositionLogprobs(TokenLogprob(number, -1.0, 1)),),
                finish=SequenceFinish(FinishReason.LENGTH) if finishes or is_last else None,
                cumulative_logprob=-float(number),
                usage=Usage(completion_tokens=number),
                is_last=is_last,
                times=RequestTimes(1.0) if is_last else None,
            )
        )

    async def _read(self):
        while not (self.messages and self.messages[-1].is_last):
            self.messages.append(await self._stream.read())


@pytest.fixture
def loop():
    return FakeLoop()


async def steps(loop, readers, count, *, last=False):
    """So many steps, each with a token for every reader."""
    for number in range(count):
        for reader in readers:
            reader.sample(is_last=last and number == count - 1)
        await loop.advance(STEP_S)


async def test_a_step_wakes_the_loop_once_for_all_streams(loop):
    bridge = OutputDispatcher(loop, math.inf)
    readers = [Reader(bridge) for _ in range(8)]
    await steps(loop, readers, 5, last=True)
    assert loop.num_wake_ups == 5


async def test_a_step_that_can_wait_for_the_next_round_wakes_nobody(loop):
    bridge = OutputDispatcher(loop, 4 / STEP_S)
    readers = [Reader(bridge) for _ in range(16)]  # a round every four steps
    await steps(loop, readers, 1)
    assert loop.num_wake_ups == 1
    await steps(loop, readers, 8)
    assert loop.num_wake_ups == 1
    assert [reader.token_ids for reader in readers] == [[[1], [2, 3, 4, 5], [6, 7, 8, 9]]] * 16
    readers[0].sample(is_last=True)
    assert loop.num_wake_ups == 2
    Reader(bridge).sample()
    assert loop.num_wake_ups == 2  # it rides along
    await steps(loop, readers[1:], 1, last=True)


async def test_what_came_in_a_pause_without_a_round_is_told_at_its_end(loop):
    bridge = OutputDispatcher(loop, 1.0)
    first, second = Reader(bridge), Reader(bridge)
    first.sample(is_last=True)  # the pause is for this message, and nobody waits
    second.sample()
    await loop.advance(0.0)
    second.sample()
    assert second.token_ids == [[1]]
    await loop.advance(MAX_WAIT_S)
    assert second.token_ids == [[1], [2]]
    await loop.advance(MAX_WAIT_S)
    second.sample()
    assert loop.num_wake_ups == 2  # there is no pause any more
    second.sample(is_last=True)
    await loop.advance(0.0)
    assert second.token_ids == [[1], [2], [3, 4]]


async def test_few_streams_speak_at_every_step(loop):
    reader = Reader(OutputDispatcher(loop, 1 / STEP_S))
    await steps(loop, [reader], 6, last=True)
    assert reader.token_ids == [[1], [2], [3], [4], [5], [6]]


async def test_many_streams_share_the_rate_and_lose_nothing(loop):
    bridge = OutputDispatcher(loop, 4 / STEP_S)  # four messages a step
    readers = [Reader(bridge) for _ in range(16)]
    await steps(loop, readers, 13, last=True)
    for reader in readers:
        assert reader.token_ids == [[1], [2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]
        assert [message.text for message in reader.messages] == ["1 ", "2 3 4 5 ", "6 7 8 9 ", "10 11 12 13 "]
        for message, so_far in zip(reader.messages, (1, 5, 9, 13), strict=True):
            assert [one.chosen.token_id for one in message.logprobs] == list(message.token_ids)
            assert (message.usage.completion_tokens, message.cumulative_logprob) == (so_far, -so_far)
        assert [message.finish is not None for message in reader.messages] == [False, False, False, True]
        assert [message.is_last for message in reader.messages] == [False, False, False, True]
        assert reader.messages[-1].times == RequestTimes(1.0)


async def test_the_first_token_and_the_last_never_wait(loop):
    bridge = OutputDispatcher(loop, 1.0)
    readers = [Reader(bridge) for _ in range(3)]
    for number, reader in enumerate(readers):
        reader.sample()
        await loop.advance(0.0)
        assert reader.token_ids == [[1]], number
    readers[0].sample()
    readers[1].sample(is_last=True)
    await loop.advance(0.0)
    assert readers[0].token_ids == [[1]]
    assert readers[1].token_ids == [[1], [2]]
    readers[0].sample(is_last=True)
    readers[2].sample(is_last=True)
    await loop.advance(0.0)
    assert readers[0].token_ids == [[1], [2, 3]]


async def test_no_token_waits_longer_than_its_bound_however_low_the_rate(loop):
    bridge = OutputDispatcher(loop, 1.0)
    readers = [Reader(bridge) for _ in range(50)]
    await steps(loop, readers, 1)
    for reader in readers:
        reader.sample()
    await loop.advance(0.0)
    assert readers[0].token_ids == [[1]]
    await loop.advance(MAX_WAIT_S)  # and no further step: it is the clock that ends the wait
    assert [reader.token_ids for reader in readers] == [[[1], [2]]] * 50
    await steps(loop, readers, 1, last=True)


async def test_others_first_tokens_hold_up_nobody(loop):
    bridge = OutputDispatcher(loop, 100.0)
    readers = [Reader(bridge) for _ in range(50)]
    await steps(loop, readers, 2)
    assert readers[0].token_ids == [[1]]
    for number in range(1, 12):
        newcomers = [Reader(bridge) for _ in range(20)]  # more messages a second than there may be
        await steps(loop, newcomers, 1, last=True)
        assert [newcomer.token_ids for newcomer in newcomers] == [[[1]]] * 20, number
    assert readers[0].token_ids == [[1], [2]]
    await steps(loop, readers, 1, last=True)


async def test_sequences_that_wait_take_turns_and_the_last_comes_last(loop):
    bridge = OutputDispatcher(loop, 1.0)
    reader = Reader(bridge)
    for index in (0, 1, 0, 1, 0):
        reader.sample(index)
        await loop.advance(0.0)
    reader.sample(1, finishes=True)
    reader.sample(0, is_last=True)
    await loop.advance(0.0)
    assert [(message.index, list(message.token_ids)) for message in reader.messages] == [
        (0, [1]),
        (1, [2, 4, 6]),
        (0, [3, 5, 7]),
    ]
    assert [message.usage.completion_tokens for message in reader.messages] == [1, 6, 7]


async def test_who_reads_nothing_along_is_told_at_the_end_alone(loop):
    reader = Reader(OutputDispatcher(loop, math.inf), is_whole=True)
    for _ in range(3):
        reader.sample()
        await loop.advance(2 * MAX_WAIT_S)
    assert not reader.messages
    reader.sample(is_last=True)
    await loop.advance(0.0)
    assert reader.token_ids == [[1, 2, 3, 4]]


async def test_a_stream_that_was_ended_from_outside_is_not_told_again(loop):
    bridge = OutputDispatcher(loop, 1.0)
    reader, other = Reader(bridge), Reader(bridge)
    for _ in range(2):
        reader.sample()
        other.sample()
        await loop.advance(0.0)
    reader._stream.end(OutputEvent("r", is_last=True, finish=SequenceFinish(FinishReason.ABORT)))
    reader.sample()
    await loop.advance(MAX_WAIT_S)
    assert reader.token_ids == [[1], [2]]
    assert reader.messages[-1].finish == SequenceFinish(FinishReason.ABORT)
    assert other.token_ids == [[1], [2]]
    other.sample(is_last=True)
    await loop.advance(0.0)


async def test_an_interval_groups_tokens_after_the_first(loop):
    bridge = OutputDispatcher(loop, math.inf)
    reader, other = Reader(bridge, interval=3), Reader(bridge, interval=4)
    await steps(loop, [reader, other], 9, last=True)
    assert reader.token_ids == [[1], [2, 3, 4], [5, 6, 7], [8, 9]]
    assert other.token_ids == [[1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert [message.text for message in reader.messages] == ["1 ", "2 3 4 ", "5 6 7 ", "8 9 "]


async def test_tokens_that_are_not_due_do_not_wake_the_loop(loop):
    reader = Reader(OutputDispatcher(loop, math.inf), interval=5)
    await steps(loop, [reader], 1)
    assert loop.num_wake_ups == 1
    await steps(loop, [reader], 4)
    assert loop.num_wake_ups == 1
    await steps(loop, [reader], 1)
    assert loop.num_wake_ups == 2
    assert reader.token_ids == [[1], [2, 3, 4, 5, 6]]
    reader.sample(is_last=True)
    await loop.advance(0.0)


async def test_an_interval_counts_each_sequence_and_its_end_is_due(loop):
    reader = Reader(OutputDispatcher(loop, math.inf), interval=3)
    for index, finishes in ((0, False), (1, False), (0, False), (1, True), (0, False), (0, False)):
        reader.sample(index, finishes=finishes)
        await loop.advance(0.0)
    assert [(message.index, list(message.token_ids)) for message in reader.messages] == [
        (0, [1]),
        (1, [2]),
        (0, [3]),
        (1, [4]),
        (0, [5, 6]),
    ]
    reader.sample(is_last=True)
    await loop.advance(0.0)
    assert reader.token_ids[-1] == [7]


async def test_an_interval_and_a_rate_hold_together(loop):
    bridge = OutputDispatcher(loop, 4 / STEP_S)  # a round every four steps
    readers = [Reader(bridge, interval=2) for _ in range(16)]
    await steps(loop, readers, 13, last=True)
    for reader in readers:
        assert reader.token_ids[0] == [1]
        assert [token_id for message in reader.token_ids for token_id in message] == list(range(1, 14))
        assert all(len(message) >= 2 for message in reader.token_ids[1:])


async def test_who_reads_nothing_along_wakes_the_loop_once(loop):
    reader = Reader(OutputDispatcher(loop, math.inf), is_whole=True)
    await steps(loop, [reader], 6, last=True)
    assert reader.token_ids == [[1, 2, 3, 4, 5, 6]]
    assert loop.num_wake_ups == 1


async def test_rounds_go_on_after_one_that_the_loop_was_late_for(loop):
    bridge = OutputDispatcher(loop, 4 / STEP_S)
    readers = [Reader(bridge) for _ in range(16)]
    await steps(loop, readers, 2)
    loop.now_s += 1.0  # other callbacks ran, and the next round is overdue
    newcomer = Reader(bridge)
    newcomer.sample()
    bridge.deliver()
    await steps(loop, readers, 40)
    assert min(reader.token_ids[-1][-1] for reader in readers) > 30
    await steps(loop, [*readers, newcomer], 1, last=True)
