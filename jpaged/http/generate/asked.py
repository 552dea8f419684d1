"""One HTTP request for a completion after its body is parsed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from jpaged.errors import InvalidArgument, ModelNotFound
from jpaged.http.exchange import read_body
from jpaged.http.requests import (
    answer_headers_of,
    caller_of,
    remaining_s_of,
    request_id_of,
    tenant_of,
)
from jpaged.openai.bodies import Job, renamed, shown
from jpaged.openai.choices import AnswerSize, Heading
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.records import Caller, RequestRecord
from jpaged.service.service import Call, Service
from jpaged.types import LoadedAdapter


@dataclass(frozen=True, slots=True)
class Asked:
    """A job with the context of the HTTP request.

    Attributes:
        model: the model that runs it.
        adapter: the resolved adapter of all its requests.
        caller: identity of the caller.
        headers: additional response headers; code may add to them before the response begins.
        size: limit of the response.
        began_s: `time.monotonic` at the start, from which the timeout counts.
    """

    job: Job
    model: LoadedModel
    adapter: LoadedAdapter | None
    request_id: str
    tenant: str
    remaining_s: float | None
    caller: Caller
    headers: dict[str, str]
    size: AnswerSize
    began_s: float = field(default_factory=time.monotonic)

    def heading(self) -> Heading:
        """Return the common fields of the responses."""
        return Heading(self.request_id, self.job.model or self.model.model.name)

    def left_s(self) -> float | None:
        """Return the remaining time of the caller's timeout."""
        return None if self.remaining_s is None else self.remaining_s - (time.monotonic() - self.began_s)

    def record(self) -> RequestRecord:
        """Return the record of a job of several prompts, which begins."""
        adapter = "" if self.adapter is None else self.adapter.name
        return RequestRecord(operation="text_completion", tenant=self.tenant, caller=self.caller, adapter=adapter)

    def call(self, number: int, record: RequestRecord | None = None) -> Call:
        """Return the service call of one prompt; one of several uses the record of the whole."""
        prompt = self.job.prompts[number]
        is_one = len(self.job.prompts) == 1
        return Call(
            read=lambda: (prompt, self.job.sampling),
            size=None if prompt.messages is not None else prompt.size,
            request_id=self.request_id if is_one else f"{self.request_id}-{number}",
            tenant=self.tenant,
            remaining_s=self.left_s(),
            is_whole=self.job.streaming is None,
            adapter=self.adapter or "",
            caller=self.caller,
            record=record,
        )

    def add_known_prompts(self) -> None:
        """Count the prompts given as token ids; raise InvalidArgument if the response would be too large."""
        self._add(sum(len(prompt.token_ids) for prompt in self.job.prompts if prompt.token_ids is not None))

    def add_prompt(self, number: int, num_tokens: int) -> None:
        """Count a prompt given as text, once its tokens are known; raise as `add_known_prompts`."""
        if self.job.prompts[number].token_ids is None:
            self._add(num_tokens)

    def _add(self, num_tokens: int) -> None:
        try:
            self.size.add_prompt(num_tokens)
        except InvalidArgument as error:
            raise renamed(error, self.job.names) from error

    @contextmanager
    def naming(self, number: int) -> Iterator[None]:
        """Rename the fields in errors of a prompt's request to the caller's."""
        try:
            yield
        except InvalidArgument as error:
            told = renamed(error, self.job.names)
            if len(self.job.prompts) > 1 and told.field.partition(".")[0] == "prompt":
                told = type(error)(f"prompt[{number}]", error.problem)
            raise told from error


async def asked_of(
    service: Service, request: Request, read: Callable[[Mapping[str, Any]], Job], *, is_kept: bool = False
) -> Asked:
    """Parse a request.

    Args:
        is_kept: a stream's last event repeats the whole answer.

    Raises:
        JpagedError: it is invalid or unsupported, or the server cannot serve it now.
    """
    began_s = time.monotonic()
    model = service.state.serving()
    request_id, tenant, remaining_s = request_id_of(request), tenant_of(request), remaining_s_of(request)
    job = await read_body(service, request, read)
    try:
        size = AnswerSize(
            job.sampling,
            num_prompts=len(job.prompts),
            vocab_size=model.model.vocab_size,
            is_chat=job.is_chat,
            has_echo=job.has_echo,
            counts_generated=is_kept or job.streaming is None,
            max_bytes=int(service.state.config.http.max_response_size * 2**20),
        )
    except InvalidArgument as error:
        raise renamed(error, job.names) from error
    if size.max_filled is not None:
        prompts = tuple(replace(one, max_filled=size.max_filled) if one.fills_length else one for one in job.prompts)
        job = replace(job, prompts=prompts)
    return Asked(
        size=size,
        job=job,
        model=model,
        adapter=_adapter(model, job),
        request_id=request_id,
        tenant=tenant,
        remaining_s=remaining_s,
        caller=replace(caller_of(request), user=job.user or ""),
        headers=answer_headers_of(request),
        began_s=began_s,
    )


def _adapter(model: LoadedModel, job: Job) -> LoadedAdapter | None:
    """Return the adapter of a job, named by `adapter` or, for OpenAI's clients, by `model`."""
    if job.model in (None, model.model.name):
        return model.adapters.named(job.adapter or "")
    if job.model not in {one.name for one in model.adapters.loaded()}:
        raise ModelNotFound(f"model: {shown(job.model)} is not served; {model.model.name!r} is")
    if job.adapter not in (None, job.model):
        raise InvalidArgument("adapter", f"{job.adapter!r} is not {job.model!r}, the adapter that model names")
    return model.adapters.named(job.model or "")
