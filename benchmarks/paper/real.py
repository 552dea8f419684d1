"""Figures 2, 13 and 15 on a real model: the same policies and the same counts, with tokens that are computed.

    python -m benchmarks.paper.real [--model demo]

All requests are there from the beginning, so that memory is full, as in the saturated simulation. Lengths are the
paper's Alpaca's, the pool is made small, and no request ends before its length. A batch's requests are the tokens that
were drawn over the steps that were run. Beams fork and die as the model's text has it: requests run one at a time, and
blocks in use are compared with what the sequences' tables would need, were nothing shared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.paper.table import Table
from benchmarks.record import machine
from jpaged.build import build
from jpaged.config import EngineConfig
from jpaged.errors import InternalError
from jpaged.service.input_processor import InputProcessor
from jpaged.service.loaded_model import EngineClient
from jpaged.types import OutputEvent, Prompt, SamplingParams

SEED = 0
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 256
_NUM_BLOCKS = 96
_NUM_REQUESTS = 48
_NUM_SHARING = 6
_TEXT = "Once upon a time a small fox lived at the edge of a quiet wood and wished for a friend to play with every day "
_SYSTEMS: dict[str, dict[str, str]] = {
    "paged": {},
    "oracle": {"kv_policy": "reserve-oracle"},
    "pow2": {"kv_policy": "reserve-pow2"},
    "max": {"kv_policy": "reserve-max"},
    "static": {"kv_policy": "reserve-max", "batching": "static"},
}


def occupancy(model: str) -> Table:
    """Figures 2 and 13: share of reserved slots that hold tokens, and requests in a batch."""
    table = Table(
        "real_f02_f13",
        f"F2, F13 on a real model ({model}, CPU): slots that hold tokens, and requests in a batch",
        [
            "Alpaca's lengths in a pool of 1536 slots and sequences of at most 256: compare the order only.",
            "paged is at 90 percent because the sequences are short: half a block of 16 is 8 of about 75 slots.",
        ],
        {"seed": SEED, "num_requests": _NUM_REQUESTS, **{k: str(v) for k, v in machine().items()}},
    )
    for system, options in _SYSTEMS.items():
        engine, processor = _engine(model, max_num_seqs=64, **options)
        _run(engine, processor, [_sampling(max_tokens=n) for n in _lengths(58.45, 0.9, 128, _NUM_REQUESTS)])
        load = engine.load()
        table.add(
            system=system,
            slots_with_tokens_percent=100 * load.slot_use,
            mean_batched_requests=load.num_generation_tokens / load.num_steps,
            steps=load.num_steps,
            preemptions=load.num_preemptions,
        )
        engine.stop()
    return table


def sharing(model: str) -> Table:
    """Figure 15: blocks saved by sharing / blocks without sharing."""
    table = Table(
        "real_f15",
        f"F15 on a real model ({model}, CPU): blocks saved by sharing, percent, Alpaca's lengths",
        [
            "Six requests one at a time; the demo model's own beams decide what is shared.",
            "Samples share the full blocks of their prompt alone: five of these six have one, half of Alpaca's do.",
        ],
        {"seed": SEED, "num_requests": _NUM_SHARING, **{k: str(v) for k, v in machine().items()}},
    )
    engine, processor = _engine(model, max_num_seqs=8)
    lengths = _lengths(58.45, 0.9, 128, _NUM_SHARING)
    for kind in ("parallel", "beam"):
        for size in (2, 4, 6):
            used = unshared = 0
            for i, length in enumerate(lengths):
                if kind == "parallel":
                    sampling = _sampling(max_tokens=length, n=size)
                else:
                    sampling = SamplingParams(max_tokens=length, beam_width=size, ignore_eos=True)
                more_used, more_unshared = _blocks(engine, processor, sampling, i)
                used, unshared = used + more_used, unshared + more_unshared
            table.add(kind=kind, size=size, paper=_PAPER[kind][size], ours=100 * (1 - used / unshared))
    engine.stop()
    return table


_PAPER = {"parallel": {2: 6.09, 4: 8.53, 6: 9.79}, "beam": {2: 37.56, 4: 53.13, 6: 55.16}}


def _blocks(engine: EngineClient, processor: InputProcessor, sampling: SamplingParams, number: int) -> tuple[int, int]:
    """(blocks in use, blocks that the tables would need unshared), summed over the steps of one request."""
    request = processor.make_request(
        request_id=f"r{number}", sampling=sampling, prompt=Prompt(token_ids=_prompt(processor, number))
    )
    ends: list[OutputEvent] = []
    engine.submit(request, lambda event: ends.append(event) if event.is_last else None)
    num_sequences = sampling.beam_width or sampling.n
    num_tokens = len(request.prompt_token_ids)
    used = unshared = 0
    while engine.step():
        if not ends:
            used += engine.load().num_blocks_used
            unshared += num_sequences * -(-num_tokens // _BLOCK_SIZE)
            num_tokens += 1
    return used, unshared


def _engine(model: str, **options: object) -> tuple[EngineClient, InputProcessor]:
    fixed = {
        "model": model,
        "block_size": _BLOCK_SIZE,
        "num_blocks": _NUM_BLOCKS,
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "preemption_mode": "recompute",
        "overlap": False,
    }
    loaded = build(EngineConfig.load({**fixed, "wait_for_all_programs": True, **options}))
    return loaded.engine, loaded.input_processor


def _run(engine: EngineClient, processor: InputProcessor, samplings: Sequence[SamplingParams]) -> None:
    num_left = len(samplings)

    def take(event: OutputEvent) -> None:
        nonlocal num_left
        if event.error is not None:
            raise event.error
        num_left -= event.is_last

    for i, sampling in enumerate(samplings):
        prompt = _prompt(processor, i)
        engine.submit(
            processor.make_request(request_id=f"r{i}", sampling=sampling, prompt=Prompt(token_ids=prompt)), take
        )
    while num_left:
        if not engine.step() and num_left:
            raise InternalError(f"{num_left} requests are in flight and the engine is idle")


def _prompt(processor: InputProcessor, number: int) -> list[int]:
    """About 19 tokens, of a text that begins elsewhere for each request."""
    token_ids = processor.tokenizer.encode(_TEXT)
    start = (7 * number) % len(token_ids)
    length = _lengths(19.31, 0.5, 64, _NUM_REQUESTS)[number % _NUM_REQUESTS]
    return (token_ids * 8)[start : start + length]


def _lengths(mean: float, sigma: float, high: int, count: int) -> list[int]:
    drawn = np.random.default_rng(SEED).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, high)]


def _sampling(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, seed=SEED, ignore_eos=True)


def main() -> None:
    """Writes both tables and prints them."""
    parser = argparse.ArgumentParser(description="Figures 2, 13 and 15 on a real model, with tokens that are computed.")
    parser.add_argument("--model", default="demo", help="`demo` or a folder in Hugging Face layout (default: demo)")
    arguments = parser.parse_args()
    for table in (occupancy(arguments.model), sharing(arguments.model)):
        table.save()
        print(f"{table}\n", flush=True)


if __name__ == "__main__":
    main()
