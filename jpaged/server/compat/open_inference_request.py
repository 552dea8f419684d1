"""A ModelInferRequest -> a parsed request. Fields that cannot be honored are rejected by name.

The model's metadata names its input and output tensors. Parameters come in two places, under the field names of
SamplingParams:

    parameters            of the request: strings, numbers and flags; a list or an object is given as JSON
    sampling_parameters   the tensor: one JSON object

A number or a flag may be written as a string, as in Triton's examples (`{"temperature": "0.1"}`).

The elements of a tensor are raw bytes of the message, or in the typed field:

BYTES          each element after its length, 4 bytes little-endian
BOOL           a byte each
numbers        little-endian
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged._proto.open_inference import inference_pb2
from jpaged.errors import InvalidArgument, NotFound, Unsupported
from jpaged.sampling_params import NO_DEFAULTS, request_fields, with_defaults
from jpaged.server.compat import SAMPLING, naming
from jpaged.types import Prompt, SamplingParams

VERSION = "1"
"""The only version of a model."""
BACKEND = "jpaged"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of requests or of responses.

    Attributes:
        datatype: the protocol's name of the element type.
        length: number of elements; -1 for any number.
    """

    name: str
    datatype: str
    length: int = 1


INPUTS = {
    one.name: one
    for one in (
        Tensor("text_input", "BYTES"),
        Tensor("input_ids", "INT64", -1),
        Tensor("stream", "BOOL"),
        Tensor("sampling_parameters", "BYTES"),
        Tensor("exclude_input_in_output", "BOOL"),
        Tensor("return_finish_reason", "BOOL"),
        Tensor("return_cumulative_logprob", "BOOL"),
        Tensor("return_logprobs", "BOOL"),
        Tensor("return_num_input_tokens", "BOOL"),
        Tensor("return_num_output_tokens", "BOOL"),
        Tensor("return_token_ids", "BOOL"),
    )
}
"""A request has exactly one of the first two; `input_ids` may also be INT32."""
TEXT_OUTPUT = "text_output"
OUTPUTS = {
    one.name: one
    for one in (
        Tensor(TEXT_OUTPUT, "BYTES", -1),
        Tensor("finish_reason", "BYTES", -1),
        Tensor("cumulative_logprob", "FP32", -1),
        Tensor("logprobs", "BYTES", -1),
        Tensor("num_input_tokens", "UINT32"),
        Tensor("num_output_tokens", "UINT32", -1),
        Tensor("token_ids", "INT32", -1),
    )
}
"""One element per sequence, except token_ids, which concatenates those of all sequences."""
_CONFIG_TYPES = {
    "BOOL": inference_pb2.TYPE_BOOL,
    "UINT32": inference_pb2.TYPE_UINT32,
    "INT32": inference_pb2.TYPE_INT32,
    "INT64": inference_pb2.TYPE_INT64,
    "FP32": inference_pb2.TYPE_FP32,
    "BYTES": inference_pb2.TYPE_STRING,
}


def require_version(version: str) -> None:
    """Reject an unknown version; an empty one is any.

    Raises:
        NotFound: the version is not served.
    """
    if version not in ("", VERSION):
        raise NotFound(f"model_version: {version!r} is not served here; {VERSION!r} is")


def build_metadata(name: str) -> inference_pb2.ModelMetadataResponse:
    """Return the tensors of the model, under a name."""

    def shown(tensor: Tensor) -> inference_pb2.ModelMetadataResponse.TensorMetadata:
        return inference_pb2.ModelMetadataResponse.TensorMetadata(
            name=tensor.name, datatype=tensor.datatype, shape=[tensor.length]
        )

    return inference_pb2.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=BACKEND,
        inputs=map(shown, INPUTS.values()),
        outputs=map(shown, OUTPUTS.values()),
    )


def build_config(name: str) -> inference_pb2.ModelConfigResponse:
    """Return the same as Triton's model configuration. Without batching: the engine batches requests of all callers."""
    return inference_pb2.ModelConfigResponse(
        config=inference_pb2.ModelConfig(
            name=name,
            backend=BACKEND,
            input=[
                inference_pb2.ModelInput(
                    name=one.name, data_type=_CONFIG_TYPES[one.datatype], dims=[one.length], optional=True
                )
                for one in INPUTS.values()
            ],
            output=[
                inference_pb2.ModelOutput(name=one.name, data_type=_CONFIG_TYPES[one.datatype], dims=[one.length])
                for one in OUTPUTS.values()
            ],
            model_transaction_policy=inference_pb2.ModelTransactionPolicy(decoupled=True),
        )
    )


MAX_PARAMETERS = 64
OF_TENSOR = "sampling_parameters"
_DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in request_fields()}
_LISTS = {name for name, value in _DEFAULTS.items() if isinstance(value, tuple)} | {"allowed_token_ids"}
_TEXT_LISTS = {"stop", "bad_words"}
_TEXTS = {name for name, value in _DEFAULTS.items() if isinstance(value, str)}
_FLAGS = {name for name, value in _DEFAULTS.items() if isinstance(value, bool)} - {"early_stopping"}
_MAX_ID_DIGITS = 10


def parse_values(parameters: Mapping[str, inference_pb2.InferParameter]) -> dict[str, Any]:
    """Return the value of each parameter.

    Raises:
        InvalidArgument: there are too many, or one has no value.
    """
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidArgument("parameters", f"{len(parameters)} are given; at most {MAX_PARAMETERS}")
    values = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgument(f"parameters.{name}", "has no value")
        values[name] = getattr(parameter, kind)
    return values


def object_in(text: bytes) -> dict[str, Any]:
    """Parse the JSON object of the tensor.

    Raises:
        InvalidArgument: it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise InvalidArgument(OF_TENSOR, "is nested too deep") from error
    except ValueError as error:
        raise InvalidArgument(OF_TENSOR, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(OF_TENSOR, "is not a JSON object")
    return value


class Parameters:
    """The merged parameters of both places, taken by name.

    Raises:
        InvalidArgument: one name has two values.
    """

    def __init__(self, of_request: Mapping[str, Any], of_tensor: Mapping[str, Any]) -> None:
        self._in_tensor = of_tensor.keys()
        given = {name: _read(value, name) for name, value in of_request.items()}
        for name, value in of_tensor.items():
            read = value if name in _TEXT_LISTS else _read(value, name)
            if name in given and given[name] != read:
                raise InvalidArgument(f"parameters.{name}", f"{given[name]!r} conflicts with {read!r} in {OF_TENSOR}")
            given[name] = read
        self._left = {name: value for name, value in given.items() if value is not None}

    def take(self, name: str) -> Any:
        """Remove and return a value that is not a field of SamplingParams; None if not given."""
        return self._left.pop(name, None)

    def has(self, name: str) -> bool:
        """Return True if a value is given and was not taken."""
        return name in self._left

    def get_name(self, field: str) -> str:
        """Return the caller's name of a field of SamplingParams, or of a part of it; other names are unchanged."""
        if not field.startswith(SAMPLING):
            return field
        path = field.removeprefix(SAMPLING)
        name = path.partition(".")[0].partition("[")[0]
        return f"{OF_TENSOR if name in self._in_tensor else 'parameters'}.{path}"

    def sampling(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """Return SamplingParams of all values that were not taken, completed by the model's sampling defaults.

        Raises:
            InvalidArgument: one is unknown, or out of range.
        """
        with naming(self.get_name):
            for name, value in self._left.items():
                _check(name, value)
            values = with_defaults(self._left, defaults)
            if (biases := values.get("logit_bias")) is not None:
                values["logit_bias"] = _biases(biases)
            if values.get("max_tokens") is None and "max_tokens" in defaults:
                values["max_tokens"] = max(1, values.get("min_tokens", 0))
            return SamplingParams.from_request(values)


def _read(value: Any, name: str) -> Any:
    """Parse a value written as a string if its field is not a string; return it unchanged if it cannot be parsed."""
    if not isinstance(value, str) or name in _TEXTS or name not in _DEFAULTS:
        return value
    if name in _TEXT_LISTS and not value.startswith("["):
        return value
    try:
        return json.loads(value.lower() if value in ("True", "False", "None") else value)
    except (ValueError, RecursionError):
        return value


def _check(name: str, value: Any) -> None:
    """Reject values that SamplingParams does not check."""
    field = f"{SAMPLING}{name}"
    if name not in _DEFAULTS:
        raise InvalidArgument(field, f"is unknown: must be one of {', '.join(_DEFAULTS)}")
    if name in _FLAGS and not isinstance(value, bool):
        raise InvalidArgument(field, f"{value!r} is not true or false")
    if name in _LISTS and not isinstance(value, list | (str if name in _TEXT_LISTS else list)):
        raise InvalidArgument(field, f"{value!r} is not a list")
    if name in ("logit_bias", "structured_outputs") and not isinstance(value, dict):
        raise InvalidArgument(field, f"{value!r} is not a JSON object")


def _biases(given: Mapping[str, Any]) -> dict[int, Any]:
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS):
            raise InvalidArgument(f"{SAMPLING}logit_bias", f"{name!r} is not a token id")
    biases = {int(name): bias for name, bias in given.items()}
    if len(biases) < len(given):
        raise InvalidArgument(f"{SAMPLING}logit_bias", "has a token id twice")
    return biases


InputTensor = inference_pb2.ModelInferRequest.InferInputTensor
OutputTensor = inference_pb2.ModelInferResponse.InferOutputTensor

MAX_RANK = 8
_LENGTH = struct.Struct("<I")
_NUMBERS = {"BOOL": "?", "INT32": "<i4", "INT64": "<i8", "UINT32": "<u4", "FP32": "<f4"}
_TYPED_FIELDS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


def get_elements(field: str, tensor: InputTensor, raw: bytes | None) -> Sequence[Any]:
    """Return the elements of a tensor, flat.

    Args:
        raw: its bytes; None if the elements are in the tensor.

    Raises:
        InvalidArgument: the number of elements contradicts the shape, or their type is wrong.
    """
    if len(tensor.shape) > MAX_RANK or any(length < 0 for length in tensor.shape):
        shown = list(tensor.shape[: MAX_RANK + 1])
        raise InvalidArgument(field, f"the shape {shown} must have at most {MAX_RANK} dimensions, none negative")
    num = math.prod(tensor.shape)
    found = _typed(field, tensor) if raw is None else _from_bytes(field, tensor.datatype, raw, num)
    if len(found) != num:
        raise InvalidArgument(field, f"has {len(found)} elements; its shape {list(tensor.shape)} requires {num}")
    return found


def _typed(field: str, tensor: InputTensor) -> Sequence[Any]:
    name = _TYPED_FIELDS[tensor.datatype]
    for given, _ in tensor.contents.ListFields():
        if given.name != name:
            raise InvalidArgument(f"{field}.contents.{given.name}", f"elements of {tensor.datatype} belong in {name}")
    found: Sequence[Any] = getattr(tensor.contents, name)
    return found


def _from_bytes(field: str, datatype: str, raw: bytes, num: int) -> Sequence[Any]:
    """Decode `num` elements; read at most one more than those."""
    if datatype == "BYTES":
        return _byte_strings(field, raw, num)
    size = np.dtype(_NUMBERS[datatype]).itemsize
    if len(raw) % size:
        raise InvalidArgument(field, f"{len(raw)} bytes are not a multiple of {size}, the size of {datatype}")
    if datatype == "BOOL" and raw.strip(b"\0\1"):
        raise InvalidArgument(field, "has a byte that is neither 0 nor 1")
    found: list[Any] = np.frombuffer(raw, _NUMBERS[datatype]).tolist()
    return found


def _byte_strings(field: str, raw: bytes, num: int) -> list[bytes]:
    found: list[bytes] = []
    place = 0
    while place < len(raw) and len(found) <= num:
        begin = place + _LENGTH.size
        if begin > len(raw):
            raise InvalidArgument(field, f"ends within the length of an element, at byte {place}")
        place = begin + _LENGTH.unpack_from(raw, begin - _LENGTH.size)[0]
        if place > len(raw):
            raise InvalidArgument(field, f"ends within an element: {place} bytes are declared, {len(raw)} are present")
        found.append(raw[begin:place])
    return found


def add_output(
    response: inference_pb2.ModelInferResponse, name: str, datatype: str, elements: Sequence[Any], *, is_typed: bool
) -> None:
    """Append a one-dimensional tensor to a response; `is_typed` selects the typed field instead of raw bytes."""
    tensor = OutputTensor(name=name, datatype=datatype, shape=[len(elements)])
    if is_typed:
        getattr(tensor.contents, _TYPED_FIELDS[datatype]).extend(elements)
    elif datatype == "BYTES":
        response.raw_output_contents.append(b"".join(_LENGTH.pack(len(one)) + one for one in elements))
    else:
        response.raw_output_contents.append(np.asarray(elements, _NUMBERS[datatype]).tobytes())
    response.outputs.append(tensor)


_SHARED_MEMORY = "shared_memory_"
_RETURN = "return_"
_REFUSED = {
    "sequence_id": "requests have no state: send the whole prompt",
    "sequence_start": "requests have no state: send the whole prompt",
    "sequence_end": "requests have no state: send the whole prompt",
    "headers": "send headers as metadata of the call",
    "binary_data_output": "applies only to HTTP: here outputs are raw bytes if the inputs are",
}
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Ask:
    """A parsed request.

    Attributes:
        id: request id to repeat in responses.
        adapter: name of an adapter; "" for the base model.
        timeout_s: timeout set by the caller; None for no limit.
        is_streamed: respond as tokens come.
        prefix: text to prepend to each output text.
        outputs: names of the response tensors.
        has_logprobs: log-probabilities are requested.
        is_typed: elements go into the typed fields, as in the request.
        parameters: maps field names in errors to the caller's.
    """

    id: str
    prompt: Prompt
    sampling: SamplingParams
    adapter: str
    timeout_s: float | None
    is_streamed: bool
    prefix: str
    outputs: tuple[str, ...]
    has_logprobs: bool
    is_typed: bool
    parameters: Parameters

    def get_name(self, field: str) -> str:
        """Return the caller's name of a field."""
        if field == "prompt" or field.startswith("prompt."):
            return f"inputs.{'text_input' if self.prompt.token_ids is None else 'input_ids'}"
        return self.parameters.get_name(field)


def parse_ask(request: inference_pb2.ModelInferRequest, defaults: Mapping[str, Any] = NO_DEFAULTS) -> Ask:
    """Parse a request.

    Args:
        defaults: the model's sampling defaults, for parameters that the request leaves out.

    Raises:
        InvalidArgument: an input, an output or a parameter is unknown, invalid or missing.
        Unsupported: it uses shared memory.
    """
    given = _inputs(request)
    of_request = parse_values(request.parameters)
    for name, reason in _REFUSED.items():
        if name in of_request:
            raise InvalidArgument(f"parameters.{name}", reason)
    timeout_s = _timeout_s(of_request.pop("timeout", None))
    _flag("parameters.triton_enable_empty_final_response", of_request.pop("triton_enable_empty_final_response", False))
    parameters = Parameters(of_request, object_in(given[OF_TENSOR][0]) if OF_TENSOR in given else {})
    given_adapter = parameters.take("lora_name")
    adapter = "" if given_adapter is None else _text("parameters.lora_name", given_adapter)
    has_length = parameters.has("max_tokens")
    sampling = parameters.sampling(defaults)
    prompt, is_streamed = _prompt(given), _one(given, "stream", default=False)
    if not has_length and (most := defaults.get("max_tokens")) is not None:
        prompt = dataclasses.replace(prompt, fills_length=True, max_filled=most)
    outputs = _outputs(request, given)
    has_logprobs = sampling.returns_logprobs
    if "cumulative_logprob" in outputs and not sampling.needs_logprobs:
        sampling = dataclasses.replace(sampling, logprobs=0)
    return Ask(
        id=request.id,
        prompt=prompt,
        sampling=sampling,
        adapter=adapter,
        timeout_s=timeout_s,
        is_streamed=is_streamed,
        prefix=_prefix(given, prompt, is_streamed=is_streamed),
        outputs=outputs,
        has_logprobs=has_logprobs,
        is_typed=not request.raw_input_contents,
        parameters=parameters,
    )


def _inputs(request: inference_pb2.ModelInferRequest) -> dict[str, Sequence[Any]]:
    """Return the elements of each input."""
    raws = request.raw_input_contents
    if len(request.inputs) > len(INPUTS):
        raise InvalidArgument("inputs", f"{len(request.inputs)} are given; at most {len(INPUTS)}")
    if raws and len(raws) != len(request.inputs):
        raise InvalidArgument("raw_input_contents", f"has {len(raws)} tensors; inputs has {len(request.inputs)}")
    given: dict[str, Sequence[Any]] = {}
    for i, tensor in enumerate(request.inputs):
        field = f"inputs.{tensor.name}"
        if tensor.name not in INPUTS:
            raise InvalidArgument(field, f"is unknown: must be one of {', '.join(INPUTS)}")
        if tensor.name in given:
            raise InvalidArgument(field, "is given twice")
        _refuse_parameters(field, tensor.parameters)
        types = ("INT32", "INT64") if tensor.name == "input_ids" else (INPUTS[tensor.name].datatype,)
        if tensor.datatype not in types:
            raise InvalidArgument(field, f"is {tensor.datatype!r}; must be {' or '.join(types)}")
        if raws and tensor.HasField("contents"):
            raise InvalidArgument(f"{field}.contents", "must be left out with raw_input_contents")
        given[tensor.name] = get_elements(field, tensor, raws[i] if raws else None)
        if INPUTS[tensor.name].length == 1 and len(given[tensor.name]) != 1:
            raise InvalidArgument(field, f"has {len(given[tensor.name])} elements; must have 1")
    return given


def _prompt(given: Mapping[str, Sequence[Any]]) -> Prompt:
    if ("text_input" in given) == ("input_ids" in given):
        problem = "conflicts with input_ids: give only one of them" if "text_input" in given else "is missing"
        raise InvalidArgument("inputs.text_input", problem)
    if "input_ids" in given:
        return Prompt(token_ids=list(given["input_ids"]))
    return Prompt(text=_decoded("inputs.text_input", given["text_input"][0]))


def _prefix(given: Mapping[str, Sequence[Any]], prompt: Prompt, *, is_streamed: bool) -> str:
    """Return the prompt text if outputs must include it (the default for non-streaming text), otherwise ""."""
    is_left_out = _one(given, "exclude_input_in_output", default=is_streamed or prompt.text is None)
    if is_left_out:
        return ""
    if is_streamed:
        raise InvalidArgument("inputs.exclude_input_in_output", "must be true for a stream")
    if prompt.text is None:
        raise InvalidArgument("inputs.exclude_input_in_output", "must be true with input_ids, which have no text")
    return prompt.text


def _outputs(request: inference_pb2.ModelInferRequest, given: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Return the listed outputs; without a list, the text and each output with a true `return_` input."""
    if len(request.outputs) > len(OUTPUTS):
        raise InvalidArgument("outputs", f"{len(request.outputs)} are given; at most {len(OUTPUTS)}")
    for output in request.outputs:
        field = f"outputs.{output.name}"
        if output.name not in OUTPUTS:
            raise InvalidArgument(field, f"is unknown: must be one of {', '.join(OUTPUTS)}")
        _refuse_parameters(field, output.parameters)
    if request.outputs:
        return tuple(dict.fromkeys(output.name for output in request.outputs))
    return (TEXT_OUTPUT, *(name for name in OUTPUTS if _one(given, f"{_RETURN}{name}", default=False)))


def _refuse_parameters(field: str, parameters: Mapping[str, inference_pb2.InferParameter]) -> None:
    for name in parameters:
        if name.startswith(_SHARED_MEMORY):
            raise Unsupported(f"{field}.parameters.{name}: shared memory is not supported: send tensors in messages")
        raise InvalidArgument(f"{field}.parameters.{name}", "is not supported: tensors have no parameters here")


def _one(given: Mapping[str, Sequence[Any]], name: str, *, default: bool) -> bool:
    return bool(given[name][0]) if name in given else default


def _timeout_s(given: Any) -> float | None:
    """Convert microseconds to seconds; None if there is no limit (0)."""
    if given is None or given == 0:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise InvalidArgument("parameters.timeout", f"{given!r} is not a number of microseconds")
    return given / _MICROSECONDS


def _flag(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(field, f"{value!r} is not true or false")


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(field, f"{value!r} is not a string")
    return value


def _decoded(field: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, f"is not UTF-8: byte 0x{value[error.start]:02x} at {error.start}") from error
