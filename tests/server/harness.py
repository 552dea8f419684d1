"""Starts the real server in this process, on a free port, with a real engine over the fake executor."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from numpy.typing import NDArray

from jpaged._proto.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from jpaged.config import EngineConfig
from jpaged.engine.data_parallel import DataParallelEngine
from jpaged.engine.engine import Engine
from jpaged.engine.executor import Progress
from jpaged.errors import InvalidArgument
from jpaged.peers import Prefills
from jpaged.server.lifecycle import Server
from jpaged.service.chat.formats import AnswerFormat
from jpaged.service.chat.output_config import ChatOutputConfig
from jpaged.service.image_inputs import ImageInputs
from jpaged.service.input_processor import InputProcessor
from jpaged.service.loaded_model import Adapters, BackendFacts, LoadedModel, Pooler
from jpaged.testing import ByteTokenizer, FakeAdapter, FakeExecutor, FakeVision, Faults
from jpaged.types import ModelInfo, Pooling

EOS = ByteTokenizer.EOS
MODEL = ModelInfo(
    name="fake",
    architecture="FakeForCausalLM",
    vocab_size=257,
    max_model_len=128,
    dtype="float32",
    num_layers=1,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    eos_token_ids=(EOS,),
    has_chat_template=True,
    max_loras=2,
    max_lora_rank=16,
    tool_call_parser="fake-calls",
    reasoning_parser="fake-thoughts",
)
CHECKPOINT = "0123456789abcdef"
BACKEND = BackendFacts(platform="cpu", device_kind="fake", num_devices=1, attention="none", jax_version="0")


@dataclass
class Harness:
    """A running server and ways to reach it; stubs are Any, as protoc writes them without types."""

    server: Server
    serving: LoadedModel
    executor: FakeExecutor
    port: int
    channel: Any
    run: asyncio.Task[int]

    @property
    def faults(self) -> Faults:
        return self.executor.faults

    @property
    def http_url(self) -> str:
        """Where OpenAI's API is."""
        return f"http://127.0.0.1:{self.server.http_port}"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def control(self) -> Any:
        return control_pb2_grpc.ControlServiceStub(self.channel)

    @property
    def num_blocks_used(self) -> int:
        return self.serving.engine.load().num_blocks_used

    @property
    def num_open_calls(self) -> int:
        """Generate calls that the server has not ended."""
        return len(self.server._service._open)


def read_fake(path: str) -> FakeAdapter:
    """The adapter of a file that holds its weight."""
    try:
        return FakeAdapter(int(Path(path).read_text()))
    except ValueError as error:
        raise InvalidArgument("lora", f"{path} holds no number") from error


@dataclass
class FakePooler:
    """Takes the first numbers of a hidden state, as many as there are labels, and doubles them for an activation."""

    labels: tuple[str, ...] = ()
    width: int | None = None
    pooling: Pooling = "mean"
    normalizes: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    can_shorten: bool = False

    def apply(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values[: self.width]

    def activate(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return 2 * logits


def make_serving(
    executor: FakeExecutor,
    config: EngineConfig,
    tokenizer: ByteTokenizer | None = None,
    answer_format: AnswerFormat | None = None,
    others: Sequence[FakeExecutor] = (),
    pooler: Pooler | None = None,
    vision: FakeVision | None = None,
) -> LoadedModel:
    """An engine with all that the server needs beside it; of several executors, as many replicas."""
    adapters = Adapters(read_fake, config.lora.max_cpu_loras) if executor.max_loras else Adapters()
    tokenizer = tokenizer or ByteTokenizer()
    engines = [Engine(one, tokenizer, config, eos_token_ids=frozenset({EOS})) for one in (executor, *others)]
    engine = DataParallelEngine(engines) if others else engines[0]
    input_processor = InputProcessor(
        tokenizer,
        executor.geometry,
        eos_token_ids=frozenset({EOS}),
        answering=ChatOutputConfig(tokenizer, answer_format, frozenset({EOS})),
    )
    model, images = replace(MODEL, aliases=tuple(config.server.served_model_aliases)), None
    if vision is not None:
        images = ImageInputs.from_options(vision, vision, config.media, executor.geometry)
        input_processor.set_images(images)
        limits = images.limits
        model = replace(model, max_images=limits.max_images, max_image_pixels=limits.max_pixels)
    return LoadedModel(
        engine,
        input_processor,
        tokenizer,
        model,
        BACKEND,
        config,
        adapters,
        checkpoint=CHECKPOINT,
        hidden_size=3,
        pooler=pooler,
        images=images,
    )


@asynccontextmanager
async def running(
    *,
    executor: FakeExecutor | None = None,
    tokenizer: ByteTokenizer | None = None,
    answer_format: AnswerFormat | None = None,
    others: Sequence[FakeExecutor] = (),
    pooler: Pooler | None = None,
    vision: FakeVision | None = None,
    **options: Any,
) -> AsyncIterator[Harness]:
    """A server that takes requests; stopped at the end, whatever happened. `options` are EngineConfig's.

    HTTP is on if its port is given.
    """
    executor = executor or FakeExecutor()
    config = EngineConfig.load({"port": 0, "enable_http": "http_port" in options, **options})

    def load(progress: Progress) -> LoadedModel:
        return make_serving(executor, config, tokenizer, answer_format, others, pooler, vision)

    loaded: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
    prefills = Prefills(config.roles) if config.roles.role == "decode" else None
    server = Server(config, load, on_serving=lambda port, serving: loaded.set_result(serving), prefills=prefills)
    port = await server.start()
    run = asyncio.create_task(server.run())
    channel = aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    try:
        yield Harness(server, await loaded, executor, port, channel, run)
    finally:
        executor.faults.release()
        await channel.close()
        server.request_stop()
        server.request_stop()
        await run


def request(text: str = "hello", *, request_id: str | None = None, **sampling: Any) -> inference_pb2.GenerateRequest:
    """A GenerateRequest; greedy, and past the end of sequence, unless told otherwise."""
    values: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return inference_pb2.GenerateRequest(
        request_id=request_id, text=text, sampling=inference_pb2.SamplingParams(**values)
    )


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for something that another thread brings about; fails after 300 s."""
    until = asyncio.get_running_loop().time() + 300
    while not condition():
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.002)


async def collect(call: Any) -> list[inference_pb2.GenerateResponse]:
    """All messages of a call that must end within 300 s."""
    async with asyncio.timeout(300):
        messages = []
        while (message := await call.read()) is not aio.EOF:
            messages.append(message)
        return messages


async def failure_of(call: Any) -> Any:
    """Awaits a call that must fail, whether it streams or not."""
    try:
        if isinstance(call, aio.UnaryStreamCall):
            await collect(call)
        else:
            await asyncio.wait_for(call, 60)
    except aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def error_details(error: Any) -> dict[str, Any]:
    """google.rpc details by the name of their type."""
    kinds = {
        kind.DESCRIPTOR.full_name: kind
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo)
    }
    found: dict[str, Any] = {}
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for packed in status_pb2.Status.FromString(value).details:
                kind = kinds[packed.TypeName()]
                detail = kind()
                packed.Unpack(detail)
                found[kind.DESCRIPTOR.name] = detail
    return found
