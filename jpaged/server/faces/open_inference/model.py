"""Model metadata: input and output tensors, and the form of responses."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged._proto.open_inference import inference_pb2
from jpaged.errors import NotFound

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


def metadata_of(name: str) -> inference_pb2.ModelMetadataResponse:
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


def config_of(name: str) -> inference_pb2.ModelConfigResponse:
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
