"""Parameters of a request -> SamplingParams. They come in two places, under the field names of SamplingParams.

    parameters            of the request: strings, numbers and flags; a list or an object is given as JSON
    sampling_parameters   the tensor: one JSON object

A number or a flag may be written as a string, as in Triton's examples (`{"temperature": "0.1"}`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jpaged._proto.open_inference import inference_pb2
from jpaged.errors import InvalidArgument
from jpaged.server.faces.naming import SAMPLING, naming
from jpaged.types import SamplingParams

MAX_PARAMETERS = 64
OF_TENSOR = "sampling_parameters"
_DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in fields(SamplingParams)}
_LISTS = {name for name, value in _DEFAULTS.items() if isinstance(value, tuple)} | {"allowed_token_ids"}
_TEXT_LISTS = {"stop", "bad_words"}
_TEXTS = {name for name, value in _DEFAULTS.items() if isinstance(value, str)}
_FLAGS = {name for name, value in _DEFAULTS.items() if isinstance(value, bool)} - {"early_stopping"}
_MAX_ID_DIGITS = 10


def values_of(parameters: Mapping[str, inference_pb2.InferParameter]) -> dict[str, Any]:
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

    def name_of(self, field: str) -> str:
        """Return the caller's name of a field of SamplingParams, or of a part of it; other names are unchanged."""
        if not field.startswith(SAMPLING):
            return field
        path = field.removeprefix(SAMPLING)
        name = path.partition(".")[0].partition("[")[0]
        return f"{OF_TENSOR if name in self._in_tensor else 'parameters'}.{path}"

    def sampling(self) -> SamplingParams:
        """Return SamplingParams of all values that were not taken.

        Raises:
            InvalidArgument: one is unknown, or out of range.
        """
        with naming(self.name_of):
            for name, value in self._left.items():
                _check(name, value)
            biases = self._left.get("logit_bias")
            return SamplingParams(**self._left if biases is None else {**self._left, "logit_bias": _biases(biases)})


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
