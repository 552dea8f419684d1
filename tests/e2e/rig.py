"""Real engines over tiny checkpoints, and what the tests ask of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jpaged.engine.engine import Engine
from jpaged.llm import LLM, TokensPrompt
from jpaged.types import CompletionOutput, RequestOutput, SamplingParams
from tests.models.tiny import tiny_case, write_checkpoint
from tests.on_demand import programs_on_demand

VOCAB_SIZE = 131
EOS_TOKEN_ID = 2


def write_model(name: str, folder: Path, *, with_tokenizer: bool = False) -> Path:
    """A tiny checkpoint of two layers; with a tokenizer, token n reads as "n," and such texts are encoded back."""
    case = tiny_case(name)
    write_checkpoint(dataclasses.replace(case, config={**case.config, "num_hidden_layers": 2}), folder)
    if with_tokenizer:
        inner = Tokenizer(models.WordLevel({f"{n},": n for n in range(VOCAB_SIZE)}, unk_token="0,"))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+,"), "isolated")
        inner.decoder = decoders.Fuse()
        inner.save(str(folder / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    return folder


@contextmanager
def open_llm(folder: Path | str, **options: Any) -> Iterator[LLM]:
    """An LLM in float32 with the fewest programs that serve; afterwards no block is lost and nothing was compiled.

    In the quick suite its programs are compiled on demand, which does not count.
    """
    few = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 8, "wait_for_all_programs": True}
    with programs_on_demand():
        llm = LLM(str(folder), **{**few, **options})
    with llm:
        yield llm
        check_at_rest(llm)


def engine_of(llm: LLM) -> Engine:
    """The one engine behind the face."""
    engine = llm._serving.engine
    assert isinstance(engine, Engine)
    return engine


def check_at_rest(llm: LLM) -> None:
    """Nothing runs, every block came back, and no program was compiled while serving."""
    load = llm.load()  # after the last step
    llm._serving.engine.check()
    assert (load.num_running, load.num_waiting, load.num_blocks_used) == (0, 0, 0)
    assert load.num_blocks_free == load.num_blocks
    assert load.num_compiles_after_warm_up == 0


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[CompletionOutput]:
    """One completion for each prompt of token ids."""
    wrapped = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [only(output) for output in llm.generate(wrapped, params)]


def only(output: RequestOutput) -> CompletionOutput:
    (completion,) = output.outputs
    assert output.usage.completion_tokens == len(completion.token_ids)
    assert output.usage.prompt_tokens == len(output.prompt_token_ids)
    return completion


def chosen_logprobs(completion: CompletionOutput) -> list[float]:
    """Log-probability of each generated token."""
    assert completion.logprobs is not None
    assert [position.chosen.token_id for position in completion.logprobs] == list(completion.token_ids)
    return [position.chosen.logprob for position in completion.logprobs]


def assert_same(got: Sequence[CompletionOutput], want: Sequence[CompletionOutput], atol: float = 1e-5) -> None:
    """The same tokens, texts and ends, and log-probabilities that differ by rounding alone."""
    assert len(got) == len(want)
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.token_ids == b.token_ids, f"completion {place}"
        assert (a.text, a.finish_reason, a.matched_stop) == (b.text, b.finish_reason, b.matched_stop)
        np.testing.assert_allclose(chosen_logprobs(a), chosen_logprobs(b), rtol=0, atol=atol)
