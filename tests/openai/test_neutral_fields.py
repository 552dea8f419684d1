"""Bodies with the defaults of other servers are read as bodies without them, on every path."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from docs.site.vllm_fields import OWN
from jpaged.anthropic import MessagesRequest, parse_messages_request
from jpaged.errors import InvalidArgument
from jpaged.http.app import adapter_in
from jpaged.openai.embeddings import (
    ClassifyJob,
    PoolingJob,
    classify_job,
    embed_job,
    parse_detokenize_job,
    parse_tokenize_job,
    pooling_job,
    rerank_job,
    score_job,
)
from jpaged.openai.lines import BadLine, parse_job, parse_request_line
from jpaged.openai.request import (
    EVERYWHERE,
    OF_ADAPTERS,
    OF_ANY,
    OF_PATH,
    Job,
    LenientBody,
    Neutral,
    chat_job,
    completion_job,
    neutral_fields,
)
from jpaged.openai.responses import ResponsesRequest, parse_responses_request
from jpaged.types import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
READERS: dict[str, tuple[Callable[[Mapping[str, Any]], Any], dict[str, Any]]] = {
    "/v1/completions": (completion_job, {"prompt": "x"}),
    "/v1/chat/completions": (chat_job, {"messages": MESSAGES}),
    "/v1/responses": (parse_responses_request, {"input": "x"}),
    "/v1/messages": (parse_messages_request, {"messages": MESSAGES, "max_tokens": 9}),
    "/v1/embeddings": (embed_job, {"input": "x"}),
    "/pooling": (pooling_job, {"input": "x"}),
    "/classify": (classify_job, {"input": "x"}),
    "/v1/score": (score_job, {"text_1": "x", "text_2": "y"}),
    "/v1/rerank": (rerank_job, {"query": "x", "documents": ["y"]}),
    "/tokenize": (parse_tokenize_job, {"prompt": "x"}),
    "/detokenize": (parse_detokenize_job, {"tokens": [1]}),
    "/v1/load_lora_adapter": (
        functools.partial(adapter_in, "/v1/load_lora_adapter"),
        {"lora_name": "a", "lora_path": "b"},
    ),
    "/v1/unload_lora_adapter": (functools.partial(adapter_in, "/v1/unload_lora_adapter"), {"lora_name": "a"}),
}
SAMPLES: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (0, 7),
    float: (0.5,),
    str: ("", "note"),
    dict: ({}, {"a": "b"}),
    list: ([], ["a"]),
}
READ_BY_SOME = {
    *("user", "echo", "stream", "return_token_ids", "include_reasoning", "add_special_tokens", "chat_template_kwargs"),
    *("documents", "continue_final_message", "add_generation_prompt", "request_id", "use_beam_search"),
    *("return_tokens_as_token_ids", "truncation_side", "thinking_token_budget", "prompt_embeds"),
    *("functions", "function_call"),
}
SURPRISE = {"never": ["meant"]}
VLLM_CHAT: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "logprobs": False,
    "top_logprobs": 0,
    "max_tokens": None,
    "n": 1,
    "presence_penalty": 0.0,
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "tools": None,
    "tool_choice": "none",
    "reasoning_effort": None,
    "thinking_token_budget": None,
    "include_reasoning": True,
    "parallel_tool_calls": True,
    "user": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "bad_words": [],
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "documents": None,
    "priority": 0,
    "return_tokens_as_token_ids": None,
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
    "return_mm_kwargs": True,
    "stream_interval": None,
}
SGLANG: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "routed_experts_start_len": 0,
    "return_cached_tokens_details": False,
    "return_token_ids": False,
}
SGLANG_CHAT: dict[str, Any] = {
    **SGLANG,
    "logprobs": False,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "use_audio_in_video": False,
    "tool_choice": "auto",
    "stream": False,
}
OPENAI_CHAT: dict[str, Any] = {
    "store": True,
    "metadata": {"team": "a"},
    "service_tier": "auto",
    "safety_identifier": "user-1",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "verbosity": "low",
    "modalities": ["text"],
    "stream_options": {"include_obfuscation": False},
}
LLAMA_CPP: dict[str, Any] = {"cache_prompt": True, "id_slot": -1, "timings_per_token": False, "repeat_penalty": 1.0}
DEFAULTS: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", body) for body in (VLLM_CHAT, SGLANG_CHAT, OPENAI_CHAT, LLAMA_CPP)),
    ("/v1/completions", {name: value for name, value in VLLM_CHAT.items() if name in EVERYWHERE}),
    ("/v1/completions", {**SGLANG, "echo": False, "best_of": 1, "suffix": "", "logprobs": None, "stream": False}),
    ("/v1/responses", {**OPENAI_CHAT, "metadata": {}, "background": False, "truncation": "disabled", "n": 1}),
    ("/v1/responses", {"store": False, "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}),
    ("/v1/embeddings", {"encoding_format": "float", "add_special_tokens": True, "priority": 0, "endianness": "native"}),
    ("/v1/embeddings", {"embed_dtype": "float32", "truncation_side": "left", "user": ""}),
]


def values_of(row: Neutral) -> list[Any]:
    return [*row.values, *(value for kind in row.types for value in SAMPLES[kind])]


def plain(value: Any) -> Any:
    """Return what was read, with one form of values that are the same and without notes of the caller."""
    if isinstance(value, ResponsesRequest | MessagesRequest):
        return plain(value.job)
    if isinstance(value, PoolingJob | ClassifyJob):
        return replace(value, request_id="")
    if not isinstance(value, Job):
        return value
    sampling = replace(value.sampling, top_k=max(0, value.sampling.top_k), best_of=None)
    prompts = [replace(one, chat_options=replace(one.chat_options, tool_choice=None)) for one in value.prompts]
    return replace(value, user=None, request_id=None, call_form=None, sampling=sampling, prompts=tuple(prompts))


@pytest.mark.parametrize("path", OF_PATH)
def test_every_neutral_value_changes_nothing_on_every_path(path: str) -> None:
    read, body = READERS[path]
    expected = plain(read(body))
    rows = neutral_fields(path)
    assert len(rows) > 90
    for name, row in rows.items():
        for value in [*values_of(row), None] if name not in body else ():
            assert plain(read({**body, name: value})) == expected, (name, value)


@pytest.mark.parametrize("path", OF_PATH)
def test_any_other_value_is_refused_by_the_name_of_its_field(path: str) -> None:
    read, body = READERS[path]
    for name, row in neutral_fields(path).items():
        values: list[Any] = [SURPRISE, "never", -7.5, True, False, 1, 0]
        for value in values:
            if name in body or row.has(value):
                continue
            if name in READ_BY_SOME:
                continue
            with pytest.raises(InvalidArgument) as refused:
                read({**body, name: value})
            assert refused.value.field.partition(".")[0] == name
            assert row.advice in refused.value.problem or name in ("stream_options", "n")


@pytest.mark.parametrize("path", OF_PATH)
def test_an_unknown_field_is_refused_by_name(path: str) -> None:
    read, body = READERS[path]
    values: tuple[object, ...] = (True, False, 0, "", [], {}, "x")
    for value in values:
        with pytest.raises(InvalidArgument, match=r"^surprise: is not supported"):
            read({**body, "surprise": value})


@pytest.mark.parametrize("path", OF_PATH)
def test_an_unknown_field_of_a_lenient_body_is_noted_and_changes_nothing(path: str) -> None:
    read, body = READERS[path]
    lenient = LenientBody({**body, "surprise": {"x": 1}, "s" * 90: 0, "absent": None})
    assert plain(read(lenient)) == plain(read(body))
    assert list(lenient.ignored) == ["surprise", "s" * 80]


def test_an_unknown_field_of_a_message_is_noted_once_and_known_ones_are_still_checked() -> None:
    read, body = READERS["/v1/chat/completions"]
    messages = [{**message, "nickname": "N"} for message in body["messages"] * 2]
    lenient = LenientBody({**body, "messages": messages})
    assert plain(read(lenient)) == plain(read({**body, "messages": body["messages"] * 2}))
    assert list(lenient.ignored) == ["messages.nickname"]
    with pytest.raises(InvalidArgument, match=r"messages.0.\.audio: is not supported"):
        read(LenientBody({**body, "messages": [{**body["messages"][0], "audio": {"id": "a"}}]}))
    with pytest.raises(InvalidArgument, match="suffix: 'x' is not supported"):
        read(LenientBody({**body, "suffix": "x"}))


def test_a_field_of_another_path_is_refused_by_a_lenient_body_too() -> None:
    assert set().union(*OWN.values(), OF_ADAPTERS) == OF_ANY
    for path, (read, body) in READERS.items():
        for name in OF_ANY - set(OWN.get(path, OF_ADAPTERS)) - neutral_fields(path).keys():
            with pytest.raises(InvalidArgument) as refused:
                read(LenientBody({**body, name: "x"}))
            assert name in (refused.value.field, *refused.value.problem.split("; ")[-1:]), (path, name)
    embed, body = READERS["/v1/embeddings"]
    with pytest.raises(InvalidArgument, match=r"^input: is not supported"):
        embed(LenientBody({**body, "messages": MESSAGES}))


def test_the_names_of_unknown_fields_are_bounded() -> None:
    read, body = READERS["/v1/completions"]
    lenient = LenientBody({**body, **{f"f{i}": i for i in range(1000)}})
    read(lenient)
    assert list(lenient.ignored) == [f"f{i}" for i in range(16)]


@pytest.mark.parametrize(("path", "defaults"), DEFAULTS)
def test_all_defaults_of_another_server_pass_at_once(path: str, defaults: dict[str, Any]) -> None:
    read, body = READERS[path]
    assert plain(read({**body, **defaults})) == plain(read(body))


@pytest.mark.parametrize("defaults", [VLLM_CHAT, SGLANG_CHAT, OPENAI_CHAT])
def test_a_line_of_a_batch_takes_them_too(defaults: dict[str, Any]) -> None:
    value: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    line = parse_request_line(1, value | {"body": {"messages": MESSAGES, "user": "me", **defaults}})
    assert not isinstance(line, BadLine)
    assert plain(parse_job(line)) == plain(chat_job({"messages": MESSAGES}))


def test_true_is_not_1_and_false_is_not_0() -> None:
    assert Neutral(values=(0,)).has(0.0) and not Neutral(values=(0,)).has(False)
    assert Neutral(types=(int,)).has(3) and not Neutral(types=(int,)).has(True)


@pytest.mark.parametrize(("given", "seed"), [(-1, None), (-2, 2**64 - 2), (-(2**63), 2**63), (5, 5), (2**64 - 1,) * 2])
def test_a_seed_below_0_is_a_signed_number(given: int, seed: int | None) -> None:
    assert SamplingParams(seed=given).seed == seed
