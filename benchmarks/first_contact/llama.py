"""Steps of Llama 3 8B with random weights, in the engine: their time, and the shares of bandwidth and FLOP/s.

Prompts are in the prefix cache after the first call, so that the difference of two calls is decode steps alone. MBU and
MFU are the bytes and FLOPs that the plan counts, over the measured time and the data sheet's peaks.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.first_contact import estimates
from benchmarks.first_contact.cells import Cells, Values
from jpaged.hardware import find_hardware
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.hf_config import from_hf
from jpaged.plan.known_models import KNOWN_MODELS
from jpaged.types import SamplingParams

_FEW = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the check.

    Attributes:
        rows: batches to decode.
        context: tokens of a prompt.
        short, long: tokens that two calls generate; their difference is timed.
        fields: of the config, in place of the model's.
    """

    rows: tuple[int, ...]
    context: int
    short: int
    long: int
    num_batched_tokens: int
    fields: Mapping[str, Any]


SIZES = {
    "full": Sizes((1, 64, 256), 512, 8, 40, 2048, {}),
    "tiny": Sizes((1, 4), 32, 2, 6, 64, _FEW),
}
_BLOCK_SIZE = 32


def check(cells: Cells, size: str) -> None:
    """Load the model, and time prefill and decode at each number of rows."""
    sizes = SIZES[size]
    fields = {**KNOWN_MODELS["llama-3-8b"].fields, **sizes.fields}
    cells.plan(["start", *(f"{kind}, {rows} rows" for rows in sizes.rows for kind in ("prefill", "decode"))])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        loaded: list[LLM] = []
        cells.run("start", lambda: _start(folder, sizes, loaded), is_needed=True)
        for llm in loaded:
            for rows in sizes.rows:
                cells.run(f"prefill, {rows} rows", functools.partial(_prefill, llm, fields, sizes, rows))
                cells.run(f"decode, {rows} rows", functools.partial(_decode, llm, fields, sizes, rows))


def _start(folder: str, sizes: Sizes, loaded: list[LLM]) -> Values:
    """Load the model and compile all programs; the progress goes to the log."""
    begin_s, times = time.perf_counter(), dict[str, float]()
    num_programs = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal num_programs
        times[what] = time.perf_counter() - begin_s
        num_programs = max(num_programs, total)
        print(f"{times[what]:.1f} s: {what} {done} of {total}", flush=True)

    max_model_len = -(-(sizes.context + sizes.long + 1) // _BLOCK_SIZE) * _BLOCK_SIZE
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "block_size": _BLOCK_SIZE,
        "max_model_len": max_model_len,
        "num_blocks": (max(sizes.rows) + 1) * (max_model_len // _BLOCK_SIZE),
        "max_num_seqs": max(sizes.rows),
        "max_num_batched_tokens": sizes.num_batched_tokens,
        "swap_space": 0.0,
        "wait_for_all_programs": True,
    }
    llm = LLM(folder, progress=progress, **options)
    loaded.append(llm)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "start_s": time.perf_counter() - begin_s,
        "stages_end_s": {what: round(end_s, 2) for what, end_s in times.items()},
        "attention_backend": llm.config.model.attention_backend,
        "bytes_in_use": stats.get("bytes_in_use"),
    }


def _prefill(llm: LLM, fields: Mapping[str, Any], sizes: Sizes, rows: int) -> Values:
    _seconds(llm, sizes, 1, 2)  # touches memory for the first time
    llm.reset_prefix_cache()
    seconds = _seconds(llm, sizes, rows, 1)
    num_tokens = rows * sizes.context
    tokens = min(sizes.num_batched_tokens, num_tokens)
    step_s = seconds * tokens / num_tokens
    values = {"rows": rows, "tokens_per_s": num_tokens / seconds, "step_tokens": tokens, "step_s": step_s}
    return {**values, **_shares(fields, step_s, tokens=tokens, context=sizes.context)}


def _decode(llm: LLM, fields: Mapping[str, Any], sizes: Sizes, rows: int) -> Values:
    _seconds(llm, sizes, rows, 1)
    short_s, long_s = (_seconds(llm, sizes, rows, count) for count in (sizes.short, sizes.long))
    if long_s <= short_s:
        return {"rows": rows, "short_s": short_s, "long_s": long_s, "step_s": None}  # the machine was too busy
    step_s = (long_s - short_s) / (sizes.long - sizes.short)
    context = sizes.context + (sizes.short + sizes.long) / 2
    values = {"rows": rows, "context": context, "step_s": step_s, "tokens_per_s": rows / step_s}
    return {**values, **_shares(fields, step_s, rows=rows, context=context)}


def _shares(
    fields: Mapping[str, Any], step_s: float, *, rows: int = 0, tokens: int = 0, context: float
) -> dict[str, float]:
    """Return MBU, MFU and the planned time of a step; empty for a device that is not in the table."""
    hardware = find_hardware(jax.devices()[0].device_kind)
    if hardware is None:
        return {}
    times = estimates.step_times(from_hf(fields), hardware, _BLOCK_SIZE)
    step = estimates.decode_step(times, rows, context) if rows else estimates.prefill_step(times, tokens, int(context))
    mbu, mfu = (step[name] / step_s / peak for name, peak in _peaks(hardware).items())
    return {"mbu": mbu, "mfu": mfu, "planned_s": step["planned_s"], "over_planned": step_s / step["planned_s"]}


def _peaks(hardware: Any) -> dict[str, float]:
    return {"bytes": hardware.hbm_bytes_per_s, "flops": hardware.flops}


def _seconds(llm: LLM, sizes: Sizes, rows: int, max_tokens: int) -> float:
    """Time prompts that share nothing with each other; those of fewer rows are the first of those of more."""
    vocab_size = llm._serving.engine.geometry.vocab_size
    prompts = [
        TokensPrompt(prompt_token_ids=np.random.default_rng(i).integers(0, vocab_size, sizes.context).tolist())
        for i in range(rows)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin_s
    if any(output.error is not None for output in outputs):
        raise RuntimeError(str(next(output.error for output in outputs if output.error is not None)))
    return seconds
