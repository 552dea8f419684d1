"""Contexts in parts with every other option: one mix of requests gives the tokens that one device gives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import LLM
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.llm import TokensPrompt
from jpaged.service.kv_protocol import get_facts
from jpaged.structured import StructuredOutputs
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import open_llm, random_prompts, write_model
from tests.models.adapters import TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_programs")]

SIZES: dict[str, Any] = {"num_blocks": 120, "block_size": 8, "max_model_len": 120, "max_num_batched_tokens": 32}
HOT = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
MIX: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3),
    "penalties": dataclasses.replace(HOT, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    "edits": dataclasses.replace(HOT, logit_bias={7: 4.0, 9: -100.0}, min_tokens=6, bad_words=["12,", "13,14,"]),
    "truncated": dataclasses.replace(HOT, top_k=20, top_p=0.9, min_p=0.01),
    "unusual": dataclasses.replace(HOT, typical_p=0.8, top_n_sigma=1.5),
    "allowed": dataclasses.replace(HOT, allowed_token_ids=range(20, 60)),
    "several": dataclasses.replace(HOT, n=3),
    "best": dataclasses.replace(HOT, n=2, best_of=3),
    "beams": SamplingParams(beam_width=3, n=2, temperature=0.0, max_tokens=10),
    "prompt": SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=2),
    "stop": SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, stop=["5,"], ignore_eos=True),
}
"""A request of each kind, all of them in one engine."""

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 6}
MODEL = "llama3_tied"
PARTS: dict[str, Any] = {"context_parallel_size": 2}


def prompts_of(num: int) -> list[list[int]]:
    """Two blocks and a part of the third in common, then something that comes again, which is proposed from."""
    (common,) = random_prompts([19])
    return [
        [*common, *own, *own[: 3 + i % 3]]
        for i, own in enumerate(random_prompts([3 + 5 * (i % 5) for i in range(num)], 7))
    ]


def answers(llm: LLM, *, adapter: Sequence[str | None] | None = None) -> list[RequestOutput]:
    """The mix twice, behind its own prefixes the second time."""
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts_of(len(MIX))]
    params = [*MIX.values()]
    if adapter is not None:
        return [*llm.generate(prompts, params, adapter=adapter), *llm.generate(prompts, params, adapter=adapter)]
    return [*llm.generate(prompts, params), *llm.generate(prompts, params)]


def assert_alike(got: Sequence[RequestOutput], want: Sequence[RequestOutput], atol: float) -> None:
    assert len(got) == len(want) == 2 * len(MIX)
    for kind, a, b in zip([*MIX, *MIX], got, want, strict=True):
        assert [(one.token_ids, one.text, one.finish_reason) for one in a.outputs] == [
            (one.token_ids, one.text, one.finish_reason) for one in b.outputs
        ], kind
        for one, other in zip(a.outputs, b.outputs, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            found, wanted = ([position.chosen.logprob for position in each.logprobs or ()] for each in (one, other))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=kind)
        assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None) == (kind != "prompt")
        for at_a, at_b in zip(a.prompt_logprobs or (), b.prompt_logprobs or (), strict=True):
            assert (at_a is None) == (at_b is None)
            if at_a is not None and at_b is not None:
                np.testing.assert_allclose(at_a.chosen.logprob, at_b.chosen.logprob, rtol=0, atol=atol)


def check(folder: Path, parts: dict[str, Any], options: dict[str, Any], atol: float = 3e-5) -> None:
    """The answers are those of one device, which has the options that change numbers too."""
    alone: dict[str, Any] = {name: options[name] for name in ("kv_cache_dtype", "quantization") if name in options}
    alone["activation_dtype"] = "model"  # as on several devices
    with open_llm(folder, **SIZES, **alone) as llm:
        want = answers(llm)
    with open_llm(folder, **{**SIZES, **parts, **options}) as llm:
        got = answers(llm)
        load = llm.load()
        if "preemption_mode" in options:
            assert load.num_preemptions > 0
            assert (load.num_blocks_swapped_in > 0) == (options["preemption_mode"] == "swap")
        if "speculative_config" in options:
            assert load.speculation.num_draft_tokens > 0
        caches = options.get("enable_prefix_caching", True)
        assert (load.num_prefix_hit_tokens > 0) == caches
    assert_alike(got, want, atol)


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        (PARTS, {}),
        ({"context_parallel_size": 8}, {}),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, {}),
        (PARTS, {"kv_cache_dtype": "int8"}),
        (PARTS, {"kv_cache_dtype": "fp8", "attention_backend": "xla"}),
        (PARTS, {"quantization": "int8"}),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2}, {"quantization": "int4", "kv_cache_dtype": "fp8"}),
        (PARTS, {"speculative_config": json.dumps(SUFFIX)}),
        ({"context_parallel_size": 4}, {"speculative_config": json.dumps(NGRAM), "kv_cache_dtype": "int8"}),
        (PARTS, {"num_scheduler_steps": 4}),
        (PARTS, {"preemption_mode": "swap", "num_blocks": 16, "swap_space": 0.01}),
        (PARTS, {"preemption_mode": "recompute", "num_blocks": 16, "swap_space": 0.0}),
        ({"context_parallel_size": 4}, {"kv_policy": "reserve-pow2", "enable_prefix_caching": False}),
        (PARTS, {"max_num_batched_tokens": 8, "policy": "fair"}),
        (PARTS, {"eviction_policy": "worth", "num_blocks": 40}),
    ],
    ids=str,
)
def test_the_mix_is_the_same_in_parts(parts: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    is_rounded = {"kv_cache_dtype", "quantization"} & options.keys()
    check(write_model(MODEL, tmp_path, with_tokenizer=True), parts, options, 2e-3 if is_rounded else 3e-5)


@pytest.mark.parametrize(
    ("name", "num_parts", "options"),
    [
        ("gemma2", 3, {"tensor_parallel_size": 2, "block_size": 12}),  # scores are capped; a window of 9 in some layers
        ("gemma3", 3, {"block_size": 12}),
        ("gpt_oss", 3, {"block_size": 12}),  # sinks, a window of 9
        ("mixtral", 2, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek_v3", 4, {"kv_cache_dtype": "int8"}),
        ("qwen3_moe", 2, {"quantization": "int8"}),
        ("starcoder2", 4, {"speculative_config": json.dumps(SUFFIX)}),  # a window of 12
        ("falcon_mqa", 4, {"tensor_parallel_size": 2}),
        ("llama_dynamic_long", 2, {}),  # a prefix is rotated by the length that it grows to
    ],
)
def test_every_attention_is_the_same_in_parts(
    name: str, num_parts: int, options: dict[str, Any], tmp_path: Path
) -> None:
    case = tiny_case(name)
    folder = write_model(MODEL, tmp_path, with_tokenizer=True)  # for its tokenizer
    write_checkpoint(case, folder)
    is_rounded = {"kv_cache_dtype", "quantization"} & options.keys()
    check(folder, {"context_parallel_size": num_parts}, options, 2e-3 if is_rounded else 1e-4)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"preemption_mode": "swap", "num_blocks": 16}])
def test_adapters_are_the_same_in_parts(options: dict[str, Any], tmp_path: Path) -> None:
    case = tiny_case("llama_gqa_bias")
    folder = write_checkpoint(case, write_model(MODEL, tmp_path / "base", with_tokenizer=True))
    for adapter in (TinyAdapter(case, "a"), TinyAdapter(case, "b", 2, 7.0)):
        adapter.write(tmp_path / adapter.name)
    lora = {"lora": [f"{name}={tmp_path / name}" for name in "ab"], "max_loras": 2}
    names = [(None, "a", "b")[i % 3] for i in range(len(MIX))]
    with open_llm(folder, **SIZES, **lora) as llm:
        want = answers(llm, adapter=names)
    with open_llm(folder, **{**SIZES, **lora, **PARTS, **options}) as llm:
        got = answers(llm, adapter=names)
    assert_alike(got, want, 3e-5)


@pytest.mark.parametrize(
    "options", [{}, {"num_scheduler_steps": 4}, {"speculative_config": json.dumps(NGRAM)}], ids=str
)
def test_grammars_are_followed_alike_in_parts(options: dict[str, Any]) -> None:
    """The demo model, whose tokens are pieces of text."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}}}
    grammars = [
        StructuredOutputs(regex="(a|b|the cat )+[0-9]{2,5}"),
        StructuredOutputs(choice=["yes", "no", "perhaps not today"]),
        StructuredOutputs(json={**schema, "required": ["a", "b"]}, always_complete=True),
    ]
    params = [
        dataclasses.replace(HOT, structured_outputs=grammar, seed=seed, max_tokens=60, ignore_eos=False)
        for seed, grammar in enumerate(grammars)
    ]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts_of(len(params))]
    found = []
    for parts in ({}, PARTS, {"context_parallel_size": 2, "tensor_parallel_size": 2}):
        with open_llm("demo", **SIZES, **(options | parts if parts else {})) as llm:
            found.append([(one.outputs[0].token_ids, one.outputs[0].text) for one in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2]


def test_random_weights_are_those_of_one_device(tmp_path: Path) -> None:
    folder = write_model(MODEL, tmp_path, with_tokenizer=True)
    with open_llm(folder, **SIZES, load_format="dummy") as llm:
        want = answers(llm)
    with open_llm(folder, **SIZES, **PARTS, load_format="dummy") as llm:
        assert_alike(answers(llm), want, 3e-5)


def test_blocks_mean_something_else_in_another_number_of_parts(tmp_path: Path) -> None:
    """They are of one size, and a server that is refused is told what differs."""
    folder, facts, identities = write_model(MODEL, tmp_path), [], set()
    for num_parts in (1, 2, 4):
        with open_llm(folder, **SIZES, swap_space=0.005, context_parallel_size=num_parts) as llm:
            facts.append(get_facts(llm._serving))
            identities.add(llm._serving.engine.kv_transfer.kv_identity())
    assert len(identities) == 3
    for other in facts[1:]:
        assert {name for (name, one), (_, two) in zip(facts[0], other, strict=True) if one != two} == {
            "context_parallel_size"
        }


def test_packed_weights_are_refused_by_both_names(tmp_path: Path) -> None:
    with (
        pytest.raises(
            Unsupported,
            match=r"linear_backend: cpu cannot run here: contexts are .* 2 devices \(context_parallel_size\)",
        ),
        open_llm(write_model(MODEL, tmp_path), **PARTS, linear_backend="cpu"),
    ):
        pass


def test_a_window_that_no_sequence_fills_need_not_divide(tmp_path: Path) -> None:
    """Nothing is hidden by it; one token more and it would be refused."""
    folder = write_checkpoint(tiny_case("phi3"), tmp_path)  # a window of 11
    sizes = {**SIZES, "max_model_len": 11}
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts([6, 3])]
    with open_llm(folder, **sizes) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with open_llm(folder, **sizes, **PARTS) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == want
    with (
        pytest.raises(InvalidArgument, match=r"context_parallel_size: 2 does not divide .* window of 11 tokens"),
        open_llm(folder, **{**sizes, "max_model_len": 12}, **PARTS),
    ):
        pass
