"""One replica: the real engine with the simulator's executor, simulated up to given times."""

from __future__ import annotations

from collections import deque
from functools import partial

from jpaged.capacity.fleet.attempts import Attempt, Ended, PoolLoad, Totals
from jpaged.capacity.fleet.executor import BulkExecutor
from jpaged.capacity.fleet.prompts import prompt_of
from jpaged.capacity.simulator.deployment import Deployment
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.errors import InternalError
from jpaged.testing.virtual_clock import VirtualClock
from jpaged.types import FinishReason, OutputEvent, Request, SamplingParams


class Replica:
    """Serves attempts in simulated time.

    Args:
        place: its index among the replicas.
        options: engine options, with both sizes of a step, `overlap` off, and `num_scheduler_steps` -1, so that the
            executor chooses the number of steps of a dispatch.
    """

    def __init__(self, place: int, deployment: Deployment, options: EngineConfig, begin_s: float = 0.0) -> None:
        scheduler = options.scheduler
        assert scheduler.max_num_seqs is not None
        assert scheduler.max_num_batched_tokens is not None
        self.place = place
        self._clock = VirtualClock(begin_s)
        self._executor = BulkExecutor(
            deployment,
            self._clock,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        vocab_size = deployment.model.config.vocab_size
        self._engine = Engine(self._executor, NoTokenizer(vocab_size), options, clock=self._clock)
        self._coming = deque[Attempt]()
        self._in_flight: dict[int, Attempt] = {}
        self._ended: list[Ended] = []

    @property
    def is_idle(self) -> bool:
        """True if no attempt is in flight or to come."""
        return not (self._in_flight or self._coming)

    @property
    def load(self) -> PoolLoad:
        """Load after its last step."""
        load = self._engine.load()
        return PoolLoad(load.num_running, load.num_waiting, load.num_blocks_used)

    @property
    def totals(self) -> Totals:
        """Counters so far."""
        load = self._engine.load()
        return Totals(
            self._executor.busy_s + self._executor.copy_s + self._executor.swap_s,
            load.num_steps,
            load.num_generation_tokens,
            load.num_prefix_query_tokens,
            load.num_prefix_hit_tokens,
            load.num_host_hit_tokens,
            load.num_preemptions,
            load.num_recomputed_tokens,
        )

    def give(self, attempts: list[Attempt]) -> None:
        """Add attempts that arrive later, in order of arrival and after all earlier ones."""
        self._coming.extend(attempts)

    def advance(self, until_s: float) -> None:
        """Run every step that begins before a time; the last may end after it."""
        coming, clock, engine = self._coming, self._clock, self._engine
        while True:
            while coming and coming[0].arrival_s <= clock():
                self._submit(coming.popleft())
            if clock() >= until_s:
                return
            self._executor.look(min(until_s, coming[0].arrival_s) if coming else until_s)
            if engine.step():
                continue
            if self._in_flight:
                raise InternalError(f"{len(self._in_flight)} requests are in flight but the engine is idle")
            if not coming:
                return
            clock.advance(max(0.0, coming[0].arrival_s - clock()))

    def kill(self, at_s: float) -> None:
        """Stop at a time that it has been simulated to: everything in flight is cut off.

        Tokens of a step that ends after that time are dropped.
        """
        for number in list(self._in_flight):
            self._engine.abort(str(number))
        self._engine.step()
        for attempt in self._coming:
            self._ended.append(Ended(at_s, attempt.number, self.place, None, 0, 0, is_whole=False))
        self._coming.clear()
        self._ended = [cut_at(ended, at_s) for ended in self._ended]

    def take_ended(self) -> list[Ended]:
        """Return and clear the attempts that have ended."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Raise InternalError if the memory has lost a block or shares one by mistake."""
        self._engine.check()

    def _submit(self, attempt: Attempt) -> None:
        sampling = SamplingParams(max_tokens=attempt.num_tokens_left, ignore_eos=True, temperature=1.0)
        request = Request(
            request_id=str(attempt.number),
            prompt_token_ids=prompt_of(attempt),
            sampling=sampling,
            tenant=str(attempt.session.tenant),
            is_whole=True,
        )
        self._in_flight[attempt.number] = attempt
        self._engine.submit(request, partial(self._take, attempt.number))

    def _take(self, number: int, event: OutputEvent) -> None:
        if event.error is not None:
            raise event.error
        if not event.is_last:
            return
        attempt = self._in_flight.pop(number)
        is_cut = event.finish is None or event.finish.reason is FinishReason.ABORT
        times, usage = event.times, event.usage
        first_s, last_s = (None, None) if times is None else (times.first_token_s, times.last_token_s)
        ended = Ended(
            self._clock() if last_s is None else last_s,
            number,
            self.place,
            first_s,
            usage.completion_tokens,
            usage.cached_tokens,
            is_whole=not is_cut,
        )
        if ended.is_whole and ended.num_tokens != attempt.num_tokens_left:
            raise InternalError(f"attempt {number} has {ended.num_tokens} of {attempt.num_tokens_left} tokens")
        self._ended.append(ended)


def cut_at(ended: Ended, at_s: float) -> Ended:
    """Return the end of an attempt whose replica stops at a time, without the token of an unfinished step."""
    is_late = ended.num_tokens > 0 and ended.end_s > at_s
    if ended.is_whole and not is_late:
        return ended
    num_tokens = ended.num_tokens - is_late
    first_token_s = ended.first_token_s if num_tokens else None
    return Ended(at_s, ended.number, ended.place, first_token_s, num_tokens, ended.num_cached, is_whole=False)
