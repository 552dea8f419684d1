"""vLLM's Python API over an engine whose executor has no model: arguments, outputs, streams, steps."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import jpaged.outputs
import jpaged.sampling_params
from jpaged import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from jpaged.checkpoints.pooler import CheckpointPooler, Dense
from jpaged.client.convert import sampling_message
from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable, Unsupported
from jpaged.llm import TokensPrompt
from jpaged.sampling_params import request_fields
from jpaged.service.loaded_model import SubmittedCall
from jpaged.testing.fake_model import expected_tokens
from tests.server.harness import EOS

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
KINDS = RequestOutputKind
IDS = [3, 1, 4, 1, 5]
Open = Callable[..., Any]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_none_is_the_default_of_every_field() -> None:
    names = [name for name in SamplingParams.__slots__ if name != "max_tokens"]
    nothing: dict[str, Any] = dict.fromkeys(names)
    assert SamplingParams(**nothing) == SamplingParams()
    assert SamplingParams.from_optional(temperature=None, n=2) == SamplingParams(n=2)
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_fields_are_assigned_and_checked_when_used(open_model: Open) -> None:
    params = SamplingParams(seed=3, output_kind=KINDS.DELTA)
    params.max_tokens, params.stop = 3, ["x"]
    cloned = params.clone()
    assert (cloned.max_tokens, cloned.stop, cloned.output_kind) == (3, ("x",), KINDS.DELTA)
    for copied in (copy.deepcopy(cloned), pickle.loads(pickle.dumps(cloned))):
        assert (copied, copied.output_kind) == (cloned, KINDS.DELTA)
    params.temperature = -1.0
    llm = open_model()
    with pytest.raises(InvalidArgument, match=r"^temperature: -1\.0"):
        llm.generate([IDS], params)
    with pytest.raises(InvalidArgument, match=r"^priority: 0\.5"):
        llm.generate([IDS], GREEDY, priority=[0.5])
    with pytest.raises(InvalidArgument, match=r"^max_tokens: 5 prompt tokens"):
        llm.generate([IDS], SamplingParams(max_tokens=100))


def test_log_probabilities_of_a_token_are_returned_once(open_model: Open) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprob_token_ids=[9, 7, 9, 8, 7])
    assert params.logprob_token_ids == (9, 7, 8)
    (output,) = open_model().generate([IDS], params)
    for position in output.outputs[0].logprobs:
        assert [one.token_id for one in position.asked] == [9, 7, 8]
    same = SamplingParams(logprobs=2, logprob_token_ids=[7, 9])
    assert (same.logprobs, same.clone()) == (None, SamplingParams(logprob_token_ids=[7, 9]))
    with pytest.raises(InvalidArgument, match=r"^logprobs: 1 is out of range: must be left out with logprob_token_ids"):
        SamplingParams(logprobs=1, logprob_token_ids=[7, 9])


def test_the_kind_of_outputs_is_a_field() -> None:
    params = SamplingParams(output_kind=KINDS.DELTA)
    assert params != SamplingParams()
    assert dataclasses.asdict(params)["output_kind"] is KINDS.DELTA
    assert SamplingParams(**dataclasses.asdict(params)) == params
    assert params.with_seed(3).output_kind is KINDS.DELTA
    assert {one.name for one in dataclasses.fields(params)} - {one.name for one in request_fields()} == {"output_kind"}
    kind: Any = 1
    with pytest.raises(InvalidArgument, match="output_kind: 1 is out of range: must be a RequestOutputKind"):
        dataclasses.replace(params, output_kind=kind)


@pytest.mark.parametrize(
    "given",
    [
        {"logits_processors": [print]},
        {"extra_args": {"a": 1}},
        {"flat_logprobs": True},
        {"repetition_detection": object()},
        {"guided_decoding": {"regex": "a"}},
    ],
)
def test_parameters_that_would_change_the_result_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=f"^{next(iter(given))}: is not supported"):
        SamplingParams(**given)


def test_parameters_without_an_effect_are_accepted() -> None:
    given: dict[str, Any] = {"spaces_between_special_tokens": False, "skip_clone": True, "stream_interval": 3}
    assert SamplingParams(**given, logits_processors=None, extra_args={}) == SamplingParams()
    assert not SamplingParams(skip_reading_prefix_cache=True).use_prefix_cache


def test_a_client_needs_a_number_of_tokens() -> None:
    with pytest.raises(InvalidArgument, match=r"sampling\.max_tokens: must be a number; only LLM and AsyncLLM"):
        sampling_message(SamplingParams(max_tokens=None))
    changed = SamplingParams()
    assert sampling_message(changed).temperature == 1.0
    changed.temperature, changed.stop = 0.5, ["a"]
    message = sampling_message(changed)
    assert (message.temperature, list(message.stop)) == (0.5, ["a"])


def test_names_are_in_vllms_modules() -> None:
    assert jpaged.sampling_params.StructuredOutputsParams(regex="a+") == StructuredOutputsParams(regex="a+")
    assert jpaged.outputs.RequestOutput is RequestOutput
    assert {"Logprob", "CompletionOutput", "EmbeddingRequestOutput"} <= set(jpaged.outputs.__all__)


@pytest.mark.parametrize(
    "prompts",
    [IDS, [IDS], {"prompt_token_ids": IDS}, [{"prompt_token_ids": IDS, "cache_salt": "s"}], bytes(IDS).decode()],
)
def test_every_form_of_a_prompt_gives_the_same_tokens(open_model: Open, prompts: Any) -> None:
    outputs = open_model().generate(prompts, GREEDY, False)
    assert tokens(outputs) == [expected_tokens(IDS, 5)]


def test_max_tokens_of_none_fills_the_context(open_model: Open) -> None:
    llm = open_model()
    (output,) = llm.generate([IDS], SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, min_tokens=2))
    limit = llm._serving.engine.geometry.max_model_len
    assert len(output.outputs[0].token_ids) == limit - len(IDS)


@pytest.mark.parametrize(
    ("prompt", "error", "problem"),
    [
        ({"prompt_embeds": [1.0]}, Unsupported, "prompt_embeds: the model was loaded without"),
        ({"prompt": "a", "multi_modal_data": {"video": [1]}}, InvalidArgument, "multi_modal_data.video: is not supp"),
        ({"prompt": "a", "prompt_embeds": [[1.0]]}, InvalidArgument, "must be one of prompt, prompt_token_ids, "),
    ],
)
def test_other_prompts_are_refused_by_name(open_model: Open, prompt: Any, error: type, problem: str) -> None:
    with pytest.raises(error, match=problem):
        open_model().generate([prompt], GREEDY)


def test_priorities_and_salts_reach_the_requests(open_model: Open) -> None:
    llm = open_model()
    requests, submit = [], llm._serving.engine.submit

    def record(request: Any, sink: Any) -> None:
        requests.append(request)
        submit(request, sink)

    llm._serving.engine.submit = record
    salted: TokensPrompt = {"prompt_token_ids": IDS, "cache_salt": "s"}
    llm.generate([salted, IDS], GREEDY, priority=[2, -1], tokenization_kwargs={"truncate_prompt_tokens": 3})
    got = {(one.sampling.priority, one.sampling.cache_salt, one.prompt_token_ids) for one in requests}
    assert got == {(2, "s", tuple(IDS[-3:])), (-1, "", tuple(IDS[-3:]))}
    with pytest.raises(InvalidArgument, match="priority: 1 given for 2 prompts"):
        llm.generate([IDS, IDS], GREEDY, priority=[1])
    with pytest.raises(Unsupported, match=r"tokenization_kwargs\.padding: is not supported"):
        llm.generate([IDS], GREEDY, tokenization_kwargs={"padding": True})


def test_outputs_have_vllms_fields(open_model: Open) -> None:
    llm = open_model()
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    llm.generate([IDS], params)
    (output,) = llm.generate([IDS], params)
    (one,) = output.outputs
    assert (output.finished, output.num_cached_tokens, one.finished()) == (True, output.usage.cached_tokens, True)
    for token_id, position in zip(one.token_ids, one.logprobs, strict=True):
        first, found = next(iter(position.items()))
        assert (first, found.logprob) == (token_id, position[token_id].logprob)
        assert {value.decoded_token for value in position.values()} == {
            llm.get_tokenizer().decode([some], skip_special_tokens=False) for some in position
        }
        assert (len(position), 10**6 in position) == (len(set(position)), False)
    assert output.prompt_logprobs[0] is None
    assert [IDS[i] in output.prompt_logprobs[i] for i in range(1, len(IDS))] == [True] * 4
    metrics = output.metrics
    assert metrics.num_generation_tokens == 3
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts


def test_a_named_stop_is_the_stop_reason(open_model: Open) -> None:
    (stop,) = expected_tokens(IDS, 5)[2:3]
    params = SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=[stop])
    (output,) = open_model().generate([IDS], params)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_adapters_are_loaded_on_first_use(open_model: Open, adapters: Callable[[str, int], LoRARequest]) -> None:
    llm = open_model(enable_lora=True, max_loras=2, max_cpu_loras=2)
    a, b, c = adapters("a", 7), adapters("b", 9), adapters("c", 11)
    outputs = llm.generate([IDS] * 3, GREEDY, lora_request=[a, None, b])
    assert tokens(outputs) == [expected_tokens(IDS, 5, weight=weight) for weight in (7, 0, 9)]
    assert [one.lora_request for one in outputs] == [a, None, b]
    assert outputs[0].outputs[0].lora_request == a
    llm.generate([IDS], GREEDY, lora_request=a)
    assert tokens(llm.generate([IDS], GREEDY, lora_request=c)) == [expected_tokens(IDS, 5, weight=11)]
    assert (llm._serving.adapters.names(), llm._serving.adapters.num_in_memory()) == ({"a", "b", "c"}, 2)
    assert tokens(llm.generate([IDS] * 2, GREEDY, lora_request=[b, a])) == [
        expected_tokens(IDS, 5, weight=weight) for weight in (9, 7)
    ]
    assert tokens(llm.generate([IDS], GREEDY, lora_request=adapters("a", 8))) == [expected_tokens(IDS, 5, weight=8)]
    assert llm.generate([IDS], GREEDY, adapter="a")[0].lora_request is None
    with pytest.raises(NotFound, match="no adapter 'x'"):
        llm.generate([IDS], GREEDY, lora_request=LoRARequest("x", 1))
    with pytest.raises(InvalidArgument, match="lora_int_id: 0 must be"):
        LoRARequest("x", 0)
    llm.unload_adapter("a")
    llm.load_adapter("a", a.path)
    with pytest.raises(InvalidArgument, match=r"lora_request: 'a' is loaded from .*; choose another name"):
        llm.generate([IDS], GREEDY, lora_request=adapters("a", 8))


def test_without_adapters_the_error_names_the_option(open_model: Open) -> None:
    with pytest.raises(Unsupported, match="adapters are off: set enable_lora"):
        open_model().generate([IDS], GREEDY, lora_request=LoRARequest("a", 1, "a"))


def test_chats_take_vllms_arguments(open_model: Open) -> None:
    llm = open_model()
    turn = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(turn, GREEDY, False)
    assert one.prompt and one.prompt == llm.get_tokenizer().decode(one.prompt_token_ids, skip_special_tokens=False)
    two = llm.chat(messages=[turn, turn], sampling_params=GREEDY, use_tqdm=False, tools=None, chat_template_kwargs=None)
    assert tokens(two) == tokens([one]) * 2
    with pytest.warns(DeprecationWarning, match="conversations is now messages"):
        assert tokens(llm.chat(conversations=[turn], sampling_params=GREEDY)) == tokens([one])
    with pytest.raises(InvalidArgument, match="chat_template_content_format: 'openai' is not 'auto'"):
        llm.chat(turn, GREEDY, chat_template_content_format="openai")
    with pytest.raises(InvalidArgument, match="messages: is missing"):
        llm.chat()
    with pytest.raises(InvalidArgument, match="conversations: is given together with messages"):
        llm.chat(turn, conversations=[turn])


def test_chats_are_rendered_to_tokens(open_model: Open) -> None:
    llm = open_model()
    turn = [{"role": "user", "content": "hi"}]
    want = [list(one.prompt_token_ids) for one in llm.chat([turn, turn], GREEDY)]
    rendered = llm.preprocess_chat([turn, turn], chat_template_content_format="auto", tools=None)
    assert [one["prompt_token_ids"] for one in rendered] == want
    assert tokens(llm.generate(rendered, GREEDY)) == tokens(llm.chat([turn, turn], GREEDY))
    (last,) = llm.preprocess_chat(turn, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert last["prompt_token_ids"] == want[0][-2:]
    with pytest.raises(InvalidArgument, match="messages: is missing"):
        llm.preprocess_chat(None)


def test_tasks_are_named_as_in_vllm(open_model: Open) -> None:
    llm = open_model()
    assert llm.supported_tasks == ("generate", "embed", "token_embed")
    with pytest.raises(
        Unsupported, match=r"set_tokenizer: load the model with the tokenizer: LLM\(model, tokenizer=FOLDER\)"
    ):
        llm.set_tokenizer(llm.get_tokenizer())


def test_arrays_are_prompts_and_other_objects_are_refused_by_name(open_model: Open) -> None:
    import jax.numpy as jnp

    llm = open_model()
    want = tokens(llm.generate([IDS], GREEDY))
    for given in (jnp.asarray(IDS), [jnp.asarray(IDS)], np.asarray(IDS), np.asarray([IDS])):
        assert tokens(llm.generate(given, GREEDY)) == want
    for wrong in (np.array([1.5, 2.0]), [7.5], [None]):
        with pytest.raises(InvalidArgument, match=r"prompts: .* of type \w+ is no prompt"):
            llm.generate(wrong, GREEDY)


def test_vectors_and_similarities(open_model: Open) -> None:
    llm = open_model()
    (raw,) = llm.embed([IDS])
    assert raw.outputs.embedding == list(raw.values)
    assert (raw.outputs.hidden_size, raw.finished, raw.num_cached_tokens) == (len(raw.values), True, 0)
    (unit,) = llm.embed([IDS], pooling_params=PoolingParams())
    assert sum(value * value for value in unit.values) == pytest.approx(1.0)
    assert llm.encode([IDS])[0].outputs.data == unit.values
    scores = llm.score("a", ["a", "bcd"])
    assert scores[0].outputs.score == pytest.approx(1.0)
    assert -1.0 <= scores[1].outputs.score <= 1.0
    assert len(llm.score(["a", "b"], ["c", "d"])) == 2
    with pytest.raises(InvalidArgument, match="data_1: 2 prompts are given for 3 in data_2"):
        llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(Unsupported, match="sleep is off: set enable_sleep_mode"):
        llm.sleep()
    for name, given in (("collective_rpc", ("f",)), ("apply_model", (len,))):
        with pytest.raises(Unsupported, match=f"^{name}: "):
            getattr(llm, name)(*given)
    with pytest.raises(Unsupported, match=r"^start_profile: use jax\.profiler"):
        llm.start_profile()
    for call in (lambda: llm.classify("a"), lambda: llm.reward("a"), lambda: llm.encode("a", pooling_task="classify")):
        with pytest.raises(Unsupported, match=r"classify|reward"):
            call()
    with pytest.raises(InvalidArgument, match=r"pooling_params\.dimensions"):
        PoolingParams(dimensions=0)


async def test_every_token_has_a_vector(open_model: Open) -> None:
    llm, engine = open_model(), open_model(AsyncLLM)
    raw = PoolingParams(use_activation=False)
    (one,) = llm.encode([IDS], raw, pooling_task="token_embed")
    values_te = one.outputs.data
    assert isinstance(values_te, np.ndarray) and values_te.shape[0] == len(IDS) == len(one.prompt_token_ids)
    for length in (1, len(IDS)):  # causal: a token's state is that of the prompt that ends with it
        assert values_te[length - 1].tolist() == list(llm.embed([IDS[:length]])[0].values)
    (units,) = llm.encode([IDS], PoolingParams(task="token_embed"))
    assert np.allclose(np.linalg.norm(np.asarray(units.outputs.data), axis=1), 1.0)
    params = PoolingParams(use_activation=False, task="token_embed")
    found = [one async for one in engine.encode({"prompt_token_ids": IDS}, params, "a")]
    assert np.array_equal(found[0].outputs.data, values_te)
    with pytest.raises(Unsupported, match="use encode"):
        llm.embed([IDS], pooling_params=PoolingParams(task="token_embed"))
    with pytest.raises(InvalidArgument, match="pooling: 'all'"):
        llm.embed([IDS], pooling="all")


def test_pooled_prompts_may_be_truncated_and_chats(open_model: Open) -> None:
    llm = open_model()
    (kept,) = llm.embed([IDS[-3:]])
    for options in (
        {"truncate_prompt_tokens": 3},
        {"tokenization_kwargs": {"truncate_prompt_tokens": 3}},
        {"truncate_prompt_tokens": 3, "tokenization_kwargs": {"truncate_prompt_tokens": 3}},
    ):
        assert llm.embed([IDS], **options)[0].values == kept.values
        assert llm.encode([IDS], **options)[0].prompt_token_ids == tuple(IDS[-3:])
    sides = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    assert llm.embed([IDS], tokenization_kwargs=sides)[0].prompt_token_ids == tuple(IDS[:2])
    assert llm.generate([IDS], GREEDY, tokenization_kwargs=sides)[0].prompt_token_ids == tuple(IDS[:2])
    (score,) = llm.score("xab", "yab", truncate_prompt_tokens=2, chat_template="unused")
    assert score.outputs.score == pytest.approx(1.0)
    turn: Any = [{"role": "user", "content": "hi"}]
    (chat,) = llm.embed({"messages": turn, "add_generation_prompt": True, "cache_salt": "s"})
    assert chat.prompt_token_ids == llm.chat(turn, GREEDY)[0].prompt_token_ids
    assert len(llm.encode([{"messages": turn}])[0].prompt_token_ids) < len(chat.prompt_token_ids)
    with pytest.raises(InvalidArgument, match="truncate_prompt_tokens: is given as "):
        llm.embed([IDS], truncate_prompt_tokens=3, pooling_params=PoolingParams(truncate_prompt_tokens=2))
    with pytest.raises(Unsupported, match=r"tokenization_kwargs\.padding: is not supported, only add_special_tokens, "):
        llm.embed([IDS], tokenization_kwargs={"padding": True})
    with pytest.raises(InvalidArgument, match=r"tokenization_kwargs\.truncation_side: 'middle' is not one of"):
        llm.embed([IDS], tokenization_kwargs={"truncation_side": "middle"})
    for call in (llm.embed, llm.generate, llm.encode):
        with pytest.raises(InvalidArgument, match=r"^tokenization_kwargs: \['padding'\] of type list is no mapping"):
            call([IDS], tokenization_kwargs=["padding"])
    with pytest.raises(InvalidArgument, match=r"^prompts\[0\]\.prompt_embeds: "):
        llm.embed({"prompt_embeds": np.zeros((2, 4), np.float32)})
    with pytest.raises(InvalidArgument, match=r"\['prompt'\] given with messages"):
        llm.embed({"messages": turn, "prompt": "a"})
    for call in (llm.embed, lambda one, **options: llm.score(one, one, **options)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'pooled'"):
            call([IDS], pooled="last")


def test_configurations_have_vllms_names(open_model: Open) -> None:
    llm = open_model(enable_prefix_caching=False)
    engine, model = llm.llm_engine, llm.model_config
    assert (
        engine.model_config.max_model_len
        == model.max_model_len
        == llm.llm_engine.vllm_config.model_config.max_model_len
    )
    assert engine.tokenizer is engine.get_tokenizer() is llm.get_tokenizer()
    assert (model.model, model.get_vocab_size(), model.is_multimodal_model) == ("demo", 257, False)
    config = engine.vllm_config
    assert (config.scheduler_config.max_num_seqs, config.cache_config.num_gpu_blocks) == (8, 256)
    assert not config.cache_config.enable_prefix_caching
    assert config.parallel_config.tensor_parallel_size == 1
    assert open_model(AsyncLLM).vllm_config.cache_config.block_size == config.cache_config.block_size
    with pytest.raises(AttributeError, match=r"llm_engine\.model_executor does not exist in jpaged: .*LLMEngine"):
        _ = engine.model_executor
    assert (model.hf_config.model_type, model.hf_config.architectures) == ("llama", ["LlamaForCausalLM"])
    assert not hasattr(model.hf_config, "vision_config") and not hasattr(model, "pooler_config")
    assert config.lora_config is None
    assert open_model(enable_lora=True, max_loras=2).vllm_config.lora_config.max_loras == 2
    assert config.cache_config.gpu_memory_utilization == llm.config.cache.memory_utilization
    (output,) = llm.generate([np.array(IDS)], GREEDY)
    assert output.prompt_token_ids == tuple(IDS)
    assert (output.kv_transfer_params, output.encoder_prompt, output.encoder_prompt_token_ids) == (None, None, None)


async def test_pooled_prompts_may_have_the_length_of_the_model(open_model: Open) -> None:
    llm, engine, longest = open_model(), open_model(AsyncLLM), [1] * 32
    (vector,) = llm.embed(longest, use_tqdm=False)
    assert len(vector.prompt_token_ids) == 32
    assert llm.encode(longest, pooling_task="token_embed")[0].outputs.data.shape[0] == 32
    assert [one.prompt_token_ids async for one in engine.encode(longest, None, "a")] == [tuple(longest)]
    ((score,),) = llm.score_continuations([longest[:30]], [[[2, 3]]])
    assert [one.token_id for one in score.tokens] == [2, 3]
    for call in (llm.embed, llm.encode):
        with pytest.raises(InvalidArgument, match=r"33 prompt tokens, over max_model_len \(32\)"):
            call([1] * 33)
    with pytest.raises(InvalidArgument, match=r"33 tokens are over max_model_len \(32\)"):
        llm.score_continuations([longest[:31]], [[[2, 3]]])


@pytest.mark.parametrize(
    ("name", "value", "error", "problem"),
    [
        ("dimensions", 0, InvalidArgument, "0 is out of range: must be an integer >= 1"),
        ("task", "score", Unsupported, "'score' is not supported"),
        ("use_activation", "no", InvalidArgument, "'no' is not True, False or None"),
        ("normalize", 0, InvalidArgument, "0 is not True, False or None"),
        ("truncate_prompt_tokens", 0, InvalidArgument, "0 is out of range: must be an integer >= 1, or -1"),
    ],
)
async def test_assigned_pooling_parameters_are_checked_when_used(
    open_model: Open, name: str, value: Any, error: type, problem: str
) -> None:
    params = PoolingParams()
    setattr(params, name, value)
    llm, engine = open_model(), open_model(AsyncLLM)
    for call in (llm.embed, llm.encode):
        with pytest.raises(error, match=rf"^pooling_params\.{name}: {problem}"):
            call([IDS], pooling_params=params)
    with pytest.raises(error, match=rf"^pooling_params\.{name}: {problem}"):
        llm.score("a", "b", pooling_params=params)
    with pytest.raises(error, match=rf"^pooling_params\.{name}: {problem}"):
        _ = [output async for output in engine.encode(IDS, params, "a")]


def test_pooling_parameters_have_their_type(open_model: Open) -> None:
    with pytest.raises(InvalidArgument, match=r"pooling_params: \{'task': 'embed'\} is not of type PoolingParams"):
        open_model().embed([IDS], pooling_params={"task": "embed"})


def test_the_former_meaning_of_score_is_an_alias(open_model: Open) -> None:
    llm = open_model()
    with pytest.warns(DeprecationWarning, match="score_continuations"):
        former = llm.score("ab", continuations=["c", "d"])
    now = llm.score_continuations("ab", ["c", "d"])
    assert [[one.logprob for one in each] for each in former] == [[one.logprob for one in each] for each in now]


def test_beam_search_returns_prompt_and_output(open_model: Open) -> None:
    llm = open_model()
    (found,) = llm.beam_search([{"prompt_token_ids": IDS}], BeamSearchParams(beam_width=2, max_tokens=4))
    (same,) = llm.generate([IDS], SamplingParams(beam_width=2, n=2, max_tokens=4))
    assert [one.tokens for one in found.sequences] == [(*IDS, *one.token_ids) for one in same.outputs]
    assert [one.cum_logprob for one in found.sequences] == [one.cumulative_logprob for one in same.outputs]
    with pytest.raises(InvalidArgument, match=r"^beam_width: 17"):
        llm.beam_search(IDS, BeamSearchParams(17, 4))


def test_metrics_have_the_names_of_the_server(open_model: Open) -> None:
    llm = open_model()
    llm.generate([IDS], GREEDY)
    llm.load()
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    generated, running = metrics["vllm:generation_tokens"], metrics["vllm:num_requests_running"]
    assert (type(generated), generated.value) == (jpaged.outputs.Counter, 5)
    assert (type(running), running.value) == (jpaged.outputs.Gauge, 0.0)
    lengths = metrics["vllm:request_generation_tokens"]
    assert (type(lengths), lengths.count, lengths.sum) == (jpaged.outputs.Histogram, 1, 5.0)
    assert lengths.buckets["+Inf"] == 1


def test_engine_arguments_have_vllms_names(open_model: Open) -> None:
    llm = open_model(gpu_memory_utilization=0.5, enforce_eager=True, dtype=None, runner="pooling", seed=3)
    assert llm.config.cache.memory_utilization == 0.5
    for given, named in (
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb"),
    ):
        with pytest.raises(InvalidArgument, match=f"{named}: .* not supported"):
            open_model(**given)
    with pytest.raises(InvalidArgument, match="memory_utilisation: unknown option"):
        open_model(memory_utilisation=1)


def test_engine_arguments_come_from_a_command_line(open_model: Open) -> None:
    import argparse

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--own", default=1)
    parser.set_defaults(model="fake")
    arguments = parser.parse_args(["--max-num-seqs", "3", "--enforce-eager", "--gpu-memory-utilization", "0.4"])
    args = EngineArgs.from_cli_args(arguments)
    assert args.options == {
        "model": "fake",
        "max_num_seqs": 3,
        "enforce_eager": True,
        "gpu_memory_utilization": "0.4",
    }
    engine = open_model(LLMEngine, **args.options)
    assert (engine.config.scheduler.max_num_seqs, engine.config.cache.memory_utilization) == (3, 0.4)


async def read(llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id)]


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_have_every_kind_of_output(open_model: Open, kind: RequestOutputKind) -> None:
    llm = open_model(AsyncLLM)
    params = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, output_kind=kind, n=2, seed=1, logprobs=1, prompt_logprobs=0
    )
    outputs = await read(llm, IDS, params, "a")
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    found: dict[int, list[int]] = {0: [], 1: []}
    texts, logprobs = {0: "", 1: ""}, {0: 0, 1: 0}
    for output in outputs if kind is KINDS.DELTA else outputs[-1:]:
        for one in output.outputs:
            found[one.index] += one.token_ids
            texts[one.index] += one.text
            logprobs[one.index] += len(one.logprobs or ())
    assert list(found.values()) == [expected_tokens(IDS, 5)] * 2
    assert set(logprobs.values()) == {5}
    (whole,) = open_model().generate([IDS], params)
    assert list(texts.values()) == [one.text for one in whole.outputs]
    assert outputs[0].prompt_logprobs is not None
    assert kind is not KINDS.FINAL_ONLY or len(outputs) == 1


@contextmanager
def held(llm: LLM | AsyncLLM, num_calls: int) -> Iterator[None]:
    """Holds the engine thread until this number of calls has arrived; afterwards their steps were those of a batch."""
    before, arrived, add = llm.load().num_steps, threading.Semaphore(0), llm._admission.add

    def count(call: SubmittedCall) -> None:
        add(call)
        arrived.release()

    def hold() -> None:
        for _ in range(num_calls):
            arrived.acquire()

    llm._admission.add = count  # type: ignore[method-assign]
    llm._serving.engine.call_soon(hold)
    yield
    assert llm.load().num_steps - before < num_calls * NUM_TOKENS / 2  # eight rows run in a step


NUM_CALLS, NUM_TOKENS = 64, 2
EACH = [
    SamplingParams(seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, use_prefix_cache=False) for i in range(NUM_CALLS)
]
EXPECTED = [expected_tokens([1 + i, 2], NUM_TOKENS, seed=i) for i in range(NUM_CALLS)]


async def test_asyncio_tasks_share_one_batch_and_get_their_own_tokens(open_model: Open) -> None:
    llm = open_model(AsyncLLM)
    with held(llm, NUM_CALLS):
        together = await asyncio.gather(*(read(llm, [1 + i, 2], EACH[i], str(i)) for i in range(NUM_CALLS)))
    assert [list(outputs[-1].outputs[0].token_ids) for outputs in together] == EXPECTED


def test_threads_share_one_batch_and_get_their_own_tokens(open_model: Open) -> None:
    llm = open_model()
    with held(llm, NUM_CALLS), ThreadPoolExecutor(NUM_CALLS) as threads:
        found = list(threads.map(lambda i: tokens(llm.generate([[1 + i, 2]], EACH[i], False)), range(NUM_CALLS)))
    assert found == [[one] for one in EXPECTED]


async def test_a_request_is_aborted_by_id_or_by_leaving_its_stream(open_model: Open) -> None:
    llm = open_model(AsyncLLM)
    long = SamplingParams(max_tokens=25, ignore_eos=True)
    outputs, is_aborted, submit = [], threading.Event(), llm._serving.engine.submit

    def submit_slowly(request: Any, sink: Callable[[Any], None]) -> None:
        def take(event: Any) -> None:
            sink(event)
            is_aborted.wait()  # the engine thread waits after one token

        submit(request, take)

    llm._serving.engine.submit = submit_slowly
    async for output in llm.generate(IDS, long, "a"):
        outputs.append(output)
        await llm.abort(["a", "unknown"])
        is_aborted.set()
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].finished) == ("abort", True)
    stream = llm.generate(IDS, long, "a")
    await anext(stream)
    with pytest.raises(AlreadyExists, match="'a' is running"):
        await anext(llm.generate(IDS, long, "a"))
    await stream.aclose()
    assert len((await read(llm, IDS, GREEDY, "a"))[-1].outputs[0].token_ids) == 5
    assert llm.load().num_blocks_used == 0


async def test_paused_requests_wait(open_model: Open) -> None:
    llm = open_model(AsyncLLM)
    added, add = asyncio.Semaphore(0), llm._admission.add

    def count(call: SubmittedCall) -> None:
        add(call)
        added.release()

    llm._admission.add = count
    stream = llm.generate(IDS, SamplingParams(max_tokens=20, ignore_eos=True), "a")
    first = await anext(stream)
    await llm.pause_generation(mode="wait")
    *_, last = [first, *[output async for output in stream]]
    assert len(last.outputs[0].token_ids) == 20
    assert await llm.is_paused()
    waiting = [asyncio.create_task(read(llm, IDS, GREEDY, name)) for name in ("b", "c")]
    for _ in range(3):
        await added.acquire()
    await llm.abort("c")
    assert (await waiting[1])[-1].outputs[0].finish_reason == "abort"
    assert not waiting[0].done()
    await llm.resume_generation()
    assert list((await waiting[0])[-1].outputs[0].token_ids) == expected_tokens(IDS, 5)
    with pytest.raises(InvalidArgument, match="mode: 'stop' is not one of abort, wait, keep"):
        await llm.pause_generation(mode="stop")


async def test_kept_requests_continue_after_a_pause(open_model: Open) -> None:
    llm = open_model(AsyncLLM)
    stream = llm.generate(IDS, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), "a")
    first = await anext(stream)
    await llm.pause_generation(mode="keep")
    assert await llm.is_paused()
    later = asyncio.create_task(read(llm, IDS, GREEDY, "b"))
    await llm.resume_generation()
    assert not await llm.is_paused()
    *_, last = [first, *[output async for output in stream]]
    assert list(last.outputs[0].token_ids) == expected_tokens(IDS, 20)
    assert list((await later)[-1].outputs[0].token_ids) == expected_tokens(IDS, 5)
    await llm.pause_generation(mode="keep")
    later = asyncio.create_task(read(llm, IDS, GREEDY, "b"))
    await llm.pause_generation()  # ends what was kept
    await llm.resume_generation()
    assert (await later)[-1].finished


async def test_every_model_sleeps_and_wakes_up(open_model: Open) -> None:
    llm = open_model(enable_sleep_mode=True)
    llm.sleep(level=1)
    assert llm.is_sleeping()
    with pytest.raises(Unavailable, match="asleep"):
        llm.generate([IDS], GREEDY)
    assert llm.wake_up(tags=["weights"]) is False
    assert llm.wake_up(tags=["kv_cache"]) is True
    assert not llm.is_sleeping()
    assert tokens(llm.generate([IDS], GREEDY)) == [expected_tokens(IDS, 5)]

    asynchronous = open_model(AsyncLLM, enable_sleep_mode=True)
    await asynchronous.sleep()
    assert await asynchronous.is_sleeping()
    assert await asynchronous.wake_up() is True
    assert not await asynchronous.is_sleeping()
    assert list((await read(asynchronous, IDS, GREEDY, "a"))[-1].outputs[0].token_ids) == expected_tokens(IDS, 5)

    engine = open_model(LLMEngine, enable_sleep_mode=True)
    engine.add_request("a", IDS, GREEDY)
    engine.step()
    engine.sleep(2, mode="keep")
    assert engine.is_sleeping() and engine.wake_up() is True
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert tokens(outputs[-1:]) == [expected_tokens(IDS, 5)]


def test_closed_event_loops_are_not_kept(open_model: Open) -> None:
    llm = open_model(AsyncLLM)

    async def run() -> None:
        many = await asyncio.gather(*(read(llm, IDS, GREEDY, name) for name in "ab"))
        assert tokens(many[0][-1:]) == tokens(many[1][-1:])
        async for _ in llm.generate(IDS, GREEDY, "c"):
            assert list(llm._deliveries) == [asyncio.get_running_loop()]
            break

    for _ in range(2):
        asyncio.run(run())
        assert not llm._deliveries


async def test_streams_raise_errors_of_an_llm(open_model: Open) -> None:
    llm = open_model(AsyncLLM)
    with pytest.raises(InvalidArgument, match=r"^max_tokens: 5 prompt tokens"):
        await read(llm, IDS, SamplingParams(max_tokens=100), "a")
    params = SamplingParams(max_tokens=3)
    params.top_p = 2.0
    with pytest.raises(InvalidArgument, match=r"^top_p: 2\.0"):
        await read(llm, IDS, params, "a")
    with pytest.raises(InvalidArgument, match="-1 is not a token id"):
        await read(llm, [1, -1], GREEDY, "a")
    (vector,) = [output async for output in llm.encode(IDS, None, "b")]
    assert sum(value * value for value in vector.outputs.data) == pytest.approx(1.0)
    await llm.check_health()
    added, add = asyncio.Event(), llm._admission.add

    def note(call: SubmittedCall) -> None:
        add(call)
        added.set()

    llm._admission.add = note
    await llm.pause_generation()
    waiting = asyncio.create_task(read(llm, IDS, GREEDY, "a"))
    await added.wait()
    llm.shutdown()
    with pytest.raises(Unavailable, match="the LLM was closed during the call"):
        await waiting
    assert not llm.is_running
    with pytest.raises(Unavailable, match="the LLM is closed"):
        await llm.check_health()


def test_an_engine_is_driven_step_by_step(open_model: Open) -> None:
    engine = open_model(LLMEngine)
    prompts = [[1 + i, 2, 3] for i in range(20)]  # more than the engine accepts at once
    for i, prompt in enumerate(prompts):
        assert engine.add_request(str(i), prompt, GREEDY) == str(i)
    with pytest.raises(AlreadyExists, match="'0' is running"):
        engine.add_request("0", IDS, GREEDY)
    engine.abort_request(["19", "unknown"])
    assert engine.get_num_unfinished_requests() == 19
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
    assert finished == {str(i): expected_tokens(prompts[i], 5) for i in range(19)}
    assert engine.step() == []
    assert engine.reset_prefix_cache()
    assert engine.load().num_blocks_used == 0


def test_an_engine_returns_vectors_next_to_texts(open_model: Open) -> None:
    engine = open_model(LLMEngine)
    engine.add_request("text", IDS, GREEDY)
    engine.add_request("vector", {"prompt_token_ids": IDS}, PoolingParams(dimensions=None))
    engine.add_request("tokens", "a text", PoolingParams(task="token_embed"))
    engine.add_request("dropped", IDS, PoolingParams())
    engine.abort_request("dropped")
    with pytest.raises(Unsupported, match="no classification head"):
        engine.add_request("labels", IDS, PoolingParams(task="classify"))
    finished: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    llm = open_model()
    for name, task, prompt in (("vector", "embed", [IDS]), ("tokens", "token_embed", ["a text"])):
        (expected,) = llm.encode(prompt, pooling_task=task)
        np.testing.assert_array_equal(finished[name].outputs.data, expected.outputs.data)
        assert finished[name].prompt_token_ids == expected.prompt_token_ids
    assert list(finished["text"].outputs[0].token_ids) == expected_tokens(IDS, 5)
    assert finished.keys() == {"text", "vector", "tokens"}


def test_an_aborted_request_of_an_engine_has_no_further_output(open_model: Open) -> None:
    engine = open_model(LLMEngine)
    engine.add_request("a", IDS, SamplingParams(max_tokens=20, ignore_eos=True, output_kind=KINDS.DELTA))
    while not (outputs := engine.step()):
        pass
    assert (outputs[0].request_id, outputs[0].finished) == ("a", False)
    engine.abort_request("a")
    assert (engine.has_unfinished_requests(), engine.step()) == (False, [])


def test_the_text_of_a_stream_ends_at_eos(open_model: Open) -> None:
    engine = open_model(LLMEngine)
    params = SamplingParams(temperature=0.0, max_tokens=20, output_kind=KINDS.FINAL_ONLY)
    engine.add_request("a", IDS, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (whole,) = open_model().generate([IDS], params)
    assert len(outputs) == 1
    assert outputs[0].outputs == whole.outputs
    assert list(outputs[0].outputs[0].token_ids) == expected_tokens(IDS, 20, eos_token_ids=frozenset({EOS}))


@pytest.mark.parametrize("prompts", [iter(["one", "two"]), np.array(["one", "two"]), map(str, ["one", "two"])])
def test_prompts_of_any_iterable_are_all_run(open_model: Open, prompts: Any) -> None:
    llm = open_model()
    assert tokens(llm.generate(prompts, GREEDY)) == tokens(llm.generate(["one", "two"], GREEDY))
    assert len(llm.score("a", iter(["b", "c"]))) == 2
    assert [len(one) for one in llm.score_continuations(["a", "b"], [iter([" c", " d"]), [" e"]])] == [2, 1]
    assert tokens(llm.generate(np.array(IDS), GREEDY)) == tokens(llm.generate([IDS], GREEDY))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"sampling_params": {"temperature": 0}}, "sampling_params: .* is neither SamplingParams nor a list of them"),
        ({"sampling_params": [GREEDY, None]}, "sampling_params: None is not SamplingParams"),
        ({"priority": 1.0}, "priority: 1.0 is neither int"),
        ({"lora_request": "ab"}, "lora_request: 'ab' is neither LoRARequest"),
    ],
)
def test_values_of_other_types_are_refused_by_name(open_model: Open, given: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        open_model().generate(["one", "two"], **{"sampling_params": GREEDY, **given})


async def test_a_caller_that_stops_waiting_for_a_pause_harms_no_request(open_model: Open) -> None:
    llm = open_model(AsyncLLM)
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    async with contextlib.aclosing(llm.generate("one", long, "one")) as stream:
        first = await anext(stream)  # the only one if its loop was slow
        pause = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        pause.cancel()
        outputs = [first, *[output async for output in stream]]
    assert outputs[-1].finished
    await llm.resume_generation()
    assert [output.finished async for output in llm.generate("two", GREEDY, "two")][-1]


@pytest.mark.parametrize("name", ["", None])
async def test_an_id_is_a_text(open_model: Open, name: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"request_id: .* is not a text"):
        await anext(open_model(AsyncLLM).generate("one", GREEDY, name))
    with pytest.raises(InvalidArgument, match=r"request_id: .* is not a text"):
        open_model(LLMEngine).add_request(name, "one", GREEDY)


def test_an_id_is_free_after_an_abort(open_model: Open) -> None:
    engine = open_model(LLMEngine)
    engine.add_request("a", "one", SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", "two", GREEDY)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert tokens(outputs[-1:]) == tokens(open_model().generate(["two"], GREEDY))


def test_encode_classifies_if_the_model_has_a_head(open_model: Open) -> None:
    llm = open_model()
    with pytest.raises(Unsupported, match="'classify' is not supported: the model has no classification head"):
        llm.encode([IDS], pooling_task="classify")
    (state,) = llm.encode([IDS], PoolingParams(use_activation=False), use_tqdm=False)
    layer = Dense(np.full((len(state.outputs.data), 2), [0.001, 0.002], np.float32))
    pooler = CheckpointPooler(layers=(layer,), labels=("no", "yes"), function="softmax")
    llm._serving = dataclasses.replace(llm._serving, pooler=pooler)
    assert llm.supported_tasks == ("classify",)
    (want,) = llm.classify([IDS])
    for given in ({"pooling_task": "classify"}, {"pooling_params": PoolingParams(task="classify")}):
        (found,) = llm.encode([IDS], **given)
        assert found.outputs.data == want.outputs.probs and found.prompt_token_ids == want.prompt_token_ids
    (logits,) = llm.encode([IDS], PoolingParams(use_activation=False), pooling_task="classify")
    np.testing.assert_allclose(logits.outputs.data, np.array(state.outputs.data) @ layer.kernel, rtol=1e-5)


def test_engines_take_the_arguments_of_vllms_constructors() -> None:
    class Options(LLM):
        def __init__(self, **options: object) -> None:
            self.given = options

    args = EngineArgs(max_num_seqs=4)
    made = Options.from_engine_args(args, start_engine_loop=True, usage_context="api server", stat_loggers=None)
    assert made.given == {"model": "demo", "max_num_seqs": 4}
    with pytest.raises(Unsupported, match="stat_loggers"):
        Options.from_engine_args(args, stat_loggers=[print])
