"""Whatever is asked for: serving compiles nothing, every block comes back, and a second start compiles nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jpaged.llm import LLM, TextPrompt, TokensPrompt
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import EOS_TOKEN_ID, check_at_rest, engine_of, only, open_llm, random_prompts, write_model

OPTIONS = {"max_num_seqs": 12, "max_num_batched_tokens": 20, "block_size": 4, "max_model_len": 96, "num_blocks": 60}
ROOT = Path(__file__).parents[2]

# Run in a process of its own: starts the same engine, counts what the persistent cache did, and runs a step.
START = """
import json, sys
from jax import monitoring

events = []
monitoring.register_event_listener(lambda event, **_: events.append(event))

from jpaged.llm import LLM
from jpaged.types import SamplingParams

options = json.loads(sys.argv[2])
with LLM(sys.argv[1], **options) as llm:
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0.0, max_tokens=9))[0]
    engine = llm._serving.engine
    found = {"compiled": engine.load().num_compiles_after_warm_up, "programs": len(engine._executor._programs.ready)}
unused = {"flax", "optax", "orbax", "tensorstore", "transformers", "huggingface_hub", "jax.experimental.pallas"}
found["imported"] = sorted(unused & sys.modules.keys())
found["misses"] = events.count("/jax/compilation_cache/cache_misses")
print(json.dumps({**found, "tokens": output.outputs[0].token_ids}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama_gqa_bias", tmp_path_factory.mktemp("model"), with_tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, **OPTIONS) as llm:
        yield llm


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Each feature on or off by a coin."""

    def coin() -> bool:
        return bool(rng.integers(2))

    max_tokens = int(rng.integers(1, 40))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(max_tokens + 1)) if coin() else 0,
        temperature=float(rng.uniform(0.1, 2.0)) if coin() else 0.0,
        top_k=int(rng.integers(1, 140)) if coin() else 0,
        top_p=float(rng.uniform(0.05, 1.0)) if coin() else 1.0,
        min_p=float(rng.uniform(0.0, 0.3)) if coin() else 0.0,
        seed=int(rng.integers(2**63)) if coin() else None,
        logprobs=int(rng.integers(21)) if coin() else None,
        stop=[f"{n}," for n in rng.integers(0, 10, 3)] if coin() else [],
        stop_token_ids=rng.integers(0, 131, 5).tolist() if coin() else [],
        ignore_eos=coin(),
        skip_special_tokens=coin(),
    )


def check_output(output: RequestOutput, params: SamplingParams) -> None:
    """Everything that can be said of an answer without knowing the model."""
    completion = only(output)
    token_ids, text = completion.token_ids, completion.text
    assert params.max_tokens is not None
    assert params.min_tokens <= len(token_ids) <= params.max_tokens
    ends = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, EOS_TOKEN_ID}
    assert not ends.intersection(token_ids[:-1])
    shown = token_ids[:-1] if token_ids[-1] in ends else token_ids
    whole = "".join(f"{token_id}," for token_id in shown)
    if isinstance(completion.matched_stop, str):
        assert completion.matched_stop in params.stop
        assert whole.startswith(text + completion.matched_stop)
    else:
        assert text == whole
    is_stopped = isinstance(completion.matched_stop, str) or token_ids[-1] in ends
    assert completion.finish_reason == ("stop" if is_stopped else "length")
    if not is_stopped:
        assert len(token_ids) == params.max_tokens
    check_logprobs(output, params)


def check_logprobs(output: RequestOutput, params: SamplingParams) -> None:
    completion = only(output)
    if params.logprobs is None:
        assert completion.logprobs is None
        return
    assert completion.logprobs is not None
    assert [p.chosen.token_id for p in completion.logprobs] == list(completion.token_ids)
    assert completion.cumulative_logprob == pytest.approx(sum(p.chosen.logprob for p in completion.logprobs), abs=1e-4)
    for position in completion.logprobs:
        assert len(position.top) == params.logprobs
        values = [token.logprob for token in position.top]
        assert values == sorted(values, reverse=True)
        rank = position.chosen.rank
        assert rank is not None
        if rank <= params.logprobs:
            assert position.top[rank - 1].logprob == pytest.approx(position.chosen.logprob, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_random_workload_compiles_nothing_and_loses_no_block(llm: LLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = [random_params(rng) for _ in range(40)]
    prompts = random_prompts(rng.integers(1, 57, 40).tolist(), seed)
    as_text = [TextPrompt(prompt="".join(f"{token_id}," for token_id in prompt)) for prompt in prompts]
    as_ids = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    mixed = [text if rng.integers(2) else ids for text, ids in zip(as_text, as_ids, strict=True)]
    outputs = llm.generate(mixed, params)
    for output, prompt, how in zip(outputs, prompts, params, strict=True):
        assert list(output.prompt_token_ids) == prompt
        check_output(output, how)
    check_at_rest(llm)


def test_the_workload_was_hard_enough(llm: LLM) -> None:
    """Sixty blocks of four hold four of the longest requests, while twelve may run."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    before = engine_of(llm).load()
    llm.generate([TokensPrompt(prompt_token_ids=p) for p in random_prompts([20] * 12)], params)
    after = engine_of(llm).load()
    assert after.num_preemptions > before.num_preemptions
    assert after.peak_blocks_used >= 55


@pytest.mark.long
def test_a_second_start_loads_every_program_from_the_cache(folder: Path) -> None:
    # Two processes of their own: what this one compiled for other tests, before they named a cache, is not in it.
    options = json.dumps({**OPTIONS, "dtype": "float32", "wait_for_all_programs": True})
    command = [sys.executable, "-c", START, str(folder), options]
    starts = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        starts.append(json.loads(done.stdout))
    first, second = starts
    # Forwards of 8, 16 and 20 tokens; samples of 8 and 12 rows, each in three details.
    assert second["programs"] == first["programs"] >= 3 + 2 * 3
    assert (second["misses"], second["compiled"]) == (0, 0)
    assert second["tokens"] == first["tokens"]
    # What a start needs no part of takes no time to import.
    assert (first["imported"], second["imported"]) == ([], [])
