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
from jpaged.service.loaded_model import LoadedModel

NUM_TOKENS = 16
_PACKAGE = Path(jpaged.__file__).parent
_NOT_ON_THE_WAY = ("_proto/", "server/lifecycle.py", "server/progress.py")
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


async def _serve_one(model: LoadedModel, recorder: Recorder) -> int:
    """Sends the request; returns how many tokens came."""
    server = Server(model.config, lambda progress: model)
    port = await server.start()
    run = asyncio.create_task(server.run())
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        sampling = inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(text="Once upon a time", sampling=sampling)
        await channel.channel_ready()
        await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1]), wait_for_ready=True)
        recorder.is_on = True
        num_tokens = sum([len(message.token_ids) async for message in stub.Generate(request, wait_for_ready=True)])
        recorder.is_on = False
    server.request_stop()
    await run
    return num_tokens


def request_way() -> list[str]:
    """The files, each as it was entered first."""
    options = {"model": "demo", "port": 0, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 256}
    model = build(EngineConfig.load({**options, "num_scheduler_steps": 8, "wait_for_all_programs": True}))
    recorder = Recorder()
    recorder.install()
    try:
        num_tokens = asyncio.run(_serve_one(model, recorder))
    finally:
        recorder.remove()
    if num_tokens != NUM_TOKENS:
        raise RuntimeError(f"{num_tokens} tokens came, {NUM_TOKENS} were asked for")
    return recorder.files


if __name__ == "__main__":
    files = request_way()
    print("\n".join(files))
    print(f"{len(files)} files")
