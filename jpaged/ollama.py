"""Bodies of Ollama's API, whole and as lines of a stream: its chats and completions over those of OpenAI. No I/O.

A body becomes the job of a chat, or with `raw` of a completion, so that everything after it is the path of OpenAI's:

    /api/chat         messages, tools                  -> a chat
    /api/generate     prompt, system                   -> a chat of one turn
    /api/generate     prompt, "raw": true              -> a completion
    /api/embed        input                            -> embeddings of length 1
    /api/embeddings   prompt                           -> one embedding

`options` are parameters of sampling under llama.cpp's names. A stream is a line of JSON for each event, and `done` is
true in the last one, which has the counts and times. Source of names: https://docs.ollama.com/api and the types of the
package `ollama`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from jpaged import json_text
from jpaged.chat import MAX_TOOL_CALLS, GivenImage, ToolCall, ToolCallPiece, json_object
from jpaged.errors import InvalidArgument
from jpaged.json_text import Items
from jpaged.openai.embeddings import EmbedJob, embed_job
from jpaged.openai.request import (
    EVERYWHERE,
    Job,
    LenientBody,
    Neutral,
    chat_job,
    completion_job,
    flag_in,
    hint,
    name_in,
    object_in,
    only,
    own_fields,
    renamed,
    shown,
)
from jpaged.openai.response import TokenText, chat_logprobs
from jpaged.sampling_params import NO_DEFAULTS
from jpaged.types import FinishReason, OutputEvent, PositionLogprobs, RequestOutput, RequestTimes, Usage

CHAT_URL, GENERATE_URL = "/api/chat", "/api/generate"
EMBED_URL, EMBEDDINGS_URL = "/api/embed", "/api/embeddings"
API_VERSION = "0.12.11"
"""First version of Ollama that has every field here; clients refuse servers of older versions."""
LATEST = ":latest"
"""Tag that Ollama adds to the name of a model without one."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking on or off."""
_THINK_LEVELS = ("low", "medium", "high", "max")
_UNLIMITED = (-2, -1, 0)
"""Values of `num_predict` without a limit."""
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
"""Option -> field of a chat."""
_OPTION_ROWS: Mapping[str, Neutral] = {
    **dict.fromkeys(("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"), hint(int)),
    **dict.fromkeys(("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock"), hint(bool)),
    **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), only(False)),
    "repeat_last_n": hint(int),
    "tfs_z": only(1.0),
    "typical_p": only(1.0),
    "mirostat": only(0),
    "mirostat_tau": hint(int, float),
    "mirostat_eta": hint(int, float),
    "penalize_newline": only(True, advice="use logit_bias of /v1/chat/completions"),
}
_INTEGERS = {"top_k", "seed", "num_predict", *(name for name, row in _OPTION_ROWS.items() if row == hint(int))}
"""Options that may be written as 8.0."""
_SHARED_ROWS: Mapping[str, Neutral] = {
    "keep_alive": hint(str, int, float),
    **{f"options.{name}": row for name, row in _OPTION_ROWS.items()},
}
_SAMPLING_ROWS: Mapping[str, Neutral] = {
    f"options.{name}": hint(int, float, str, list) for name in (*_SAMPLING, "num_predict")
}
"""Options of sampling, which clients also send with texts to embed."""
_TEXT_ROWS: Mapping[str, Neutral] = {
    **_SHARED_ROWS,
    "shift": hint(bool),
    "_debug_render_only": only(False, advice="use /tokenize and /detokenize"),
}
ROWS: Mapping[str, Mapping[str, Neutral]] = {
    CHAT_URL: {**EVERYWHERE, **_TEXT_ROWS, "images": only([], advice="send them in messages")},
    GENERATE_URL: {
        **EVERYWHERE,
        **_TEXT_ROWS,
        "context": only([], advice="send the conversation to /api/chat"),
        "truncate": hint(bool),
        "template": only("", advice="the server has the model's chat template; use raw for another prompt"),
        **dict.fromkeys(("width", "height", "steps"), only(0, advice="the server makes no images")),
    },
    EMBED_URL: {**EVERYWHERE, **_SHARED_ROWS, **_SAMPLING_ROWS},
    EMBEDDINGS_URL: {**EVERYWHERE, **_SHARED_ROWS, **_SAMPLING_ROWS},
    "/api/show": {
        **EVERYWHERE,
        "verbose": hint(bool),
        **dict.fromkeys(("system", "template"), only("")),
        "options": only({}),
    },
    "/api/pull": {**EVERYWHERE, "insecure": hint(bool), **dict.fromkeys(("username", "password"), hint(str))},
}
"""Fields that have no effect, by path, with the values that pass; `options.x` is a key of `options`."""
_OF_TEXTS = {
    *("model", "stream", "format", "think", "logprobs", "top_logprobs", "options.num_predict"),
    *(f"options.{name}" for name in _SAMPLING),
}
OF_CHATS = {*_OF_TEXTS, "messages", "tools", "truncate"}
OF_PROMPTS = {*_OF_TEXTS, "prompt", "system", "raw", "images"}
OF_EMBEDDINGS = {"model", "input", "truncate", "dimensions"}
_THEIRS = {
    **{ours: f"options.{theirs}" for theirs, ours in _SAMPLING.items()},
    "structured_outputs": "format",
    "response_format": "format",
    "reasoning": "think",
    "chat_template_kwargs": "think",
}
"""Field of a chat -> its name in Ollama's bodies."""


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A parsed body of /api/chat or /api/generate.

    Attributes:
        model: name of the model in the body, which answers repeat.
        is_chat: answers have a message; otherwise a text.
        loads: the body has nothing to answer, as those that only load a model.
        truncates: leave out the oldest turns of a conversation that is too long.
    """

    job: Job
    model: str
    is_chat: bool
    loads: bool = False
    truncates: bool = False


def without_tag(name: str, served: Collection[str]) -> str:
    """Return the name of a model as it is served: without the tag `:latest`, unless that is a part of the name."""
    return name if name in served else name.removesuffix(LATEST)


def with_tag(name: str) -> str:
    """Return the name of a model with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def parse_chat_request(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    *,
    served: Collection[str] = (),
    can_think: bool = True,
) -> OllamaRequest:
    """Parse a body of /api/chat.

    Args:
        defaults: the model's sampling defaults, for options that the body leaves out.
        served: names of the model and its adapters.
        can_think: the model's reasoning format is known.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
    """
    body = _own_fields(CHAT_URL, given, OF_CHATS)
    messages = body.get("messages", [])
    if not isinstance(messages, list):
        raise InvalidArgument("messages", "must be a list")
    loads = not messages
    chat = _chat_fields(body, served, can_think=can_think) | {
        "messages": [{"role": "user", "content": ""}] if loads else _messages(messages),
        "tools": body.get("tools") or None,
    }
    return OllamaRequest(
        _read(body, chat_job, chat, defaults),
        str(body["model"]),
        is_chat=True,
        loads=loads,
        truncates=flag_in(body, "truncate", default=True),
    )


def parse_generate_request(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    *,
    served: Collection[str] = (),
    can_think: bool = True,
    has_template: bool = True,
) -> OllamaRequest:
    """Parse a body of /api/generate.

    Args:
        has_template: the model has a chat template; otherwise every prompt is raw.

    Other arguments and errors are those of `parse_chat_request`.
    """
    body = _own_fields(GENERATE_URL, given, OF_PROMPTS)
    prompt, system = name_in(body, "prompt") or "", name_in(body, "system") or ""
    fields = _chat_fields(body, served, can_think=can_think)
    is_raw = flag_in(body, "raw") or not has_template
    images = body.get("images")
    if is_raw and images:
        raise InvalidArgument("images", "need a chat template: send them to /api/chat, or prompts that are not raw")
    if is_raw and system:
        raise InvalidArgument("system", "needs a chat template: write it into the prompt")
    if is_raw and body.get("think"):
        raise InvalidArgument("think", "is not supported with raw prompts")
    if is_raw:
        wants_logprobs = fields.pop("logprobs")
        num_top = fields.pop("top_logprobs") or 0
        of_chats = ("reasoning", "chat_template_kwargs")
        completion = {name: value for name, value in fields.items() if name not in of_chats}
        completion |= {"prompt": prompt or " ", "logprobs": num_top if wants_logprobs else None}
        job = _read(body, completion_job, completion, defaults)
        job = replace(job, names={**job.names, "logprobs": "top_logprobs"})
    else:
        messages = [{"role": "system", "content": system}] if system else []
        content = _with_images("", prompt, images) if images else prompt
        messages.append({"role": "user", "content": content})
        job = _read(body, chat_job, fields | {"messages": messages}, defaults)
        job = replace(job, names={**job.names, "prompt": "prompt"})
    return OllamaRequest(job, str(body["model"]), is_chat=False, loads=not prompt and not images)


def _own_fields(path: str, given: Mapping[str, Any], own: set[str]) -> dict[str, Any]:
    """Return the fields of a body that its path reads, with those of `options` as `options.x`."""
    flat = {name: value for name, value in given.items() if name != "options"}
    if given.get("options") is not None:  # Ollama's client in Go sends null
        flat |= {f"options.{name}": _option(name, value) for name, value in object_in(given, "options").items()}
    body = own_fields(ROWS[path], LenientBody(flat, given.ignored) if isinstance(given, LenientBody) else flat, own)
    if not name_in(body, "model"):
        raise InvalidArgument("model", "is missing or empty")
    return body


def _option(name: str, value: Any) -> Any:
    return int(value) if name in _INTEGERS and isinstance(value, float) and value.is_integer() else value


def _read(
    body: Mapping[str, Any],
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], Job],
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> Job:
    """Return the job of a chat or a completion, whose errors have Ollama's names of fields.

    Its limit is `num_predict`, or what the model's length and the pool allow.
    """
    limit = body.get("options.num_predict", _UNLIMITED[0])
    if type(limit) is not int or limit < _UNLIMITED[0]:
        raise InvalidArgument("options.num_predict", f"{shown(limit)} is not an integer of {_UNLIMITED[0]} or more")
    try:
        job = read(LenientBody(fields, body.ignored) if isinstance(body, LenientBody) else fields, defaults)
    except InvalidArgument as error:
        raise _renamed(error) from error
    if limit not in _UNLIMITED:
        job = replace(job, prompts=tuple(replace(one, max_filled=limit) for one in job.prompts))
    return replace(job, names={**job.names, **_THEIRS})


def _renamed(error: InvalidArgument) -> InvalidArgument:
    if error.field.startswith(("messages", "tools")):
        return error
    return renamed(error, _THEIRS)


def _chat_fields(body: Mapping[str, Any], served: Collection[str], *, can_think: bool) -> dict[str, Any]:
    """Return the fields that chats and completions share, by OpenAI's names."""
    fields = {ours: body.get(f"options.{theirs}") for theirs, ours in _SAMPLING.items()}
    return fields | {
        "model": without_tag(str(body["model"]), served),
        "stream": flag_in(body, "stream", default=True),
        **_output_format(body.get("format", "")),
        **_thinking(body.get("think"), can_think=can_think),
        "logprobs": flag_in(body, "logprobs"),
        "top_logprobs": body.get("top_logprobs") or None,
    }


def _output_format(given: Any) -> dict[str, Any]:
    """Return the fields of a chat for `format`; as in llama.cpp, objects have only the properties of the schema."""
    if given == "":
        return {}
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(given, dict):
        raise InvalidArgument("format", f"{shown(given)} is neither 'json' nor a JSON schema")
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": given}},
        "structured_outputs": {"disable_additional_properties": True},
    }


def _thinking(think: Any, *, can_think: bool) -> dict[str, Any]:
    """Return the fields of a chat that switch thinking on or off, without an effect if the template has no switch."""
    if think is None or think == "":
        return {}
    if not isinstance(think, bool) and think not in _THINK_LEVELS:
        raise InvalidArgument("think", f"{shown(think)} is not true, false or one of {', '.join(_THINK_LEVELS)}")
    if not can_think:
        if think:
            raise InvalidArgument("think", "is not supported: the model's reasoning format is unknown")
        return {}
    reasoning = {"effort": think} if isinstance(think, str) else {"include": think}
    return {"reasoning": reasoning, "chat_template_kwargs": dict.fromkeys(_SWITCHES, bool(think))}


def _with_images(where: str, text: Any, images: Any) -> Any:
    """Return the content of a message with images, which stand before its text as in Ollama."""
    if not isinstance(images, list):
        raise InvalidArgument(f"{where}images", f"{shown(images)} is not a list")
    if not isinstance(text, str):
        return text  # the error is that of chats
    parts: list[dict[str, Any]] = []
    for number, image in enumerate(images):
        field = f"{where}images[{number}]"
        if not isinstance(image, str):
            raise InvalidArgument(field, f"{shown(image)} is not an image in base64")
        parts.append({"type": "image", "image": GivenImage(field, f"data:;base64,{image}")})
    return [*parts, {"type": "text", "text": text}] if text else parts


def _messages(given: Sequence[Any]) -> list[Any]:
    """Return messages in OpenAI's format: calls get ids, and results the id of their call."""
    messages: list[Any] = []
    pending: list[tuple[str, str]] = []
    for i, one in enumerate(given):
        if not isinstance(one, Mapping):
            messages.append(one)  # the error is that of chats
            continue
        message = {name: value for name, value in one.items() if value is not None}
        message.setdefault("content", "")
        if images := message.pop("images", None):
            message["content"] = _with_images(f"messages[{i}].", message["content"], images)
        for name in ("thinking", "tool_name"):
            if not isinstance(message.get(name, ""), str):
                raise InvalidArgument(f"messages[{i}].{name}", f"{shown(message[name])} is not a string")
        if thought := message.pop("thinking", None):
            message["reasoning_content"] = thought
        tool_name = message.pop("tool_name", None)
        if message.get("role") == "tool":
            message.setdefault("tool_call_id", _take_call(pending, tool_name))
            if tool_name:
                message["name"] = tool_name
        calls = message.get("tool_calls")
        if isinstance(calls, list) and len(calls) > MAX_TOOL_CALLS:
            raise InvalidArgument(f"messages[{i}].tool_calls", f"{len(calls)} calls; at most {MAX_TOOL_CALLS}")
        if isinstance(calls, list) and calls:
            message["tool_calls"] = [_with_id(call, f"call_{i}_{j}") for j, call in enumerate(calls)]
            pending = [
                (call["id"], call["function"].get("name"))
                for call in message["tool_calls"]
                if isinstance(call, dict) and isinstance(call.get("function"), dict)
            ]
        messages.append(message)
    return messages


def _with_id(call: Any, call_id: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        function = {name: value for name, value in function.items() if name != "index"}
    return {"type": "function", **call, "id": call.get("id") or call_id, "function": function}


def _take_call(pending: list[tuple[str, str]], name: Any) -> str:
    """Remove the call that a result belongs to, and return its id; "" if there is none."""
    found = next((one for one in pending if one[1] == name), pending[0] if pending else None)
    if found is None:
        return ""
    pending.remove(found)
    return found[0]


@dataclass(frozen=True, slots=True)
class OllamaEmbedRequest:
    """A parsed body of /api/embed or /api/embeddings.

    Attributes:
        job: None if there is nothing to embed.
        dimensions: numbers of a vector to keep; None keeps all.
        is_one: the answer is one vector, as the model computes it; others have length 1.
    """

    job: EmbedJob | None
    model: str
    dimensions: int | None = None
    is_one: bool = False


def parse_embed_request(given: Mapping[str, Any], *, served: Collection[str] = ()) -> OllamaEmbedRequest:
    """Parse a body of /api/embed; long inputs lose their last tokens unless `truncate` is false.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
    """
    body = _own_fields(EMBED_URL, given, OF_EMBEDDINGS)
    inputs = body.get("input", [])
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(inputs, list) or not all(isinstance(one, str) for one in inputs):
        raise InvalidArgument("input", f"{shown(inputs)} is neither a string nor a list of strings")
    dimensions = body.get("dimensions", 0)
    if type(dimensions) is not int or dimensions < 0:
        raise InvalidArgument("dimensions", f"{shown(dimensions)} is not an integer of 0 or more")
    truncates = flag_in(body, "truncate", default=True)
    job = None if inputs in ([], [""]) else _embed_job(body, inputs, served, truncates=truncates)
    return OllamaEmbedRequest(job, str(body["model"]), dimensions or None)


def parse_embeddings_request(given: Mapping[str, Any], *, served: Collection[str] = ()) -> OllamaEmbedRequest:
    """Parse a body of /api/embeddings; raise as `parse_embed_request`."""
    body = _own_fields(EMBEDDINGS_URL, given, {"model", "prompt"})
    prompt = name_in(body, "prompt")
    job = _embed_job(body, [prompt], served, truncates=True, normalize=False) if prompt else None
    return OllamaEmbedRequest(job, str(body["model"]), is_one=True)


def _embed_job(
    body: Mapping[str, Any], inputs: list[str], served: Collection[str], *, truncates: bool, normalize: bool = True
) -> EmbedJob:
    fields = {"input": inputs, "model": without_tag(str(body["model"]), served), "normalize": normalize}
    if truncates:
        fields |= {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    return embed_job(fields)


def embeddings_body(
    request: OllamaEmbedRequest, vectors: Sequence[Sequence[float]], *, num_tokens: int, began_s: float
) -> dict[str, Any]:
    """Return the response to embeddings; `began_s` is `time.monotonic` at the start."""
    if request.is_one:
        return {"embedding": list(vectors[0]) if vectors else []}
    return {
        "model": request.model,
        "embeddings": Items(lambda: (_shortened(one, request.dimensions) for one in vectors)),
        "total_duration": _nanoseconds(time.monotonic() - began_s),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }


def _shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Return the first numbers of a vector, scaled to length 1."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = sum(value * value for value in kept) ** 0.5 or 1.0
    return [value / length for value in kept]


def parse_show_request(given: Mapping[str, Any]) -> str:
    """Return the name of the model in a body of /api/show, which may be `name` as well.

    Raises:
        InvalidArgument: it is missing, or a field is unknown.
    """
    return _model_in(own_fields(ROWS["/api/show"], given, {"model", "name"}))


def parse_pull_request(given: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the name of the model in a body of /api/pull, and whether to stream; raise as `parse_show_request`."""
    body = own_fields(ROWS["/api/pull"], given, {"model", "name", "stream"})
    return _model_in(body), flag_in(body, "stream", default=True)


def _model_in(body: Mapping[str, Any]) -> str:
    name = name_in(body, "model") or name_in(body, "name")
    if not name:
        raise InvalidArgument("model", "is missing or empty")
    return name


def timestamp(moment: datetime | None = None) -> str:
    """Return a time, now by default, in RFC 3339."""
    return (moment or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def hex_digest(text: str) -> str:
    """Return a digest in the format of Ollama's: 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def load_body(request: OllamaRequest) -> dict[str, Any]:
    """Return the response to a body without anything to answer; the model is always loaded."""
    return {**_heading(request), **_content(request, ""), "done": True, "done_reason": "load"}


def _heading(request: OllamaRequest) -> dict[str, Any]:
    return {"model": request.model, "created_at": timestamp()}


def _content(
    request: OllamaRequest, text: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return the fields of an answer, or of a part of one."""
    thinking = {"thinking": thought} if thought else {}
    if not request.is_chat:
        return {"response": text, **thinking}
    called = {"tool_calls": list(calls)} if calls else {}
    return {"message": {"role": "assistant", "content": text, **thinking, **called}}


def _logprobs(positions: Sequence[PositionLogprobs], token_text: TokenText) -> dict[str, Any]:
    return {"logprobs": chat_logprobs(positions, token_text)["content"]} if positions else {}


def _tool_call(index: int, call: ToolCall) -> dict[str, Any]:
    """Return a call, whose arguments are an object; those that are none are the text in `arguments`."""
    try:
        arguments: Any = json_object("arguments", call.arguments or "{}", max_bytes=1 << 30)
    except InvalidArgument:
        arguments = {"arguments": call.arguments}
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def _end(reason: str, usage: Usage, times: RequestTimes | None, began_s: float) -> dict[str, Any]:
    """Return the fields of a finished answer; durations are in nanoseconds."""
    prompt_s = eval_s = 0.0
    if times is not None and times.first_token_s is not None:
        prompt_s = times.first_token_s - (times.first_scheduled_s or times.arrival_s)
        eval_s = (times.last_token_s or times.first_token_s) - times.first_token_s
    return {
        "done": True,
        "done_reason": "length" if reason == FinishReason.LENGTH.value else "stop",
        "total_duration": _nanoseconds(time.monotonic() - began_s),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(prompt_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(eval_s),
    }


def build_ollama_answer(
    request: OllamaRequest, output: RequestOutput, token_text: TokenText, began_s: float
) -> dict[str, Any]:
    """Return the response of a finished request; `began_s` is `time.monotonic` at the start."""
    (one,) = output.outputs
    calls = [_tool_call(index, call) for index, call in enumerate(one.tool_calls)]
    return {
        **_heading(request),
        **_content(request, one.text, one.reasoning_content, calls),
        **_end(one.finish_reason or "", output.usage, output.times, began_s),
        **_logprobs(one.logprobs or (), token_text),
    }


def line(value: Mapping[str, Any]) -> bytes:
    """Encode a line of a stream."""
    return b"".join((*json_text.pieces(value), b"\n"))


@dataclass(slots=True)
class OllamaLines:
    """Builds the lines of one answer from its request's events. Must not be shared between threads.

    A call is one line, sent when its arguments are complete.

    Attributes:
        began_s: `time.monotonic` at the start.
    """

    request: OllamaRequest
    token_text: TokenText
    began_s: float
    _call: ToolCall | None = None
    _num_calls: int = 0
    _index: int = -1
    _arguments: list[str] = field(default_factory=list)

    def of(self, event: OutputEvent) -> bytes:
        """Return the lines for an event of the request."""
        return b"".join(map(line, self._iter_lines(event)))

    def _iter_lines(self, event: OutputEvent) -> Iterator[dict[str, Any]]:
        more = {"done": False, **_logprobs(event.logprobs, self.token_text)}
        if event.text or event.reasoning_content or event.logprobs:
            content = _content(self.request, event.text, event.reasoning_content)
            yield {**_heading(self.request), **content, **more}
        for piece in event.tool_calls:
            yield from self._add(piece)
        if event.finish is not None:
            yield from self._take()
            end = _end(event.finish.reason.value, event.usage, event.times, self.began_s)
            yield {**_heading(self.request), **_content(self.request, ""), **end}

    def _add(self, piece: ToolCallPiece) -> Iterator[dict[str, Any]]:
        if piece.index != self._index:
            yield from self._take()
            self._index, self._call = piece.index, ToolCall(piece.id or "", piece.name or "", "")
        self._arguments.append(piece.arguments)

    def _take(self) -> Iterator[dict[str, Any]]:
        """Yield the line of the call that is complete, if any."""
        if self._call is None:
            return
        call = replace(self._call, arguments="".join(self._arguments))
        self._call = None
        self._arguments.clear()
        content = _content(self.request, "", calls=[_tool_call(self._num_calls, call)])
        self._num_calls += 1
        yield {**_heading(self.request), **content, "done": False}
