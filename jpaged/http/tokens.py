"""/tokenize and /detokenize, compatible with vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.errors import InvalidArgument
from jpaged.http.exchange import CHARS_OF_NUMBER, answer_of, body_in
from jpaged.openai.tokens import detokenize_job_of, tokenize_job_of, tokenized_body
from jpaged.service.service import Service
from jpaged.types import MAX_DETOKENIZE_IDS


def token_routes(service: Service) -> list[Route]:
    """Return the routes of /tokenize and /detokenize."""

    async def tokenize(request: Request) -> Response:
        body, num_bytes = await body_in(service, request)
        job = await service.work(lambda: tokenize_job_of(body), num_bytes)
        size = None if job.prompt.messages is not None else job.prompt.size
        token_ids = await service.tokenize(
            lambda: job.prompt, size, add_special_tokens=job.add_special_tokens, model=job.model
        )
        model = service.state.loaded()
        texts = None
        if job.wants_texts:
            if len(token_ids) > MAX_DETOKENIZE_IDS:
                problem = f"would return {len(token_ids)} tokens; at most {MAX_DETOKENIZE_IDS}"
                raise InvalidArgument("return_token_strs", problem)
            decode = model.tokenizer.decode
            texts = await service.work(
                lambda: [decode([one], skip_special_tokens=False) for one in token_ids], 8 * len(token_ids)
            )
        max_model_len = model.model.max_model_len
        return await answer_of(
            service,
            lambda: tokenized_body(token_ids, texts, max_model_len=max_model_len),
            CHARS_OF_NUMBER * len(token_ids),
        )

    async def detokenize(request: Request) -> Response:
        body, num_bytes = await body_in(service, request)
        job = await service.work(lambda: detokenize_job_of(body), num_bytes)
        text = await service.detokenize(job.token_ids, skip_special_tokens=job.skip_special_tokens, model=job.model)
        return await answer_of(service, lambda: {"prompt": text}, len(text))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
