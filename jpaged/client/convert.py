"""Values <-> messages, and the assembly of streams. No I/O; shared by both clients.

A unary call is a `UnaryCall`: its method, its request, and a conversion of the response. A client only sends it. Chats
and the calls Score and Embed are converted here, too.
"""

from __future__ import annotations

import base64
import io
import math
import operator
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from jpaged import json_text
from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.chat import (
    MESSAGE_TEXTS,
    ChatOptions,
    GivenImage,
    Tool,
    ToolCallPiece,
    ToolChoice,
    ToolChoiceMode,
    parse_images,
    read_message,
)
from jpaged.errors import InternalError, InvalidArgument, Unsupported
from jpaged.outputs import Evaluated, new_completions
from jpaged.sampling_params import request_fields
from jpaged.server_load import Load, ReplicaLoad
from jpaged.structured import StructuredOutputs
from jpaged.types import (
    EMBED_TYPES,
    EmbedsInput,
    FinishReason,
    GivenEmbeds,
    ImagesInput,
    ModelInfo,
    Pooling,
    PositionLogprobs,
    PriorOutput,
    Prompt,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    Score,
    SequenceDelta,
    SequenceFinish,
    TokenLogprob,
    Usage,
    WeightVersionRun,
    require_whole_characters,
    to_host_array,
)

_MODES = {
    ToolChoiceMode.NONE: inference_pb2.TOOL_CHOICE_MODE_NONE,
    ToolChoiceMode.AUTO: inference_pb2.TOOL_CHOICE_MODE_AUTO,
    ToolChoiceMode.REQUIRED: inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
    ToolChoiceMode.NAMED: inference_pb2.TOOL_CHOICE_MODE_NAMED,
}


def chat_message(prompt: Prompt) -> inference_pb2.ChatPrompt:
    """Convert a conversation and its options to a message.

    Raises:
        InvalidArgument: it has values that the message cannot hold; names the field, as in
            `messages[1].tool_calls[0].id`.
    """
    options = prompt.chat_options
    kwargs = options.template_kwargs
    return inference_pb2.ChatPrompt(
        messages=[_turn(f"messages[{i}]", message) for i, message in enumerate(prompt.messages or ())],
        tools=[_tool_message(tool) for tool in options.tools],
        tool_choice=None if options.tool_choice is None else _choice_message(options.tool_choice),
        parallel_tool_calls=options.parallel_tool_calls,
        chat_template_kwargs=json_text.dumps(dict(kwargs), ensure_ascii=False) if kwargs else "",
        reasoning=_reasoning_message(options),
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        documents=[json_text.dumps(dict(one), ensure_ascii=False) for one in options.documents],
        chat_template=options.chat_template or "",
    )


def parse_piece(delta: inference_pb2.ToolCallDelta) -> ToolCallPiece:
    """Convert a part of a call to a value."""
    return ToolCallPiece(
        delta.index,
        delta.arguments,
        delta.id if delta.HasField("id") else None,
        delta.name if delta.HasField("name") else None,
    )


def _turn(where: str, message: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    read = read_message(where, message)
    parts = list[inference_pb2.ContentPart]()
    if isinstance(read["content"], list):
        parts = [_part_message(f"{where}.content", part) for part in read.pop("content")]
    texts = {name: _whole(f"{where}.{name}", read[name]) for name in MESSAGE_TEXTS if read.get(name) is not None}
    calls = [_call_message(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(read.get("tool_calls", ()))]
    return inference_pb2.ChatMessage(**texts, tool_calls=calls, parts=parts)


def _part_message(where: str, part: Mapping[str, Any]) -> inference_pb2.ContentPart:
    if part["type"] == "text":
        return inference_pb2.ContentPart(text=_whole(where, part["text"]))
    return inference_pb2.ContentPart(image=_image_file(part["image"]))


_MAX_HEAD = 256
"""Characters of a data URI that may come before its content."""
_OF_URLS = str.maketrans("-_", "+/")
_MODES_OF_COLOR = frozenset({"CMYK", "YCbCr", "HSV", "LAB", "RGBX", "RGBa", "PA"})
"""Modes of Pillow that PNG does not have."""


def _image_file(given: GivenImage) -> bytes:
    """Return the file of an image: bytes, a data URI, or an image of Pillow, which is written as PNG.

    Raises:
        InvalidArgument: it is something else; the client fetches no URL.
    """
    field, source = given
    if isinstance(source, str) and source[:5].lower() == "data:" and ";base64," in source[:_MAX_HEAD].lower():
        try:
            text = "".join(source.partition(",")[2].split()).translate(_OF_URLS).rstrip("=")
            return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except ValueError as error:
            raise InvalidArgument(field, f"is not base64: {error}") from error
    if hasattr(source, "save"):
        written = io.BytesIO()
        try:
            shown = source.convert("RGB") if source.mode in _MODES_OF_COLOR else source
            shown.save(written, "PNG", exif=source.getexif())  # with its orientation
        except (OSError, ValueError) as error:
            raise InvalidArgument(field, f"cannot be written as PNG: {error}") from error
        return written.getvalue()
    if not isinstance(source, bytes):
        raise InvalidArgument(field, "must be bytes of a file, a data URI in base64, or an image of Pillow")
    return source


def _call_message(where: str, call: Mapping[str, Any]) -> inference_pb2.ToolCall:
    call_id = call.get("id")
    return inference_pb2.ToolCall(id=None if call_id is None else _whole(f"{where}.id", call_id), **call["function"])


def _whole(where: str, text: str) -> str:
    require_whole_characters(where, text)
    return text


def _tool_message(tool: Tool) -> inference_pb2.Tool:
    parameters = json_text.dumps(dict(tool.parameters), ensure_ascii=False)
    return inference_pb2.Tool(
        name=tool.name, description=tool.description, parameters=parameters, strict=tool.is_strict
    )


def _choice_message(choice: ToolChoice) -> inference_pb2.ToolChoice:
    return inference_pb2.ToolChoice(mode=_MODES[choice.mode], name=choice.name or "")


def _reasoning_message(options: ChatOptions) -> inference_pb2.ReasoningOptions:
    reasoning = options.reasoning
    return inference_pb2.ReasoningOptions(
        effort=reasoning.effort,
        enabled=reasoning.enabled,
        thinking_token_budget=reasoning.thinking_token_budget,
        include=reasoning.include,
    )


_T = TypeVar("_T")

_DEFAULT_CHAT_OPTIONS = ChatOptions()
TENANT_KEY = "x-jpaged-tenant"
"""Metadata key of the request's tenant."""
MAX_TENANT_CHARS = 128

_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    inference_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}
_EARLY_STOPPING: dict[bool | str, inference_pb2.EarlyStopping] = {
    False: inference_pb2.EARLY_STOPPING_BEST_RUNNING,
    True: inference_pb2.EARLY_STOPPING_FIRST_FULL,
    "never": inference_pb2.EARLY_STOPPING_NEVER,
}


@dataclass(slots=True)
class GenerateChunk(SequenceDelta):
    """Addition of one message of a stream; `cumulative_logprob` is set with `finish` if log-probabilities are needed.

    Attributes:
        prompt_token_ids: set in the first chunk, if requested.
        seed: set in the first chunk of sampled output: the seed in use.
    """

    prompt_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the sequence: "stop", "tool_calls", "length" or "abort"; None before its last chunk."""
        return None if self.finish is None else self.finish.reason.value


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties and state of a server, as GetServerInfo returns them.

    Attributes:
        state: "starting", "serving", "draining" or "failed".
        startup: (what, done, total) while the server starts.
        platform: None, like the next four fields, until the model is loaded.
        options: option -> effective value.
        role: "both", "prefill" or "decode"; "" from a server that does not report it.
        checkpoint: fingerprint of the model's files; "" until loaded, and from a server that does not report it.
    """

    server_version: str
    api_version: str
    state: str
    start_time: datetime
    startup: tuple[str, int, int] | None
    platform: str | None
    device_kind: str | None
    num_devices: int
    attention: str | None
    jax_version: str | None
    options: dict[str, str] = field(default_factory=dict)
    role: str = ""
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter (LoRA) that requests can use: its name, its path on the server, and its memory."""

    name: str
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[_T]):
    """One unary call: method, request, and conversion of the response.

    Attributes:
        scope: the servers to call: any one, each of them, or the one that knows the subject.
    """

    method: str
    request: Any
    read: Callable[[Any], _T]
    scope: Literal["one", "each", "knowing"] = "one"


def get_prompt(
    prompt: str | EmbedsInput | ImagesInput | None,
    prompt_token_ids: Sequence[int] | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    chat_options: ChatOptions | None = None,
) -> Prompt:
    """Return the prompt of the given form.

    Raises:
        InvalidArgument: not exactly one form is given, or chat options are given without messages.
    """
    if sum(given is not None for given in (prompt, prompt_token_ids, messages)) != 1:
        raise InvalidArgument("prompt", "give exactly one of prompt, prompt_token_ids and messages")
    if chat_options is not None and messages is None:
        raise InvalidArgument("chat_options", "require messages")
    given: Any = prompt
    embeds: GivenEmbeds | None = None
    images: tuple[GivenImage, ...] = ()
    if given is not None and not isinstance(given, str):
        if set(given) == {"prompt", "multi_modal_data"}:
            given, images = given["prompt"], parse_images(given["multi_modal_data"])
        elif set(given) == {"prompt_embeds"}:
            given, rows = None, given["prompt_embeds"]
            embeds = rows if isinstance(rows, bytes) else to_host_array(rows)
        else:
            known = "must be text, or have prompt and multi_modal_data, or prompt_embeds"
            raise InvalidArgument("prompt", f"has the keys {sorted(given)}; {known}")
    return Prompt(
        given,
        None if prompt_token_ids is None else tuple(prompt_token_ids),
        None if messages is None else tuple(messages),
        chat_options=chat_options or _DEFAULT_CHAT_OPTIONS,
        embeds=embeds,
        images=images,
    )


def _embeds_message(given: GivenEmbeds) -> inference_pb2.PromptEmbeds:
    """Build the message of input embeddings.

    Raises:
        InvalidArgument: they are no array of floating numbers `[tokens, width]` or `[1, tokens, width]`.
    """
    if isinstance(given, bytes | str):
        return inference_pb2.PromptEmbeds(torch_file=given if isinstance(given, bytes) else base64.b64decode(given))
    name, given = given.dtype.name, given[0] if given.ndim == 3 and len(given) == 1 else given
    if name not in EMBED_TYPES or given.ndim != 2:
        problem = f"is {name}{list(given.shape)}; must be [tokens, hidden size] of {', '.join(EMBED_TYPES)}"
        raise InvalidArgument("prompt_embeds", problem)
    values = given.astype(given.dtype.newbyteorder("<")) if given.dtype.byteorder == ">" else given
    return inference_pb2.PromptEmbeds(values=values.tobytes(), dtype=name, num_tokens=len(given))


def generate_request(
    prompt: Prompt,
    sampling: SamplingParams | None,
    *,
    request_id: str | None,
    model: str | None,
    whole: bool = False,
    adapter: str = "",
) -> inference_pb2.GenerateRequest:
    """Build a Generate request. Without a request id it gets one here, so that the caller can abort it."""
    if prompt.text is not None:
        require_whole_characters("prompt.text", prompt.text)
    message = inference_pb2.GenerateRequest(
        request_id=request_id or uuid.uuid4().hex,
        text=prompt.text,
        sampling=None if sampling is None else sampling_message(sampling),
        model=model,
        return_prompt_token_ids=prompt.token_ids is None,
        whole=whole,
        adapter=adapter,
        images=[_image_file(image) for image in prompt.images],
    )
    if prompt.token_ids is not None:
        message.token_ids.CopyFrom(inference_pb2.TokenIds(ids=checked_ids("prompt.token_ids", prompt.token_ids)))
    elif prompt.messages is not None:
        message.chat.CopyFrom(chat_message(prompt))
    elif prompt.embeds is not None:
        message.prompt_embeds.CopyFrom(_embeds_message(prompt.embeds))
    _add_generated(message, prompt.generated)
    return message


def continued_request(
    request: inference_pb2.GenerateRequest, generated: Sequence[PriorOutput], seed: int | None
) -> inference_pb2.GenerateRequest:
    """Build the request that resumes after the given tokens, with the seed of the first message."""
    message = inference_pb2.GenerateRequest()
    message.CopyFrom(request)
    if seed is not None:
        message.sampling.seed = seed
    _add_generated(message, generated)
    return message


def _add_generated(message: inference_pb2.GenerateRequest, generated: Sequence[PriorOutput]) -> None:
    for one in generated:
        message.generated_token_ids.add(
            index=one.index,
            ids=one.token_ids,
            cumulative_logprob=one.cumulative_logprob,
            finished=one.has_finished,
        )


def sampling_message(sampling: SamplingParams) -> inference_pb2.SamplingParams:
    """Convert all fields including defaults, so that the meaning does not depend on the server's version.

    Many requests have the same parameters, so messages are cached; do not change them.
    """
    values: tuple[Any, ...] = _SAMPLING_VALUES(sampling)
    try:
        return _build_sampling_once(values)
    except TypeError:  # a value cannot be hashed
        return _build_sampling(values)


def _build_sampling(given: tuple[Any, ...]) -> inference_pb2.SamplingParams:
    sampling = SamplingParams(**dict(zip(_SAMPLING_NAMES, given, strict=True)))  # fields may have been assigned
    if sampling.max_tokens is None:
        raise InvalidArgument("sampling.max_tokens", "must be a number; only LLM and AsyncLLM accept None")
    pairs = zip(_SAMPLING_NAMES, _SAMPLING_VALUES(sampling), strict=True)
    values: dict[str, Any] = {name: value for name, value in pairs if value is not None}
    for name in ("max_tokens", "min_tokens"):
        values[name] = _checked_uint32(f"sampling.{name}", values[name])
    values["top_k"] = min(sampling.top_k, 2**31 - 1)  # no vocabulary is larger: all tokens are kept either way
    values["stop_token_ids"] = checked_ids("sampling.stop_token_ids", sampling.stop_token_ids)
    for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens", "thinking_token_budget"):
        if name in values:
            values[name] = checked_int32(f"sampling.{name}", values[name])
    values["logprob_token_ids"] = checked_ids("sampling.logprob_token_ids", sampling.logprob_token_ids)
    values["early_stopping"] = _EARLY_STOPPING[sampling.early_stopping]
    biases = sampling.logit_bias or {}
    values["logit_bias"] = dict(zip(checked_ids("sampling.logit_bias", list(biases)), biases.values(), strict=True))
    allowed = sampling.allowed_token_ids
    if allowed is not None:
        values["allowed_token_ids"] = inference_pb2.TokenIds(ids=checked_ids("sampling.allowed_token_ids", allowed))
    if sampling.structured_outputs is not None:
        values["structured_outputs"] = _structured_message(sampling.structured_outputs)
    return inference_pb2.SamplingParams(**values)


_SAMPLING_NAMES = tuple(one.name for one in request_fields())
_SAMPLING_VALUES = operator.attrgetter(*_SAMPLING_NAMES)
_build_sampling_once = lru_cache(maxsize=64)(_build_sampling)


def _structured_message(outputs: StructuredOutputs) -> inference_pb2.StructuredOutputs:
    return inference_pb2.StructuredOutputs(**{one.name: getattr(outputs, one.name) for one in fields(outputs)})


def parse_chunk(message: inference_pb2.GenerateResponse) -> GenerateChunk:
    """Convert one message of a stream to a value."""
    has_finish = message.HasField("finish")
    return GenerateChunk(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_parse_position(position) for position in message.logprobs),
        prompt_logprobs=tuple(_parse_position(position) for position in message.prompt_logprobs),
        usage=_build_usage(message),
        finish=_parse_finish(message.finish) if has_finish else None,
        cumulative_logprob=message.finish.cumulative_logprob if message.finish.HasField("cumulative_logprob") else None,
        prompt_token_ids=tuple(message.prompt_token_ids),
        seed=message.seed if message.HasField("seed") else None,
        is_last=message.is_last,
        times=_parse_times(message.times) if message.HasField("times") else None,
        reasoning_content=message.reasoning_content,
        tool_calls=tuple([parse_piece(delta) for delta in message.tool_calls]),
        weight_versions=tuple([WeightVersionRun(run.version, run.num_tokens) for run in message.finish.weight_versions])
        if has_finish
        else (),
        routed_experts=_parse_experts(message.routed_experts) if message.HasField("routed_experts") else None,
    )


def _parse_experts(message: inference_pb2.RoutedExperts) -> NDArray[Any]:
    dtype = "<u1" if message.bytes_per_id == 1 else "<u2"
    return np.frombuffer(message.ids, dtype).reshape(-1, message.num_layers, message.top_k)


class Assembler:
    """Assembles the chunks of one stream into a RequestOutput."""

    def __init__(self, prompt: Prompt, sampling: SamplingParams | None) -> None:
        self._completions = new_completions(sampling or SamplingParams())
        self._prompt = prompt
        self._prompt_token_ids = tuple(prompt.token_ids or ())
        self._request_id = ""

    def add(self, chunk: GenerateChunk) -> None:
        """Add the next chunk."""
        self._completions.add(chunk)
        self._prompt_token_ids = chunk.prompt_token_ids or self._prompt_token_ids
        self._request_id = chunk.request_id

    def output(self) -> RequestOutput:
        """Return the complete output; raise InternalError if a part is missing."""
        return self._completions.output(self._request_id, self._prompt.text, self._prompt_token_ids)


def tokenize_call(prompt: Prompt, *, add_special_tokens: bool | None, model: str | None) -> UnaryCall[tuple[int, ...]]:
    """Build a Tokenize call: text or messages -> ids."""
    request = inference_pb2.TokenizeRequest(text=prompt.text, add_special_tokens=add_special_tokens, model=model)
    if prompt.messages is not None:
        request.chat.CopyFrom(chat_message(prompt))
    return UnaryCall("Tokenize", request, lambda response: tuple(response.token_ids))


def detokenize_call(token_ids: Sequence[int], *, skip_special_tokens: bool, model: str | None) -> UnaryCall[str]:
    """Build a Detokenize call: ids -> text."""
    request = inference_pb2.DetokenizeRequest(
        token_ids=checked_ids("token_ids", token_ids), skip_special_tokens=skip_special_tokens, model=model
    )
    return UnaryCall("Detokenize", request, lambda response: response.text)


def token_bytes_call(
    token_ids: Sequence[int], *, skip_special_tokens: bool, model: str | None
) -> UnaryCall[tuple[bytes, ...]]:
    """Ids -> the bytes of each."""
    request = inference_pb2.DetokenizeRequest(
        token_ids=checked_ids("token_ids", token_ids),
        skip_special_tokens=skip_special_tokens,
        model=model,
        return_token_bytes=True,
    )

    def read(response: inference_pb2.DetokenizeResponse) -> tuple[bytes, ...]:
        if len(response.token_bytes) != len(request.token_ids):
            raise Unsupported("the server does not return token bytes: it is older than this client")
        return tuple(response.token_bytes)

    return UnaryCall("Detokenize", request, read)


def server_info_call() -> UnaryCall[ServerInfo]:
    """Build a GetServerInfo call."""
    return UnaryCall("GetServerInfo", control_pb2.GetServerInfoRequest(), _parse_server_info)


def model_info_call() -> UnaryCall[ModelInfo]:
    """Build a GetModelInfo call."""
    return UnaryCall("GetModelInfo", control_pb2.GetModelInfoRequest(), _parse_model_info)


def load_call() -> UnaryCall[Load]:
    """Build a GetLoad call."""
    return UnaryCall("GetLoad", control_pb2.GetLoadRequest(), _parse_load)


def abort_call(request_id: str) -> UnaryCall[None]:
    """Build an Abort call."""
    return UnaryCall("Abort", control_pb2.AbortRequest(request_id=request_id), lambda response: None, "knowing")


def pin_prefix_call(name: str, prefix: Prompt, cache_salt: str, adapter: str) -> UnaryCall[int]:
    """Build a PinPrefix call; it returns the number of pinned tokens."""
    request = control_pb2.PinPrefixRequest(name=name, text=prefix.text, cache_salt=cache_salt, adapter=adapter)
    if prefix.token_ids is not None:
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=checked_ids("prefix.token_ids", prefix.token_ids)))
    return UnaryCall("PinPrefix", request, lambda response: response.num_pinned_tokens, "each")


def unpin_prefix_call(name: str) -> UnaryCall[None]:
    """Build an UnpinPrefix call."""
    return UnaryCall("UnpinPrefix", control_pb2.UnpinPrefixRequest(name=name), lambda response: None, "each")


UpdateMode = Literal["keep", "wait", "abort"]
_UPDATE_MODES = {
    "keep": control_pb2.UPDATE_MODE_KEEP,
    "wait": control_pb2.UPDATE_MODE_WAIT,
    "abort": control_pb2.UPDATE_MODE_ABORT,
}


def load_adapter_call(name: str, path: str) -> UnaryCall[int]:
    """Build a LoadAdapter call; it returns the bytes of the matrices."""
    require_whole_characters("path", path)
    request = control_pb2.LoadAdapterRequest(name=name, path=path)
    return UnaryCall("LoadAdapter", request, lambda response: response.num_bytes, "each")


def unload_adapter_call(name: str) -> UnaryCall[None]:
    """Build an UnloadAdapter call."""
    return UnaryCall("UnloadAdapter", control_pb2.UnloadAdapterRequest(name=name), lambda response: None, "each")


GivenWeights = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Arrays of NumPy, JAX or PyTorch by Hugging Face's names, or pairs of name and array."""


def update_weights_call(path: str, mode: UpdateMode, version: str | int | None) -> UnaryCall[str]:
    """Build an UpdateWeights call; it returns the version.

    Raises:
        InvalidArgument: the mode is unknown.
    """
    require_whole_characters("path", path)
    if mode not in _UPDATE_MODES:
        raise InvalidArgument("mode", f"{str(mode)[:80]!r} is not one of {', '.join(_UPDATE_MODES)}")
    named = "" if version is None else str(version)
    request = control_pb2.UpdateWeightsRequest(path=path, mode=_UPDATE_MODES[mode], version=named)
    return UnaryCall("UpdateWeights", request, lambda response: response.weight_version, "each")


_PART_BYTES = 512 << 10
"""Bytes of new weights in a call; servers accept messages of 1 MiB by default."""
_STORED_TYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""Names in safetensors files, and bytes."""


def send_weights_calls(weights: GivenWeights, mode: UpdateMode, version: str | int | None) -> Iterator[UnaryCall[Any]]:
    """Yield the calls that send arrays, and then the one that replaces the weights and returns the version.

    Raises:
        InvalidArgument: the mode is unknown, or a value is no array, or of a type that cannot be sent.
    """
    update = update_weights_call("", mode, version)
    update.request.upload = uuid.uuid4().hex
    offset = 0
    for part in _split_weights(weights):
        request = control_pb2.SendWeightsRequest(upload=update.request.upload, offset=offset, data=part)
        yield UnaryCall("SendWeights", request, lambda response: response.num_bytes, "each")
        offset += len(part)
    yield update


def _split_weights(weights: GivenWeights) -> Iterator[bytes]:
    """Yield the bytes of a safetensors file in parts; one array at a time is copied to the host."""
    header, arrays, end = dict[str, Any](), list[Any](), 0
    for name, array in weights.items() if isinstance(weights, Mapping) else weights:
        dtype, shape = str(getattr(array, "dtype", "")).removeprefix("torch."), getattr(array, "shape", ())
        if dtype not in _STORED_TYPES:
            problem = f"tensor {name[:80]} is a {type(array).__name__} of type {dtype!r}"
            raise InvalidArgument("weights", f"{problem}, not an array of {', '.join(_STORED_TYPES)}")
        if name in header:
            raise InvalidArgument("weights", f"tensor {name[:80]} occurs twice")
        stored, size = _STORED_TYPES[dtype]
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": stored, "shape": [int(one) for one in shape], "data_offsets": [begin, end]}
        arrays.append(array)
    text = json_text.dumps(header).encode()
    part = bytearray(len(text).to_bytes(8, "little") + text)
    for array in arrays:
        content = _view_bytes(array)
        for begin in range(0, len(content), _PART_BYTES):
            part += content[begin : begin + _PART_BYTES].data
            while len(part) >= _PART_BYTES:
                yield bytes(part[:_PART_BYTES])
                del part[:_PART_BYTES]
    if part:
        yield bytes(part)


def _view_bytes(array: Any) -> NDArray[np.uint8]:
    """Return the bytes of an array of NumPy or JAX, or of a tensor of PyTorch, in host memory."""
    if hasattr(array, "detach"):
        flat = array.detach().cpu().contiguous().reshape(-1)
        bits: NDArray[np.uint8] = flat.view(sys.modules["torch"].uint8).numpy()  # NumPy lacks some types of PyTorch
        return bits
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def list_adapters_call() -> UnaryCall[tuple[AdapterInfo, ...]]:
    """Build a ListAdapters call."""
    return UnaryCall("ListAdapters", control_pb2.ListAdaptersRequest(), _parse_adapters)


def get_metadata(tenant: str, api_key: str = "") -> tuple[tuple[str, str], ...]:
    """Return the metadata of calls by a tenant with a key.

    Raises:
        InvalidArgument: one of them has characters that metadata cannot carry.
    """
    key: tuple[tuple[str, str], ...] = ()
    if api_key:
        if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise InvalidArgument("api_key", "must be printable ASCII without spaces")
        key = (("authorization", f"Bearer {api_key}"),)
    if not tenant:
        return key
    if not (tenant.isascii() and tenant.isprintable() and len(tenant) <= MAX_TENANT_CHARS and tenant.strip() == tenant):
        raise InvalidArgument("tenant", f"{tenant!r} is not 1 to {MAX_TENANT_CHARS} printable ASCII characters")
    return ((TENANT_KEY, tenant), *key)


def _parse_server_info(message: control_pb2.GetServerInfoResponse) -> ServerInfo:
    startup, backend = message.startup, message.backend
    is_loaded = message.HasField("backend")
    return ServerInfo(
        server_version=message.server_version,
        api_version=message.api_version,
        state=control_pb2.ServerState.Name(message.state).removeprefix("SERVER_STATE_").lower(),
        start_time=message.start_time.ToDatetime(tzinfo=UTC),
        startup=(startup.what, startup.done, startup.total) if message.HasField("startup") else None,
        platform=backend.platform if is_loaded else None,
        device_kind=backend.device_kind if is_loaded else None,
        num_devices=backend.num_devices,
        attention=backend.attention if is_loaded else None,
        jax_version=backend.jax_version if is_loaded else None,
        options={option.name: option.value for option in message.options},
        role=message.role,
        checkpoint=message.checkpoint,
    )


def _parse_model_info(message: control_pb2.GetModelInfoResponse) -> ModelInfo:
    fields = {
        **_parse_fields(message),
        "eos_token_ids": tuple(message.eos_token_ids),
        "aliases": tuple(message.aliases),
    }
    return ModelInfo(
        **fields, default_sampling={field.name: value for field, value in message.default_sampling.ListFields()}
    )


def _parse_adapters(message: control_pb2.ListAdaptersResponse) -> tuple[AdapterInfo, ...]:
    return tuple(AdapterInfo(**_parse_fields(adapter)) for adapter in message.adapters)


def _parse_load(message: control_pb2.GetLoadResponse) -> Load:
    return Load(**_parse_fields(message), replicas=tuple(ReplicaLoad(**_parse_fields(one)) for one in message.replicas))


def _parse_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message by name, except submessages."""
    return {
        field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.message_type is None
    }


def checked_ids(name: str, token_ids: Sequence[int]) -> Sequence[int]:
    """Return the token ids; raise InvalidArgument if one does not fit into the message."""
    for token_id in token_ids:
        _checked_uint32(name, token_id)
    return token_ids


def _checked_uint32(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise InvalidArgument(name, f"{value!r} is not an integer from 0 to {2**32 - 1}")
    return value


def checked_int32(field: str, value: int) -> int:
    """Return the number; raise InvalidArgument if it does not fit into 32 bits."""
    if not -(2**31) <= value < 2**31:
        raise InvalidArgument(field, f"{value} is not a 32-bit integer")
    return value


def _parse_position(position: inference_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        parse_logprob(position.chosen),
        tuple(parse_logprob(token) for token in position.top),
        tuple(parse_logprob(token) for token in position.asked),
        position.sampling_logprob if position.HasField("sampling_logprob") else None,
        position.entropy if position.HasField("entropy") else None,
    )


def parse_logprob(token: inference_pb2.TokenLogprob) -> TokenLogprob:
    """Convert a message to a value."""
    return TokenLogprob(token.token_id, token.logprob, token.rank if token.HasField("rank") else None)


def _parse_times(times: inference_pb2.RequestTimes) -> RequestTimes:
    told = {one.name: getattr(times, one.name) for one, _ in times.ListFields()}
    return RequestTimes(**told | {"arrival_s": times.arrival_s, "preempted_s": tuple(times.preempted_s)})


def _parse_finish(finish: inference_pb2.Finish) -> SequenceFinish:
    reason = _FINISH_REASONS.get(finish.reason)
    if reason is None:
        raise InternalError(f"the server sent the finish reason {finish.reason}, which this client does not support")
    match finish.WhichOneof("matched_stop"):
        case "matched_stop_string":
            return SequenceFinish(reason, finish.matched_stop_string)
        case "matched_stop_token_id":
            return SequenceFinish(reason, finish.matched_stop_token_id)
        case _:
            return SequenceFinish(reason)


GivenText = str | Sequence[int]
"""A text, or its token ids."""

_POOLINGS: Mapping[Pooling | None, inference_pb2.Pooling] = {
    None: inference_pb2.POOLING_UNSPECIFIED,
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
}


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call: the common fields of both requests."""

    model: str | None = None
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields by name; raise InvalidArgument for values that the message cannot hold."""
        require_whole_characters("adapter", self.adapter)
        require_whole_characters("cache_salt", self.cache_salt)
        checked_int32("priority", self.priority)
        return {name: getattr(self, name) for name in self.__slots__}


def score_call(
    prompt: GivenText, continuations: Sequence[GivenText], asker: CallOptions
) -> UnaryCall[Evaluated[Score]]:
    """Build a Score call: a prompt and continuations -> scores."""
    _require_several("continuations", continuations)
    request = inference_pb2.ScoreRequest(
        **_build_form("prompt", prompt),
        continuations=[
            inference_pb2.Continuation(**_build_form(f"continuations[{i}]", one)) for i, one in enumerate(continuations)
        ],
        **asker.fields(),
    )
    return UnaryCall("Score", request, _parse_scores)


def embed_call(
    inputs: Sequence[GivenText], asker: CallOptions, *, pooling: Pooling | None, normalize: bool | None
) -> UnaryCall[Evaluated[tuple[float, ...]]]:
    """Build an Embed call: texts or token ids -> vectors."""
    _require_several("inputs", inputs)
    if pooling not in _POOLINGS:
        raise InvalidArgument("pooling", f"{pooling!r} is neither 'last' nor 'mean'")
    request = inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(**_build_form(f"inputs[{i}]", one)) for i, one in enumerate(inputs)],
        pooling=_POOLINGS[pooling],
        normalize=bool(normalize),
        **asker.fields(),
    )
    return UnaryCall("Embed", request, _parse_vectors)


def _require_several(field: str, texts: Sequence[GivenText]) -> None:
    """Reject a single string, whose characters would be taken for texts."""
    if isinstance(texts, str):
        raise InvalidArgument(field, f"{texts[:40]!r} is one string: give a list of strings, or of lists of token ids")


def _build_form(field: str, given: GivenText) -> dict[str, Any]:
    """Return a text or token ids as fields of a message."""
    if isinstance(given, str):
        require_whole_characters(field, given)
        return {"text": given}
    try:
        token_ids = list(given)
    except TypeError as error:
        raise InvalidArgument(field, f"{given!r} is neither a string nor a list of token ids") from error
    return {"token_ids": inference_pb2.TokenIds(ids=checked_ids(field, token_ids))}


def _parse_scores(response: inference_pb2.ScoreResponse) -> Evaluated[Score]:
    scores = [Score(tuple(parse_logprob(token) for token in one.tokens), one.is_greedy) for one in response.scores]
    return Evaluated(scores, _build_usage(response))


def _parse_vectors(response: inference_pb2.EmbedResponse) -> Evaluated[tuple[float, ...]]:
    return Evaluated([tuple(one.values) for one in response.embeddings], _build_usage(response))


def _build_usage(response: Any) -> Usage:
    usage = response.usage
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.image_tokens)
