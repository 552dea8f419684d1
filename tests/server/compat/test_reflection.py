"""A client that knows nothing of the services learns them from the port, as grpcurl does, and calls one."""

import asyncio
from typing import Any

import grpc
import tritonclient.grpc  # noqa: F401 - its messages have the same names in the pool that all share
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.server.harness import running


def call(channel: grpc.Channel, method: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """All answers to a request, of a method that reflection has told of."""
    message = json_format.ParseDict(request, GetMessageClass(method.input_type)())
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    kind = kinds[method.client_streaming, method.server_streaming]
    path = f"/{method.containing_service.full_name}/{method.name}"
    answer_type = GetMessageClass(method.output_type)
    made = kind(path, request_serializer=_serialized, response_deserializer=answer_type.FromString)
    answered = made(iter([message]) if method.client_streaming else message, timeout=60)
    answers = answered if method.server_streaming else [answered]
    return [json_format.MessageToDict(answer, preserving_proto_field_name=True) for answer in answers]


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def learned(target: str) -> dict[str, list[dict[str, Any]]]:
    """What methods of each service answer."""
    with grpc.insecure_channel(target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        services = {name: pool.FindServiceByName(name) for name in database.get_services()}
        assert all(service.methods for service in services.values())
        assert services["inference.GRPCInferenceService"].file.name == "jpaged/open_inference/inference.proto"
        ours = services["jpaged.v1.InferenceService"].methods_by_name["Generate"]
        triton = services["inference.GRPCInferenceService"].methods_by_name
        vllm = services["vllm.grpc.engine.VllmEngine"].methods_by_name
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": ["aGVsbG8="]}}
        infer = {"model_name": "fake", "inputs": [tensor], "parameters": {"max_tokens": {"int64_param": 3}}}
        greedy = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
        return {
            "Generate": call(channel, ours, {"text": "hello", "sampling": greedy}),
            "ModelInfer": call(channel, triton["ModelInfer"], infer),
            "ModelStreamInfer": call(channel, triton["ModelStreamInfer"], infer),
            "ModelConfig": call(channel, triton["ModelConfig"], {"name": "fake"}),
            "GetModelInfo": call(channel, vllm["GetModelInfo"], {}),
            "VllmEngine": call(channel, vllm["Generate"], {"text": "hello", "sampling_params": greedy}),
        }


async def test_every_service_can_be_learned_from_the_port_and_called():
    async with running() as harness:
        answers = await asyncio.to_thread(learned, harness.target)
    assert answers["Generate"][-1]["is_last"]
    assert answers["ModelInfer"][0]["outputs"][0]["name"] == "text_output"
    assert answers["ModelStreamInfer"][-1]["infer_response"]["parameters"]["triton_final_response"] == {
        "bool_param": True
    }
    assert answers["ModelConfig"][0]["config"]["backend"] == "jpaged"
    assert answers["GetModelInfo"][0]["served_model_name"] == "fake"
    assert answers["VllmEngine"][-1]["complete"]["output_ids"] == [75, 11, 88]
