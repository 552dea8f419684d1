"""Who asks: by each face, with cancels, deadlines and slow readers. Each load asks for one case after the other.

Loads of our own clients know both servers, and their streams survive. Other people's clients do not: what they lose
with a server is counted as broken and asked for again, of the server that lives.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import tritonclient.grpc.aio as triton
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from tritonclient.utils import InferenceServerException

from benchmarks.soak.cases import Case, Texts
from benchmarks.soak.servers import Child
from benchmarks.soak.tally import BROKEN, CANCELLED, LATE, RESUMED, WRONG, Tally
from jpaged.client import AsyncClient, Client
from jpaged.client.batch import BatchOptions, run_batch
from jpaged.client.results import failure_in
from jpaged.errors import DeadlineExceeded

_MODEL = "demo"
_PAUSE_S = 0.2
_LINES_OF_BATCH = 24


@dataclass(frozen=True, slots=True)
class Run:
    """What every load works with."""

    steady: Child
    mortal: Child
    cases: list[Case]
    expected: list[Texts]
    tally: Tally
    min_kills: int

    @property
    def is_over(self) -> bool:
        """Enough was asked for, and killed."""
        return self.tally.is_over and self.mortal.num_kills >= self.min_kills

    @property
    def targets(self) -> list[str]:
        """Both servers; the one that is killed first, so that it is not only asked in need."""
        return [self.mortal.target, self.steady.target]

    def choices(self, seed: int) -> AsyncIterator[tuple[Case, Texts]]:
        """Cases until enough were asked for."""

        async def chosen() -> AsyncIterator[tuple[Case, Texts]]:
            choose = random.Random(seed)
            while not self.is_over:
                i = choose.randrange(len(self.cases))
                yield self.cases[i], self.expected[i]

        return chosen()


async def streams(run: Run, seed: int, pause_s: float = 0.0) -> None:
    """Streams of an AsyncClient; a reader that pauses between chunks is slow."""
    load = "slow readers" if pause_s else "streams"
    async with AsyncClient(run.targets) as client:
        async for case, expected in run.choices(seed):
            texts = [""] * case.sampling.n
            async with client.generate(case.prompt, case.sampling) as stream:
                async for chunk in stream:
                    texts[chunk.index] += chunk.text
                    await asyncio.sleep(pause_s)
            if stream.num_tries > 1:
                run.tally.note(load, RESUMED)
            run.tally.answered(load, case, expected, tuple(texts))


async def threads(run: Run, seed: int) -> None:
    """Streams of a Client, on a thread."""

    def read(client: Client, case: Case) -> tuple[Texts, int]:
        texts = [""] * case.sampling.n
        with client.generate(case.prompt, case.sampling) as stream:
            for chunk in stream:
                texts[chunk.index] += chunk.text
        return tuple(texts), stream.num_tries

    with Client(run.targets) as client:
        async for case, expected in run.choices(seed):
            texts, num_tries = await asyncio.to_thread(read, client, case)
            if num_tries > 1:
                run.tally.note("threads", RESUMED)
            run.tally.answered("threads", case, expected, texts)


async def cancels(run: Run, seed: int) -> None:
    """Streams that are closed after some chunks."""
    choose = random.Random(seed)
    async with AsyncClient(run.targets) as client:
        async for case, _ in run.choices(seed):
            num_left = choose.randrange(4)
            async with client.generate(case.prompt, case.sampling) as stream:
                async for _ in stream:
                    num_left -= 1
                    if num_left < 0:
                        break
            run.tally.done("cancels", CANCELLED)


async def deadlines(run: Run, seed: int) -> None:
    """Requests that have little time; those that make it are compared."""
    choose = random.Random(seed)
    async with AsyncClient(run.targets) as client:
        async for case, expected in run.choices(seed):
            try:
                output = await client.complete(case.prompt, case.sampling, timeout_s=choose.uniform(0.02, 0.6))
            except DeadlineExceeded:
                run.tally.done("deadlines", LATE)
            else:
                run.tally.answered("deadlines", case, expected, tuple(one.text for one in output.outputs))


async def batches(run: Run, seed: int) -> None:
    """Files of requests, each run to its end on both servers."""
    choose, rounds = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as name:
        while not run.is_over:
            rounds += 1
            chosen = [choose.randrange(len(run.cases)) for _ in range(_LINES_OF_BATCH)]
            source, output = Path(name, f"{rounds}.jsonl"), Path(name, f"{rounds}.out.jsonl")
            lines = "".join(_line(f"{j}", run.cases[i]) for j, i in enumerate(chosen))
            await asyncio.to_thread(source.write_text, lines)
            await run_batch(BatchOptions(source, output, run.targets, max_concurrency=4), lambda summary: None)
            for line in map(json.loads, (await asyncio.to_thread(output.read_text)).splitlines()):
                i = chosen[int(line["custom_id"])]
                if (code := failure_in(line)) is not None:
                    run.tally.done("batches", WRONG)
                    run.tally.wrong.append(f"batches: {code}: {line['response']}")
                    continue
                texts = tuple(choice["text"] for choice in line["response"]["body"]["choices"])
                run.tally.answered("batches", run.cases[i], run.expected[i], texts)


def _line(custom_id: str, case: Case) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": case.body}) + "\n"


async def over_http(run: Run, seed: int) -> None:
    """Streams of OpenAI's client."""
    known = {"temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "stop", "seed", "max_tokens"}

    async def ask(child: Child, case: Case) -> Texts:
        texts = [""] * case.sampling.n
        body = case.body
        own = {name: body[name] for name in known & body.keys()}
        extra = {name: value for name, value in body.items() if name not in {*known, "prompt"}}
        async with openai.AsyncOpenAI(base_url=child.url, api_key="none", max_retries=0) as client:
            async for event in await client.completions.create(
                model=_MODEL, prompt=case.prompt, stream=True, extra_body=extra, **own
            ):
                for choice in event.choices:
                    texts[choice.index] += choice.text
        return tuple(texts)

    await _others(run, seed, "OpenAI's client", ask, (openai.APIConnectionError, openai.APIError, OSError))


async def by_triton(run: Run, seed: int) -> None:
    """Requests of Triton's client."""
    names = {"temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "min_tokens"}
    names |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "stop"}

    async def ask(child: Child, case: Case) -> Texts:
        text = triton.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(_bytes(case.prompt))
        alone = triton.InferInput("exclude_input_in_output", [1], "BOOL")
        alone.set_data_from_numpy(_flag())
        sampling = triton.InferInput("sampling_parameters", [1], "BYTES")
        sampling.set_data_from_numpy(
            _bytes(json.dumps({name: value for name, value in case.body.items() if name in names}))
        )
        async with triton.InferenceServerClient(child.target) as client:
            result = await client.infer(_MODEL, [text, alone, sampling])
        return tuple(one.decode() for one in result.as_numpy("text_output"))

    await _others(run, seed, "Triton's client", ask, (InferenceServerException, grpc.RpcError))


async def by_vllm(run: Run, seed: int) -> None:
    """Streams of the stub that gateways have; it answers in tokens, whose text is asked for apart."""

    async def ask(child: Child, case: Case) -> Texts:
        given = {name: value for name, value in case.body.items() if name != "prompt"}
        message = vllm_engine_pb2.GenerateRequest(
            text=case.prompt, sampling_params=vllm_engine_pb2.SamplingParams(**given), stream=True
        )
        token_ids: list[list[int]] = [[] for _ in range(case.sampling.n)]
        async with grpc.aio.insecure_channel(child.target) as channel:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            async for response in stub.Generate(message):
                if response.HasField("complete"):
                    token_ids[response.complete.index] = [*response.complete.output_ids]
        async with AsyncClient(run.steady.target) as client:
            return tuple([await client.detokenize(ids) for ids in token_ids])

    # Where a stop string ends a text within a token, tokens alone do not say where.
    await _others(run, seed, "vLLM's stub", ask, (grpc.RpcError,), skips=lambda case: bool(case.sampling.stop))


async def _others(
    run: Run,
    seed: int,
    load: str,
    ask: Callable[[Child, Case], Awaitable[Texts]],
    failures: tuple[type[BaseException], ...],
    skips: Callable[[Case], bool] = lambda case: False,
) -> None:
    """Ask one server or the other as a client that knows nothing of the two."""
    choose = random.Random(seed)
    async for case, expected in run.choices(seed):
        if skips(case):
            continue
        child = choose.choice((run.steady, run.mortal))
        try:
            texts = await ask(child, case)
        except failures:
            if child is run.steady:
                raise
            run.tally.note(load, BROKEN)
            await asyncio.sleep(_PAUSE_S)
            texts = await ask(run.steady, case)
        run.tally.answered(load, case, expected, texts)


def _bytes(text: str) -> Any:
    return np.array([text.encode()], np.object_)


def _flag() -> Any:
    return np.array([True])


LOADS: tuple[tuple[Callable[[Run, int], Awaitable[None]], int], ...] = (
    (streams, 8),
    (lambda run, seed: streams(run, seed, 0.05), 3),
    (threads, 2),
    (cancels, 2),
    (deadlines, 2),
    (batches, 1),
    (over_http, 4),
    (by_triton, 2),
    (by_vllm, 2),
)
"""Each load, and how many of it there are."""
