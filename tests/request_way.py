"""The files of jpaged that one request enters while it is served: `python -m tests.request_way`.

A server of the demo model runs in this process behind a real port. Once it serves, one `Generate` of 16 tokens is sent
by a bare stub, and every function that is called meanwhile, on whatever thread, is noted by its file.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from grpc import aio

import jpaged
from jpaged._proto.v1 import inference_pb2, inference_pb2_grpc
from jpaged.assemble import build
from jpaged.config import EngineConfig
from jpaged.server.lifecycle import Server

NUM_TOKENS = 16
_PACKAGE = Path(jpaged.__file__).parent
_NOT_ON_THE_WAY = ("_proto/", "server/lifecycle.py")
"""Generated code; and what looks five times a second whether the engine is well, with requests or without."""


class Recorder:
    """Notes the files of the package in which functions are called, while it is on."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.is_on = False
        self._seen: set[str] = set()

    def install(self) -> None:
        """Watches this thread and every one that is made from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not self.is_on or name in self._seen:
            return
        self._seen.add(name)
        path = Path(name)
        if path.is_relative_to(_PACKAGE):
            file = path.relative_to(_PACKAGE).as_posix()
            if not file.startswith(_NOT_ON_THE_WAY):
                self.files.append(file)


async def _serve_one(recorder: Recorder) -> int:
    """Sends the request when every program is compiled; returns how many tokens came."""
    config = EngineConfig.load({"model": "demo", "port": 0, "max_num_seqs": 4, "max_model_len": 256})
    loop, compiled = asyncio.get_running_loop(), asyncio.Event()

    def note(what: str, done: int, total: int) -> None:
        if " programs: " in what:
            loop.call_soon_threadsafe(compiled.set)

    server = Server(config, lambda progress: build(config, note))
    port = await server.start()
    run = asyncio.create_task(server.run())
    await compiled.wait()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        await channel.channel_ready()
        sampling = inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(text="Once upon a time", sampling=sampling)
        recorder.is_on = True
        num_tokens = sum([len(message.token_ids) async for message in stub.Generate(request, wait_for_ready=True)])
        recorder.is_on = False
    server.request_stop()
    await run
    return num_tokens


def request_way() -> list[str]:
    """The files, each as it was entered first."""
    recorder = Recorder()
    recorder.install()
    try:
        num_tokens = asyncio.run(_serve_one(recorder))
    finally:
        recorder.remove()
    if num_tokens != NUM_TOKENS:
        raise RuntimeError(f"{num_tokens} tokens came, {NUM_TOKENS} were asked for")
    return recorder.files


if __name__ == "__main__":
    files = request_way()
    print("\n".join(files))
    print(f"{len(files)} files")
