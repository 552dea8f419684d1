"""Requests at random: whatever is in them, the answer is a status that means something, and the server goes on."""

import contextlib
import random
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio
from smg_grpc_proto.generated import vllm_engine_pb2

from jpaged._proto.open_inference import inference_pb2
from jpaged.server.compat.open_inference_request import INPUTS, OUTPUTS
from jpaged.testing import FakeExecutor
from jpaged.types import SamplingParams
from tests.server.compat import test_open_inference as open_inference
from tests.server.compat import test_vllm_engine as vllm_engine
from tests.server.harness import collect, eventually, running

NUM = 80
TEXTS = (
    "",
    "hello",
    "true",
    "1",
    "-1",
    "0.5",
    "nan",
    "[",
    "[1, 2]",
    '["a", 3, null]',
    "{}",
    '{"1": 2, "x": []}',
    "never",
)
NAMES = (*SamplingParams.__slots__, "timeout", "priority", "lora_name", "sequence_id", "x")
TYPES = ("BYTES", "BOOL", "INT32", "INT64", "FP32", "")


def parameter(rng: random.Random) -> inference_pb2.InferParameter:
    numbers = (-1, 0, 1, 2, 7, 2**40)
    kinds: list[dict[str, Any]] = [
        {"bool_param": rng.random() < 0.5},
        {"int64_param": rng.choice(numbers)},
        {"string_param": rng.choice(TEXTS)},
        {"double_param": rng.choice((0.0, 0.5, 1.0, float("nan"), -3.0, 1e300))},
        {"uint64_param": 2**63 + 1},
        {},
    ]
    return inference_pb2.InferParameter(**rng.choice(kinds))


def tensor(rng: random.Random, name: str, *, is_raw: bool) -> Any:
    is_right = rng.random() < 0.8 and name in INPUTS
    contents: dict[str, dict[str, Any]] = {
        "BYTES": {"bytes_contents": [rng.choice((*TEXTS, '{"max_tokens": 3}')).encode()]},
        "BOOL": {"bool_contents": [rng.random() < 0.5]},
        "INT64": {"int64_contents": [rng.randint(-1, 260) for _ in range(rng.randint(0, 4))]},
        "INT32": {"int_contents": [3]},
    }
    datatype = INPUTS[name].datatype if is_right else rng.choice(TYPES)
    given = contents.get(datatype, {"fp32_contents": [1.0]})
    length = len(next(iter(given.values()))) if is_right else rng.randint(-1, 3)
    return inference_pb2.ModelInferRequest.InferInputTensor(
        name=name,
        datatype=datatype,
        shape=[length],
        contents=None if is_raw else inference_pb2.InferTensorContents(**given),
    )


def infer_request(rng: random.Random) -> inference_pb2.ModelInferRequest:
    names = ["text_input", *rng.sample([*INPUTS, "x"], rng.randint(0, 3))]
    is_raw = rng.random() < 0.2
    return inference_pb2.ModelInferRequest(
        model_name="fake",
        inputs=[tensor(rng, name, is_raw=is_raw) for name in dict.fromkeys(names)],
        outputs=[
            inference_pb2.ModelInferRequest.InferRequestedOutputTensor(name=name)
            for name in rng.sample([*OUTPUTS, "x"], rng.choice((0, 0, 1, 3)))
        ],
        parameters={rng.choice(NAMES): parameter(rng) for _ in range(rng.choice((0, 1, 1, 2)))},
        raw_input_contents=[rng.randbytes(rng.randint(0, 12)) for _ in names] if is_raw else (),
    )


def random_of(rng: random.Random, kind: Any, share: float) -> Message:
    """A message some of whose fields have values at random."""
    message: Message = kind()
    for field in message.DESCRIPTOR.fields:
        if rng.random() > share or field.message_type is not None:
            continue
        values: dict[int, tuple[Any, ...]] = {
            field.TYPE_STRING: TEXTS,
            field.TYPE_BOOL: (True, False),
            field.TYPE_FLOAT: (0.0, 0.5, 1.0, float("nan"), -3.0, float("inf")),
        }
        numbers = (0, 1, 2, 5, 2**31 - 1) if field.type == field.TYPE_UINT32 else (-1, 0, 1, 3, -(2**31))
        value = rng.choice(values.get(field.type, numbers))
        if field.is_repeated:
            getattr(message, field.name).extend([value] * rng.randint(0, 3))
        else:
            setattr(message, field.name, value)
    return message


def generate_request(rng: random.Random) -> Any:
    request: Any = random_of(rng, vllm_engine_pb2.GenerateRequest, 0.15)
    request.sampling_params.CopyFrom(random_of(rng, vllm_engine_pb2.SamplingParams, 0.1))
    if rng.random() < 0.8:
        request.tokenized.input_ids.extend([rng.randint(0, 256) for _ in range(rng.randint(0, 5))])
    return request


async def test_every_request_is_answered_or_refused_by_name():
    async with running(executor=FakeExecutor(max_model_len=32)) as harness:
        await ask_at_random(harness)


async def ask_at_random(harness):
    rng, codes = random.Random(11), dict[grpc.StatusCode, int]()
    triton, vllm = open_inference.stub_of(harness), vllm_engine.stub_of(harness)
    for number in range(NUM):
        calls = [
            triton.ModelInfer(infer_request(rng)),
            triton.ModelStreamInfer(iter([infer_request(rng)]), metadata=(("triton_grpc_error", "true"),)),
            vllm.Generate(generate_request(rng)),
        ]
        for call in calls:
            with contextlib.suppress(aio.AioRpcError):
                await (call if isinstance(call, aio.UnaryUnaryCall) else collect(call))
            code = await call.code()
            assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (number, await call.details())
            codes[code] = codes.get(code, 0) + 1
    assert codes[grpc.StatusCode.OK] > NUM / 5
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > NUM / 5
    await eventually(lambda: harness.num_blocks_used == 0)
