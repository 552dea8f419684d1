"""Runs an OpenAI batch file against a server: bounded concurrency, retries, and an output that can be taken up again.

A line of output is written when its request has ended. A second run keeps what succeeded and what can never succeed,
and runs the others: those without a line, and those that failed for a reason that may pass (`results.PASSING`).
When the server is gone for longer than the retries reach, the run ends; what it has written stays.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from jpaged.client.aio import AsyncClient
from jpaged.client.channel import Backoff, require_target
from jpaged.client.openai import BadLine, Job, Line, failure_line, job_of, parse_file, success_line
from jpaged.client.results import Results
from jpaged.errors import Cancelled, InvalidArgument, JpagedError, NotFound, QueueFull, Unavailable
from jpaged.types import RequestOutput

_T = TypeVar("_T")

DEFAULT_MAX_CONCURRENCY = 256
"""Twice the rows that a server has by default: while one answer is on its way, another request waits for the row."""
_MAX_UNAVAILABLE_TRIES = 8
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 15.0


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Where to read, where to write, whom to ask, and how much at a time.

    Attributes:
        max_concurrency: requests in flight at most.
        timeout_s: for each try of a request; None is none.
    """

    input_path: Path
    output_path: Path
    target: str
    max_concurrency: int = DEFAULT_MAX_CONCURRENCY
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise InvalidArgument("--max-concurrency", f"{self.max_concurrency} is below the limit of 1")
        if self.timeout_s is not None and not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise InvalidArgument("--timeout", f"{self.timeout_s} s is not a number above 0; leave it out for no limit")
        require_target("--target", self.target)


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a run did. Lines that an earlier run had finished are in `num_skipped`, failed ones `num_failed_before`."""

    num_lines: int = 0
    num_skipped: int = 0
    num_failed_before: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def num_done(self) -> int:
        """Lines that need no further run."""
        return self.num_skipped + self.num_succeeded + self.num_failed

    @property
    def has_failures(self) -> bool:
        """Whether a request failed, in this run or in one before."""
        return self.num_failed + self.num_failed_before > 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, over the whole run."""
        return self.completion_tokens / self.elapsed_s if self.elapsed_s else 0.0


async def run_batch(options: BatchOptions, on_progress: Callable[[BatchSummary], None]) -> BatchSummary:
    """Runs every line of the input that the output does not hold yet, or holds as failed for a reason that may pass.

    Args:
        options: what to run.
        on_progress: told the summary so far, whenever it has changed.

    Raises:
        InvalidArgument: the input or the output is not what it should be; nothing was sent.
        OutputError: another run writes the output, or it cannot be written.
        Unavailable: the server was not there, or went away for good.
    """
    lines = parse_file(_read(options.input_path))
    if options.output_path.exists() and options.output_path.samefile(options.input_path):
        raise InvalidArgument("--output", f"{options.output_path} is the input")
    ids = {line.custom_id for line in lines if line.custom_id is not None}
    with Results(options.output_path, ids) as output:
        finished = output.finished
        todo = [line for line in lines if line.custom_id not in finished]
        good = [line for line in todo if isinstance(line, Line)]
        before = BatchSummary(len(lines), len(lines) - len(todo), output.num_failed)
        async with AsyncClient(options.target, timeout_s=options.timeout_s) as client:
            batch = _Batch(client, output, before, on_progress)
            on_progress(batch.summary)
            if good:
                await batch.meet()
            output.retake()
            batch.refuse([line for line in todo if isinstance(line, BadLine)])
            if good:
                await batch.run(good, options.max_concurrency)
    return batch.summary


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument("--input", f"{path} cannot be read: {error.strerror or error}") from error


class _Batch:
    """One run: workers that take lines, and the summary that they keep."""

    def __init__(
        self,
        client: AsyncClient,
        output: Results,
        summary: BatchSummary,
        on_progress: Callable[[BatchSummary], None],
    ) -> None:
        self.summary = summary
        self._client = client
        self._output = output
        self._on_progress = on_progress
        self._start_s = time.monotonic()
        self._token_texts: dict[int, str] = {}

    async def meet(self) -> None:
        """Waits for the server, and asks which model it has."""
        self._model = await self._retried(self._client.model_info)

    def refuse(self, lines: Sequence[BadLine]) -> None:
        """Writes the lines that are no requests."""
        for line in lines:
            self._output.append(failure_line(line.custom_id, line.error))
            self._count(num_failed=1)

    async def run(self, lines: Sequence[Line], max_concurrency: int) -> None:
        """Has workers take the lines, one by one."""
        waiting = iter(lines)
        workers = [asyncio.create_task(self._work(waiting)) for _ in range(min(max_concurrency, len(lines)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, waiting: Iterator[Line]) -> None:
        for line in waiting:
            try:
                output = await self._answer(line)
            except Unavailable:
                raise
            except JpagedError as error:
                self._output.append(failure_line(line.custom_id, error))
                self._count(num_failed=1)
            else:
                text = success_line(line, output, model=self._model.name, token_text=self._token_texts.__getitem__)
                self._output.append(text)
                usage = output.usage
                self._count(
                    num_succeeded=1, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
                )

    async def _answer(self, line: Line) -> RequestOutput:
        job = job_of(line)
        if job.model is not None and job.model != self._model.name:
            raise NotFound(f"body.model: {job.model!r} is not served; {self._model.name!r} is")
        output = await self._retried(lambda: self._complete(job))
        await self._name_tokens(output)
        return output

    async def _complete(self, job: Job) -> RequestOutput:
        if not job.fills_length:
            return await self._client.complete(
                job.prompt,
                job.sampling,
                prompt_token_ids=job.prompt_token_ids,
                messages=job.messages,
                adapter=job.adapter or "",
            )
        token_ids = await self._client.tokenize(messages=job.messages)
        max_tokens = max(1, self._model.max_model_len - len(token_ids))
        return await self._client.complete(
            prompt_token_ids=token_ids,
            sampling=replace(job.sampling, max_tokens=max_tokens),
            adapter=job.adapter or "",
        )

    async def _name_tokens(self, output: RequestOutput) -> None:
        """Learns the texts of the tokens that the output's log-probabilities speak of."""
        positions = [position for one in output.outputs for position in one.logprobs or ()]
        token_ids = {token.token_id for position in positions for token in (position.chosen, *position.top)}
        for token_id in token_ids - self._token_texts.keys():
            ask = partial(self._client.detokenize, [token_id], skip_special_tokens=False)
            self._token_texts[token_id] = await self._retried(ask)

    async def _retried(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Tries until it works: as long as the queue is full, and a few times when the server is not there."""
        backoff, num_unavailable = Backoff(_FIRST_BACKOFF_S, 2.0, _MAX_BACKOFF_S), 0
        while True:
            try:
                return await attempt()
            except QueueFull as error:
                wait_s = backoff.next_s(error.retry_after_s)
            except (Unavailable, Cancelled):  # a server that ends cuts calls in either way
                num_unavailable += 1
                if num_unavailable == _MAX_UNAVAILABLE_TRIES:
                    raise
                wait_s = backoff.next_s()
            self._count(num_retries=1)
            await asyncio.sleep(wait_s)

    def _count(self, **more: int) -> None:
        """Adds to fields of the summary, by their names."""
        counts = {name: getattr(self.summary, name) + number for name, number in more.items()}
        self.summary = replace(self.summary, **counts, elapsed_s=time.monotonic() - self._start_s)
        self._on_progress(self.summary)
