"""What it costs to be watched, of a pool of 100,000 blocks that are all in use: `python -m benchmarks.page.cost`.

picture   on the engine's thread, between two steps; ten times a second at most
change    on another thread: which cells and tables have changed since, and the frame of that
whole     the frame for who has just come
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.inspector.frames import FrameWriter
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.types import Request, SamplingParams

BLOCK_SIZE = 16
_T = TypeVar("_T")


def run(num_blocks: int, num_requests: int, num_rounds: int) -> None:
    num_tokens = num_blocks // num_requests * BLOCK_SIZE
    executor = FakeExecutor(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_blocks * BLOCK_SIZE,
        max_model_len=num_tokens + 1000,
    )
    engine = Engine(executor, ByteTokenizer(), EngineConfig().replace(max_num_queued_reqs=num_requests))
    for number in range(num_requests):
        prompt = tuple((number * 31 + i) % 250 for i in range(num_tokens - 40 * BLOCK_SIZE))
        sampling = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
        engine.submit(Request(f"request-{number}", prompt, sampling), lambda event: None)
    for _ in range(20):
        engine.step()
    used = engine.load().num_blocks_used
    print(f"{used} of {num_blocks} blocks in use by {num_requests} requests")
    loop, writer = engine._loop, FrameWriter()
    picture_ms, change_ms, sizes = [], [], []
    for _ in range(num_rounds):
        for _ in range(4):
            engine.step()
        picture = timed(lambda: loop.snapshotter.picture(loop.stats.snapshot(0)), picture_ms)
        frame = timed(lambda picture=picture: writer.change([picture]), change_ms)
        sizes.append(len(frame.data))
    whole_ms: list[float] = []
    whole = timed(writer.whole, whole_ms)
    print(f"picture {statistics.median(picture_ms):.2f} ms (at most {max(picture_ms):.2f})")
    print(f"change {statistics.median(change_ms):.2f} ms, {statistics.median(sizes[1:]) / 1000:.1f} kB")
    print(f"whole {whole_ms[0]:.2f} ms, {len(whole.data) / 1000:.0f} kB")


def timed(act: Callable[[], _T], into: list[float]) -> _T:
    begin_s = time.perf_counter()
    result = act()
    into.append((time.perf_counter() - begin_s) * 1000)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs an engine to be watched.")
    parser.add_argument("--num-blocks", type=int, default=100_000)
    parser.add_argument("--num-requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    for num_requests in arguments.num_requests:
        run(arguments.num_blocks, num_requests, arguments.rounds)


if __name__ == "__main__":
    main()
