"""Backend for jpaged servers, over gRPC."""

from __future__ import annotations

from jpaged.bench.datasets import Sample
from jpaged.bench.trace import Trace
from jpaged.client import AsyncClient, Tls
from jpaged.errors import Unavailable
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
        if isinstance(sample.prompt, str):
            stream = self._client.generate(sample.prompt, sampling)
        else:
            stream = self._client.generate(prompt_token_ids=sample.prompt, sampling=sampling)
        num_seen = 0
        async for chunk in stream:
            if chunk.token_ids:
                trace.receive(chunk.text)
                num_seen += len(chunk.token_ids)
            if chunk.usage.prompt_tokens:
                trace.count(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        if not num_seen:
            raise Unavailable("the stream ended without a token")

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._client.close()
