"""vllm.grpc.engine.VllmEngine, from the published messages: a method for each RPC.

Gateways tokenize, and read tokens, not text. Errors are statuses with jpaged's usual details. Fields of model, server
and load information without a counterpart are left at zero. A gateway gets the files of the model's tokenizer in a zip,
from which it builds the same tokenizer.

Defaults of a GenerateRequest, and the meaning of zeros, are those of the published messages:

    temperature    unset is 1                max_tokens          unset is the rest of the model's length
    top_p          0 is 1                    top_k               0 is all
    repetition_penalty, n   0 is 1           stop                text is generated only to search for stop strings

Responses have tokens and no text, so `spaces_between_special_tokens` has no effect. A constraint always holds from the
first token on, as with `grammar_from_first_token`.

Events of a request become chunks as they come, and the end of each sequence:

    stream          chunk, chunk, ..., complete (of one sequence), ...    a chunk has only new tokens
    no stream       complete, complete, ...                               one per sequence, when all have ended

A `complete` message has all tokens of the sequence in both cases. Log-probabilities are in chunks, or in `complete` if
not streaming. Those of the prompt are in the first chunk of each sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from jpaged.access import authenticator as access
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidArgument, NotFound, PermissionDenied, Unsupported
from jpaged.sampling_params import NO_DEFAULTS
from jpaged.server.compat import SAMPLING, completed, estimate_size, naming, whole_size
from jpaged.server.grpc_server import ServicerContext, status_on_error
from jpaged.server.servicer import get_caller, get_tenant
from jpaged.server_load import EngineLoad
from jpaged.service.calls import Call, Caller, RequestRecord
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.score_embed import EMBED_SAMPLING, VectorOptions, embeddable
from jpaged.service.service import SMALL, Service, ServiceState, Stage
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.structured import StructuredOutputs
from jpaged.types import OutputEvent, PositionLogprobs, Prompt, RequestOutput, SamplingParams, TokenLogprob, Usage
from jpaged.version import __version__

SERVER_TYPE = "jpaged-grpc"
SECTIONS = ("core", "all", "memory", "spec", "lora", "disagg", "queues")
"""Sections of a load that gateways request; these messages have only the first."""
_MIN_WINDOW_S = 1.0


def build_model_info(model: LoadedModel) -> vllm_engine_pb2.GetModelInfoResponse:
    """Return the model's properties, fixed at startup."""
    info, source = model.model, model.config.model.model
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=source,
        is_generation=True,
        max_context_length=info.max_model_len,
        vocab_size=info.vocab_size,
        served_model_name=info.name,
        tokenizer_path=source,
        architectures=[info.architecture],
        eos_token_ids=info.eos_token_ids,
        max_req_input_len=info.max_model_len - 1,
    )


def build_server_info(
    state: ServiceState, last_receive_s: float, uptime_s: float
) -> vllm_engine_pb2.GetServerInfoResponse:
    """Return the server's properties; most of them only after its model is loaded.

    Args:
        last_receive_s: when the last request came, in seconds since 1970; 0 before the first.
    """
    facts: dict[str, Any] = {
        "last_receive_timestamp": last_receive_s,
        "uptime_seconds": uptime_s,
        "server_type": SERVER_TYPE,
        "data_parallel_size": state.config.parallel.data_parallel_size,
        "constrained_decoding_start": "first_token",
    }
    if (model := state.model) is not None:
        load, geometry = model.engine.load(), model.engine.geometry
        facts |= {
            "active_requests": load.num_running + load.num_waiting,
            "kv_cache_dtype": model.config.cache.kv_cache_dtype,
            "block_size": geometry.block_size,
            "attention_backend": model.backend.attention,
            "model_dtype": model.model.dtype,
            "max_num_seqs": geometry.max_num_seqs,
        }
    return vllm_engine_pb2.GetServerInfoResponse(**facts)


class Loads:
    """State of GetLoads: measures tokens per second between calls, over windows of at least a second."""

    def __init__(self) -> None:
        self._since: tuple[float, list[int]] | None = None
        self._rates: list[float] = []

    def of(self, model: LoadedModel, request: vllm_engine_pb2.GetLoadsRequest) -> vllm_engine_pb2.GetLoadsResponse:
        """Return the load of each replica, or of the requested one.

        Raises:
            InvalidArgument: there is no such replica, or section.
        """
        loads = model.engine.replica_loads()
        for i, name in enumerate(request.include):
            if name not in SECTIONS:
                raise InvalidArgument(f"include[{i}]", f"{name!r} is not one of {', '.join(SECTIONS)}")
        ranks = range(len(loads))
        if request.HasField("dp_rank"):
            if request.dp_rank not in ranks:
                raise InvalidArgument("dp_rank", f"{request.dp_rank} is not from 0 to {len(loads) - 1}")
            ranks = range(request.dp_rank, request.dp_rank + 1)
        self._measure(model.engine.clock(), loads)
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=__version__,
            dp_rank_count=len(loads),
            loads=[_build_load(rank, loads[rank], self._rates[rank]) for rank in ranks],
        )

    def _measure(self, now_s: float, loads: Sequence[EngineLoad]) -> None:
        counts = [load.num_generation_tokens for load in loads]
        if self._since is None:
            self._since, self._rates = (now_s, counts), [0.0] * len(loads)
        since_s, before = self._since
        if now_s - since_s >= _MIN_WINDOW_S:
            self._rates = [(new - old) / (now_s - since_s) for new, old in zip(counts, before, strict=True)]
            self._since = now_s, counts


def _build_load(rank: int, load: EngineLoad, tokens_per_s: float) -> vllm_engine_pb2.SchedulerLoad:
    return vllm_engine_pb2.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_used_tokens=load.num_blocks_used * load.block_size,
        max_total_num_tokens=load.num_blocks * load.block_size,
        token_usage=load.num_blocks_used / max(1, load.num_blocks),
        gen_throughput=tokens_per_s,
        cache_hit_rate=load.num_prefix_hit_tokens / max(1, load.num_prefix_query_tokens),
        utilization=load.num_running / max(1, load.max_num_seqs),
        max_running_requests=load.max_num_seqs,
    )


_OF_PREFILL = "disaggregated prefill is not supported in this API"
_NO_MEDIA = "only text is supported"
_REFUSED = {
    "kv_transfer_params": _OF_PREFILL,
    "kv_transfer_params_json": _OF_PREFILL,
    "mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
}
_CONSTRAINTS = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
    "choice": "choice",
}
"""Names of constraints -> names in StructuredOutputs."""
_SAME = (
    *("frequency_penalty", "presence_penalty", "min_tokens", "stop", "stop_token_ids"),
    *("skip_special_tokens", "ignore_eos", "include_stop_str_in_output"),
)
"""Fields copied unchanged."""
_OPTIONAL = ("logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens", "temperature")
_ONE_AT_ZERO = ("top_p", "repetition_penalty", "n")
_ZERO_AT_ZERO = ("min_p", "top_k")
"""Fields of which 0 is the unset value."""


def get_name(field: str) -> str:
    """Return the caller's name of a field."""
    if field in ("prompt.token_ids", "inputs[0]"):
        return "tokenized.input_ids"
    if field == "prompt":
        return "input"
    path = field.removeprefix(SAMPLING)
    if path == field:
        return field
    for theirs, ours in _CONSTRAINTS.items():
        if path.partition("[")[0] == f"structured_outputs.{ours}":
            return f"sampling_params.{theirs}"
    return f"sampling_params.{path}"


def refuse_unsupported(request: vllm_engine_pb2.GenerateRequest, num_replicas: int) -> None:
    """Reject unsupported fields by name.

    Raises:
        Unsupported: an unsupported field is set.
        InvalidArgument: the rank does not exist.
    """
    for name, reason in _REFUSED.items():
        if request.HasField(name):
            raise Unsupported(f"{name}: {reason}")
    if request.extra_mm_inputs:
        raise Unsupported(f"extra_mm_inputs: {_NO_MEDIA}")
    if request.HasField("data_parallel_rank"):
        rank = request.data_parallel_rank
        if not 0 <= rank < num_replicas:
            raise InvalidArgument("data_parallel_rank", f"{rank} is not from 0 to {num_replicas - 1}")
        if num_replicas > 1:
            raise Unsupported("data_parallel_rank: the replica of a request is chosen by cached prefixes and load")


def estimate_request_size(request: vllm_engine_pb2.GenerateRequest) -> int:
    """Return the number of characters or token ids of the prompt."""
    return len(request.text) + len(request.tokenized.input_ids)


def read(
    request: vllm_engine_pb2.GenerateRequest, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> tuple[Prompt, SamplingParams]:
    """Return prompt and parameters; raise InvalidArgument for invalid fields.

    Args:
        defaults: the model's sampling defaults, for zero and unset fields.
    """
    given, prompt = request.sampling_params, _parse_prompt(request)
    if given.HasField("max_tokens"):
        return prompt, parse_sampling(given, given.max_tokens, defaults)
    prompt = dataclasses.replace(prompt, fills_length=True, max_filled=defaults.get("max_tokens"))
    return prompt, parse_sampling(given, max(1, given.min_tokens), defaults)


def parse_sampling(
    given: vllm_engine_pb2.SamplingParams, max_tokens: int, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    """Return the parameters, with the defaults of zero and unset fields; raise InvalidArgument if out of range."""
    values: dict[str, Any] = {name: getattr(given, name) for name in _SAME}
    values |= {name: getattr(given, name) for name in _OPTIONAL if given.HasField(name)}
    values |= {name: getattr(given, name) or defaults.get(name, 1) for name in _ONE_AT_ZERO}
    values |= {name: getattr(given, name) or defaults.get(name, 0) for name in _ZERO_AT_ZERO}
    if "temperature" in defaults:
        values.setdefault("temperature", defaults["temperature"])
    values["logit_bias"] = given.logit_bias or None
    values["structured_outputs"] = _parse_constraint(given)
    return SamplingParams.from_request({**values, "max_tokens": max_tokens, "detokenize": bool(given.stop)})


def _parse_prompt(request: vllm_engine_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "tokenized":
            return Prompt(token_ids=request.tokenized.input_ids)
        case "text":
            return Prompt(text=request.text)
        case _:
            raise InvalidArgument("input", "is missing: set tokenized or text")


def _parse_constraint(given: vllm_engine_pb2.SamplingParams) -> StructuredOutputs | None:
    field = given.WhichOneof("constraint")
    if field is None or (field == "json_object" and not given.json_object):
        return None
    value = given.choice.choices if field == "choice" else getattr(given, field)
    arguments: Mapping[str, Any] = {_CONSTRAINTS[field]: value}
    return StructuredOutputs(**arguments)


@dataclass(slots=True)
class _RunningSequence:
    """Tokens so far of a running sequence."""

    token_ids: list[int] = field(default_factory=list)
    has_begun: bool = False


class StreamMessages:
    """Builds the messages of one streamed request.

    Args:
        prompt_token_ids: known when the first event comes.
        num_prompt_logprobs: top log-probabilities per prompt position; None for no prompt log-probabilities.
    """

    def __init__(self, prompt_token_ids: Sequence[int], num_prompt_logprobs: int | None) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._num_prompt_logprobs = num_prompt_logprobs
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._sequences: dict[int, _RunningSequence] = {}

    def estimate_size(self, event: OutputEvent) -> int:
        """Return the amount of work to build an event's messages."""
        sequence = self._sequences.get(event.index, _RunningSequence())
        size = estimate_size(event.token_ids, event.logprobs)
        if event.finish is not None:
            size += len(sequence.token_ids)
        if self._num_prompt_logprobs is not None and not sequence.has_begun:
            size += estimate_size((), [*self._prompt_logprobs, *event.prompt_logprobs])
        return size

    def get_messages(self, event: OutputEvent) -> list[vllm_engine_pb2.GenerateResponse]:
        """Return the messages of an event."""
        return [*self.of(event)]

    def of(self, event: OutputEvent) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yield the messages of an event: none before a sequence has a token or has ended."""
        self._prompt_logprobs += event.prompt_logprobs
        if not event.token_ids and event.finish is None:
            return
        sequence = self._sequences.setdefault(event.index, _RunningSequence())
        if event.token_ids:
            sequence.token_ids += event.token_ids
            yield self._chunk(event, is_first=not sequence.has_begun)
            sequence.has_begun = True
        if event.finish is not None:
            reason, matched = event.finish.reason.value, event.finish.matched_stop
            complete = _complete(event.index, sequence.token_ids, (reason, matched), event.usage)
            yield vllm_engine_pb2.GenerateResponse(complete=complete)

    def _chunk(self, event: OutputEvent, *, is_first: bool) -> vllm_engine_pb2.GenerateResponse:
        told = is_first and self._num_prompt_logprobs is not None
        return vllm_engine_pb2.GenerateResponse(
            chunk=vllm_engine_pb2.GenerateStreamChunk(
                token_ids=event.token_ids,
                prompt_tokens=event.usage.prompt_tokens,
                completion_tokens=len(event.token_ids),
                cached_tokens=event.usage.cached_tokens,
                output_logprobs=_output_logprobs(event.logprobs),
                input_logprobs=_input_logprobs(self._prompt_token_ids, self._prompt_logprobs) if told else None,
                index=event.index,
            )
        )


def iter_ends(output: RequestOutput, num_prompt_logprobs: int | None) -> Iterator[vllm_engine_pb2.GenerateResponse]:
    """Yield the messages of a request that is not streamed; the second argument is as in `StreamMessages`."""
    of_prompt = None
    if num_prompt_logprobs is not None and output.prompt_logprobs is not None:
        positions = [one for one in output.prompt_logprobs if one is not None]
        of_prompt = _input_logprobs(output.prompt_token_ids, positions)
    for one in output.outputs:
        complete = _complete(one.index, one.token_ids, (one.finish_reason or "", one.matched_stop), output.usage)
        if (logprobs := _output_logprobs(one.logprobs or ())) is not None:
            complete.output_logprobs.CopyFrom(logprobs)
        if of_prompt is not None:
            complete.input_logprobs.CopyFrom(of_prompt)
        yield vllm_engine_pb2.GenerateResponse(complete=complete)


def _complete(
    index: int, token_ids: Sequence[int], finish: tuple[str, str | int | None], usage: Usage
) -> vllm_engine_pb2.GenerateComplete:
    reason, matched = finish
    return vllm_engine_pb2.GenerateComplete(
        output_ids=token_ids,
        finish_reason=reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=len(token_ids),
        cached_tokens=usage.cached_tokens,
        index=index,
        matched_token_id=matched if isinstance(matched, int) else None,
        matched_stop_str=matched if isinstance(matched, str) else None,
    )


def _output_logprobs(positions: Sequence[PositionLogprobs]) -> vllm_engine_pb2.OutputLogProbs | None:
    if not positions:
        return None
    has_top = any(position.top for position in positions)
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[position.chosen.logprob for position in positions],
        token_ids=[position.chosen.token_id for position in positions],
        top_logprobs=[_top(position.top) for position in positions] if has_top else (),
    )


def _input_logprobs(token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> vllm_engine_pb2.InputLogProbs:
    """Return an entry for each token of the prompt; the first has no log-probability."""
    has_top = any(position.top for position in positions)
    none = vllm_engine_pb2.InputTokenLogProb()
    values = [vllm_engine_pb2.InputTokenLogProb(value=position.chosen.logprob) for position in positions]
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[none, *values],
        token_ids=token_ids,
        top_logprobs=[_top(()), *(_top(position.top) for position in positions)] if has_top else (),
    )


def _top(tokens: Sequence[TokenLogprob]) -> vllm_engine_pb2.TopLogProbs:
    return vllm_engine_pb2.TopLogProbs(
        values=[one.logprob for one in tokens], token_ids=[one.token_id for one in tokens]
    )


CHUNK_BYTES = 64 << 10
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.json", "config.json", "generation_config.json"),
)
_PATTERNS = ("*.model", "*.tiktoken", "*.jinja")
_SAME_TIME = (1980, 1, 1, 0, 0, 0)
"""Fixed time stamp, so that the same files make the same zip."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A zip.

    Attributes:
        sha256: digest of the content, in hexadecimal.
    """

    content: bytes
    sha256: str

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Yield the messages that carry it; the last has the digest."""
        last = max(0, len(self.content) - 1) // CHUNK_BYTES
        for number in range(last + 1):
            begin = number * CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(
                data=self.content[begin : begin + CHUNK_BYTES], sha256=self.sha256 if number == last else ""
            )


def build_bundle(tokenizer: Tokenizer) -> Bundle:
    """Put the files of a tokenizer's folder into a zip.

    Raises:
        Unsupported: it has no folder.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.folder.is_dir():
        raise Unsupported("GetTokenizer: this model's tokenizer has no files to send")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in _files(tokenizer.folder):
            entry = zipfile.ZipInfo(path.name, _SAME_TIME)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return Bundle(content.getvalue(), hashlib.sha256(content.getvalue()).hexdigest())


def _files(folder: Path) -> list[Path]:
    found = {folder / name for name in _NAMES}
    for pattern in _PATTERNS:
        found.update(folder.glob(pattern))
    return sorted(path for path in found if path.is_file())


SERVICE_NAME = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_ABORTS = 4096
_NOT_HERE = {
    "StartProfile": "profiling at run time is not supported",
    "StopProfile": "profiling at run time is not supported",
    "SubscribeKvEvents": "use GetLoads, which returns block counts",
}


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Servicer over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loads = Loads()
        self._bundle: Bundle | None = None
        self._began_s = time.monotonic()
        self._last_receive_s = 0.0

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: ServicerContext) -> None:
        """Stream chunks, or respond once at the end; a client disconnect aborts the request."""
        async with status_on_error(context):
            with naming(get_name):
                async with contextlib.aclosing(self._generated(request, context)) as messages:
                    async for message in messages:
                        await context.write(message)

    async def Embed(
        self, request: vllm_engine_pb2.EmbedRequest, context: ServicerContext
    ) -> vllm_engine_pb2.EmbedResponse:
        """Return the last token's hidden state scaled to length 1, vLLM's default pooling."""
        async with status_on_error(context):
            self._receive()
            tenant, caller = get_tenant(context), _get_caller(context)
            record = RequestRecord(operation="embeddings", tenant=tenant, caller=caller, adapter="")
            with naming(get_name):
                async with self._service.open_batch_call(None, record) as model:
                    call = Call(
                        read=lambda: (_embeddable(request, model), EMBED_SAMPLING),
                        size=len(request.tokenized.input_ids),
                        request_id=request.request_id or None,
                        tenant=tenant,
                        remaining_s=context.time_remaining(),
                        is_whole=True,
                        caller=caller,
                        record=record,
                    )
                    output = await self._service.complete(call, model)
                    found = VectorOptions(normalize=True).embedding(model.pooler, output)
            return vllm_engine_pb2.EmbedResponse(
                embedding=found.values, prompt_tokens=found.usage.prompt_tokens, embedding_dim=len(found.values)
            )

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: ServicerContext
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Return the same health as grpc.health.v1."""
        state = self._service.state
        is_healthy = state.stage is Stage.SERVING and state.failure is None
        return vllm_engine_pb2.HealthCheckResponse(healthy=is_healthy, message=state.stage.value)

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: ServicerContext
    ) -> vllm_engine_pb2.AbortResponse:
        """Abort requests in flight; unknown ids are ignored, as in vLLM."""
        async with status_on_error(context):
            if len(request.request_ids) > MAX_ABORTS:
                raise InvalidArgument("request_ids", f"{len(request.request_ids)} are given; at most {MAX_ABORTS}")
            tenant = get_tenant(context)
            with naming(lambda field: "request_ids" if field == "request_id" else field):
                for request_id in request.request_ids:
                    with contextlib.suppress(NotFound):
                        self._service.abort(request_id, tenant)
            return vllm_engine_pb2.AbortResponse()

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: ServicerContext
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Return the model's properties, fixed at startup."""
        async with status_on_error(context):
            return build_model_info(self._service.state.loaded())

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: ServicerContext
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Return the server's properties, in every state."""
        async with status_on_error(context):
            return build_server_info(self._service.state, self._last_receive_s, time.monotonic() - self._began_s)

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: ServicerContext
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Return a snapshot of each replica's load."""
        async with status_on_error(context):
            return self._loads.of(self._service.state.loaded(), request)

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: ServicerContext) -> None:
        """Stream the files of the tokenizer, in a zip that is built once."""
        async with status_on_error(context):
            model = self._service.state.loaded()
            if self._bundle is None:
                self._bundle = await self._service.run_blocking(lambda: build_bundle(model.tokenizer), SMALL)
            for chunk in self._bundle.chunks():
                await context.write(chunk)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        """Reset the prefix cache without waiting for requests in flight, which keep their blocks."""
        async with status_on_error(context):
            access.require_control("FlushCache")
            model = self._service.state.serving()
            if model.config.server.disable_control:
                raise PermissionDenied("FlushCache is turned off on this server (disable_control)")
            num_blocks = await asyncio.wrap_future(model.engine.reset_prefix_cache())
            return common_pb2.FlushCacheResponse(
                success=True, message=f"removed {num_blocks} blocks from the prefix cache"
            )

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: ServicerContext) -> None:
        """Refuse: not supported."""
        await _refuse("StartProfile", context)

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: ServicerContext) -> None:
        """Refuse: not supported."""
        await _refuse("StopProfile", context)

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: ServicerContext) -> None:
        """Refuse: not supported."""
        await _refuse("SubscribeKvEvents", context)

    async def _generated(
        self, request: vllm_engine_pb2.GenerateRequest, context: ServicerContext
    ) -> AsyncGenerator[vllm_engine_pb2.GenerateResponse, None]:
        model = self._receive()
        refuse_unsupported(request, len(model.engine.replica_loads()))
        call = Call(
            read=lambda: read(request, model.model.default_sampling),
            size=estimate_request_size(request),
            request_id=request.request_id or None,
            tenant=get_tenant(context),
            remaining_s=context.time_remaining(),
            is_whole=not request.stream,
            caller=_get_caller(context),
        )
        told = request.sampling_params.prompt_logprobs if request.sampling_params.HasField("prompt_logprobs") else None
        if not request.stream:
            output = await completed(self._service, call)
            for message in await self._service.run_blocking(lambda: [*iter_ends(output, told)], whole_size(output)):
                yield message
            return
        async with self._service.generate(call) as generation:
            chunks = StreamMessages(generation.prompt_token_ids, told)
            async for event in generation:
                for message in await self._service.run_blocking(
                    functools.partial(chunks.get_messages, event), chunks.estimate_size(event)
                ):
                    yield message

    def _receive(self) -> LoadedModel:
        """Record the arrival of a request; return the model for it."""
        self._last_receive_s = time.time()
        return self._service.state.serving()


def _get_caller(context: ServicerContext) -> Caller:
    return dataclasses.replace(get_caller(context), face="vllm")


def _embeddable(request: vllm_engine_pb2.EmbedRequest, model: LoadedModel) -> Prompt:
    if not request.HasField("tokenized"):
        raise InvalidArgument("tokenized", "is missing: Embed requires token ids")
    options = VectorOptions()
    options.check(model.pooler, model.hidden_size)
    (token_ids,) = embeddable(model.input_processor, [Prompt(token_ids=request.tokenized.input_ids)])
    return Prompt(token_ids=token_ids, pooling=options.get_pooling(model.pooler))


async def _refuse(method: str, context: ServicerContext) -> NoReturn:
    async with status_on_error(context):
        raise Unsupported(f"{method}: {_NOT_HERE[method]}")
