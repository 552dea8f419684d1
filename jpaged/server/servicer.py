"""Proto <-> types, and one method for each RPC. Every call ends with one status, set in one place.

For requests, unset fields take the defaults of `SamplingParams`, which raises for values out of range. For responses,
every attribute of a type has a field.

Score and Embed are calls of several requests: see `jpaged.service.score_embed`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from jpaged._proto.v1 import control_pb2, inference_pb2, inference_pb2_grpc, prefixes_pb2
from jpaged.access.authenticator import enter_part, key_id, owner
from jpaged.chat import (
    MAX_DOCUMENTS,
    MAX_DOCUMENTS_BYTES,
    MAX_TEMPLATE_KWARGS_BYTES,
    MAX_TOOL_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ChatMessages,
    ChatOptions,
    GivenImage,
    ReasoningOptions,
    Tool,
    ToolCallPiece,
    ToolChoice,
    ToolChoiceMode,
    json_object,
    read_message,
)
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, JpagedError, Unavailable
from jpaged.sampling_params import NO_DEFAULTS, with_defaults
from jpaged.server.grpc_server import MessagesInHand, ServicerContext, error_for, get_status, status_on_error
from jpaged.server_load import EngineLoad
from jpaged.service.calls import NOBODY, TRACE_KEYS, Call, Caller, require_name
from jpaged.service.score_embed import CallerOptions, GivenContinuation, VectorOptions, embed, require_parts, score
from jpaged.service.service import Service, ServiceState, Stage
from jpaged.structured import get_structured_outputs
from jpaged.types import (
    EMBED_TYPES,
    MAX_CHAT_MESSAGES,
    FinishReason,
    GivenEmbeds,
    ModelInfo,
    OutputEvent,
    Pooling,
    PositionLogprobs,
    PriorOutput,
    Prompt,
    SamplingParams,
    Score,
    SequenceFinish,
    TokenLogprob,
    Usage,
    widen_bfloat16,
)
from jpaged.version import __version__

_MODES = {
    inference_pb2.TOOL_CHOICE_MODE_NONE: ToolChoiceMode.NONE,
    inference_pb2.TOOL_CHOICE_MODE_AUTO: ToolChoiceMode.AUTO,
    inference_pb2.TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode.REQUIRED,
    inference_pb2.TOOL_CHOICE_MODE_NAMED: ToolChoiceMode.NAMED,
}


def messages_from(chat: inference_pb2.ChatPrompt) -> tuple[dict[str, Any], ...]:
    """Convert a conversation to the format of `jpaged.service.chat.template`.

    Raises:
        InvalidArgument: too many messages or calls, before any is copied.
    """
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidArgument("chat.messages", f"{len(chat.messages)} messages; at most {MAX_CHAT_MESSAGES}")
    messages = tuple(_message_from(i, turn) for i, turn in enumerate(chat.messages))
    if not any(turn.parts for turn in chat.messages):
        return messages
    return ChatMessages(read_message(f"chat.messages[{i}]", message) for i, message in enumerate(messages))


def _message_from(i: int, turn: inference_pb2.ChatMessage) -> dict[str, Any]:
    if len(turn.tool_calls) > MAX_TOOL_CALLS:
        problem = f"{len(turn.tool_calls)} calls; at most {MAX_TOOL_CALLS}"
        raise InvalidArgument(f"chat.messages[{i}].tool_calls", problem)
    is_null = turn.role == "assistant" and not turn.HasField("content")
    message: dict[str, Any] = {"role": turn.role, "content": None if is_null else turn.content}
    if turn.parts:
        if turn.HasField("content"):
            raise InvalidArgument(f"chat.messages[{i}].parts", "take the place of content: set only one of them")
        message["content"] = [_part_from(f"chat.messages[{i}].parts[{j}]", part) for j, part in enumerate(turn.parts)]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if turn.HasField(name):
            message[name] = getattr(turn, name)
    if turn.tool_calls:
        message["tool_calls"] = [_call_from(call) for call in turn.tool_calls]
    return message


def _part_from(where: str, part: inference_pb2.ContentPart) -> dict[str, Any]:
    kind = part.WhichOneof("part")
    if kind is None:
        raise InvalidArgument(where, "is empty: set text or image")
    if kind == "text":
        return {"type": "text", "text": part.text}
    return {"type": "image", "image": GivenImage(f"{where}.image", part.image)}


def _call_from(call: inference_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id if call.HasField("id") else None, "type": "function", "function": function}


def chat_options_from(chat: inference_pb2.ChatPrompt) -> ChatOptions:
    """Convert the options of a chat.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`.
    """
    if len(chat.documents) > MAX_DOCUMENTS:
        raise InvalidArgument("documents", f"{len(chat.documents)} documents; at most {MAX_DOCUMENTS}")
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidArgument("tools", f"{len(chat.tools)} tools; at most {MAX_TOOLS}")
    return ChatOptions(
        tools=tuple(_tool_from(f"tools[{i}]", tool) for i, tool in enumerate(chat.tools)),
        template_kwargs=json_object(
            "chat_template_kwargs", chat.chat_template_kwargs, max_bytes=MAX_TEMPLATE_KWARGS_BYTES
        )
        if chat.chat_template_kwargs
        else {},
        tool_choice=_choice_from(chat.tool_choice),
        parallel_tool_calls=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True,
        reasoning=ReasoningOptions(**{one.name: value for one, value in chat.reasoning.ListFields()}),
        add_generation_prompt=chat.add_generation_prompt
        if chat.HasField("add_generation_prompt")
        else not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        documents=tuple(
            json_object(f"documents[{i}]", one, max_bytes=MAX_DOCUMENTS_BYTES) for i, one in enumerate(chat.documents)
        ),
        chat_template=chat.chat_template or None,
    )


def _tool_from(path: str, tool: inference_pb2.Tool) -> Tool:
    given: dict[str, Any] = {}
    if tool.parameters:
        where = f"{path}.function.parameters"
        given["parameters"] = json_object(where, tool.parameters, max_bytes=MAX_TOOL_BYTES)
    try:
        return Tool(tool.name, tool.description, is_strict=tool.strict, **given)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}.{error.field}", error.problem) from error


def _choice_from(choice: inference_pb2.ToolChoice) -> ToolChoice | None:
    if choice.mode == inference_pb2.TOOL_CHOICE_MODE_UNSPECIFIED:
        if choice.name:
            raise InvalidArgument("tool_choice.mode", "is missing: a name requires TOOL_CHOICE_MODE_NAMED")
        return None
    if choice.mode not in _MODES:
        raise InvalidArgument("tool_choice.mode", f"{choice.mode} is not a value of ToolChoiceMode")
    return ToolChoice(_MODES[choice.mode], choice.name or None)


def build_delta(piece: ToolCallPiece) -> inference_pb2.ToolCallDelta:
    """Convert a part of a call to a message."""
    return inference_pb2.ToolCallDelta(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)


_POOLINGS: dict[int, Pooling | None] = {
    inference_pb2.POOLING_UNSPECIFIED: None,
    inference_pb2.POOLING_LAST: "last",
    inference_pb2.POOLING_MEAN: "mean",
}


def parse_caller_options(
    message: inference_pb2.ScoreRequest | inference_pb2.EmbedRequest,
    tenant: str,
    remaining_s: float | None,
    caller: Caller = NOBODY,
) -> CallerOptions:
    """Return the caller and options of a call."""
    return CallerOptions(
        model=message.model if message.HasField("model") else None,
        tenant=tenant,
        remaining_s=remaining_s,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        priority=message.priority,
        caller=caller,
    )


async def scored(
    service: Service, asker: CallerOptions, message: inference_pb2.ScoreRequest
) -> inference_pb2.ScoreResponse:
    """Answer Score."""
    num = len(message.continuations)
    require_parts("continuations", num)

    def read() -> tuple[Prompt, Sequence[GivenContinuation]]:
        prompt = _prompt("prompt", message, message.WhichOneof("prompt"))
        return prompt, [_continuation(i, one) for i, one in enumerate(message.continuations)]

    size = num * _size(message) + sum(map(_size, message.continuations))
    scores = await score(service, asker, read, size)

    def response() -> inference_pb2.ScoreResponse:
        return inference_pb2.ScoreResponse(
            scores=[_score_message(one) for one in scores], usage=_usage(one.usage for one in scores)
        )

    return await service.run_blocking(response, sum(len(one.tokens) for one in scores))


async def embedded(
    service: Service, asker: CallerOptions, message: inference_pb2.EmbedRequest
) -> inference_pb2.EmbedResponse:
    """Answer Embed."""
    require_parts("inputs", len(message.inputs))
    if message.pooling not in _POOLINGS:
        raise InvalidArgument("pooling", f"{message.pooling} is not a value of Pooling")

    def read() -> list[Prompt]:
        return [_prompt(f"inputs[{i}]", one, one.WhichOneof("input")) for i, one in enumerate(message.inputs)]

    size = sum(map(_size, message.inputs))
    options = VectorOptions(_POOLINGS[message.pooling], message.normalize or None)
    found = await embed(service, asker, read, size, options)

    def response() -> inference_pb2.EmbedResponse:
        return inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=one.values) for one in found],
            usage=_usage(one.usage for one in found),
        )

    return await service.run_blocking(response, sum(len(one.values) for one in found))


def _size(message: inference_pb2.ScoreRequest | inference_pb2.Continuation | inference_pb2.EmbedInput) -> int:
    """Return the number of characters or token ids."""
    return len(message.text) + len(message.token_ids.ids)


def _prompt(field: str, message: inference_pb2.ScoreRequest | inference_pb2.EmbedInput, form: str | None) -> Prompt:
    match form:
        case "text":
            return Prompt(text=message.text)
        case "token_ids":
            return Prompt(token_ids=list(message.token_ids.ids))
        case _:
            raise InvalidArgument(field, "is missing: set text or token_ids")


def _continuation(i: int, message: inference_pb2.Continuation) -> GivenContinuation:
    match message.WhichOneof("continuation"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case _:
            raise InvalidArgument(f"continuations[{i}]", "is missing: set text or token_ids")


def _score_message(score: Score) -> inference_pb2.Score:
    return inference_pb2.Score(
        logprob=score.logprob, is_greedy=score.is_greedy, tokens=[_token(one) for one in score.tokens]
    )


def _token(token: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, rank=token.rank)


def _usage(usages: Iterable[Usage]) -> inference_pb2.Usage:
    """Return the sum of usages, without the sampled tokens, which are dropped."""
    many = list(usages)
    return inference_pb2.Usage(
        prompt_tokens=sum(one.prompt_tokens for one in many), cached_tokens=sum(one.cached_tokens for one in many)
    )


_M = TypeVar("_M", bound=Message)

TENANT_KEY = "x-jpaged-tenant"
"""Metadata key of the request's tenant."""
REQUEST_ID_KEY = "x-jpaged-request-id"
"""Key in the initial metadata of a stream: the id under which the request was accepted."""
API_VERSION = "v1"
_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
    FinishReason.TOOL_CALLS: inference_pb2.FINISH_REASON_TOOL_CALLS,
}
_EARLY_STOPPING: dict[int, bool | Literal["never"]] = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    inference_pb2.EARLY_STOPPING_BEST_RUNNING: False,
    inference_pb2.EARLY_STOPPING_FIRST_FULL: True,
    inference_pb2.EARLY_STOPPING_NEVER: "never",
}
_PROMPTS: dict[type[Message], tuple[str, str]] = {
    inference_pb2.GenerateRequest: ("prompt", "text, token_ids, chat or prompt_embeds"),
    inference_pb2.TokenizeRequest: ("input", "text or chat"),
    control_pb2.PinPrefixRequest: ("prefix", "text or token_ids"),
    prefixes_pb2.SavePrefixRequest: ("prefix", "text or token_ids"),
    prefixes_pb2.FetchPrefixRequest: ("prefix", "text or token_ids"),
}
"""Requests with a prompt: the oneof of the prompt, and its forms."""


def tenant_from(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the tenant of a call: its key's, else the one in the metadata; "" if none.

    Raises InvalidArgument if the metadata has several.
    """
    named = [value for key, value in metadata if key == TENANT_KEY]
    if not named:
        return owner("")
    if len(named) > 1:
        raise InvalidArgument(TENANT_KEY, f"is given {len(named)} times: a request has one tenant")
    tenant = named[0]
    name = tenant.decode(errors="replace") if isinstance(tenant, bytes) else tenant
    require_name(TENANT_KEY, name)
    return owner(name)


def get_tenant(context: ServicerContext) -> str:
    """Return the tenant of a call; see `tenant_from`."""
    return tenant_from(context.invocation_metadata() or ())


def caller_from(metadata: Iterable[tuple[str, str | bytes]], peer: str = "") -> Caller:
    """Return the caller by metadata and address, with the W3C trace context of the call."""
    trace = {key: value for key, value in metadata if key in TRACE_KEYS and isinstance(value, str)}
    return Caller("grpc", peer, key_id(), trace)


def get_caller(context: ServicerContext) -> Caller:
    """Return the caller; see `caller_from`."""
    return caller_from(context.invocation_metadata() or (), context.peer())


def call_from(
    message: inference_pb2.GenerateRequest,
    metadata: Iterable[tuple[str, str | bytes]],
    remaining_s: float | None,
    peer: str = "",
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> Call:
    """Convert a request to a call of the service; the prompt is decoded later.

    Args:
        defaults: the model's sampling defaults, for fields that the request leaves out.
    """

    def read() -> tuple[Prompt, SamplingParams]:
        prompt = prompt_from(message)
        if message.generated_token_ids:
            prompt = replace(prompt, generated=generated_from(message))
        sampling = sampling_from(message.sampling, defaults)
        if not message.sampling.HasField("max_tokens") and (most := defaults.get("max_tokens")) is not None:
            prompt = replace(prompt, fills_length=True, max_filled=most)
            sampling = replace(sampling, max_tokens=max(1, sampling.min_tokens))
        return prompt, sampling

    return Call(
        read=read,
        size=prompt_size(message),
        request_id=message.request_id if message.HasField("request_id") else None,
        model=model_from(message),
        tenant=tenant_from(metadata),
        remaining_s=remaining_s,
        is_whole=message.whole,
        adapter=message.adapter,
        caller=caller_from(metadata, peer),
    )


def model_from(
    message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest,
) -> str | None:
    """Return the required name of the model; None for any."""
    return message.model if message.HasField("model") else None


def prompt_size(message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> int | None:
    """Return the number of characters or token ids to process; None for a conversation."""
    if message.HasField("chat"):
        return None
    if isinstance(message, inference_pb2.TokenizeRequest):
        return len(message.text)
    num_generated = sum(len(one.ids) for one in message.generated_token_ids)
    if message.HasField("prompt_embeds"):
        return num_generated + len(message.prompt_embeds.values) + len(message.prompt_embeds.torch_file)
    return num_generated + (len(message.token_ids.ids) if message.HasField("token_ids") else len(message.text))


def prompt_from(message: Any) -> Prompt:
    """Return the prompt of a message of `_PROMPTS`, in the form that was sent; its content is not checked yet."""
    field, forms = _PROMPTS[type(message)]
    match message.WhichOneof(field):
        case "text":
            return Prompt(text=message.text, images=images_from(message))
        case "token_ids":
            return Prompt(token_ids=message.token_ids.ids, images=images_from(message))
        case "chat":
            return Prompt(messages=messages_from(message.chat), chat_options=chat_options_from(message.chat))
        case "prompt_embeds":
            return Prompt(embeds=embeds_from(message.prompt_embeds))
        case _:
            raise InvalidArgument(field, f"is missing: set {forms}")


def images_from(message: Any) -> tuple[GivenImage, ...]:
    """Return the images of a prompt; messages of other methods than Generate have none."""
    images = message.images if isinstance(message, inference_pb2.GenerateRequest) else ()
    return tuple(GivenImage(f"images[{i}]", image) for i, image in enumerate(images))


def embeds_from(message: inference_pb2.PromptEmbeds) -> GivenEmbeds:
    """Return input embeddings as they were sent; raise InvalidArgument if their number or type is wrong."""
    name, values, num_tokens = message.dtype or "float32", message.values, message.num_tokens
    if message.torch_file:
        if values:
            raise InvalidArgument("prompt_embeds.torch_file", "takes the place of values: set only one of them")
        return message.torch_file
    if name not in EMBED_TYPES:
        raise InvalidArgument("prompt_embeds.dtype", f"{name[:40]!r} is not one of {', '.join(EMBED_TYPES)}")
    item_bytes = EMBED_TYPES[name]
    if not values or not num_tokens or len(values) % (num_tokens * item_bytes):
        problem = f"{len(values)} bytes of {name} are not rows of {num_tokens} tokens (num_tokens)"
        raise InvalidArgument("prompt_embeds.values", problem)
    if name != "bfloat16":
        return np.frombuffer(values, f"<f{item_bytes}").reshape(num_tokens, -1)
    return widen_bfloat16(np.frombuffer(values, "<u2")).reshape(num_tokens, -1)


def generated_from(message: inference_pb2.GenerateRequest) -> tuple[PriorOutput, ...]:
    """Return the tokens to resume after; not checked yet."""
    return tuple(
        PriorOutput(one.index, tuple(one.ids), one.cumulative_logprob, one.finished)
        for one in message.generated_token_ids
    )


def sampling_from(message: inference_pb2.SamplingParams, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
    """Convert sampling parameters, with defaults for unset fields; raise InvalidArgument for values out of range."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    values["beam_width"] = message.beam_width or None
    values["early_stopping"] = _early_stopping_from(message.early_stopping)
    if "allowed_token_ids" in values:
        values["allowed_token_ids"] = message.allowed_token_ids.ids
    if "structured_outputs" in values:
        given = {field.name: value for field, value in message.structured_outputs.ListFields()}
        values["structured_outputs"] = get_structured_outputs(given)
    return SamplingParams.from_request(with_defaults(values, defaults))


def build_response(
    event: OutputEvent, request_id: str, prompt_token_ids: tuple[int, ...] = (), seed: int | None = None
) -> inference_pb2.GenerateResponse:
    """Convert one event, or several merged, to a message; the first has the seed, and may have the prompt's ids."""
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        index=event.index,
        text=event.text,
        token_ids=event.token_ids,
        logprobs=[_build_position(position) for position in event.logprobs],
        prompt_logprobs=[_build_position(position) for position in event.prompt_logprobs],
        usage=_build_usage(event.usage),
        finish=None if event.finish is None else _build_finish(event.finish, event),
        prompt_token_ids=prompt_token_ids,
        is_last=event.is_last,
        times=None if event.times is None else build_message(inference_pb2.RequestTimes, event.times),
        reasoning_content=event.reasoning_content,
        tool_calls=[build_delta(piece) for piece in event.tool_calls],
        routed_experts=None if event.routed_experts is None else _build_experts(event.routed_experts),
        seed=seed,
    )


def build_model_info(model: ModelInfo) -> control_pb2.GetModelInfoResponse:
    """Convert the model's properties to a message."""
    message = build_message(control_pb2.GetModelInfoResponse, model)
    message.default_sampling.MergeFrom(inference_pb2.SamplingParams(**model.default_sampling))
    return message


def build_load(load: EngineLoad, replica_loads: Iterable[EngineLoad]) -> control_pb2.GetLoadResponse:
    """Convert the total load and each replica's load to a message."""
    message = build_message(control_pb2.GetLoadResponse, load)
    message.replicas.extend(build_message(control_pb2.ReplicaLoad, replica) for replica in replica_loads)
    return message


def build_server_info(state: ServiceState) -> control_pb2.GetServerInfoResponse:
    """Return the server's properties and state."""
    startup, model = state.startup, state.model
    return control_pb2.GetServerInfoResponse(
        server_version=__version__,
        api_version=API_VERSION,
        state=f"SERVER_STATE_{state.stage.name}",
        start_time=state.start_time,
        startup=control_pb2.StartupProgress(what=startup.what, done=startup.done, total=startup.total)
        if state.stage is Stage.STARTING
        else None,
        backend=None if model is None else build_message(control_pb2.Backend, model.backend),
        options=list_options(state.config),
        role=state.config.roles.role,
        checkpoint="" if model is None else model.checkpoint,
    )


def list_options(config: EngineConfig) -> list[control_pb2.Option]:
    """Return every option that has a value."""
    return [
        control_pb2.Option(name=name.replace("_", "-"), value=value, source=source)
        for name, value, source in config.explain()
        if value != "None"
    ]


def _early_stopping_from(value: int) -> bool | Literal["never"]:
    if value not in _EARLY_STOPPING:
        raise InvalidArgument("sampling.early_stopping", f"{value} is not a value of EarlyStopping")
    return _EARLY_STOPPING[value]


def build_message(kind: type[_M], value: object) -> _M:
    """Build a message by copying attributes of equal names, except submessages."""
    names = [field.name for field in kind.DESCRIPTOR.fields if field.message_type is None]
    return kind(**{name: getattr(value, name) for name in names})


def _build_position(position: PositionLogprobs) -> inference_pb2.PositionLogprobs:
    return inference_pb2.PositionLogprobs(
        chosen=_build_logprob(position.chosen),
        top=[_build_logprob(token) for token in position.top],
        asked=[_build_logprob(token) for token in position.asked],
        sampling_logprob=position.sampling_logprob,
        entropy=position.entropy,
    )


def _build_logprob(token: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, rank=token.rank)


def _build_usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        image_tokens=usage.image_tokens,
    )


def _build_finish(finish: SequenceFinish, event: OutputEvent) -> inference_pb2.Finish:
    matched = finish.matched_stop
    return inference_pb2.Finish(
        reason=_FINISH_REASONS[finish.reason],
        matched_stop_string=matched if isinstance(matched, str) else None,
        matched_stop_token_id=matched if isinstance(matched, int) else None,
        cumulative_logprob=event.cumulative_logprob,
        weight_versions=[build_message(inference_pb2.WeightVersionRun, run) for run in event.weight_versions],
    )


def _build_experts(ids_tlk: NDArray[Any]) -> inference_pb2.RoutedExperts:
    _, num_layers, top_k = ids_tlk.shape
    ids = ids_tlk.astype(ids_tlk.dtype.newbyteorder("<"), copy=False).tobytes()
    size = ids_tlk.dtype.itemsize
    return inference_pb2.RoutedExperts(ids=ids, num_layers=num_layers, top_k=top_k, bytes_per_id=size)


async def responses(
    service: Service, message: inference_pb2.GenerateRequest, call: Call
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    """Stream one request; closing the iterator aborts it."""
    async with service.generate(call) as generation:
        first_ids, seed = generation.prompt_token_ids if message.return_prompt_token_ids else (), generation.seed
        async for event in generation:
            yield build_response(event, generation.request_id, first_ids, seed)
            first_ids, seed = (), None


async def tokenized(service: Service, message: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
    """Answer Tokenize."""

    def read() -> Prompt:
        if message.HasField("chat") and message.HasField("add_special_tokens"):
            raise InvalidArgument(
                "add_special_tokens", "applies only to text: a chat template writes its own special tokens"
            )
        return prompt_from(message)

    token_ids = await service.tokenize(
        read,
        prompt_size(message),
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        model=model_from(message),
    )
    return inference_pb2.TokenizeResponse(token_ids=token_ids)


async def detokenized(service: Service, message: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
    """Answer Detokenize."""
    skip_special_tokens = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    how: Any = {"skip_special_tokens": skip_special_tokens, "model": model_from(message)}
    text = await service.detokenize(message.token_ids, **how)
    if not message.return_token_bytes:
        return inference_pb2.DetokenizeResponse(text=text)
    token_bytes = await service.token_bytes(message.token_ids, **how)
    build = partial(inference_pb2.DetokenizeResponse, text=text, token_bytes=token_bytes)
    return await service.run_blocking(build, len(token_bytes))


_MAX_STARTS = 256
"""Maximum requests that one message starts."""
_MAX_RESPONSES_BYTES = 1 << 20
"""Size from which the responses that are ready take a further message: clients accept 4 MiB by default."""
_MAX_READY = 1024
"""Responses that may wait for a slow reader before no more requests are read: those of requests that are refused."""


class MultiplexedCall:
    """One call of GenerateMultiplexed: each request is a task, and responses that are ready share messages.

        client ──starts──> read ──> request 1 ──┐
                                ──> request 2 ──┴──> ready ──one message──> client

    While a message is being written, each request may add one more response; its further output is merged by its
    `OutputStream`. Bound to one event loop.

    Args:
        messages: the client's messages.
        in_hand: limits the total size of the requests.
        context: has metadata, deadline and peer of the call.
    """

    def __init__(
        self,
        service: Service,
        messages: AsyncIterator[inference_pb2.GenerateMultiplexedRequest],
        in_hand: MessagesInHand,
        context: ServicerContext,
    ) -> None:
        self._service = service
        self._messages = messages
        self._in_hand = in_hand
        self._context = context
        metadata = tuple(context.invocation_metadata() or ())
        self._metadata = tuple((key, value) for key, value in metadata if key not in TRACE_KEYS)
        self._peer = context.peer()
        self._ready: list[inference_pb2.MultiplexedResponse] = []
        self._has_changed = asyncio.Event()
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._last_number = -1
        self._error: JpagedError | None = None
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(lambda _: self._has_changed.set())

    async def responses(self) -> AsyncGenerator[inference_pb2.GenerateMultiplexedResponse, None]:
        """Yield messages until the client has closed its side and all requests have ended; closing aborts the others.

        Raises:
            Exception: the error of reading messages, or the one passed to `end`.
        """
        try:
            while not (self._reading.done() and self._has_ended()):
                await self._has_changed.wait()
                self._has_changed.clear()
                while self._ready:
                    self._is_writable.clear()
                    yield self._take()
                    self._is_writable.set()
        finally:
            tasks = [self._reading, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, error: JpagedError) -> None:
        """Read no more messages, and end the call with an error after the open requests."""
        self._error = error
        self._reading.cancel()

    def _has_ended(self) -> bool:
        """Return True if no request is open; raise the error that ends the call, if any."""
        if not self._reading.cancelled() and (failure := self._reading.exception()) is not None:
            raise failure
        if self._tasks or self._ready:
            return False
        if self._error is not None:
            raise self._error
        return True

    async def _read(self) -> None:
        async for message in self._messages:
            if len(message.starts) > _MAX_STARTS:
                raise InvalidArgument("starts", f"{len(message.starts)} requests; at most {_MAX_STARTS} in a message")
            for start in message.starts:
                if start.number <= self._last_number:
                    raise InvalidArgument("starts.number", f"{start.number} is not above {self._last_number}")
                self._last_number = start.number
                self._start(start)
            for number in message.cancels:
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            if len(self._ready) >= _MAX_READY:
                await self._is_writable.wait()

    def _start(self, start: inference_pb2.MultiplexedStart) -> None:
        number = start.number

        def forget(_: object) -> None:
            del self._tasks[number]
            self._has_changed.set()

        task = self._tasks[number] = asyncio.create_task(self._run(start, number))
        task.add_done_callback(forget)

    async def _run(self, start: inference_pb2.MultiplexedStart, number: int) -> None:
        enter_part()
        try:
            with self._in_hand.counted(start.ByteSize()) as too_much:
                if too_much is not None:
                    raise too_much
                call, request = self._call_from(start), start.request
                async with self._service.generate(call) as generation:
                    ahead = {REQUEST_ID_KEY: generation.request_id, **generation.record.headers}
                    self._add(number, accepted=inference_pb2.MultiplexedAcceptance(metadata=ahead))
                    first_ids = generation.prompt_token_ids if request.return_prompt_token_ids else ()
                    seed = generation.seed
                    async for event in generation:
                        response = build_response(event, generation.request_id, first_ids, seed)
                        self._add(number, response=response)
                        first_ids, seed = (), None
                        await self._is_writable.wait()
        except Exception as error:
            self._add(number, status=get_status(error_for(error)).SerializeToString())

    def _call_from(self, start: inference_pb2.MultiplexedStart) -> Call:
        if not start.HasField("request"):
            raise InvalidArgument("request", "is missing")
        limits_s = [] if (left_s := self._context.time_remaining()) is None else [left_s]
        if start.HasField("timeout_s"):
            if not start.timeout_s >= 0:
                raise InvalidArgument("timeout_s", f"{start.timeout_s} is not a number of at least 0")
            limits_s.append(start.timeout_s)
        trace = [(key, start.trace[key]) for key in TRACE_KEYS if key in start.trace]
        metadata = (*self._metadata, *trace)
        defaults = self._service.state.default_sampling
        return call_from(start.request, metadata, min(limits_s, default=None), self._peer, defaults)

    def _add(self, number: int, **content: Any) -> None:
        self._ready.append(inference_pb2.MultiplexedResponse(number=number, **content))
        self._has_changed.set()

    def _take(self) -> inference_pb2.GenerateMultiplexedResponse:
        """Remove the responses that fit into one message, and return the message."""
        num_bytes = 0
        for count, one in enumerate(self._ready):
            num_bytes += one.ByteSize()
            if count and num_bytes > _MAX_RESPONSES_BYTES:
                break
        else:
            count = len(self._ready)
        taken, self._ready = self._ready[:count], self._ready[count:]
        return inference_pb2.GenerateMultiplexedResponse(responses=taken)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """jpaged.v1.InferenceService.

    Args:
        in_hand: limits the total size of the requests of GenerateMultiplexed.
    """

    def __init__(self, service: Service, in_hand: MessagesInHand) -> None:
        self._service = service
        self._in_hand = in_hand
        self._calls: set[MultiplexedCall] = set()
        self._are_closed = asyncio.Event()
        self._are_closed.set()
        self._has_ended = False

    async def end(self, timeout_s: float) -> None:
        """End the calls of GenerateMultiplexed with UNAVAILABLE, and wait up to `timeout_s` until they have ended."""
        self._has_ended = True
        for call in self._calls:
            call.end(_shutting_down())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._are_closed.wait()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: ServicerContext) -> None:
        """Stream one request; its blocks are free within a step, however the call ends.

        The initial metadata has its id and trace headers.
        """
        async with status_on_error(context):
            metadata = context.invocation_metadata() or ()
            call = call_from(
                request, metadata, context.time_remaining(), context.peer(), self._service.state.default_sampling
            )
            async with self._service.generate(call) as generation:
                ahead = {REQUEST_ID_KEY: generation.request_id, **generation.record.headers}
                await context.send_initial_metadata(tuple(ahead.items()))
                first_ids = generation.prompt_token_ids if request.return_prompt_token_ids else ()
                seed = generation.seed
                async for event in generation:
                    await context.write(build_response(event, generation.request_id, first_ids, seed))
                    first_ids, seed = (), None

    async def GenerateMultiplexed(
        self, request_iterator: AsyncIterator[inference_pb2.GenerateMultiplexedRequest], context: ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateMultiplexedResponse]:
        """Run requests concurrently on one call; a client disconnect aborts all of them."""
        async with status_on_error(context):
            if self._has_ended:
                raise _shutting_down()
            call = MultiplexedCall(self._service, request_iterator, self._in_hand, context)
            self._calls.add(call)
            self._are_closed.clear()
            try:
                async with contextlib.aclosing(call.responses()) as responses:
                    async for response in responses:
                        yield response
            finally:
                self._calls.discard(call)
                if not self._calls:
                    self._are_closed.set()

    async def Score(self, request: inference_pb2.ScoreRequest, context: ServicerContext) -> inference_pb2.ScoreResponse:
        """Score each continuation as a request; a client disconnect aborts all of them."""
        async with status_on_error(context):
            asker = parse_caller_options(request, get_tenant(context), context.time_remaining(), get_caller(context))
            return await scored(self._service, asker, request)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: ServicerContext) -> inference_pb2.EmbedResponse:
        """Embed each input as a request; a client disconnect aborts all of them."""
        async with status_on_error(context):
            asker = parse_caller_options(request, get_tenant(context), context.time_remaining(), get_caller(context))
            return await embedded(self._service, asker, request)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        """Tokenize with the checks of Generate, except the length: texts may be longer than a prompt."""
        async with status_on_error(context):
            return await tokenized(self._service, request)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        """Detokenize; accepts more ids than a sequence has."""
        async with status_on_error(context):
            return await detokenized(self._service, request)


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down: it accepts no new requests")
