"""A proposer beside streams that are known: which of its proposals would have been accepted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.speculation.streams import Stream
from jpaged.engine.speculative.drafts import verify
from jpaged.engine.speculative.ngram import Proposer

_KEYS = count()
_NEVER_ENDS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it.

    Attributes:
        tokens_per_step: of a row: accepted proposals and the draw behind them; plain decoding has 1.
        accepted: of the tokens that were proposed.
        proposed_per_step: of a row.
        host_us: of this thread for a row in a step, telling included.
    """

    tokens_per_step: float
    accepted: float
    proposed_per_step: float
    host_us: float


def replay(proposer: Proposer, streams: Sequence[Stream], limit: int, sharing: bytes | None = b"all") -> Replayed:
    """Runs each stream to its end, all of them side by side, and forgets them."""
    keys = [next(_KEYS) for _ in streams]
    places = [1] * len(streams)  # the prompt's step draws the first token
    num_steps = num_tokens = num_proposed = num_accepted = 0
    host_s = 0.0
    for key, stream in zip(keys, streams, strict=True):
        proposer.begin(key, stream.prompt_token_ids, sharing)
        proposer.extend(key, stream.output_token_ids[:1])
    while running := [i for i, stream in enumerate(streams) if places[i] < len(stream.output_token_ids)]:
        lefts = [len(streams[i].output_token_ids) - places[i] for i in running]
        begin_s = time.thread_time()
        proposals = [proposer.propose(keys[i], min(limit, left - 1)) for i, left in zip(running, lefts, strict=True)]
        host_s += time.thread_time() - begin_s
        coming = [streams[i].output_token_ids[places[i] : places[i] + limit + 1] for i in running]
        padded = np.array([one + [-1] * (limit - len(one)) for one in proposals], np.int32)
        drawn = np.array([one + [-2] * (limit + 1 - len(one)) for one in coming], np.int32)
        done = verify(padded, np.array([len(one) for one in proposals]), drawn, [_NEVER_ENDS] * len(running))
        for i, token_ids in zip(running, done.token_ids, strict=True):
            begin_s = time.thread_time()
            proposer.extend(keys[i], token_ids)
            host_s += time.thread_time() - begin_s
            places[i] += len(token_ids)
            num_tokens += len(token_ids)
        num_steps += len(running)
        num_proposed += sum(map(len, proposals))
        num_accepted += sum(done.num_accepted)
    for key in keys:
        proposer.remove(key)
    return Replayed(
        num_tokens / num_steps, num_accepted / max(1, num_proposed), num_proposed / num_steps, host_s / num_steps * 1e6
    )
