"""Parameters of a request -> SamplingParams. They come in two places, under the names of its fields.

    parameters            of the request: texts, numbers and flags; a list or an object is its JSON
    sampling_parameters   the tensor: one JSON object

A number or a flag may be written as a text, as Triton's examples do (`{"temperature": "0.1"}`).
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
    """The value of each parameter.

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
    """The JSON object that the tensor holds.

    Raises:
        InvalidArgument: it holds none.
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
    """What both places say together, taken by name.

    Raises:
        InvalidArgument: one name has two values.
    """

    def __init__(self, of_request: Mapping[str, Any], of_tensor: Mapping[str, Any]) -> None:
        self._in_tensor = of_tensor.keys()
        given = {name: _read(value, name) for name, value in of_request.items()}
        for name, value in of_tensor.items():
            read = value if name in _TEXT_LISTS else _read(value, name)
            if name in given and given[name] != read:
                raise InvalidArgument(f"parameters.{name}", f"{given[name]!r} is {read!r} in {OF_TENSOR}")
            given[name] = read
        self._left = {name: value for name, value in given.items() if value is not None}

    def take(self, name: str) -> Any:
        """Take what is no field of SamplingParams; None where it was not given."""
        return self._left.pop(name, None)

    def name_of(self, field: str) -> str:
        """How the caller knows a field of SamplingParams, or what is below it; others keep their name."""
        if not field.startswith(SAMPLING):
            return field
        path = field.removeprefix(SAMPLING)
        name = path.partition(".")[0].partition("[")[0]
        return f"{OF_TENSOR if name in self._in_tensor else 'parameters'}.{path}"

    def sampling(self) -> SamplingParams:
        """What is left, all of which has to be of SamplingParams.

        Raises:
            InvalidArgument: one is not known, or out of its range.
        """
        with naming(self.name_of):
            for name, value in self._left.items():
                _check(name, value)
            biases = self._left.get("logit_bias")
            return SamplingParams(**self._left if biases is None else {**self._left, "logit_bias": _biases(biases)})


def _read(value: Any, name: str) -> Any:
    """A value that was written as a text, where it is none; what cannot be read stays what it is, and is refused."""
    if not isinstance(value, str) or name in _TEXTS or name not in _DEFAULTS:
        return value
    if name in _TEXT_LISTS and not value.startswith("["):
        return value
    try:
        return json.loads(value.lower() if value in ("True", "False", "None") else value)
    except (ValueError, RecursionError):
        return value


def _check(name: str, value: Any) -> None:
    """Refuse what SamplingParams does not look at."""
    field = f"{SAMPLING}{name}"
    if name not in _DEFAULTS:
        raise InvalidArgument(field, f"is not known; there are {', '.join(_DEFAULTS)}")
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
        raise InvalidArgument(f"{SAMPLING}logit_bias", "names a token twice")
    return biases
