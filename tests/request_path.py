"""The files of jpaged that one request enters while it is served: `python -m tests.request_path`.

A server of the demo model runs in this process and listens on real ports. Once it serves, one `Generate` of 16 tokens
is sent by a bare stub, then one streamed chat of as many over HTTP. The file of every function that runs during a
request, on any thread, is recorded.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
from grpc import aio

import jpaged
from jpaged._proto.v1 import inference_pb2, inference_pb2_grpc
from jpaged.build import build
from jpaged.config import EngineConfig
from jpaged.server.lifecycle import Server
from jpaged.service.loaded_model import LoadedModel

NUM_TOKENS = 16
_PACKAGE = Path(jpaged.__file__).parent
_NOT_ON_THE_PATH = ("_proto/", "server/lifecycle.py", "http/port.py")
"""Generated code, and what timers run with requests or without."""


class Recorder:
    """The files of the package in which functions are called while a request is recorded."""

    def __init__(self) -> None:
        self._files: list[str] | None = None
        self._seen: set[str] = set()

    def install(self) -> None:
        """Watch this thread and every thread that is created from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        """Watch no thread any longer."""
        threading.setprofile(None)
        sys.setprofile(None)

    def start(self) -> None:
        """Begin to record."""
        self._seen.clear()
        self._files = []

    def stop(self) -> list[str]:
        """Stop recording; return the files in the order in which they were entered first."""
        files, self._files = self._files, None
        assert files is not None
        return files

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name, files = frame.f_code.co_filename, self._files
        if event != "call" or files is None or name in self._seen:
            return
        self._seen.add(name)
        path = Path(name)
        if path.is_relative_to(_PACKAGE):
            file = path.relative_to(_PACKAGE).as_posix()
            if not file.startswith(_NOT_ON_THE_PATH):
                files.append(file)


async def _generate(port: int, recorder: Recorder) -> list[str]:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        sampling = inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(text="Once upon a time", sampling=sampling)
        await channel.channel_ready()
        await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1]), wait_for_ready=True)
        recorder.start()
        num_tokens = sum([len(message.token_ids) async for message in stub.Generate(request, wait_for_ready=True)])
        files = recorder.stop()
    _check(num_tokens)
    return files


async def _chat(port: int, recorder: Recorder) -> list[str]:
    body = {
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300.0) as client:
        await client.get("/health")
        recorder.start()
        answer = await client.post("/v1/chat/completions", json=body)
        files = recorder.stop()
    answer.raise_for_status()
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    _check(chunks[-1]["usage"]["completion_tokens"])
    return files


def _check(num_tokens: int) -> None:
    if num_tokens != NUM_TOKENS:
        raise RuntimeError(f"{num_tokens} tokens came instead of {NUM_TOKENS}")


async def _serve(model: LoadedModel, recorder: Recorder) -> dict[str, list[str]]:
    server = Server(model.config, lambda progress: model)
    port = await server.start()
    run = asyncio.create_task(server.run())
    assert server.http_port is not None
    paths = {"generate": await _generate(port, recorder), "chat": await _chat(server.http_port, recorder)}
    server.request_stop()
    await run
    return paths


def request_paths() -> dict[str, list[str]]:
    """Return the files that `generate` and `chat` enter, in the order in which they are entered first."""
    options = {"model": "demo", "port": 0, "http_port": 0, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    options["swap_space"] = 0  # the check of an idle engine looks at host memory, if there is any
    limits = {"max_model_len": 256, "num_scheduler_steps": 8, "wait_for_all_programs": True}
    model = build(EngineConfig.load({**options, **limits}))
    recorder = Recorder()
    recorder.install()
    try:
        return asyncio.run(_serve(model, recorder))
    finally:
        recorder.remove()


if __name__ == "__main__":
    for name, files in request_paths().items():
        print(f"{name}: {len(files)} files")
        print("\n".join(f"    {file}" for file in files))
