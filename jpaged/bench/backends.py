"""Backends of the load generator: jpaged servers over gRPC, and servers with OpenAI's HTTP API.

Over HTTP, completions or chat completions are received as server-sent events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import httpx2

from jpaged.bench.datasets import Sample
from jpaged.bench.metrics import Trace
from jpaged.client import AsyncClient, Tls
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.types import SamplingParams


class GrpcBackend:
    """`jpaged serve` at `target`.

    Args:
        target: HOST:PORT.
        ignore_eos: generate all tokens that a sample requests.
        temperature: 0 is greedy.
        cache_salt: prefixes are shared only with requests of the same salt.
        api_key: key for a server that requires one.
        tls: trusted and client certificates; None connects in plain text.
        proxy: as for `Client`.
    """

    def __init__(
        self,
        target: str,
        *,
        ignore_eos: bool,
        temperature: float,
        cache_salt: str = "",
        api_key: str = "",
        tls: Tls | None = None,
        proxy: str | None = None,
    ) -> None:
        self._client = AsyncClient(target, api_key=api_key, tls=tls, proxy=proxy)
        self._ignore_eos = ignore_eos
        self._temperature = temperature
        self._cache_salt = cache_salt

    async def send(self, sample: Sample, trace: Trace) -> None:
        """See `Backend.send`."""
        sampling = SamplingParams(
            max_tokens=sample.output_len,
            ignore_eos=self._ignore_eos,
            temperature=self._temperature,
            cache_salt=self._cache_salt,
        )
        prompt = sample.whole_prompt
        if isinstance(prompt, str):
            stream = self._client.generate(prompt, sampling)
        else:
            stream = self._client.generate(prompt_token_ids=prompt, sampling=sampling)
        num_seen = 0
        async for chunk in stream:
            if chunk.token_ids:
                trace.receive(chunk.text, chunk.token_ids)
                num_seen += len(chunk.token_ids)
            if chunk.usage.prompt_tokens:
                usage = chunk.usage
                trace.count(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if not num_seen:
            raise Unavailable("the stream ended without a token")

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._client.close()


Api = Literal["openai", "openai-chat"]
ENDPOINTS: Mapping[Api, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_MAX_SHOWN = 300
"""Maximum number of characters of a server's error that are shown."""


class OpenAIBackend:
    """Server with OpenAI's API.

    Args:
        url: full URL of the endpoint.
        api: completions or chat completions.
        model: sent with every request.
        ignore_eos: requests all tokens, by vLLM's field, which llama.cpp and SGLang accept too.
        extra: further fields of every request.
        headers: headers of every request.
        proxy: URL of an HTTP proxy; None for none, regardless of the environment.
    """

    def __init__(
        self,
        url: str,
        api: Api,
        model: str,
        *,
        ignore_eos: bool,
        temperature: float,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
    ) -> None:
        self._url = url
        self._is_chat = api == "openai-chat"
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
            **(extra or {}),
        }
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(
            timeout=None, limits=limits, headers=dict(headers or {}), trust_env=False, proxy=proxy
        )

    async def send(self, sample: Sample, trace: Trace) -> None:
        """See `Backend.send`."""
        try:
            async with self._client.stream("POST", self._url, json=self._body(sample)) as response:
                if response.status_code != httpx2.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise Unavailable(f"the server answered {response.status_code}: {text[:_MAX_SHOWN]}")
                await self._read(response, trace)
        except httpx2.HTTPError as error:
            raise Unavailable(f"{self._url}: {type(error).__name__}: {error}") from error

    def _body(self, sample: Sample) -> dict[str, Any]:
        if not self._is_chat:
            whole = sample.whole_prompt
            if sample.adds and not isinstance(whole, str):
                raise InvalidArgument("--prompt-format", "ids of answers are known only over gRPC: choose text")
            prompt = whole if isinstance(whole, str) else list(whole)
            return {**self._fields, "prompt": prompt, "max_tokens": sample.output_len}
        if not isinstance(sample.prompt, str):
            raise InvalidArgument("--prompt-format", "ids cannot be sent as a chat: choose text")
        messages = []
        for asked, answer in sample.history:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": sample.prompt})
        return {**self._fields, "messages": messages, "max_tokens": sample.output_len}

    async def _read(self, response: httpx2.Response, trace: Trace) -> None:
        """Read the events. If the server does not count its tokens, each message counts as one."""
        num_messages, num_tokens = 0, None
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if data in (line, "[DONE]"):  # an empty line, a comment, another field of the event
                continue
            event = _build_event(data)
            choices = event.get("choices")
            if choices and (text := self._read_text(choices[0])) is not None:
                trace.receive(text)
                num_messages += 1
            if usage := event.get("usage"):
                num_tokens = usage.get("completion_tokens")
                details = usage.get("prompt_tokens_details") or {}
                trace.count(usage.get("prompt_tokens"), num_tokens, details.get("cached_tokens"))
        if not num_messages:
            raise Unavailable("the stream ended without a token")
        if num_tokens is None:
            trace.count(None, num_messages)

    def _read_text(self, choice: Any) -> str | None:
        """Return the text of a message; None if it has no token: only a role, or only the finish reason."""
        if not self._is_chat:
            text = choice.get("text")
        else:
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if text:
            return str(text)
        # A token may have no text (half a character): it counts, unless it is in the final message.
        return "" if text == "" and choice.get("finish_reason") is None and not self._is_chat else None

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._client.aclose()


def _build_event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise Unavailable(f"the server sent an event that is not JSON: {data[:_MAX_SHOWN]}") from error
    if not isinstance(event, dict):
        raise Unavailable(f"the server sent an event that is no object: {data[:_MAX_SHOWN]}")
    if reason := event.get("error"):
        raise Unavailable(f"the server ended the stream: {str(reason)[:_MAX_SHOWN]}")
    return event


async def first_model(base_url: str, headers: Mapping[str, str], proxy: str | None = None) -> str:
    """Return the first model that the server lists.

    Raises:
        Unavailable: the response has none.
    """
    try:
        async with httpx2.AsyncClient(timeout=30.0, headers=dict(headers), trust_env=False, proxy=proxy) as client:
            answer = (await client.get(f"{base_url}/v1/models")).json()
            return str(answer["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(
            f"{base_url}/v1/models names no model ({type(error).__name__}: {error}); give --model"
        ) from error
