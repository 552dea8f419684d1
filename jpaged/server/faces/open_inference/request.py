"""A ModelInferRequest -> a parsed request. Fields that cannot be honored are rejected by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged._proto.open_inference import inference_pb2
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.server.faces.open_inference.model import INPUTS, OUTPUTS, TEXT_OUTPUT
from jpaged.server.faces.open_inference.parameters import OF_TENSOR, Parameters, object_in, values_of
from jpaged.server.faces.open_inference.tensors import elements_of
from jpaged.types import Prompt, SamplingParams

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

    def name_of(self, field: str) -> str:
        """Return the caller's name of a field."""
        if field == "prompt" or field.startswith("prompt."):
            return f"inputs.{'text_input' if self.prompt.token_ids is None else 'input_ids'}"
        return self.parameters.name_of(field)


def ask_of(request: inference_pb2.ModelInferRequest) -> Ask:
    """Parse a request.

    Raises:
        InvalidArgument: an input, an output or a parameter is unknown, invalid or missing.
        Unsupported: it uses shared memory.
    """
    given = _inputs(request)
    of_request = values_of(request.parameters)
    for name, reason in _REFUSED.items():
        if name in of_request:
            raise InvalidArgument(f"parameters.{name}", reason)
    timeout_s = _timeout_s(of_request.pop("timeout", None))
    _flag("parameters.triton_enable_empty_final_response", of_request.pop("triton_enable_empty_final_response", False))
    parameters = Parameters(of_request, object_in(given[OF_TENSOR][0]) if OF_TENSOR in given else {})
    given_adapter = parameters.take("lora_name")
    adapter = "" if given_adapter is None else _text("parameters.lora_name", given_adapter)
    sampling = parameters.sampling()
    prompt, is_streamed = _prompt(given), _one(given, "stream", default=False)
    outputs = _outputs(request, given)
    has_logprobs = sampling.logprobs is not None or bool(sampling.logprob_token_ids)
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
        given[tensor.name] = elements_of(field, tensor, raws[i] if raws else None)
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
