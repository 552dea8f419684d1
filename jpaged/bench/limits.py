"""Hardware limits for a model, and the share of them that a run reached.

    bytes   every step reads all weights once, and the keys and values of every row's context
    FLOPs   2 * weights per token (the output matrix only for sampled ones), 4 * layers * query width per score
    limit   the greater of bytes / bandwidth and FLOPs / peak
    MBU     bytes / (seconds * bandwidth)       MFU   FLOPs / (seconds * peak)

Prompts from the prefix cache count as if they were computed: MFU is of the model's work, not of the machine's.
Bandwidth and peak of a CPU are measured (`jpaged bench probe`); those of accelerators are the data sheet's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jpaged.bench.metrics import Trace
from jpaged.hardware import HARDWARE, OTHER_HARDWARE
from jpaged.plan.cost import ModelShape

_PROBE_BYTES = 512 << 20
"""More than any cache holds."""
_PROBE_WIDTH = 1536
_NUM_PROBES = 5


@dataclass(frozen=True, slots=True)
class HardwareLimits:
    """Peak rates of all devices of one server together.

    Attributes:
        bytes_per_s: memory read bandwidth.
        flops_per_s: rate of matrix products in the model's type.
        source: origin of the two numbers.
    """

    bytes_per_s: float
    flops_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Cost of a step of a model.

    Attributes:
        shape: sizes of the weights and of the attention reads.
    """

    shape: ModelShape

    def work(self, lens: Iterable[tuple[int, int]], num_steps: int, num_rows: float = math.inf) -> StepWork:
        """Return the minimum work of requests.

        Args:
            lens: (prompt tokens, generated tokens) of each.
            num_steps: number of steps, each of which reads the weights.
            num_rows: rows per step; only the experts that these rows choose are read.
        """
        shape, flops, kv_tokens, num_decoded = self.shape, 0.0, 0.0, 0
        for prompt_len, output_len in lens:
            num_run = prompt_len + max(0, output_len - 1)
            flops += 2 * shape.token_params * num_run + 2 * shape.head_params * output_len
            flops += 4 * shape.num_layers * shape.query_width * num_run * (num_run + 1) / 2
            kv_tokens += (num_run * (num_run + 1) - prompt_len * (prompt_len + 1)) / 2
            num_decoded += max(0, output_len - 1)
        state_bytes = 2 * shape.state_bytes * num_decoded
        return StepWork(
            num_steps * shape.read_bytes(num_rows) + kv_tokens * shape.kv_bytes_per_token + state_bytes, flops
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """Bytes to read and operations to compute."""

    num_bytes: float
    flops: float

    def seconds(self, limits: HardwareLimits) -> float:
        """Return the minimum time for the work."""
        return max(self.num_bytes / limits.bytes_per_s, self.flops / limits.flops_per_s)


def offline_shares(
    model: ServedModel, limits: HardwareLimits, lens: Sequence[tuple[int, int]], max_num_seqs: int, elapsed_s: float
) -> dict[str, float]:
    """Return the shares that a run of `lens` in `elapsed_s` reached, with at most `max_num_seqs` rows per step."""
    output_lens = [output_len for _, output_len in lens]
    num_steps = max(*output_lens, -(-sum(output_lens) // max_num_seqs))
    work = model.work(lens, num_steps, sum(output_lens) / num_steps)
    return {
        "mbu": work.num_bytes / (elapsed_s * limits.bytes_per_s),
        "mfu": work.flops / (elapsed_s * limits.flops_per_s),
        "limit_seconds": work.seconds(limits),
        "share_of_limit": work.seconds(limits) / elapsed_s,
    }


def serving_shares(
    model: ServedModel, limits: HardwareLimits, traces: Sequence[Trace], duration_s: float
) -> dict[str, float | None]:
    """Return the shares of a served run: MFU over all of it, MBU of the mean decode step.

    The mean step takes the mean time per output token; its rows are the mean number of open streams. If no request had
    a second token there is no such step, and its numbers are None.
    """
    good = [trace for trace in traces if not trace.error]
    work = model.work(((trace.prompt_len, trace.output_len) for trace in good), 0)
    shares: dict[str, float | None] = {"mfu": work.flops / (duration_s * limits.flops_per_s)}
    decoding = [trace for trace in good if trace.output_len > 1]
    decode_s = [trace.end_s - trace.first_s for trace in decoding]
    num_decoded = sum(trace.output_len - 1 for trace in decoding)
    if not num_decoded or not sum(decode_s):
        return shares | {"mbu": None, "limit_tpot_ms": None, "share_of_limit": None}
    step_s, busy_s = sum(decode_s) / num_decoded, _covered_s(decoding)
    rows = sum(decode_s) / busy_s
    contexts = [s * (t.prompt_len + t.output_len / 2) for t, s in zip(decoding, decode_s, strict=True)]
    kv_tokens = sum(contexts) / busy_s
    shape = model.shape
    step = StepWork(
        shape.moved_bytes(rows, rows) + kv_tokens * shape.kv_bytes_per_token,
        2 * rows * (shape.token_params + shape.head_params) + 4 * shape.num_layers * shape.query_width * kv_tokens,
    )
    return shares | {
        "mbu": step.num_bytes / (step_s * limits.bytes_per_s),
        "limit_tpot_ms": 1e3 * step.seconds(limits),
        "share_of_limit": step.seconds(limits) / step_s,
    }


def _covered_s(traces: Sequence[Trace]) -> float:
    """Return the seconds in which at least one of the requests was decoding."""
    covered, until_s = 0.0, float("-inf")
    for first_s, end_s in sorted((trace.first_s, trace.end_s) for trace in traces):
        covered += max(0.0, end_s - (first_s if first_s > until_s else until_s))
        until_s = max(until_s, end_s)
    return covered


def of_accelerator(name: str, num_devices: int) -> HardwareLimits:
    """Return the limits of an accelerator in the table."""
    device = HARDWARE.get(name) or OTHER_HARDWARE[name]
    count = f"{num_devices} x " if num_devices > 1 else ""
    return HardwareLimits(
        num_devices * device.hbm_bytes_per_s, num_devices * device.flops, f"data sheet of {count}{name}"
    )


def probe() -> HardwareLimits:
    """Measure this machine with numpy: a matrix times a vector, and a product of matrices, in float32."""
    matrix = np.ones((_PROBE_BYTES // 4 // 8192, 8192), np.float32)
    vector = np.ones(8192, np.float32)
    square = np.ones((_PROBE_WIDTH, _PROBE_WIDTH), np.float32)
    read_s = _best_s(lambda: matrix @ vector)
    product_s = _best_s(lambda: square @ square)
    return HardwareLimits(matrix.nbytes / read_s, 2 * _PROBE_WIDTH**3 / product_s, "measured: numpy, float32")


def _best_s(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs, after one that is not timed."""
    run()
    times = []
    for _ in range(_NUM_PROBES):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return min(times)


def as_record(limits: HardwareLimits | None, reason: str) -> dict[str, Any]:
    """Return the record of the limits in a result; with a reason if there are none."""
    return {"source": reason} if limits is None else asdict(limits)
