"""Bodies of completions and chats, from any source. No I/O.

A field that cannot be honored is an error that names it; `neutral_fields` lists fields and values without effect,
which pass. Options of `SamplingParams` that OpenAI lacks (`top_k`, `beam_width`, `cache_salt`, ...) are fields under
the same names, and so is `adapter`, the name of a loaded adapter. Fields that are null count as absent.

Neutral fields are fields of other servers' bodies that have no effect, with the values that pass, on every path.

Source of names and defaults: OpenAI's API reference, vLLM's ChatCompletionRequest, CompletionRequest, ResponsesRequest
and EmbeddingRequest, SGLang's protocol.py and its router, llama.cpp's server and TGI. Routers send all defaults.

    only(False)            passes with this value, which is the behavior in any case
    hint(str)              passes with any value of the type: a note, or advice without an effect
    never("use tools")     never passes; errors contain the advice
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jpaged.chat import (
    ChatMessages,
    ChatOptions,
    build_chat_options,
    parse_reasoning,
    read_message,
    text_in,
)
from jpaged.errors import InvalidArgument, RequestTooLong
from jpaged.openai.chat_tools import CallForm, convert_tools, tools_in
from jpaged.sampling_params import NO_DEFAULTS, request_fields, with_defaults
from jpaged.structured import StructuredOutputs, get_response_format, get_structured_outputs
from jpaged.types import Prompt, SamplingParams

_PLAIN = (
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "chat_template", "documents"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Fields that `build_chat_options` has under the same name."""
CHAT_FIELDS = frozenset(
    {
        *("messages", *_PLAIN),
        *("reasoning", "reasoning_effort", "include_reasoning", "thinking_token_budget"),
        *("thinking", "enable_thinking", "preserve_thinking", "thinking_budget"),
    }
)
"""Fields of a body that are read here. The last line has words of the APIs of Qwen, Z.ai and DeepSeek."""
_OF_REASONING = {
    "reasoning_effort": "effort",
    "include_reasoning": "include",
    "thinking_token_budget": "thinking_token_budget",
    "thinking_budget": "thinking_token_budget",
}
_VARIABLES = ("enable_thinking", "preserve_thinking")
"""Fields of Qwen's API that are variables of chat templates."""
_THINKING_TYPES = {"enabled": True, "adaptive": True, "auto": True, "disabled": False}
_THINKING_FIELDS = ("type", "budget_tokens", "clear_thinking")
_LONG_FIELDS = ("max_tokens", "min_tokens", "prompt_embeds")
_UNLIMITED = -1
"""The thinking token budget that vLLM reads as none."""


def messages_in(body: Mapping[str, Any]) -> ChatMessages:
    """Return the conversation of a body, whose contents are strings or lists of parts.

    Raises:
        InvalidArgument: names the field, as in `messages[1].content`.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", "must be a list with at least one message")
    ignore = body.ignore if isinstance(body, LenientBody) else None
    return ChatMessages(read_message(f"messages[{i}]", message, ignore) for i, message in enumerate(messages))


def chat_options_in(body: Mapping[str, Any]) -> ChatOptions:
    """Return the options of a chat body.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`.
    """
    given: Any = {name: body.get(name) for name in _PLAIN}
    ignore = body.ignore if isinstance(body, LenientBody) else None
    if "tools" in body or "tool_choice" in body:
        given["tools"], given["tool_choice"] = tools_in(body, ignore)
    given["chat_template_kwargs"] = _variables_in(body)
    options = build_chat_options(**given, reasoning=parse_reasoning(_reasoning_in(body)))
    return replace(options, add_special_tokens=flag_in(body, "add_special_tokens"))


def _variables_in(body: Mapping[str, Any]) -> Any:
    """Return the variables of the chat template: those of `thinking`, of fields of their name, and the body's own."""
    given, thinking, found = body.get("chat_template_kwargs"), object_in(body, "thinking"), dict[str, bool]()
    if thinking:
        for name in thinking.keys() - {*_THINKING_FIELDS}:
            if not isinstance(body, LenientBody):
                raise InvalidArgument(f"thinking.{name[:_MAX_SHOWN]}", f"is not one of {', '.join(_THINKING_FIELDS)}")
            body.ignore(f"thinking.{name}")
        kind = thinking.get("type")
        if not isinstance(kind, str) or kind not in _THINKING_TYPES:
            raise InvalidArgument("thinking.type", f"{shown(kind)} is not one of {', '.join(_THINKING_TYPES)}")
        found |= thinking_kwargs(is_on=_THINKING_TYPES[kind])
        if "clear_thinking" in thinking:
            found["clear_thinking"] = flag_in(thinking, "clear_thinking")
    found |= {name: flag_in(body, name) for name in _VARIABLES if name in body}
    return {**found, **(given or {})} if found and isinstance(given, Mapping | None) else given


def thinking_kwargs(*, is_on: bool | None = None, is_kept: bool | None = None) -> dict[str, bool]:
    """Return variables that switch thinking, and keep that of earlier turns; templates without them ignore them."""
    found = {} if is_on is None else {"enable_thinking": is_on, "thinking": is_on}
    return found if is_kept is None else {**found, "preserve_thinking": is_kept, "clear_thinking": not is_kept}


def _reasoning_in(body: Mapping[str, Any]) -> Any:
    others = {key: body[name] for name, key in _OF_REASONING.items() if name in body}
    if (budget := object_in(body, "thinking").get("budget_tokens")) is not None:
        others.setdefault("thinking_token_budget", budget)
    if others.get("thinking_token_budget") == _UNLIMITED:
        others["thinking_token_budget"] = None
    value = _in_our_words(body.get("reasoning"))
    if not others:
        return value
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgument("reasoning", "must be a JSON object")
    for name, key in _OF_REASONING.items():
        if name in body and key in (value or {}):
            raise InvalidArgument(name, f"conflicts with reasoning.{key}: give only one of them")
    return {**(value or {}), **others}


def _in_our_words(reasoning: Any) -> Any:
    """Return the options of reasoning, with OpenRouter's `exclude` and `max_tokens` under the names here."""
    if not isinstance(reasoning, Mapping):
        return reasoning
    found = {name: one for name, one in reasoning.items() if name not in ("exclude", "max_tokens")}
    if reasoning.get("max_tokens") is not None:
        found.setdefault("thinking_token_budget", reasoning["max_tokens"])
    if (exclude := reasoning.get("exclude")) is not None:
        if not isinstance(exclude, bool):
            raise InvalidArgument("reasoning.exclude", f"{shown(exclude)} is not true or false")
        found.setdefault("include", not exclude)
    return found


_MAX_SHOWN = 80
_MAX_NAMED = 16
"""Maximum wrong fields, or keys of one, that an error names after the first."""


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
    "service_tier": hint(str),
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
_CHECKPOINT_DECIDES = "the checkpoint decides how images are prepared"
VLLM: Mapping[str, Neutral] = {
    "use_beam_search": only(False, advice="use beam_width"),
    "spaces_between_special_tokens": hint(bool),
    "return_tokens_as_token_ids": only(False, advice="use return_token_ids"),
    "return_token_ids": _OFF,
    "return_token_offsets": _OFF,
    "return_prompt_text": _OFF,
    "return_weight_versions": _OFF,
    "return_mm_kwargs": hint(bool),
    "mm_payload": hint(str),
    "add_generation_prompt": _ON,
    "continue_final_message": _OFF,
    "include_reasoning": _ON,
    "repetition_detection": never("use max_tokens, or repetition_penalty"),
    "truncation_side": only("left", advice="truncate_prompt_tokens keeps the last tokens"),
    "padding": only("do_not_pad", advice="inputs are never padded"),
    "stream_interval": hint(int),
    "session_id": hint(str),
    "watermarking": _OFF,
    "documents": only([]),
    "chat_template_kwargs": only({}),
    "media_io_kwargs": only({}, advice=_CHECKPOINT_DECIDES),
    "mm_processor_kwargs": only({}, advice=_CHECKPOINT_DECIDES),
    "multi_modal_data": only({}, advice="send images in messages, to /v1/chat/completions"),
    "kv_transfer_params": only({}),
    "ec_transfer_params": only({}),
    "vllm_xargs": only({}),
    "logits_processors": only([]),
    "prompt_embeds": only([], advice="use /v1/completions"),
    "guided_decoding_backend": hint(str),
    "request_id": hint(str),
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
_ONE_ANSWER = "a response has one output"
_ONE_MESSAGE = "the answer is one message"
OF_PATH: Mapping[str, Mapping[str, Neutral]] = {
    "/v1/completions": {},
    "/v1/chat/completions": {},
    "/v1/responses": {
        "conversation": never("conversations are not stored: use `previous_response_id`, or send all items in `input`"),
        "prompt": never("prompt templates are not stored: send `instructions` and `input`"),
        "client_metadata": hint(dict),
        "access_programs": hint(dict),
        "background_options": hint(dict),
        "image": hint(dict),
        "max_tool_calls": hint(int),
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
    "/v1/messages": {
        "cache_control": hint(dict),
        "speed": only("standard", "fast"),
        "inference_geo": hint(str),
        "diagnostics": hint(dict),
        "user_profile_id": hint(str),
        "workspace_id": hint(str),
        "billing_policy": hint(dict),
        "fallbacks": hint(str, list, dict),
        "fallback_credit_token": hint(str, dict),
        "betas": hint(list),
        "anthropic_beta": hint(list),
        "anthropic_version": hint(str),
        "container": never("the server runs no code"),
        "mcp_servers": only([], advice="the client calls MCP servers: send their tools in `tools`"),
        "compaction": never("send a request for a summary as a message"),
        "thread": never("messages are not stored: send the whole conversation in `messages`"),
        "n": only(1, advice=_ONE_MESSAGE),
        "best_of": only(1, advice=_ONE_MESSAGE),
        "beam_width": only(0, advice=_ONE_MESSAGE),
        "logprobs": only(False, advice="use /v1/chat/completions"),
        "prompt_logprobs": never("use /v1/chat/completions"),
        "stop": never("use `stop_sequences`"),
        "max_completion_tokens": never("use `max_tokens`"),
        "response_format": only({"type": "text"}, advice="use `output_config.format`"),
        "reasoning": never("use `thinking`"),
        "reasoning_effort": never("use `output_config.effort`"),
        "parallel_tool_calls": never("use `tool_choice.disable_parallel_tool_use`"),
    },
    "/v1/embeddings": {
        "task": only("embed", advice="/pooling has other tasks"),
    },
    "/pooling": {
        "data": never("IO processor plugins are not supported"),
        "normalize": never("use `use_activation`"),
        "pooling": never("use /v1/embeddings"),
    },
    "/classify": {"normalize": never("use `use_activation`")},
    "/v1/score": {
        **_OF_TEXTS,
        "instruction": only("", advice="write it into the texts"),
    },
    "/v1/rerank": {
        **_OF_TEXTS,
        "instruction": only("", advice="write it into the query"),
        "rank_fields": only([], ["text"], advice="documents are ranked by their text"),
        "max_chunks_per_doc": hint(int),
    },
    "/tokenize": {},
    "/detokenize": {},
    "/v1/load_lora_adapter": {
        "lora_int_id": hint(int),
        "base_model_name": hint(str),
        "is_3d_lora_weight": hint(bool),
    },
    "/v1/unload_lora_adapter": {"lora_int_id": hint(int)},
}
"""Rows for one path, which take precedence over `EVERYWHERE`. Each path handles its other fields itself."""


def neutral_fields(path: str) -> dict[str, Neutral]:
    """Return the fields of a path that have no effect, by name."""
    return {**EVERYWHERE, **OF_PATH[path]}


_NEUTRAL_FIELDS = {path: neutral_fields(path) for path in OF_PATH}


class LenientBody(dict[str, Any]):
    """A body whose unknown fields are noted instead of refused, except those that another path reads.

    Attributes:
        ignored: unknown fields, at most 16 of them: `seeed`, or `messages.nickname` for any message.
    """

    def __init__(self, fields: Mapping[str, Any], ignored: dict[str, None] | None = None) -> None:
        super().__init__(fields)
        self.ignored = {} if ignored is None else ignored

    def ignore(self, name: str) -> None:
        """Note an unknown field."""
        if len(self.ignored) < _MAX_NAMED:
            self.ignored[name[:_MAX_SHOWN]] = None


def own_fields(path: str | Mapping[str, Neutral], body: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a body that its path reads; null counts as absent.

    Those of a `LenientBody` are another one, which shares `ignored`.

    Args:
        path: the path, or the fields without effect.
        own: names of the fields that the path reads.

    Raises:
        InvalidArgument: a field is unknown and the body is no `LenientBody`, or its value is not supported.
    """
    neutral, known = _NEUTRAL_FIELDS[path] if isinstance(path, str) else path, frozenset(own)
    found: dict[str, Any] = LenientBody({}, body.ignored) if isinstance(body, LenientBody) else {}
    problems: dict[str, str] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            found[name] = value
        elif (row := neutral.get(name)) is None:
            if isinstance(body, LenientBody) and name not in OF_ANY:
                body.ignore(name)
            else:
                problems[name] = "is not supported"
        elif not row.has(value):
            problems[name] = _problem(row, value)
        if len(problems) > _MAX_NAMED:
            break
    if problems:
        (name, problem), *others = problems.items()
        raise InvalidArgument(name[:_MAX_SHOWN], "; ".join([problem, *(f"{n[:_MAX_SHOWN]}: {p}" for n, p in others)]))
    return found


def _problem(row: Neutral, value: Any) -> str:
    advice = f": {row.advice}" if row.advice else ""
    if row.values:
        return f"{repr(value)[:_MAX_SHOWN]} is not supported, only {' or '.join(map(repr, row.values))}{advice}"
    if row.types:
        expected = " or ".join(sorted(one.__name__ for one in row.types))
        return f"{repr(value)[:_MAX_SHOWN]} is not of type {expected}{advice}"
    return f"is not supported{advice}"


MAX_PROMPTS = 1024
"""Prompts of one body of completions."""
MAX_USER_CHARS = 512
_MAX_ID_DIGITS = 10
"""Digits of 2**32 - 1, above which no message has a token id."""
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Fields of older versions of vLLM: fields of `structured_outputs`."""
_SHARED = {
    *("model", "adapter", "stream", "stream_options", "return_token_ids", "user", "response_format", "request_id"),
    *("return_tokens_as_token_ids", "use_beam_search", "truncation_side", "add_special_tokens", "echo", *GUIDED),
}
_SAMPLING = {f.name for f in request_fields()} - {"logprobs"}
OF_COMPLETIONS = {*_SAMPLING, *_SHARED, "prompt", "prompt_embeds", "logprobs"}
_OF_TOOLS = frozenset({"tools", "tool_choice", "functions", "function_call"})
OF_CHATS = {*_SAMPLING, *_SHARED, *CHAT_FIELDS, *_OF_TOOLS, "logprobs", "top_logprobs", "max_completion_tokens"}
OF_ADAPTERS = {"lora_name", "lora_path"}
OF_ANY = frozenset(
    {
        *(OF_COMPLETIONS | OF_CHATS | OF_ADAPTERS),
        *("input", "instructions", "max_output_tokens", "text", "include", "store", "background"),
        *("previous_response_id", "truncation"),
        *("system", "stop_sequences", "thinking", "output_config", "output_format", "metadata", "context_management"),
        *("pooling", "encoding_format", "dimensions", "normalize", "use_activation", "continuations", "prompt_name"),
        *("text_1", "text_2", "data_1", "data_2", "queries", "items", "query", "documents", "top_n"),
        *("return_documents", "tokens", "return_token_strs", "task", "embed_dtype", "endianness"),
        *("max_tokens_per_query", "max_tokens_per_doc"),
    }
)
"""Fields that some path reads."""
TRUNCATION_SIDES = ("left", "right")
_TEXTS = {"stop", "bad_words"}
"""Lists of texts, of which one may stand by itself."""
_LISTS = _TEXTS | {"stop_token_ids", "allowed_token_ids", "logprob_token_ids"}
_FLAGS = {f.name for f in request_fields() if isinstance(f.default, bool)} - {"early_stopping"}


@dataclass(frozen=True, slots=True)
class Streaming:
    """Options of a streamed answer.

    Attributes:
        include_usage: the last chunk has the usage of the whole, and no choices.
        continuous_usage_stats: every chunk has the usage so far; without `include_usage` none has.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed body.

    Attributes:
        prompts: one request each; a chat is one.
        has_echo: prepend the prompt to the text, and its log-probabilities to the text's; for completions only.
        shows_prompt_logprobs: return the prompt's log-probabilities by themselves, even if the text's include them.
        echoed: text before the answer of a chat, which its last message contains; "" for none.
        role: role of the answer of a chat.
        call_form: form of the calls in it; None for `tool_calls` of functions.
        is_only_told: return only the prompt, without generated text: `max_tokens` of 0. `sampling` then samples one
            token, which is dropped.
        has_token_ids: return token ids in addition to the text.
        names_token_ids: log-probabilities name a token `token_id:N` instead of by its text.
        request_id: id of the request, if the caller's headers have none.
        user: the end user as named by the caller; has no effect.
        streaming: None for a single response.
        names: the caller's names of fields that have another name here.
    """

    sampling: SamplingParams
    prompts: tuple[Prompt, ...]
    model: str | None = None
    adapter: str | None = None
    has_echo: bool = False
    shows_prompt_logprobs: bool = True
    is_only_told: bool = False
    has_token_ids: bool = False
    names_token_ids: bool = False
    request_id: str | None = None
    echoed: str = ""
    role: str = "assistant"
    call_form: CallForm | None = None
    user: str | None = None
    streaming: Streaming | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.prompts[0].messages is not None

    def echoes_text(self, number: int) -> bool:
        """Return True if an echo of a prompt is the text that the caller sent, not decoded from tokens."""
        return self.prompts[number].text is not None and self.sampling.truncate_prompt_tokens is None


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body; those that are null count as left out."""
    return {name: value for name, value in body.items() if value is not None}


def completion_job(given: Mapping[str, Any], defaults: Mapping[str, Any] = NO_DEFAULTS) -> Job:
    """Read a body of /v1/completions.

    Args:
        defaults: the model's sampling defaults, for fields that the body leaves out.

    Raises:
        InvalidArgument: a field is unknown, wrong, or cannot be honoured.
    """
    body = own_fields("/v1/completions", given, OF_COMPLETIONS)
    has_echo, logprobs = flag_in(body, "echo"), _int_or_none(body, "logprobs")
    shows_prompt_logprobs = not has_echo or "prompt_logprobs" in body
    if has_echo and logprobs is not None and body.setdefault("prompt_logprobs", logprobs) != logprobs:
        problem = f"must be equal to logprobs ({logprobs}) with echo, which returns both"
        raise InvalidArgument("prompt_logprobs", problem)
    is_only_told = type(body.get("max_tokens")) is int and body["max_tokens"] == 0
    if is_only_told:
        if not has_echo:
            raise InvalidArgument("max_tokens", "0 needs echo to be true: otherwise there is nothing to return")
        body["max_tokens"] = 1
    length = _length(body, defaults)
    names = _names(body)
    adds = flag_in(body, "add_special_tokens", default=True)
    length |= {"add_special_tokens": adds, "truncation_side": truncation_side_in(body)}
    prompts = _prompts_of_body(body)
    return Job(
        _sampling(body, logprobs, names, defaults),
        tuple(replace(one, **length, is_only_told=is_only_told) for one in prompts),
        has_echo=has_echo,
        shows_prompt_logprobs=shows_prompt_logprobs,
        is_only_told=is_only_told,
        names=names,
        **_of_both(body),
    )


def chat_job(given: Mapping[str, Any], defaults: Mapping[str, Any] = NO_DEFAULTS) -> Job:
    """Read a body of /v1/chat/completions; one without a limit fills the model's length.

    Args:
        defaults: the model's sampling defaults, for fields that the body leaves out.

    Raises:
        InvalidArgument: a field is unknown, wrong, or cannot be honoured.
    """
    body = own_fields("/v1/chat/completions", given, OF_CHATS)
    if "max_completion_tokens" in body:
        if body.get("max_tokens", body["max_completion_tokens"]) != body["max_completion_tokens"]:
            raise InvalidArgument("max_tokens", "conflicts with max_completion_tokens: give only one of them")
        body["max_tokens"] = body["max_completion_tokens"]
    wants_logprobs, num_top = flag_in(body, "logprobs"), _int_or_none(body, "top_logprobs")
    if num_top and not wants_logprobs:
        raise InvalidArgument("top_logprobs", "needs logprobs to be true")
    length = _length(body, defaults)
    form = convert_tools(body) if _has_calls(body) else None
    try:
        messages, options = messages_in(body), chat_options_in(body)
    except InvalidArgument as error:
        raise error if form is None else form.rename(error) from error
    prompt = Prompt(messages=messages, chat_options=options, truncation_side=truncation_side_in(body), **length)
    names = {"prompt": "messages", **_names(body), **({"logprobs": "top_logprobs"} if num_top else {})}
    body.pop("thinking_token_budget", None)  # read with the options
    sampling = _sampling(body, (num_top or 0) if wants_logprobs else None, names, defaults)
    last = messages[-1]
    role = "assistant" if options.add_generation_prompt else last["role"]
    echoed = text_in(last["content"]) if flag_in(body, "echo") and last["role"] == role else ""
    return Job(sampling, (prompt,), names=names, role=role, echoed=echoed, call_form=form, **_of_both(body))


def _has_calls(body: Mapping[str, Any]) -> bool:
    """Return True if a body of a chat has tools, or calls in its messages."""
    turns = body.get("messages")
    listed = turns if isinstance(turns, list) else ()
    has_call = any("tool_calls" in one or "function_call" in one for one in listed if isinstance(one, dict))
    return has_call or not _OF_TOOLS.isdisjoint(body)


def _length(body: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Prompt that limit the output, if the body has no limit; set the minimum that must fit."""
    if "max_tokens" in body:
        return {}
    if type(least := body.get("min_tokens", 1)) is int:
        body["max_tokens"] = max(1, least)
    return {"fills_length": True, "max_filled": defaults.get("max_tokens")}


def _names(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the caller's names of fields that have another name here."""
    names = {"structured_outputs": "response_format", "max_tokens": "max_completion_tokens"}
    found = {ours: theirs for ours, theirs in names.items() if theirs in body}
    guided = next((name for name in GUIDED if name in body), None)
    return found if guided is None else {"structured_outputs": guided, **found}


def renamed(error: InvalidArgument, names: Mapping[str, str]) -> InvalidArgument:
    """Return an error with the caller's name of the field."""
    bare = error.field.removeprefix("sampling.")
    if bare == "prompt" or (isinstance(error, RequestTooLong) and bare not in _LONG_FIELDS):
        return type(error)(names.get("prompt", "prompt"), error.problem)
    first, dot, rest = bare.partition(".")
    if first == "structured_outputs" and first in names:  # the caller has no names for nested fields
        return type(error)(names[first], error.problem)
    return type(error)(f"{names.get(first, first)}{dot}{rest}", error.problem)


def _of_both(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common fields of completions and chats, by the names of a Job."""
    user = name_in(body, "user")
    if user is not None and len(user) > MAX_USER_CHARS:
        raise InvalidArgument("user", f"{len(user)} characters, over the limit of {MAX_USER_CHARS}")
    return {
        "model": name_in(body, "model") or None,
        "adapter": name_in(body, "adapter"),
        "has_token_ids": flag_in(body, "return_token_ids"),
        "names_token_ids": flag_in(body, "return_tokens_as_token_ids"),
        "request_id": name_in(body, "request_id") or None,
        "user": user,
        "streaming": _streaming(body),
    }


def _streaming(body: Mapping[str, Any]) -> Streaming | None:
    is_streamed, options = flag_in(body, "stream"), body.get("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidArgument("stream_options", "must be an object")
    known = {one.name for one in fields(Streaming)}
    for name, value in options.items():
        if name not in known and name != "include_obfuscation":
            if isinstance(body, LenientBody):
                body.ignore(f"stream_options.{name}")
                continue
            raise InvalidArgument(
                f"stream_options.{name[:_MAX_SHOWN]}", f"is unknown: must be one of {', '.join(sorted(known))}"
            )
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(f"stream_options.{name}", f"{shown(value)} is not true or false")
        if value and name not in known:
            raise InvalidArgument(f"stream_options.{name}", "True is not supported, only False")
    if not is_streamed:
        if any(options.values()):
            raise InvalidArgument("stream_options", "needs stream to be true")
        return None
    has_usage = bool(options.get("include_usage"))
    return Streaming(has_usage, has_usage and bool(options.get("continuous_usage_stats")))


def _prompts_of_body(body: Mapping[str, Any]) -> tuple[Prompt, ...]:
    """Return the prompts of completions: first input embeddings; an empty `prompt` is then none, as in vLLM."""
    given = body.get("prompt_embeds", [])
    many = [given] if isinstance(given, str) else given
    if not isinstance(many, list) or not all(isinstance(one, str) for one in many):
        raise InvalidArgument("prompt_embeds", f"{shown(given)} is neither a base64 text nor a list of these")
    for name in ("echo", "prompt_logprobs") if many else ():
        if body.get(name, False) is not False:
            raise InvalidArgument(name, "is not compatible with prompt_embeds, whose positions have no tokens")
    prompts = () if many and body.get("prompt", "") in ("", []) else _prompts(body.get("prompt"))
    if (total := len(many) + len(prompts)) > MAX_PROMPTS:
        raise InvalidArgument("prompt_embeds", f"{total} prompts, with those of `prompt`, are over {MAX_PROMPTS}")
    return (*(Prompt(embeds=one) for one in many), *prompts)


def _prompts(given: Any) -> tuple[Prompt, ...]:
    """Return the prompts: one text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return (Prompt(text=given),)
    if not isinstance(given, list) or not given:
        raise InvalidArgument("prompt", "must be a string, a list of token ids, or a list of these")
    if type(given[0]) is int:
        return (_prompt_of_ids("prompt", given),)
    if len(given) > MAX_PROMPTS:
        raise InvalidArgument("prompt", f"{len(given)} prompts are over the limit of {MAX_PROMPTS}")
    return tuple(
        Prompt(text=one) if isinstance(one, str) else _prompt_of_ids(f"prompt[{i}]", one) for i, one in enumerate(given)
    )


def _prompt_of_ids(where: str, given: Any) -> Prompt:
    if not isinstance(given, list) or not given or set(map(type, given)) != {int}:
        raise InvalidArgument(where, f"{shown(given)} is neither a string nor a list of token ids")
    return Prompt(token_ids=tuple(given))


def _sampling(
    body: Mapping[str, Any], logprobs: int | None, names: Mapping[str, str], defaults: Mapping[str, Any]
) -> SamplingParams:
    values = {name: value for name, value in body.items() if name in _SAMPLING}
    for name in _LISTS & values.keys():
        if not isinstance(values[name], list | (str if name in _TEXTS else list)):
            raise InvalidArgument(name, f"{shown(values[name])} is not a list")
    for name in _FLAGS & values.keys():
        flag_in(values, name)
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"])
    if guided := {key: body[name] for name, key in GUIDED.items() if name in body}:
        if "structured_outputs" in values:
            raise InvalidArgument(
                names["structured_outputs"], "conflicts with structured_outputs: give only one of them"
            )
        values["structured_outputs"] = guided
    if flag_in(body, "use_beam_search"):
        if "beam_width" in values:
            raise InvalidArgument("use_beam_search", "conflicts with beam_width: give only one of them")
        values["beam_width"] = values.get("n", 1)
        values.pop("temperature", None)
    if values.get("logprob_token_ids"):
        logprobs = None  # those of the named tokens take the place of the top ones
    try:
        if "response_format" in body:
            values["structured_outputs"] = _constraint(body["response_format"], values.get("structured_outputs"))
        return SamplingParams(**with_defaults(values, defaults), logprobs=logprobs)
    except InvalidArgument as error:
        raise renamed(error, names) from error


def _constraint(response_format: Any, given: Any) -> StructuredOutputs | None:
    """Return the constraint of a response format, with the options of `structured_outputs`."""
    wanted = get_response_format(response_format, "response_format")
    options = get_structured_outputs(given) if isinstance(given, Mapping) else given
    if wanted is None or options is None:
        return options if wanted is None else wanted
    if options.has_constraint:
        raise InvalidArgument("response_format", f"must be left out with structured_outputs.{options.kind.value}")
    return wanted.with_options(options)


def _biases(given: Any) -> dict[int, Any] | None:
    """Return token ids -> biases; JSON has the ids as strings."""
    if not isinstance(given, dict):
        raise InvalidArgument("logit_bias", f"{shown(given)} is not an object of token ids and numbers")
    wrong = [name for name in given if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS)]
    if wrong:
        named = ", ".join(map(shown, wrong[: 1 + _MAX_NAMED]))
        raise InvalidArgument(
            "logit_bias", f"{named} {'is not a token id' if len(wrong) == 1 else 'are not token ids'}"
        )
    biases = {int(name): bias for name, bias in given.items()}
    if len(biases) < len(given):
        raise InvalidArgument("logit_bias", "has a token id twice")
    return biases or None


def object_in(body: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the object in a field without its nulls, empty if absent; raise InvalidArgument if it is none."""
    value = body.get(field, {})
    if not isinstance(value, dict):
        raise InvalidArgument(field, "must be an object")
    return without_nulls(value)


def list_in(body: Mapping[str, Any], field: str) -> list[Any]:
    """Return the list in a field, empty if absent; raise InvalidArgument if it is none."""
    value = body.get(field, [])
    if not isinstance(value, list):
        raise InvalidArgument(field, "must be a list")
    return value


def name_in(body: Mapping[str, Any], field: str) -> str | None:
    """Return the name in a field, None if absent; raise InvalidArgument if it is not a string."""
    name = body.get(field)
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(field, f"{shown(name)} is not a string")
    return name


def truncation_side_in(body: Mapping[str, Any]) -> Any:
    """Return the side on which a body's prompts are truncated; raise InvalidArgument if it is neither."""
    side = body.get("truncation_side", TRUNCATION_SIDES[0])
    if side not in TRUNCATION_SIDES:
        raise InvalidArgument("truncation_side", f"{shown(side)} is not one of {', '.join(TRUNCATION_SIDES)}")
    return side


def flag_in(body: Mapping[str, Any], field: str, *, default: bool = False) -> bool:
    """Return the flag in a field, `default` if absent; raise InvalidArgument if it is not a boolean."""
    value = body.get(field, default)
    if not isinstance(value, bool):
        raise InvalidArgument(field, f"{shown(value)} is not true or false")
    return value


def _int_or_none(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise InvalidArgument(name, f"{shown(value)} is not an integer")
    return value


def shown(value: Any) -> str:
    """Return a value as errors show it, truncated."""
    return repr(value)[:_MAX_SHOWN]
