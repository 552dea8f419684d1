"""Fields of other servers' bodies that have no effect, with the values that pass, on every path.

Source of names and defaults: OpenAI's API reference, vLLM's ChatCompletionRequest, CompletionRequest, ResponsesRequest
and EmbeddingRequest, SGLang's protocol.py and its router, llama.cpp's server and TGI. Routers send all defaults.

    only(False)            passes with this value, which is the behavior in any case
    hint(str)              passes with any value of the type: a note, or advice without an effect
    never("use tools")     never passes; errors contain the advice
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jpaged.errors import InvalidArgument

_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Neutral:
    """Values of one field that have no effect.

    Attributes:
        values: values that pass.
        types: any value of these types passes.
        advice: appended to the error of any other value.
    """

    values: tuple[Any, ...] = ()
    types: tuple[type, ...] = ()
    advice: str = ""

    def has(self, value: Any) -> bool:
        """Return True if a value has no effect; JSON's true is not 1."""
        if type(value) in self.types:
            return True
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)


def only(*values: Any, advice: str = "") -> Neutral:
    """Return a field that passes with these values."""
    return Neutral(values=values, advice=advice)


def hint(*types: type, advice: str = "") -> Neutral:
    """Return a field that passes with any value of these types."""
    return Neutral(types=types, advice=advice)


def never(advice: str) -> Neutral:
    """Return a field that never passes, with what to do instead."""
    return Neutral(advice=advice)


_NOTHING = only({}, [], "", 0, False)
_OFF, _ON = only(False), only(True)

OPENAI: Mapping[str, Neutral] = {
    "store": hint(bool),
    "metadata": hint(dict),
    "service_tier": only("auto", "default", "flex", "scale", "priority"),
    "safety_identifier": hint(str),
    "user": hint(str),
    "prompt_cache_key": hint(str),
    "prompt_cache_retention": hint(str),
    "prompt_cache_options": hint(dict),
    "verbosity": only("low", "medium", "high"),
    "modalities": only(["text"]),
    "suffix": only("", advice="infilling is not supported"),
    "prediction": hint(dict),
    "echo": _OFF,
    "stream": _OFF,
    "stream_options": only({}, advice="needs stream to be true"),
    "functions": only([], advice="use tools"),
    "function_call": only("none", "auto", advice="use tool_choice"),
    "audio": never("output is text only"),
    "web_search_options": never("the server cannot search the web"),
    "moderation": never("the server does not moderate texts"),
}
VLLM: Mapping[str, Neutral] = {
    "use_beam_search": only(False, advice="use beam_width"),
    "spaces_between_special_tokens": _ON,
    "return_tokens_as_token_ids": only(False, advice="use return_token_ids"),
    "return_token_ids": _OFF,
    "return_token_offsets": _OFF,
    "return_prompt_text": _OFF,
    "return_mm_kwargs": hint(bool),
    "routed_experts_prompt_start": only(0),
    "add_generation_prompt": _ON,
    "continue_final_message": _OFF,
    "include_reasoning": _ON,
    "truncation_side": only("left", advice="truncate_prompt_tokens keeps the last tokens"),
    "stream_interval": hint(int),
    "session_id": hint(str),
    "watermarking": _OFF,
    "documents": only([]),
    "chat_template_kwargs": only({}),
    "media_io_kwargs": only({}),
    "mm_processor_kwargs": only({}),
    "kv_transfer_params": only({}),
    "ec_transfer_params": only({}),
    "vllm_xargs": only({}),
    "logits_processors": only([]),
    "prompt_embeds": only([]),
    "guided_decoding_backend": hint(str),
    "guided_json": never("use structured_outputs.json"),
    "guided_regex": never("use structured_outputs.regex"),
    "guided_choice": never("use structured_outputs.choice"),
    "guided_grammar": never("use structured_outputs.grammar"),
    "request_id": never("use the header x-request-id"),
    "embed_dtype": only("float32"),
    "endianness": only("native", "little"),
    "additional_data": _NOTHING,
    "enable_response_messages": _OFF,
    "previous_input_messages": only([]),
}
SGLANG: Mapping[str, Neutral] = {
    "no_stop_trim": only(False, advice="use include_stop_str_in_output"),
    "separate_reasoning": only(True, advice="use include_reasoning"),
    "stream_reasoning": _ON,
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "return_cached_tokens_details": _OFF,
    "return_prompt_token_ids": only(False, advice="use return_token_ids"),
    "return_meta_info": _OFF,
    "return_pooled_hidden_states": _OFF,
    "routed_experts_start_len": only(0),
    "apply_softmax": _OFF,
    "item_first": _OFF,
    "use_audio_in_video": _OFF,
    "regex": never("use structured_outputs.regex"),
    "ebnf": never("use structured_outputs.grammar"),
    "json_schema": never("use response_format"),
    "stop_regex": only([]),
    "sampling_seed": never("use seed"),
    "session_params": only({}),
    "custom_params": only({}),
    "custom_labels": only({}),
    "images_config": only({}),
    "extra_key": never("use cache_salt"),
    "rid": never("use the header x-request-id"),
    "lora_path": never("use adapter"),
}
LLAMA_CPP_AND_TGI: Mapping[str, Neutral] = {
    "cache_prompt": hint(bool),
    "id_slot": only(-1),
    "timings_per_token": _OFF,
    "return_progress": _OFF,
    "return_tokens": only(False, advice="use return_token_ids"),
    "post_sampling_probs": _OFF,
    "response_fields": only([]),
    "lora": only([], advice="use adapter"),
    "n_probs": only(0, advice="use logprobs"),
    "n_predict": only(-1, advice="use max_tokens"),
    "min_keep": only(0),
    "n_indent": only(0),
    "t_max_predict_ms": only(0, -1),
    "repeat_penalty": only(1.0, advice="use repetition_penalty"),
    "repeat_last_n": hint(int),
    "tfs_z": only(1.0),
    "mirostat": only(0),
    "mirostat_tau": hint(int, float),
    "mirostat_eta": hint(int, float),
    "dynatemp_range": only(0.0),
    "dynatemp_exponent": hint(int, float),
    "xtc_probability": only(0.0),
    "xtc_threshold": hint(int, float),
    "dry_multiplier": only(0.0),
    "dry_base": hint(int, float),
    "dry_allowed_length": hint(int),
    "dry_penalty_last_n": hint(int),
    "watermark": _OFF,
    "return_full_text": only(False, advice="use echo"),
    "decoder_input_details": _OFF,
    "transforms": only([]),
}
EVERYWHERE: Mapping[str, Neutral] = {**OPENAI, **VLLM, **SGLANG, **LLAMA_CPP_AND_TGI}

_OF_TEXTS = {"add_special_tokens": _ON}
_OF_CHATS = {"add_special_tokens": only(False, advice="the chat template writes special tokens")}
_NO_STORE = "responses are not stored: send the whole conversation in `input`, with earlier outputs"
_ONE_ANSWER = "a response has one output"
OF_PATH: Mapping[str, Mapping[str, Neutral]] = {
    "/v1/completions": _OF_TEXTS,
    "/v1/chat/completions": _OF_CHATS,
    "/v1/responses": {
        **_OF_CHATS,
        "background": only(
            False, advice="wait for the response, or stream it; /v1/batches runs requests in the background"
        ),
        "truncation": only("disabled", advice="remove items from `input` if the conversation is too long"),
        "previous_response_id": never(_NO_STORE),
        "conversation": never(_NO_STORE),
        "prompt": never("prompt templates are not stored: send `instructions` and `input`"),
        "max_tool_calls": never("the client runs the functions, and can stop after any number of calls"),
        "context_management": only([], advice="remove items from `input`"),
        "n": only(1, advice=_ONE_ANSWER),
        "best_of": only(1, advice=_ONE_ANSWER),
        "beam_width": only(0, advice=_ONE_ANSWER),
        "logprobs": only(False, advice="use include with 'message.output_text.logprobs', and top_logprobs"),
        "prompt_logprobs": never("use /v1/chat/completions"),
        "messages": never("use `input`"),
        "max_tokens": never("use `max_output_tokens`"),
        "max_completion_tokens": never("use `max_output_tokens`"),
        "response_format": only({"type": "text"}, advice="use `text.format`"),
        "reasoning_effort": never("use `reasoning.effort`"),
    },
    "/v1/embeddings": _OF_TEXTS,
    "/v1/score": _OF_TEXTS,
    "/tokenize": _OF_TEXTS,
    "/detokenize": {},
}
"""Rows for one path, which take precedence over `EVERYWHERE`. Each path handles its other fields itself."""


def neutral_fields(path: str) -> dict[str, Neutral]:
    """Return the fields of a path that have no effect, by name."""
    return {**EVERYWHERE, **OF_PATH[path]}


_NEUTRAL_FIELDS = {path: neutral_fields(path) for path in OF_PATH}


def own_fields(path: str, body: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a body that its path reads; null counts as absent.

    Args:
        own: names of the fields that the path reads.

    Raises:
        InvalidArgument: a field is unknown, or its value is not supported.
    """
    neutral, known = _NEUTRAL_FIELDS[path], frozenset(own)
    found = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            found[name] = value
        elif (row := neutral.get(name)) is None:
            raise InvalidArgument(name[:_MAX_SHOWN], "is not supported")
        elif not row.has(value):
            raise InvalidArgument(name, _problem(row, value))
    return found


def _problem(row: Neutral, value: Any) -> str:
    advice = f": {row.advice}" if row.advice else ""
    if row.values:
        return f"{repr(value)[:_MAX_SHOWN]} is not supported, only {' or '.join(map(repr, row.values))}{advice}"
    if row.types:
        expected = " or ".join(sorted(one.__name__ for one in row.types))
        return f"{repr(value)[:_MAX_SHOWN]} is not of type {expected}{advice}"
    return f"is not supported{advice}"
