"""/v1/responses: a chat in another format, as a whole or streamed. Stateless: nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.errors import NotFound
from jpaged.http.completions import CompletionJob, EventStream, TokenTexts, iter_events, parse_job, run_job
from jpaged.http.exchange import JSON, build_answer, error_for, while_there
from jpaged.openai.request import Job
from jpaged.openai.responses import ResponseEvents, build_response, parse_responses_request
from jpaged.service.service import Service
from jpaged.types import Prompt


def response_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/responses."""
    texts = TokenTexts()

    async def create(request: Request) -> Response | EventStream:
        echoed: dict[str, Any] = {}

        def read(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
            asking = parse_responses_request(body, defaults)
            echoed.update(asking.echoed)
            return asking.job

        asked = await parse_job(service, request, read, is_kept=True)
        if asked.job.streaming is not None:
            keep_alive_s = service.state.config.http.http_keep_alive
            return EventStream(_events(service, asked, echoed, texts), keep_alive_s, asked.left_s())
        return await while_there(request, _whole(service, asked, echoed, texts), asked.left_s())

    async def count(request: Request) -> Response:
        asked = await parse_job(service, request, lambda body, defaults: parse_responses_request(body, defaults).job)
        token_ids = await service.tokenize(lambda: asked.job.prompts[0], None)
        return JSON({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def missing(request: Request) -> Response:
        raise NotFound("response_id: responses are not stored: each is returned only to its own request")

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
        Route("/v1/responses/{rest:path}", missing, methods=["GET", "POST", "DELETE"]),
    ]


async def _whole(service: Service, asked: CompletionJob, echoed: Mapping[str, Any], texts: TokenTexts) -> Response:
    (output,) = await run_job(service, asked)
    (one,) = output.outputs
    num_reasoning = await _num_tokens(service, one.reasoning_content)

    def body() -> dict[str, Any]:
        return build_response(
            asked.heading(), echoed, output, lambda token_id: texts.of(asked.model, token_id), num_reasoning
        )

    num_told = len(one.logprobs) * (1 + len(one.logprobs[0].top)) if one.logprobs else 0
    return await build_answer(service, body, len(one.text) + len(one.reasoning_content) + 10 * num_told)


async def _events(
    service: Service, asked: CompletionJob, echoed: Mapping[str, Any], texts: TokenTexts
) -> AsyncGenerator[bytes, None]:
    events = ResponseEvents(asked.heading(), echoed, lambda token_id: texts.of(asked.model, token_id))
    has_begun = False
    try:
        async with aclosing(iter_events(service, asked)) as told:
            async for _, _, event in told:
                if not has_begun:
                    has_begun = True
                    yield events.begin()
                num_told = 10 * len(event.logprobs) * (1 + len(event.logprobs[0].top)) if event.logprobs else 0
                made = await service.run_blocking(lambda: events.of(event), num_told)  # noqa: B023 - called before the next
                if made:
                    yield made
        yield events.end(await _num_tokens(service, events.reasoning))
    except Exception as error:
        if not has_begun:
            raise
        yield events.failed(error_for(error))


async def _num_tokens(service: Service, text: str) -> int:
    """Return the number of tokens of a text."""
    if not text:
        return 0
    return len(await service.tokenize(lambda: Prompt(text=text), len(text), add_special_tokens=False))
