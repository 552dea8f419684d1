"""One life of a server with a disk beneath it, prompts whose prefix a tier has, and when their first tokens come."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.checkpoints import SHAPES
from benchmarks.travel.servers import free_port, serving
from jpaged.client import Client
from jpaged.types import SamplingParams

MODEL = "S"
_FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
BLOCK_SIZE = 16
_SETTLED_S, _LONGEST_S = 0.3, 60.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and the token behind it where it has been computed."""

    token_ids: tuple[int, ...]
    answer: int | None = None


@dataclass(frozen=True, slots=True)
class First:
    """A first token.

    Attributes:
        begin_s, ttft_s: when it was asked for, by time.perf_counter, and how long it took.
        cached_tokens: of the prompt, that were found.
        host_tokens, disk_tokens: that came back from there.
    """

    begin_s: float
    ttft_s: float
    cached_tokens: int
    host_tokens: int
    disk_tokens: int


class Life:
    """A server that runs, and its folder."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.folder = folder

    def ask(self, prompt: Prompt) -> tuple[Prompt, First]:
        """Asks for one token.

        Raises:
            RuntimeError: it is another one than before.
        """
        before, begin_s = self.client.load(), time.perf_counter()
        completion = self.client.complete(prompt_token_ids=list(prompt.token_ids), sampling=_FIRST)
        ttft_s, after = time.perf_counter() - begin_s, self.client.load()
        answer = completion.outputs[0].token_ids[0]
        if prompt.answer not in (None, answer):
            raise RuntimeError(f"token {answer} came behind a prompt that had {prompt.answer}")
        host_tokens = after.num_host_hit_tokens - before.num_host_hit_tokens
        disk_tokens = after.num_disk_hit_tokens - before.num_disk_hit_tokens
        first = First(begin_s, ttft_s, completion.usage.cached_tokens, host_tokens, disk_tokens)
        return replace(prompt, answer=answer), first

    def settle(self) -> None:
        """Waits until nothing more is written to disk.

        Raises:
            RuntimeError: that does not end.
        """
        until_s, last = time.monotonic() + _LONGEST_S, -1
        while (now := self.client.load().disk_bytes_written) != last:
            if time.monotonic() > until_s:
                raise RuntimeError(f"{now} bytes are written to disk, and still more")
            last = now
            time.sleep(_SETTLED_S)


@contextlib.contextmanager
def living(home: Path, folder: Path, num_blocks: int, core: int | None) -> Iterator[Life]:
    """A server of the model in a home; it ends as SIGTERM has it, and has then written what it knew."""
    options = [
        *("--max-num-seqs", "16", "--block-size", str(BLOCK_SIZE), "--num-blocks", str(num_blocks)),
        *("--max-messages-per-second", "100000", "--wait-for-all-programs"),
        *("--swap-space", "0.5", "--kv-disk-space", "1", "--kv-disk-dir", str(folder)),
    ]
    with serving(home / MODEL, free_port(), home / "server.log", core, options) as client:
        yield Life(client, folder)


def prompts(seed: int, length: int) -> Iterator[Prompt]:
    """Prompts that share nothing, of so many tokens each, without end."""
    choose, num_ids = random.Random(seed), SHAPES[MODEL].vocab_size
    while True:
        yield Prompt(tuple(choose.randrange(3, num_ids) for _ in range(length)))


def num_findable(length: int) -> int:
    """Tokens of a prompt that can be found: full blocks, and not the last token, which is computed."""
    return (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def pool_blocks(length: int, num_streams: int, stream_tokens: int) -> int:
    """A pool that has room for a prompt and the streams, and not for two prompts, so that two push out a third.

    Raises:
        ValueError: the streams need more than a prompt.
    """
    num_blocks, per_stream = -(-length // BLOCK_SIZE), -(-stream_tokens // BLOCK_SIZE)
    num_needed = num_blocks + num_streams * per_stream + 2
    if num_needed >= 2 * num_blocks:
        raise ValueError(f"{num_streams} streams of {stream_tokens} tokens need more blocks than {length} tokens")
    return max(num_needed, 3 * num_blocks // 2)
