"""Worker of NVIDIA Dynamo that forwards to a server's OpenAI API: `python worker.py URL MODEL`.

Dynamo's frontend sends chats and completions as they are. With `--tokenizer`, the frontend tokenizes, and its router
chooses a worker by KV events. Discovery is by files, so neither etcd nor NATS is needed.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from dynamo._core import (
    DistributedRuntime,
    InvalidArgument,
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
STOPS = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids")
UNSUPPORTED = ("best_of", "use_beam_search", "length_penalty", "include_stop_str_in_output")
"""Fields of a request by token ids; other values than none, 0 and false are refused."""


def completion_body(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of /v1/completions for Dynamo's request by token ids.

    Raises:
        InvalidArgument: the request has a field that cannot be forwarded.
    """
    sampling, stops = request["sampling_options"], request["stop_conditions"]
    given = {name: sampling.get(name) for name in (*SAMPLING, "repetition_penalty")}
    given |= {name: stops.get(name) for name in STOPS}
    refused = [name for name in UNSUPPORTED if sampling.get(name)]
    refused += ["n"] * ((sampling.get("n") or 1) > 1) + ["logprobs"] * bool(request["output_options"].get("logprobs"))
    if refused:
        raise InvalidArgument(f"{refused[0]}: is not supported by this worker")
    if sampling.get("guided_decoding"):
        given["structured_outputs"] = {name: one for name, one in sampling["guided_decoding"].items() if one}
    return {
        "model": request["model"],
        "prompt": request["token_ids"],
        "return_token_ids": True,
        **{name: value for name, value in given.items() if value is not None},
    }


class Worker:
    """Forwards requests to one server.

    Args:
        url: the server's address, without `/v1`.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._session = session

    async def forward(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a chat or a completion."""
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        async for chunk in self._stream(path, {**request, "stream_options": {"include_usage": True}}, context):
            yield chunk

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the token ids that follow those of a request."""
        async for chunk in self._stream("/v1/completions", completion_body(request), context):
            for choice in chunk["choices"]:
                reason = choice.get("finish_reason")
                yield {"token_ids": choice.get("token_ids") or []} | ({"finish_reason": reason} if reason else {})

    async def _stream(self, path: str, body: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        async with self._session.post(self._url + path, json={**body, "stream": True}) as response:
            if response.status != 200:
                raise InvalidArgument((await response.json())["error"]["message"])
            async for line in response.content:
                if context.is_stopped():
                    return  # closes the connection, which ends the request on the server
                data = line.strip().removeprefix(b"data: ")
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield chunk


async def serve(options: argparse.Namespace) -> None:
    """Register the model and serve requests until the process ends."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint(options.endpoint)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 22) as session:
        worker = Worker(options.url, session)
        surfaces, kind = ModelType.Chat | ModelType.Completions, {"worker_type": WorkerType.Aggregated}
        if options.tokenizer is None:
            await register_model(
                ModelInput.Text, surfaces, endpoint, options.model, options.model, skip_model_assets=True, **kind
            )
            await endpoint.serve_endpoint(worker.forward)
            return
        config = ModelRuntimeConfig()
        known = {"context_length": options.max_model_len, "total_kv_blocks": options.num_blocks}
        parsers = {name: getattr(options, name) for name in ("tool_call_parser", "reasoning_parser")}
        for name, value in {**known, **parsers}.items():
            if value is not None:
                setattr(config, name, value)
        await register_model(
            ModelInput.Tokens,
            surfaces,
            endpoint,
            options.tokenizer,
            options.model,
            kv_cache_block_size=options.block_size,
            runtime_config=config,
            **kind,
        )
        events = KvEventPublisher(
            endpoint, kv_block_size=options.block_size, zmq_endpoint=options.kv_events, zmq_topic=""
        )
        await endpoint.serve_endpoint(worker.generate)
        events.shutdown()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="Worker of NVIDIA Dynamo that forwards to a server's OpenAI API.")
    parser.add_argument("url", help="address of the server, such as http://127.0.0.1:8001")
    parser.add_argument("model", help="name of the model, as the server has it")
    parser.add_argument("--endpoint", default="dynamo.backend.generate", help="address in Dynamo's namespace")
    by_tokens = parser.add_argument_group("routing by KV events")
    by_tokens.add_argument("--tokenizer", help="folder of the model, whose tokenizer and chat template Dynamo reads")
    by_tokens.add_argument("--kv-events", help="the server's --kv-events-endpoint")
    by_tokens.add_argument("--block-size", type=int, default=16, help="the server's block size")
    by_tokens.add_argument("--max-model-len", type=int, help="the server's maximum length of a sequence")
    by_tokens.add_argument("--num-blocks", type=int, help="the server's number of blocks")
    by_tokens.add_argument("--tool-call-parser", help="Dynamo's parser of tool calls, such as hermes")
    by_tokens.add_argument("--reasoning-parser", help="Dynamo's parser of reasoning")
    options = parser.parse_args()
    if (options.tokenizer is None) != (options.kv_events is None):
        parser.error("--tokenizer and --kv-events need each other")
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
