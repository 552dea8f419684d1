"""Log-probabilities and hidden states of a fake executor: likelihood falls with the distance from the next token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpaged.engine.executor import TOP_WIDTH
from jpaged.engine.executor.steps import Tell, TellInputs, ToldOutputs

LOGPROB_STEP = -0.125
"""Sums of it are exact, so that equal sums are equal."""


def tell_of(inputs: TellInputs, contexts: Sequence[Sequence[int]], next_ids: Sequence[int], size: int) -> ToldOutputs:
    """Return log-probabilities or hidden states of the rows in use.

    Args:
        contexts: all tokens up to that of each hidden state.
        next_ids: the token that each would sample.
        size: of the vocabulary.
    """
    if inputs.tell == Tell.HIDDEN:
        hidden = [[context[-1], len(context), sum(context) % 1000] for context in contexts]
        return ToldOutputs(hidden_re=np.array(hidden, np.float32))
    next_r1 = np.array(next_ids, np.int64)[:, None]
    if inputs.tell == Tell.ALL_LOGPROBS:
        distances_rv = (np.arange(size) - next_r1) % size
        return ToldOutputs(all_logprobs_rv=((distances_rv + 1) * LOGPROB_STEP).astype(np.float32))
    distances_rk = (inputs.ids_rk[: len(next_ids)] - next_r1) % size
    top = np.arange(min(TOP_WIDTH, size))
    return ToldOutputs(
        is_sound_r=np.ones(len(next_ids), np.bool_),
        ranks_r=(distances_rk[:, 0] + 1).astype(np.int32),
        logprobs_rk=((distances_rk + 1) * LOGPROB_STEP).astype(np.float32),
        top_ids_rk=((next_r1 + top) % size).astype(np.int32),
        top_logprobs_rk=np.broadcast_to((top + 1) * LOGPROB_STEP, (len(next_ids), len(top))).astype(np.float32),
    )
