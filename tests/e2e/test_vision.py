"""Greedy tokens of prompts with images equal those of the model without an engine, whatever happens to a request."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.engine.scheduler.output import rope_shifts
from jpaged.errors import Unsupported
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.model import Model
from jpaged.models.tokens import InputEmbeds, TokenBatch
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.prompt_embeds import with_digests
from jpaged.types import EmbeddedSpan, PromptEmbeds, SamplingParams
from tests.e2e.rig import engine_of, open_llm
from tests.models import dense
from tests.models.vision import pictures, write_vision_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PICTURES = pictures((20, 32), (31, 9), (70, 50))
PROMPTS: Sequence[Sequence[int | np.ndarray]] = [
    [3, 20, 40, 50],
    [3, 20, PICTURES[0], 33, 34],
    [3, 21, 22, PICTURES[1], 60, PICTURES[2], 61],
    [3, 21, 22, PICTURES[0], 60, PICTURES[2], 62],
    [PICTURES[2], 4],
]


class Expanded:
    """Prompts with images as tokens and rows of the encoder.

    Args:
        serving: the loaded model.
    """

    def __init__(self, serving: LoadedModel, prompt: Sequence[int | np.ndarray]) -> None:
        assert serving.vision is not None
        self.token_ids: list[int] = []
        self.spans: list[EmbeddedSpan] = []
        images = [serving.vision.processor.prepare(part) for part in prompt if isinstance(part, np.ndarray)]
        encoded = iter(zip(images, serving.vision.encoder.encode(images), strict=True))
        for part in prompt:
            if not isinstance(part, np.ndarray):
                self.token_ids.append(part)
                continue
            image, rows = next(encoded)
            places = np.flatnonzero(image.is_embed_t) + len(self.token_ids)
            starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
            for begin, rows_te in zip(places[starts], np.split(rows, starts[1:]), strict=True):
                self.spans.append(EmbeddedSpan(int(begin), rows_te, rope_grid=image.rope_grid))
            self.token_ids += image.token_ids


@contextmanager
def reading_images(llm: LLM, prompts: Sequence[Expanded]) -> Iterator[list[TokensPrompt]]:
    """Prompts of tokens whose spans the input processor adds."""
    processor: Any = llm._serving.input_processor
    block_size = engine_of(llm).geometry.block_size
    known = {tuple(one.token_ids): one for one in prompts}
    before = processor._inputs

    def inputs(*args: Any) -> Any:
        token_ids, _ = before(*args)
        spans = known[tuple(token_ids)].spans
        return token_ids, with_digests(spans, len(token_ids), block_size) if spans else None

    processor._inputs = inputs
    yield [TokensPrompt(prompt_token_ids=one.token_ids) for one in prompts]
    processor._inputs = before


def greedy(folder: Path, prompt: Expanded, num_tokens: int) -> tuple[int, ...]:
    """Tokens from a full recomputation without an engine."""
    model = Model(read_config(folder), np.dtype(np.float32))
    params = load_params(model, folder, "loop")
    token_ids, start = list(prompt.token_ids), len(prompt.token_ids)
    length = start + num_tokens
    given, is_embed = np.zeros((length, model.config.embed_width), np.float32), np.zeros(length, np.bool_)
    for span in prompt.spans:
        given[span.start : span.stop], is_embed[span.start : span.stop] = span.values_te, True
    positions_t = jnp.arange(length, dtype=jnp.int32)
    embeds = InputEmbeds(jnp.asarray(is_embed), jnp.asarray(given))
    numbers_t = jnp.where(is_embed, np.cumsum(np.diff(is_embed, prepend=False)), -1)
    assert model.config.vision is not None
    attend = functools.partial(dense.attend, images_t=numbers_t if model.config.vision.is_bidirectional else None)
    axes_3t = positions_t - rope_shifts(PromptEmbeds(tuple(prompt.spans), ()), 0, length)

    @jax.jit
    def logits(ids_t: jax.Array) -> jax.Array:
        tokens = TokenBatch(ids_t, positions_t, jnp.full_like(positions_t, length), embeds=embeds, rope_axes_3t=axes_3t)
        hidden_te, _ = model.run(params, tokens, attend, (), "loop")
        return model.logits(params, hidden_te)

    for _ in range(num_tokens):
        ids_t = np.array(token_ids + [0] * (length - len(token_ids)), np.int32)
        token_ids.append(int(logits(ids_t)[len(token_ids) - 1].argmax()))
    return tuple(token_ids[start:])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mistral3", {}),
        ("mistral3", {"max_num_batched_tokens": 64}),
        ("mistral3", {"tensor_parallel_size": 2}),
        ("mistral3", {"enable_prefix_caching": False}),
        ("gemma3", {"max_num_batched_tokens": 64}),
        ("gemma3", {"max_num_batched_tokens": 26}),
        ("gemma3", {"tensor_parallel_size": 2, "num_scheduler_steps": 1, "max_num_batched_tokens": 32}),
        ("gemma3", {"attention_backend": "xla", "max_num_batched_tokens": 40}),
        ("qwen2_5_vl", {}),
        ("qwen2_5_vl", {"context_parallel_size": 2}),
        ("qwen2_5_vl", {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16}),
        ("qwen3_vl", {"max_num_batched_tokens": 64}),
        ("qwen3_vl", {"tensor_parallel_size": 2}),
        ("qwen2_5_vl", {"tensor_parallel_size": 2, "max_num_batched_tokens": 64}),
        ("qwen2_5_vl", {"num_scheduler_steps": 1, "overlap": False}),
    ],
    ids=str,
)
def test_greedy_tokens_equal_those_without_an_engine(name: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """In mixed batches, in chunks that split images, preempted, after cached prefixes, and on two devices."""
    write_vision_checkpoint(name, tmp_path)
    with open_llm(tmp_path, **{"num_blocks": 96, "block_size": 4, "max_model_len": 80, **options}) as llm:
        prompts = [Expanded(llm._serving, prompt) for prompt in PROMPTS]
        want = [greedy(tmp_path, prompt, 8) for prompt in prompts]
        assert len(set(want)) == len(want)
        with reading_images(llm, prompts) as given:
            for _ in range(2):
                outputs = llm.generate(given, GREEDY)
                assert [output.outputs[0].token_ids for output in outputs] == want
            cached = [output.usage.cached_tokens for output in outputs]
        vision: Any = llm._serving.vision
        assert not vision.encoder._programs  # all are of the executor's list
        if "enable_prefix_caching" not in options:
            assert all(cached[1:])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mode"),
    [("mistral3", "recompute"), ("mistral3", "swap"), ("gemma3", "swap"), ("qwen2_5_vl", "swap"), ("qwen3_vl", "auto")],
)
def test_preempted_requests_keep_their_images(name: str, mode: str, tmp_path: Path) -> None:
    write_vision_checkpoint(name, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    num_blocks = 36 if name == "gemma3" else 16  # layers with windows have their own blocks
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": 4,
        "max_model_len": 60,
        "max_num_batched_tokens": 64,
    }
    with open_llm(tmp_path, **options, preemption_mode=mode) as llm:
        prompts = [Expanded(llm._serving, [token_id, PICTURES[token_id % 2], 5]) for token_id in range(20, 26)]
        with reading_images(llm, prompts) as given:
            outputs = llm.generate(given, params)
        assert [one.outputs[0].token_ids for one in outputs] == [greedy(tmp_path, one, 24) for one in prompts]
        assert engine_of(llm).load().num_preemptions > 0


@pytest.mark.long
def test_prompt_embeds_stay_refused_without_their_option(tmp_path: Path) -> None:
    write_vision_checkpoint("mistral3", tmp_path)
    with (
        open_llm(tmp_path, num_blocks=24, block_size=4, max_model_len=80) as llm,
        pytest.raises(Unsupported, match="prompt_embeds: the model was loaded without --enable-prompt-embeds"),
    ):
        llm.generate({"prompt_embeds": np.zeros((3, 64), np.float32)}, GREEDY)
