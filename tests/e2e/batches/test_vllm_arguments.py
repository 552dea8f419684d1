"""Arguments, attributes and methods of vLLM's Python API over an engine whose executor has no model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from jpaged import (
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from jpaged.demo import FOLDER as DEMO_FOLDER
from jpaged.errors import InvalidArgument, NotFound, Unavailable, Unsupported
from jpaged.llm import TokensPrompt
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.service.tokenizer_parts import read_parts
from jpaged.testing.fake_model import expected_tokens
from tests.e2e.test_vllm_names import GREEDY, IDS, Open, tokens


def test_prompts_of_vllm_may_have_empty_options_and_a_text_next_to_ids(open_model: Open) -> None:
    llm = open_model()
    given = [
        {"prompt_token_ids": IDS, "prompt": "its text", "mm_processor_kwargs": {}},
        TokensPrompt(prompt_token_ids=IDS, prompt="its text"),
    ]
    found = llm.generate(given, GREEDY, mm_processor_kwargs=None)
    assert tokens(found) == tokens(llm.generate([IDS, IDS], GREEDY))
    assert [one.prompt_token_ids for one in found] == [tuple(IDS)] * 2
    with pytest.raises(Unsupported, match=r"^mm_processor_kwargs: "):
        llm.generate(IDS, GREEDY, mm_processor_kwargs={"max_pixels": 1})
    with pytest.raises(Unsupported, match=r"^mm_processor_kwargs: "):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, mm_processor_kwargs={"max_pixels": 1})
    with pytest.raises(Unsupported, match=r"^prompts: mm_processor_kwargs: "):
        llm.generate({"prompt": "x", "mm_processor_kwargs": {"max_pixels": 1}}, GREEDY)
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True) >= 0


def test_parameters_are_copied_and_read_from_json() -> None:
    params = PoolingParams(dimensions=4)
    cloned = params.clone()
    cloned.dimensions = 2
    assert (params.dimensions, cloned.dimensions) == (4, 2)
    assert SamplingParams.from_optional(logit_bias={"3": 1.0}) == SamplingParams(logit_bias={3: 1.0})
    with pytest.raises(InvalidArgument, match=r"^logit_bias: 'x'"):
        SamplingParams.from_optional(logit_bias={"x": 1.0})


def test_beam_searches_have_vllms_parameters(open_model: Open) -> None:
    params = BeamSearchParams(2, 3, ignore_eos=True, skip_special_tokens=False)
    (found,) = open_model().beam_search([IDS], params)
    assert [len(one.tokens) for one in found.sequences] == [len(IDS) + 3] * 2
    for given in ({"structured_outputs": StructuredOutputsParams(regex="a")}, {"allowed_token_ids": [7]}):
        with pytest.raises(InvalidArgument, match=f"{next(iter(given))}: .* with beam_width"):
            BeamSearchParams(2, 3, **given).to_sampling()
    with pytest.raises(Unsupported, match="watermarking"):
        BeamSearchParams(2, 3, watermarking=True).to_sampling()


def test_engine_arguments_are_attributes(open_model: Open) -> None:
    args = EngineArgs(model="fake", max_num_seqs=3)
    args.seed, args.tensor_parallel_size = 5, None
    assert (args.model, args.seed, args.max_model_len, args.gpu_memory_utilization) == ("fake", 5, None, None)
    assert dataclasses.asdict(args) == dict(args.options)
    llm = open_model(**dataclasses.asdict(args))
    assert (llm.config.model.seed, llm.config.scheduler.max_num_seqs) == (5, 3)
    assert copy.deepcopy(args).options == args.options
    with pytest.raises(AttributeError, match="max_model_length"):
        _ = args.max_model_length


async def test_adapters_are_loaded_and_removed_by_vllms_names(
    open_model: Open, adapters: Callable[[str, int], LoRARequest]
) -> None:
    one, two = adapters("a", 1), adapters("b", 2)
    engine = open_model(LLMEngine, enable_lora=True)
    assert engine.add_lora(one) and engine.add_lora(two)
    assert (engine.list_loras(), one.adapter_id) == ({1, 2}, 1)
    assert (engine.remove_lora(1), engine.remove_lora(1), engine.list_loras()) == (True, False, {2})
    llm = open_model(AsyncLLM, enable_lora=True)
    assert await llm.add_lora(one)
    outputs = [output async for output in llm.generate(IDS, GREEDY, "1", lora_request=one)]
    assert tokens(outputs[-1:]) == [expected_tokens(IDS, 5, weight=1)]
    assert (await llm.list_loras(), await llm.remove_lora(1), await llm.list_loras()) == ({1}, True, set())
    with pytest.raises(NotFound):
        await llm.add_lora(LoRARequest("c", 3))


def test_an_adapter_is_read_again_in_place(open_model: Open, adapters: Callable[[str, int], LoRARequest]) -> None:
    llm, given = open_model(enable_lora=True), adapters("a", 7)
    assert tokens(llm.generate(IDS, GREEDY, lora_request=given)) == [expected_tokens(IDS, 5, weight=7)]
    Path(given.path).write_text("9")
    assert tokens(llm.generate(IDS, GREEDY, lora_request=given)) == [expected_tokens(IDS, 5, weight=7)]
    again = dataclasses.replace(given, load_inplace=True, base_model_name="fake")
    assert tokens(llm.generate(IDS, GREEDY, lora_request=again)) == [expected_tokens(IDS, 5, weight=9)]


async def test_streams_have_vllms_arguments(open_model: Open) -> None:
    llm = open_model(AsyncLLM)
    assert (await llm.get_supported_tasks(), await llm.is_tracing_enabled()) == (llm.supported_tasks, False)
    stream = llm.generate(IDS, GREEDY, "1", trace_headers={"traceparent": "x"}, data_parallel_rank=0)
    first = await anext(stream)
    assert (first.request_id, llm.get_num_unfinished_requests(), llm.is_stopped) == ("1", 1, False)
    await stream.aclose()
    pooled = llm.encode(IDS, PoolingParams(), "2", None, None, 0, {"truncate_prompt_tokens": 2})
    assert [one.prompt_token_ids async for one in pooled] == [(1, 5)]
    await llm.abort("2", internal=True)
    llm.shutdown(timeout=1.0)
    assert llm.is_stopped and isinstance(llm.dead_error, Unavailable)


def test_a_tokenizer_without_a_configuration_has_its_special_tokens(open_model: Open, tmp_path: Path) -> None:
    llm, parts = open_model(), read_parts(DEMO_FOLDER)
    tokenizer = HuggingFaceTokenizer(tmp_path, parts=parts)  # as of a GGUF file
    llm._serving = dataclasses.replace(llm._serving, tokenizer=tokenizer)
    found = llm.get_tokenizer()
    assert (found.eos_token, found.eos_token_id) == ("<|endoftext|>", 0)
    assert found.pad_token == parts.special_tokens["pad_token"]
