"""Messages to attack with: valid ones, valid ones with a few fields gone wild, bytes gone wrong, and noise.

Everything is read off the descriptors, so that a field that is added to the API is attacked without a word here, and
everything is a function of the generator that is passed in.
"""

import math
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from jpaged._proto.v1 import control_pb2, inference_pb2

_MAX_TOKENS = 12
"""The longest output of a request that is to run: an attack is about many requests, not long ones."""

_BIG_INTEGERS = (2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))
_INTEGERS = (0, 1, 2, 3, 7, 16, 17, 31, 32, 33, 64, 255, 256, 257, 1023, 1024, 1025, 65536, *_BIG_INTEGERS)
_FLOATS = (0.0, -0.0, 1.0, 0.5, math.nextafter(1, 2), math.nextafter(0, 1), -1.0, 100.0, 100.1, 1e308, -1e308)
_NOT_FINITE = (math.nan, math.inf, -math.inf)
_TEXTS = (
    "",
    " ",
    "\0",
    "\u2028\u2029\x85",
    "\ufffd",
    "\U0001f9e8" * 40,
    "e\u0301" * 30,
    "\u202eabc",
    "{{ 7 * 7 }}{% for i in range(9) %}",
    "<|im_start|>system\n<|im_end|><s></s><|endoftext|><pad>",
    "%s%n../../etc/passwd\r\n\x1b[2J",
    "a" * 129,
    "a" * 257,
    "word " * 1200,
    "\n" * 5000,
)
_EARLY_STOPPING = (
    inference_pb2.EARLY_STOPPING_UNSPECIFIED,
    inference_pb2.EARLY_STOPPING_BEST_RUNNING,
    inference_pb2.EARLY_STOPPING_FIRST_FULL,
    inference_pb2.EARLY_STOPPING_NEVER,
)
_POOLINGS = (inference_pb2.POOLING_UNSPECIFIED, inference_pb2.POOLING_LAST, inference_pb2.POOLING_MEAN)
_FILLINGS = ("a", "word ", "\U0001f9e8", "\0", "{{")
_INTEGER_LIMITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


@dataclass(frozen=True, slots=True)
class Names:
    """The names that are in use, so that some of what is sent meets what is there."""

    request_ids: tuple[str, ...] = ("a", "b", "c", "a request")
    pins: tuple[str, ...] = ("one", "two", "three")
    model: str = "demo"


def valid_message(rng: random.Random, kind: type[Message], names: Names) -> Message:
    """A message that its method takes, or refuses for the state of the server alone."""
    return _VALID[kind](rng, names)


def mutate(rng: random.Random, message: Message) -> None:
    """Changes a field of `message`, however deep it lies, to a value of its type that is likely to be at a limit."""
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    if not fields:
        return
    spec = rng.choice(fields)
    if spec.is_repeated:
        _mutate_repeated(rng, message, spec)
    elif spec.type == FieldDescriptor.TYPE_MESSAGE:
        part = getattr(message, spec.name)
        if rng.random() < 0.1:
            part.SetInParent()
        else:
            mutate(rng, part)
    elif rng.random() < 0.1:
        message.ClearField(spec.name)
    else:
        setattr(message, spec.name, _scalar(rng, spec))


def inflate(rng: random.Random, message: Message, num_bytes: int) -> None:
    """Fills a text or a list of `message`, however deep it lies, to about so many bytes."""
    fields: list[Any] = [spec for spec in message.DESCRIPTOR.fields if _can_grow(spec)]
    if not fields:
        return
    spec = rng.choice(fields)
    if not spec.is_repeated:
        if spec.type == FieldDescriptor.TYPE_MESSAGE:
            inflate(rng, getattr(message, spec.name), num_bytes)
        else:
            setattr(message, spec.name, (rng.choice(_FILLINGS) * num_bytes)[:num_bytes])
        return
    values = getattr(message, spec.name)
    if _is_map(spec):
        values.update(dict.fromkeys(range(num_bytes // 8), 1.0))
        return
    if spec.type == FieldDescriptor.TYPE_MESSAGE:
        empty = values.add()
        values.extend([empty] * (num_bytes // 2))
    else:
        values.extend(["" if spec.type == FieldDescriptor.TYPE_STRING else rng.randrange(100)] * num_bytes)


def _is_map(spec: Any) -> bool:
    return spec.type == FieldDescriptor.TYPE_MESSAGE and bool(spec.message_type.GetOptions().map_entry)


def _can_grow(spec: Any) -> bool:
    growing = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)
    return bool(spec.is_repeated) or spec.type in growing


def corrupted(rng: random.Random, encoded: bytes) -> bytes:
    """The bytes with a few changes that a decoder has to live with: some still decode, most do not."""
    data = bytearray(encoded)
    for _ in range(rng.randint(1, 4)):
        place = rng.randint(0, len(data))
        match rng.randrange(6):
            case 0 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 9))
            case 3:
                data += encoded  # a message twice: the second one's scalars win
            case 4:
                data += b"\xfa\x3f" + bytes([4]) + b"none"  # a field that nobody knows
            case _:
                data[place:place] = b"\xff" * 11  # a varint that does not end in time
    return bytes(data)


def decodes(kind: type[Message], encoded: bytes) -> bool:
    """Whether the bytes are a message of this kind."""
    try:
        kind.FromString(encoded)
    except DecodeError:
        return False
    return True


def _scalar(rng: random.Random, spec: Any) -> object:
    if spec.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if spec.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice((rng.choice(_FLOATS), rng.choice(_NOT_FINITE), rng.uniform(-2, 2)))
    if spec.type == FieldDescriptor.TYPE_STRING:
        return rng.choice((rng.choice(_TEXTS), _text(rng, rng.randint(0, 300))))
    if spec.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.randint(0, 64))
    low, high = _INTEGER_LIMITS[spec.type]
    return rng.choice([value for value in _INTEGERS if low <= value <= high])


def _mutate_repeated(rng: random.Random, message: Message, spec: Any) -> None:
    values = getattr(message, spec.name)
    count = rng.choice((0, 1, 2, 15, 16, 17, 33, 200, 1025))
    if _is_map(spec):
        key, value = spec.message_type.fields
        values.update({_scalar(rng, key): _scalar(rng, value) for _ in range(count)})
        return
    if spec.type == FieldDescriptor.TYPE_MESSAGE:
        if values and rng.random() < 0.7:
            mutate(rng, rng.choice(values))
            return
        for _ in range(count):
            mutate(rng, values.add())
        return
    if rng.random() < 0.3:
        message.ClearField(spec.name)
    if spec.type == FieldDescriptor.TYPE_STRING:
        count = min(count, 33)
    values.extend([_scalar(rng, spec) for _ in range(count)])


def _text(rng: random.Random, length: int) -> str:
    letters = string.printable + "äß漢字🙂\u200d"
    return "".join(rng.choice(letters) for _ in range(length))


# --- valid ones -------------------------------------------------------------------------------------------------------


def _generate(rng: random.Random, names: Names) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest()
    match rng.randrange(3):
        case 0:
            message.text = rng.choice(("Once upon a time", _text(rng, 40), "the same long beginning " * 8))
        case 1:
            message.token_ids.ids.extend(rng.randrange(200) for _ in range(rng.randint(1, 90)))
        case _:
            message.chat.messages.add(role="user", content=rng.choice(("Tell me a story", _text(rng, 30))))
    sampling = message.sampling
    sampling.max_tokens = rng.randint(1, _MAX_TOKENS)
    sampling.min_tokens = rng.randint(0, sampling.max_tokens)
    sampling.ignore_eos = rng.random() < 0.3
    if rng.random() < 0.15:
        sampling.beam_width = rng.randint(1, 4)
        sampling.n = rng.randint(1, sampling.beam_width)
        sampling.early_stopping = rng.choice(_EARLY_STOPPING)
    else:
        sampling.temperature = rng.choice((0.0, 0.7, 1.3))
        sampling.top_k, sampling.top_p = rng.choice((0, 5)), rng.choice((1.0, 0.9))
        sampling.min_p = rng.choice((0.0, 0.05))
        sampling.seed = rng.randrange(2**64)
        sampling.n = rng.choice((1, 1, 1, 2, 4))
        if rng.random() < 0.2:
            sampling.best_of = sampling.n + rng.randint(0, 2)
        if rng.random() < 0.2:
            sampling.stop.extend(rng.choice(("the", ".", "\n", "xyzzy")) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.2:
        sampling.logprobs = rng.randint(0, 20)
    sampling.stop_token_ids.extend(rng.randrange(200) for _ in range(rng.choice((0, 0, 2))))
    sampling.priority = rng.randint(-3, 3)
    sampling.cache_salt = rng.choice(("", "", "salt", "pepper"))
    sampling.use_prefix_cache = rng.random() < 0.9
    message.return_prompt_token_ids = rng.random() < 0.3
    if rng.random() < 0.3:
        message.request_id = rng.choice(names.request_ids)
    if rng.random() < 0.1:
        message.model = names.model
    message.whole = rng.random() < 0.2
    return message


def _fill(rng: random.Random, message: Any) -> None:
    """A text or token ids, never none."""
    if rng.random() < 0.5:
        message.text = rng.choice(("Once upon a time", _text(rng, 20) or "x", "the same long beginning " * 3))
    else:
        message.token_ids.ids.extend(rng.randrange(200) for _ in range(rng.randint(1, 40)))


def _fill_rest(rng: random.Random, names: Names, message: Any) -> None:
    message.cache_salt = rng.choice(("", "", "salt", "pepper"))
    message.priority = rng.randint(-3, 3)
    if rng.random() < 0.1:
        message.model = names.model


def _score(rng: random.Random, names: Names) -> Message:
    message = inference_pb2.ScoreRequest()
    _fill(rng, message)
    for _ in range(rng.choice((1, 2, 4, 20))):
        _fill(rng, message.continuations.add())
    _fill_rest(rng, names, message)
    return message


def _embed(rng: random.Random, names: Names) -> Message:
    message = inference_pb2.EmbedRequest(pooling=rng.choice(_POOLINGS), normalize=rng.random() < 0.5)
    for _ in range(rng.choice((1, 2, 4, 20))):
        _fill(rng, message.inputs.add())
    _fill_rest(rng, names, message)
    return message


def _tokenize(rng: random.Random, names: Names) -> Message:
    message = inference_pb2.TokenizeRequest()
    if rng.random() < 0.5:
        message.text = _text(rng, rng.randint(0, 200))
        message.add_special_tokens = rng.random() < 0.5
    else:
        for turn in range(rng.randint(1, 5)):
            message.chat.messages.add(role=("user", "assistant")[turn % 2], content=_text(rng, 20) or "x")
    return message


def _detokenize(rng: random.Random, names: Names) -> Message:
    ids = [rng.randrange(200) for _ in range(rng.randint(0, 100))]
    return inference_pb2.DetokenizeRequest(
        token_ids=ids, skip_special_tokens=rng.random() < 0.5, return_token_bytes=rng.random() < 0.5
    )


def _pin(rng: random.Random, names: Names) -> Message:
    message = control_pb2.PinPrefixRequest(name=rng.choice(names.pins))
    if rng.random() < 0.5:
        message.text = "the same long beginning " * 8
    else:
        message.token_ids.ids.extend([5] * rng.randint(1, 60))
    return message


def _empty(kind: type[Message]) -> Callable[[random.Random, Names], Message]:
    return lambda rng, names: kind()


def _multiplexed(rng: random.Random, names: Names) -> Message:
    message = inference_pb2.GenerateMultiplexedRequest()
    for number in range(rng.randrange(4)):
        start = message.starts.add(number=number + 1)
        start.request.CopyFrom(_generate(rng, names))
        if rng.random() < 0.2:
            start.timeout_s = rng.choice((0.0, 0.01, 60.0))
    if rng.random() < 0.3:
        message.cancels.append(rng.randrange(4))
    return message


_VALID: dict[type[Message], Callable[[random.Random, Names], Message]] = {
    inference_pb2.GenerateRequest: _generate,
    inference_pb2.GenerateMultiplexedRequest: _multiplexed,
    inference_pb2.ScoreRequest: _score,
    inference_pb2.EmbedRequest: _embed,
    inference_pb2.TokenizeRequest: _tokenize,
    inference_pb2.DetokenizeRequest: _detokenize,
    control_pb2.GetServerInfoRequest: _empty(control_pb2.GetServerInfoRequest),
    control_pb2.GetModelInfoRequest: _empty(control_pb2.GetModelInfoRequest),
    control_pb2.GetLoadRequest: _empty(control_pb2.GetLoadRequest),
    control_pb2.AbortRequest: lambda rng, names: control_pb2.AbortRequest(request_id=rng.choice(names.request_ids)),
    control_pb2.PinPrefixRequest: _pin,
    control_pb2.UnpinPrefixRequest: lambda rng, names: control_pb2.UnpinPrefixRequest(name=rng.choice(names.pins)),
    control_pb2.LoadAdapterRequest: lambda rng, names: control_pb2.LoadAdapterRequest(
        name=rng.choice(names.pins), path="adapter"
    ),
    control_pb2.UpdateWeightsRequest: lambda rng, names: control_pb2.UpdateWeightsRequest(
        path=rng.choice(["/nowhere", ""]), mode=rng.choice(control_pb2.UpdateMode.keys())
    ),
    control_pb2.SendWeightsRequest: lambda rng, names: control_pb2.SendWeightsRequest(
        upload=rng.choice(names.pins), offset=rng.choice((0, 0, 8)), data=rng.randbytes(rng.choice((0, 8, 64)))
    ),
    control_pb2.UnloadAdapterRequest: lambda rng, names: control_pb2.UnloadAdapterRequest(name=rng.choice(names.pins)),
    control_pb2.ListAdaptersRequest: _empty(control_pb2.ListAdaptersRequest),
    health_pb2.HealthCheckRequest: lambda rng, names: health_pb2.HealthCheckRequest(
        service=rng.choice(("", "jpaged.v1.InferenceService"))
    ),
    reflection_pb2.ServerReflectionRequest: lambda rng, names: reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="jpaged.v1.InferenceService"
    ),
}


def names_a_field(kind: type[Message], path: str) -> bool:
    """Whether `path` (`sampling.top_p`, `chat.messages[3].role`, or by way of a oneof's name) leads to a field."""
    descriptor: Any = kind.DESCRIPTOR
    parts: Sequence[str] = path.split(".")
    for number, part in enumerate(parts):
        name, _, index = part.partition("[")
        if descriptor is None:
            return False
        if name in descriptor.oneofs_by_name and not index:
            members = {spec.name for spec in descriptor.oneofs_by_name[name].fields}
            if number + 1 < len(parts) and parts[number + 1].partition("[")[0] not in members:
                return False
            continue
        spec = descriptor.fields_by_name.get(name)
        if spec is None or (index and not (spec.is_repeated and index.removesuffix("]").isdigit())):
            return False
        descriptor = spec.message_type
    return True
