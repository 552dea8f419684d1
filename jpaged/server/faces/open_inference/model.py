"""What is told of the model: the tensors that it takes and gives, and how its responses come."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged._proto.open_inference import inference_pb2
from jpaged.errors import NotFound

VERSION = "1"
"""The one version of a model that there is."""
BACKEND = "jpaged"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of requests or of responses.

    Attributes:
        datatype: the protocol's name of its elements' type.
        length: how many elements it has; -1 is any number.
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
"""A request has one of the first two; `input_ids` may be INT32, too."""
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
"""An element for each sequence, but for token_ids, which are those of all sequences in turn."""
_CONFIG_TYPES = {
    "BOOL": inference_pb2.TYPE_BOOL,
    "UINT32": inference_pb2.TYPE_UINT32,
    "INT32": inference_pb2.TYPE_INT32,
    "INT64": inference_pb2.TYPE_INT64,
    "FP32": inference_pb2.TYPE_FP32,
    "BYTES": inference_pb2.TYPE_STRING,
}


def require_version(version: str) -> None:
    """Refuse a version that is not there; an empty one is any.

    Raises:
        NotFound: there is only one.
    """
    if version not in ("", VERSION):
        raise NotFound(f"model_version: {version!r} is not served here; {VERSION!r} is")


def metadata_of(name: str) -> inference_pb2.ModelMetadataResponse:
    """The tensors of the model of a name."""

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
    """The same, as Triton configures a model. No batches: requests run side by side whoever sends them."""
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
