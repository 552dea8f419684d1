"""Streams that are read: so many calls of one server, whose messages are counted and dropped.

    python -m benchmarks.route.callers --target HOST:PORT --streams 1000

Each line of standard input is answered with how many messages have come so far, and how many streams are open.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from grpc import aio

from jpaged import json_text
from jpaged._proto.v1 import inference_pb2

_STREAMS_OF_CHANNEL = 100


class Callers:
    """All streams of this process."""

    def __init__(self) -> None:
        self.num_messages = self.num_open = 0

    async def read(self, method: Any, number: int) -> None:
        """One stream, to its end."""
        sampling = inference_pb2.SamplingParams(max_tokens=1 << 19, seed=number)
        request = inference_pb2.GenerateRequest(text=f"Once upon a time, number {number}", sampling=sampling)
        call = method(request.SerializeToString())
        await call.initial_metadata()
        self.num_open += 1
        async for _ in call:
            self.num_messages += 1


async def main(target: str, num_streams: int) -> None:
    """Open all streams, then tell of them when asked, until standard input ends."""
    callers, tasks, channels = Callers(), list[asyncio.Task[None]](), list[aio.Channel]()
    for number in range(num_streams):
        if number % _STREAMS_OF_CHANNEL == 0:
            channels.append(aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]))
            method: Any = channels[-1].unary_stream("/jpaged.v1.InferenceService/Generate")
        tasks.append(asyncio.create_task(callers.read(method, number)))
    while await asyncio.to_thread(sys.stdin.readline):
        failed = [str(task.exception()) for task in tasks if task.done()]
        told = {"num_messages": callers.num_messages, "num_open": callers.num_open, "failed": failed[:3]}
        print(json_text.dumps(told), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for channel in channels:
        await channel.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Read streams.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--streams", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.target, arguments.streams))
