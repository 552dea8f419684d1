"""/v1/embeddings and /v1/score: calls of several requests, aborted if the client disconnects."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.http.exchange import CHARS_OF_NUMBER, answer_of, body_in, while_there
from jpaged.http.local import LocalServer
from jpaged.http.requests import caller_of, remaining_s_of, tenant_of
from jpaged.openai.answers import Answers
from jpaged.openai.lines import EMBEDDINGS_URL, SCORE_URL
from jpaged.openai.scoring import ScoringJob, embed_job, score_job
from jpaged.service.service import Service


def scoring_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/embeddings and /v1/score."""

    def answering(url: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body, num_bytes = await body_in(service, request)
            read = embed_job if url == EMBEDDINGS_URL else score_job
            job: ScoringJob = await service.work(lambda: read(body), num_bytes)
            model = service.state.serving().model
            remaining_s = remaining_s_of(request)
            server = LocalServer(
                service=service,
                tenant=tenant_of(request),
                caller=replace(caller_of(request), user=str(body.get("user") or "")),
                until_s=None if remaining_s is None else time.monotonic() + remaining_s,
            )
            max_bytes = int(service.state.config.http.max_response_size * 2**20)
            answers = Answers(model, service.work, service.state.loaded().adapters.names, max_bytes=max_bytes)
            found = await while_there(request, answers.evaluate(server, job), remaining_s)
            return await answer_of(service, found.body, CHARS_OF_NUMBER * found.size)

        return answer

    return [
        Route(EMBEDDINGS_URL, answering(EMBEDDINGS_URL), methods=["POST"]),
        Route(SCORE_URL, answering(SCORE_URL), methods=["POST"]),
        Route("/score", answering(SCORE_URL), methods=["POST"]),
    ]
