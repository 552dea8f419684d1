"""The requests of a job, one per prompt: their events as they come, or their outputs."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jpaged.completions import completions_of
from jpaged.engine.tokenizer import Tokenizer, is_special_token
from jpaged.http.generate.asked import Asked
from jpaged.openai.choices import ShownToken
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.records import RequestRecord
from jpaged.service.score_embed import num_at_once, run_all
from jpaged.service.service import Generation, Service
from jpaged.types import OutputEvent, RequestOutput

Told = tuple[int, Generation, OutputEvent]
"""Index of the prompt, its request, and the event."""
_MAX_WAITING = 64
"""Maximum queued events of several prompts; further ones are merged in their streams."""


async def outputs_of(service: Service, asked: Asked) -> list[RequestOutput]:
    """Run a job to its end; return the output of each prompt.

    Raises:
        JpagedError: a request is refused or has failed; the others are aborted.
    """
    asked.add_known_prompts()
    if len(asked.job.prompts) == 1:
        return [await _output(service, asked, 0)]
    record = asked.record()
    async with service.several(None, record) as model:
        asked.headers.update(record.headers)
        return await run_all(
            lambda number: _output(service, asked, number, model, record),
            len(asked.job.prompts),
            num_at_once(model),
        )


async def _output(
    service: Service,
    asked: Asked,
    number: int,
    model: LoadedModel | None = None,
    record: RequestRecord | None = None,
) -> RequestOutput:
    completions = completions_of(asked.job.sampling)
    with asked.naming(number):
        async with service.generate(asked.call(number, record), model) as generation:
            asked.add_prompt(number, len(generation.prompt_token_ids))
            asked.headers.update(generation.record.headers)
            async for event in generation:
                completions.add(event)
            return completions.output(generation.request_id, None, generation.prompt_token_ids)


async def events_of(service: Service, asked: Asked) -> AsyncGenerator[Told, None]:
    """Run a job and yield its events; closing it aborts running requests. Raises as `outputs_of`."""
    asked.add_known_prompts()
    if len(asked.job.prompts) > 1:
        async with aclosing(_events_of_several(service, asked)) as told:
            async for one in told:
                yield one
        return
    with asked.naming(0):
        async with service.generate(asked.call(0)) as generation:
            asked.add_prompt(0, len(generation.prompt_token_ids))
            asked.headers.update(generation.record.headers)
            async for event in generation:
                yield 0, generation, event


async def _events_of_several(service: Service, asked: Asked) -> AsyncGenerator[Told, None]:
    waiting: asyncio.Queue[Told | Exception | None] = asyncio.Queue(_MAX_WAITING)
    record = asked.record()

    async def tell(number: int, model: LoadedModel) -> None:
        with asked.naming(number):
            async with service.generate(asked.call(number, record), model) as generation:
                asked.add_prompt(number, len(generation.prompt_token_ids))
                async for event in generation:
                    await waiting.put((number, generation, event))

    async def tell_all(model: LoadedModel) -> None:
        try:
            await run_all(lambda number: tell(number, model), len(asked.job.prompts), num_at_once(model))
        except Exception as error:
            await waiting.put(error)
        else:
            await waiting.put(None)

    async with service.several(None, record) as model:
        asked.headers.update(record.headers)
        telling = asyncio.create_task(tell_all(model))
        try:
            while (one := await waiting.get()) is not None:
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            telling.cancel()
            await asyncio.wait((telling,))


async def prompt_text_of(service: Service, asked: Asked, number: int, prompt_token_ids: tuple[int, ...]) -> str:
    """Return the text of a prompt, as given or from the tokens after truncation."""
    text, sampling = asked.job.prompts[number].text, asked.job.sampling
    if text is not None and sampling.truncate_prompt_tokens is None:
        return text
    text = await service.detokenize(prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens)
    if asked.job.is_only_told or not text.endswith("\ufffd"):
        return text
    return text.removesuffix(_begun_character(asked.model.tokenizer, prompt_token_ids))


class TokenTexts:
    """Cache of the texts of a model's tokens; at most one entry per token."""

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._texts: dict[int, ShownToken] = {}

    def of(self, model: LoadedModel, token_id: int) -> ShownToken:
        """Return one token as log-probabilities show it."""
        if model is not self._model:
            self._model, self._texts = model, {}
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = shown_token(model.tokenizer, token_id)
        return text


def shown_token(tokenizer: Tokenizer, token_id: int) -> ShownToken:
    """Return a token as log-probabilities show it."""
    alone = tokenizer.decode([token_id], skip_special_tokens=False)
    return ShownToken(tokenizer.token_bytes(token_id), alone, is_special=is_special_token(tokenizer, token_id))


def _begun_character(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the placeholder of a character that the last tokens begin and the next may complete; "" without one."""
    data = b"".join(map(tokenizer.token_bytes, token_ids[-4:]))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return "\ufffd" if decoder.getstate()[0] else ""
