"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.http.exchange import answer_of as json_answer_of
from jpaged.http.exchange import while_there
from jpaged.http.generate.asked import Asked, asked_of
from jpaged.http.generate.calls import TokenTexts, events_of, outputs_of, prompt_text_of
from jpaged.http.generate.events import EventStream
from jpaged.openai.bodies import Job, chat_job, completion_job
from jpaged.openai.choices import answer_of
from jpaged.openai.chunks import Chunks
from jpaged.service.service import Service
from jpaged.types import PositionLogprobs, RequestOutput


def completion_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/completions and /v1/chat/completions."""
    texts = TokenTexts()

    def answering(read: Callable[[Mapping[str, Any]], Job]) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Response | EventStream:
            asked = await asked_of(service, request, read)
            if asked.job.streaming is not None:
                keep_alive_s = service.state.config.http.http_keep_alive
                return EventStream(_chunks(service, asked, texts), keep_alive_s, asked.left_s())
            return await while_there(request, _whole(service, asked, texts), asked.left_s())

        return answer

    return [
        Route("/v1/completions", answering(completion_job), methods=["POST"]),
        Route("/v1/chat/completions", answering(chat_job), methods=["POST"]),
    ]


async def _whole(service: Service, asked: Asked, texts: TokenTexts) -> Response:
    outputs, heading = await outputs_of(service, asked), asked.heading()
    prompt_texts = []
    if asked.job.has_echo:
        for number, output in enumerate(outputs):
            prompt_texts.append(await prompt_text_of(service, asked, number, output.prompt_token_ids))

    def body() -> dict[str, Any]:
        return answer_of(heading, asked.job, outputs, lambda token_id: texts.of(asked.model, token_id), prompt_texts)

    return await json_answer_of(service, body, sum(map(_size_of_output, outputs)), outputs)


async def _chunks(service: Service, asked: Asked, texts: TokenTexts) -> AsyncGenerator[bytes, None]:
    chunks = Chunks(asked.heading(), asked.job, lambda token_id: texts.of(asked.model, token_id))
    prompt_texts: dict[int, str] = {}
    async with aclosing(events_of(service, asked)) as told:
        async for number, generation, event in told:
            token_ids = generation.prompt_token_ids
            if asked.job.has_echo and number not in prompt_texts:
                prompt_texts[number] = await prompt_text_of(service, asked, number, token_ids)
            prompt_text = prompt_texts.get(number, "")
            if event.logprobs or event.prompt_logprobs:
                size = len(event.text) + _size((*event.logprobs, *event.prompt_logprobs))
                chunk = await service.work(
                    lambda: chunks.of(number, event, token_ids, prompt_text),  # noqa: B023 - called before the next
                    size,
                )
            else:
                chunk = chunks.of(number, event, token_ids, prompt_text)
            if chunk:
                yield chunk
    yield chunks.end()


def _size_of_output(output: RequestOutput) -> int:
    """Return the approximate number of characters of an output in JSON."""
    size = sum(len(one.text) + len(one.token_ids) + _size(one.logprobs or ()) for one in output.outputs)
    return size + _size((output.prompt_logprobs or ())[1:])


def _size(told: Sequence[PositionLogprobs | None]) -> int:
    """Estimate the characters of log-probabilities, from the width of the first position."""
    first = told[0] if told else None
    return 0 if first is None else 10 * len(told) * (1 + len(first.top) + len(first.asked))
