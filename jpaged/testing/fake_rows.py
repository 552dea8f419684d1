"""Properties of a row of step inputs."""

from __future__ import annotations

import numpy as np

from jpaged.engine.executor import StepInputs
from jpaged.errors import InternalError


def run_of(inputs: StepInputs, row: int) -> tuple[int, int]:
    """Return the first row and the end of the run that a row is in; the row alone if there are no runs."""
    if not inputs.num_runs:
        return row, row + 1
    run = int(np.searchsorted(inputs.run_starts_s1[: inputs.num_runs + 1], row, side="right")) - 1
    first, end = inputs.run_starts_s1[run : run + 2]
    if not first <= row < end or inputs.kv_begins_s[row] != inputs.kv_begins_s[first]:
        raise InternalError(f"row {row} shares {inputs.kv_begins_s[row]} tokens with the rows {first} to {end}")
    begin, shared = inputs.query_starts_s1[row], inputs.kv_begins_s[row]
    if begin < inputs.query_starts_s1[row + 1] and shared > inputs.positions_t[begin]:
        raise InternalError(f"row {row} is at {inputs.positions_t[begin]} and shares {shared} tokens")
    return int(first), int(end)


def adapter_slot(inputs: StepInputs, row: int) -> int:
    """Return the adapter slot of a row, which all its tokens share."""
    slots = inputs.adapters_t[inputs.query_starts_s1[row] : inputs.query_starts_s1[row + 1]]
    slot = int(inputs.adapters_t[inputs.sample_tokens_s[row]])
    if np.any(slots != slot):
        raise InternalError(f"row {row} of adapter slot {slot} has tokens of {slots.tolist()}")
    return slot
