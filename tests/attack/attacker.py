"""Sends fuzzed calls to a server and judges every answer: an allowed status, an end, a stream that keeps its word."""

import asyncio
import collections
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from jpaged._proto.v1 import control_pb2, inference_pb2
from tests.attack.messages import Names, corrupted, decodes, inflate, mutate, names_a_field, valid_message

HANG_S = 300.0
"""What has not ended by then never will, however busy the machine is."""
MAX_ROUNDS_OF_UNPINNING = 600
"""A tenth of a second each, at least."""
MAX_REQUEST_BYTES = 1 << 20
"""The server's own default; what is longer is refused by gRPC, which knows no field."""
WHOLE_MESSAGE = "request"
_NO_MESSAGE = b"\x08"
"""The begin of a number, and no more."""
"""The field that is named when the bytes are no message at all."""
TENANT_KEY = "x-jpaged-tenant"
_FROM_OUR_SIDE = "Internal error from Core"
"""What gRPC's client says when it writes to a call that has ended meanwhile; no server sends it."""
CUT_SHORT = "cut short"
"""The status of a call that the attacker itself ended."""
_TENANTS = ("", "a", "b", "a tenant with spaces", "t" * 128, "t" * 129, "\x7f")


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: its path, what it takes and answers, the statuses it may end with besides OK and INVALID_ARGUMENT."""

    path: str
    request: type[Message]
    response: type[Message]
    statuses: frozenset[str]
    weight: int
    streams_in: bool = False
    streams_out: bool = False


def _method(path: str, request: type[Message], response: type[Message], weight: int, *statuses: str) -> Method:
    return Method(path, request, response, frozenset(statuses), weight)


METHODS: tuple[Method, ...] = (
    Method(
        "/jpaged.v1.InferenceService/Generate",
        inference_pb2.GenerateRequest,
        inference_pb2.GenerateResponse,
        frozenset({"NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}),
        weight=40,
        streams_out=True,
    ),
    Method(
        "/jpaged.v1.InferenceService/GenerateMultiplexed",
        inference_pb2.GenerateMultiplexedRequest,
        inference_pb2.GenerateMultiplexedResponse,
        frozenset(),
        weight=20,
        streams_in=True,
        streams_out=True,
    ),
    _method(
        "/jpaged.v1.InferenceService/Score",
        inference_pb2.ScoreRequest,
        inference_pb2.ScoreResponse,
        12,
        "NOT_FOUND",
        "RESOURCE_EXHAUSTED",
        "UNIMPLEMENTED",
    ),
    _method(
        "/jpaged.v1.InferenceService/Embed",
        inference_pb2.EmbedRequest,
        inference_pb2.EmbedResponse,
        12,
        "NOT_FOUND",
        "RESOURCE_EXHAUSTED",
        "UNIMPLEMENTED",
    ),
    _method(
        "/jpaged.v1.InferenceService/Tokenize",
        inference_pb2.TokenizeRequest,
        inference_pb2.TokenizeResponse,
        12,
        "NOT_FOUND",
    ),
    _method(
        "/jpaged.v1.InferenceService/Detokenize",
        inference_pb2.DetokenizeRequest,
        inference_pb2.DetokenizeResponse,
        10,
        "NOT_FOUND",
    ),
    _method(
        "/jpaged.v1.ControlService/GetServerInfo",
        control_pb2.GetServerInfoRequest,
        control_pb2.GetServerInfoResponse,
        2,
    ),
    _method(
        "/jpaged.v1.ControlService/GetModelInfo", control_pb2.GetModelInfoRequest, control_pb2.GetModelInfoResponse, 2
    ),
    _method("/jpaged.v1.ControlService/GetLoad", control_pb2.GetLoadRequest, control_pb2.GetLoadResponse, 3),
    _method("/jpaged.v1.ControlService/Abort", control_pb2.AbortRequest, control_pb2.AbortResponse, 8, "NOT_FOUND"),
    _method(
        "/jpaged.v1.ControlService/PinPrefix",
        control_pb2.PinPrefixRequest,
        control_pb2.PinPrefixResponse,
        6,
        "ALREADY_EXISTS",
        "RESOURCE_EXHAUSTED",
        "UNIMPLEMENTED",
    ),
    _method(
        "/jpaged.v1.ControlService/UnpinPrefix",
        control_pb2.UnpinPrefixRequest,
        control_pb2.UnpinPrefixResponse,
        6,
        "NOT_FOUND",
    ),
    _method(
        "/jpaged.v1.ControlService/LoadAdapter",
        control_pb2.LoadAdapterRequest,
        control_pb2.LoadAdapterResponse,
        4,
        "UNIMPLEMENTED",
    ),
    _method(
        "/jpaged.v1.ControlService/UnloadAdapter",
        control_pb2.UnloadAdapterRequest,
        control_pb2.UnloadAdapterResponse,
        4,
        "UNIMPLEMENTED",
    ),
    _method(
        "/jpaged.v1.ControlService/UpdateWeights",
        control_pb2.UpdateWeightsRequest,
        control_pb2.UpdateWeightsResponse,
        4,
        "UNIMPLEMENTED",
        "NOT_FOUND",
    ),
    _method(
        "/jpaged.v1.ControlService/SendWeights",
        control_pb2.SendWeightsRequest,
        control_pb2.SendWeightsResponse,
        4,
        "UNIMPLEMENTED",
        "UNAVAILABLE",
    ),
    _method(
        "/jpaged.v1.ControlService/ListAdapters",
        control_pb2.ListAdaptersRequest,
        control_pb2.ListAdaptersResponse,
        2,
        "UNIMPLEMENTED",
    ),
    _method(
        "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, 3, "NOT_FOUND"
    ),
    Method(
        "/grpc.health.v1.Health/Watch",
        health_pb2.HealthCheckRequest,
        health_pb2.HealthCheckResponse,
        frozenset(),
        weight=2,
        streams_out=True,
    ),
    Method(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest,
        reflection_pb2.ServerReflectionResponse,
        frozenset(),
        weight=2,
        streams_in=True,
        streams_out=True,
    ),
    Method(
        "/jpaged.v1.InferenceService/NoSuchMethod",
        control_pb2.GetLoadRequest,
        control_pb2.GetLoadResponse,
        frozenset({"UNIMPLEMENTED"}),
        weight=1,
    ),
)


@dataclass(slots=True)
class Verdict:
    """What came of an attack: how often each method ended with each status, and what must not be, in words."""

    counts: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.counts.total()

    def statuses_of(self, method: str) -> set[str]:
        """Every status that a method, by the last part of its path, ended with."""
        return {status for path, status in self.counts if path.endswith("/" + method)}


@dataclass(frozen=True, slots=True)
class _Shot:
    """One call: what is sent and how it is cut short, if it is."""

    method: Method
    encoded: bytes
    is_decodable: bool
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float | None
    cancels_after: int | None


class Attacker:
    """Fires shots, several at a time, at one server.

    Args:
        target: host and port.
        seed: the shots are a function of it; which of them meet each other at the server is not.
    """

    def __init__(self, target: str, seed: int, *, names: Names | None = None, num_at_once: int = 24) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._names = names or Names()
        self._num_at_once = num_at_once
        self._verdict = Verdict()
        self._pins: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    async def fire(self, num_shots: int) -> Verdict:
        """Fires so many shots, waits until all have ended, lets go of everything pinned, and says how it went.

        The first ones are no message of any kind, one for each method; the others are drawn.
        """
        none = [_Shot(method, _NO_MESSAGE, False, (), timeout_s=None, cancels_after=None) for method in METHODS]
        shots = iter([*none, *(self._aim() for _ in range(num_shots - len(none)))])
        async with aio.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._num_at_once):
                    group.create_task(self._fire_all(channel, shots))
            await self._let_go(channel)
        return self._verdict

    async def _let_go(self, channel: aio.Channel) -> None:
        """Unpins all that was sent to be pinned, again until nothing is used: a call that was cut short may pin yet."""
        load: Any = channel.unary_unary(
            "/jpaged.v1.ControlService/GetLoad", response_deserializer=control_pb2.GetLoadResponse.FromString
        )
        unpin: Any = channel.unary_unary("/jpaged.v1.ControlService/UnpinPrefix")
        for _ in range(MAX_ROUNDS_OF_UNPINNING):
            for name, metadata in self._pins:
                request = control_pb2.UnpinPrefixRequest(name=name).SerializeToString()
                try:
                    await unpin(request, metadata=metadata, timeout=HANG_S)
                except aio.AioRpcError:
                    continue  # none of that name
            answer = await load(b"", timeout=HANG_S)
            if answer.num_blocks_used == 0:
                return
            await asyncio.sleep(0.1)

    def _aim(self) -> _Shot:
        rng = self._rng
        method = rng.choices(METHODS, [method.weight for method in METHODS])[0]
        message = valid_message(rng, method.request, self._names)
        kind = rng.random()
        for _ in range(0 if kind < 0.35 else rng.randint(1, 3)):
            mutate(rng, message)
        if rng.random() < 0.005:
            inflate(rng, message, rng.choice((50_000, 250_000, 500_000, 1_000_000, 3_000_000)))
        encoded = message.SerializeToString()
        if kind > 0.95:
            encoded = rng.randbytes(rng.randint(1, 200))
        elif kind > 0.85:
            encoded = corrupted(rng, encoded)
        is_decodable = decodes(method.request, encoded)
        metadata = _tenant_metadata(rng.choice(_TENANTS) if rng.random() < 0.1 else "")
        if is_decodable and method.request is control_pb2.PinPrefixRequest:
            self._pins.add((control_pb2.PinPrefixRequest.FromString(encoded).name, metadata))
        return _Shot(
            method,
            encoded,
            is_decodable,
            metadata,
            timeout_s=rng.choice((0.0, 0.001, 0.02, 0.2)) if rng.random() < 0.08 else None,
            cancels_after=rng.randint(0, 3) if rng.random() < 0.1 else None,
        )

    async def _fire_all(self, channel: aio.Channel, shots: Any) -> None:
        for shot in shots:
            status, problem = await self._fire_one(channel, shot)
            self._verdict.counts[shot.method.path, status] += 1
            if problem:
                self._verdict.faults.append(f"{shot.method.path} {shot.encoded[:300].hex()}: {status}: {problem}")

    async def _fire_one(self, channel: aio.Channel, shot: _Shot) -> tuple[str, str]:
        """The status that the call ended with, and what is wrong with that, if anything."""
        call, messages = _start(channel, shot), list[Any]()
        try:
            async with asyncio.timeout(HANG_S):
                if await _is_read_to_its_end(call, shot, messages):
                    return "OK", _problem_of_answer(shot, messages)
                return CUT_SHORT, ""
        except TimeoutError:
            call.cancel()
            return "HANG", f"has not ended after {HANG_S} s"
        except aio.AioRpcError as error:
            return error.code().name, _problem_of_error(shot, error, messages)
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            return CUT_SHORT, ""  # the call's own end: its status met our cancel on the way


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _tenant_metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    return ((TENANT_KEY, tenant),) if tenant and tenant.isprintable() else ()


def _start(channel: aio.Channel, shot: _Shot) -> Any:
    method = shot.method
    arity = f"{'stream' if method.streams_in else 'unary'}_{'stream' if method.streams_out else 'unary'}"
    multicallable = getattr(channel, arity)(method.path, response_deserializer=method.response.FromString)
    request = iter([shot.encoded]) if method.streams_in else shot.encoded
    return multicallable(request, metadata=shot.metadata, timeout=shot.timeout_s)


async def _is_read_to_its_end(call: Any, shot: _Shot, messages: list[Any]) -> bool:
    """Reads all messages, and returns False where the shot, or a watch without an end, is cut short before that."""
    limit = shot.cancels_after
    if shot.method.path.endswith("/Watch"):
        limit = min(1, 1 if limit is None else limit)
    if not shot.method.streams_out and limit is None:
        messages.append(await call)
        return True
    while shot.method.streams_out and len(messages) != limit:
        message = await call.read()
        if message is aio.EOF:
            return True
        messages.append(message)
    call.cancel()
    return False


def _problem_of_error(shot: _Shot, error: aio.AioRpcError, messages: Sequence[Any]) -> str:
    status = error.code().name
    has_last = any(getattr(message, "is_last", False) for message in messages)
    if has_last and shot.timeout_s is None:  # a caller's own timer may run out between the last message and the status
        return "a stream that had its last message ended with an error"
    if status == "INVALID_ARGUMENT":
        return _problem_of_refusal(shot, error)
    if status == "RESOURCE_EXHAUSTED" and len(shot.encoded) > MAX_REQUEST_BYTES:
        return ""
    if status == "DEADLINE_EXCEEDED" and shot.timeout_s is not None:
        return ""
    if status == "INTERNAL" and shot.method.streams_in and error.details() == _FROM_OUR_SIDE:
        return ""
    return "" if status in shot.method.statuses else f"is not a status of this method: {error.details()!r}"


def _problem_of_refusal(shot: _Shot, error: aio.AioRpcError) -> str:
    fields = _violated_fields(error)
    if not fields:
        return f"names no field: {error.details()!r}"
    for name in fields:
        if not shot.is_decodable and name == WHOLE_MESSAGE:
            continue
        if not (name == TENANT_KEY or (shot.is_decodable and names_a_field(shot.method.request, name))):
            return f"names {name!r}, which is no field of {shot.method.request.DESCRIPTOR.name}: {error.details()!r}"
    return ""


def _violated_fields(error: aio.AioRpcError) -> list[str]:
    bad = error_details_pb2.BadRequest()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for packed in status_pb2.Status.FromString(value).details:
                if packed.Is(bad.DESCRIPTOR):
                    packed.Unpack(bad)
    return [violation.field for violation in bad.field_violations]


def _problem_of_answer(shot: _Shot, messages: Sequence[Any]) -> str:
    if not shot.is_decodable:
        return "what is no message was taken for one"
    request = shot.method.request.FromString(shot.encoded)
    if isinstance(request, inference_pb2.GenerateRequest):
        return _problem_of_stream(request, messages)
    if isinstance(request, inference_pb2.ScoreRequest):
        return _problem_of_scores(request, messages[0])
    if isinstance(request, inference_pb2.EmbedRequest):
        return _problem_of_vectors(request, messages[0])
    return ""


def _problem_of_scores(request: inference_pb2.ScoreRequest, answer: inference_pb2.ScoreResponse) -> str:
    """What the API promises of scores."""
    if len(answer.scores) != len(request.continuations):
        return f"{len(answer.scores)} scores of {len(request.continuations)} continuations"
    for score in answer.scores:
        total = math.fsum(token.logprob for token in score.tokens)
        if not score.tokens or not math.isclose(score.logprob, total, abs_tol=1e-3):
            return f"a score of {score.logprob}, of tokens that make {total}"
    return ""


def _problem_of_vectors(request: inference_pb2.EmbedRequest, answer: inference_pb2.EmbedResponse) -> str:
    """What the API promises of vectors."""
    if len(answer.embeddings) != len(request.inputs):
        return f"{len(answer.embeddings)} vectors of {len(request.inputs)} inputs"
    widths = {len(one.values) for one in answer.embeddings}
    if len(widths) != 1 or 0 in widths:
        return f"vectors of {widths} numbers"
    if request.normalize and any(
        not math.isclose(math.hypot(*one.values), 1.0, abs_tol=1e-3) for one in answer.embeddings
    ):
        return "a vector that is not of length 1"
    return ""


def _problem_of_stream(request: inference_pb2.GenerateRequest, messages: Sequence[Any]) -> str:
    """What the API promises of a stream that ended with OK."""
    if [message.is_last for message in messages] != [False] * (len(messages) - 1) + [True]:
        return "not exactly one last message, as the last"
    num_sequences = request.sampling.n if request.sampling.HasField("n") else 1
    max_tokens = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else 16
    counts: collections.Counter[int] = collections.Counter()
    finished: list[int] = []
    for message in messages:
        if message.index in finished:
            return f"sequence {message.index} went on after its end"
        if request.HasField("request_id") and message.request_id != request.request_id:
            return f"came under the id {message.request_id!r}"
        counts[message.index] += len(message.token_ids)
        if message.HasField("finish"):
            finished.append(message.index)
        has_logprobs = request.sampling.HasField("logprobs") or bool(request.sampling.logprob_token_ids)
        if len(message.logprobs) != (len(message.token_ids) if has_logprobs else 0):
            return f"{len(message.logprobs)} log-probabilities for {len(message.token_ids)} tokens"
    was_aborted = messages[-1].finish.reason == inference_pb2.FINISH_REASON_ABORT
    if sorted(finished) != list(range(num_sequences)) and not was_aborted:
        return f"sequences {sorted(finished)} finished, of {num_sequences}"
    if any(count > max_tokens for count in counts.values()):
        return f"{dict(counts)} tokens, of {max_tokens} at most"
    return ""
