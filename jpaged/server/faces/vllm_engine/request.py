"""A GenerateRequest -> prompt and parameters. Defaults, and the meaning of zeros, are those of the published messages.

    temperature    unset is 1                max_tokens          unset is the rest of the model's length
    top_p          0 is 1                    top_k               0 is all
    repetition_penalty, n   0 is 1           stop                text is generated only to search for stop strings

Responses have tokens and no text, so `spaces_between_special_tokens` has no effect. A constraint always holds from the
first token on, as with `grammar_from_first_token`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.server.faces.naming import SAMPLING
from jpaged.structured import StructuredOutputs
from jpaged.types import Prompt, SamplingParams

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
    *("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "stop", "stop_token_ids"),
    *("skip_special_tokens", "ignore_eos", "include_stop_str_in_output", "top_k"),
)
"""Fields copied unchanged."""
_OPTIONAL = ("logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens", "temperature")
_ONE_AT_ZERO = ("top_p", "repetition_penalty", "n")


def name_of(field: str) -> str:
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


def size_of(request: vllm_engine_pb2.GenerateRequest) -> int:
    """Return the number of characters or token ids of the prompt."""
    return len(request.text) + len(request.tokenized.input_ids)


def read(request: vllm_engine_pb2.GenerateRequest) -> tuple[Prompt, SamplingParams]:
    """Return prompt and parameters; raise InvalidArgument for invalid fields."""
    given, prompt = request.sampling_params, _prompt_of(request)
    if given.HasField("max_tokens"):
        return prompt, sampling_of(given, given.max_tokens)
    return dataclasses.replace(prompt, fills_length=True), sampling_of(given, max(1, given.min_tokens))


def sampling_of(given: vllm_engine_pb2.SamplingParams, max_tokens: int) -> SamplingParams:
    """Return the parameters, with the defaults of zero and unset fields; raise InvalidArgument if out of range."""
    values: dict[str, Any] = {name: getattr(given, name) for name in _SAME}
    values |= {name: getattr(given, name) for name in _OPTIONAL if given.HasField(name)}
    values |= {name: getattr(given, name) or 1 for name in _ONE_AT_ZERO}
    values["logit_bias"] = given.logit_bias or None
    values["structured_outputs"] = _constraint_of(given)
    return SamplingParams(**values, max_tokens=max_tokens, detokenize=bool(given.stop))


def _prompt_of(request: vllm_engine_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "tokenized":
            return Prompt(token_ids=request.tokenized.input_ids)
        case "text":
            return Prompt(text=request.text)
        case _:
            raise InvalidArgument("input", "is missing: set tokenized or text")


def _constraint_of(given: vllm_engine_pb2.SamplingParams) -> StructuredOutputs | None:
    field = given.WhichOneof("constraint")
    if field is None or (field == "json_object" and not given.json_object):
        return None
    value = given.choice.choices if field == "choice" else getattr(given, field)
    arguments: Mapping[str, Any] = {_CONSTRAINTS[field]: value}
    return StructuredOutputs(**arguments)
