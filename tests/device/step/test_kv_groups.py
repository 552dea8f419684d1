"""A model of windows and global layers, served in few blocks, samples what it does where every block is kept."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.engine.engine import Engine
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.decoder import DecoderConfig
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from jpaged.testing import ByteTokenizer
from jpaged.types import OutputEvent, Request, SamplingParams
from tests.device import tiny_model
from tests.models import dense
from tests.on_demand import programs_on_demand

pytestmark = pytest.mark.usefixtures("quick_programs")

NUM_LAYERS, WINDOW = 6, 11
OPTIONS = tiny_model.OPTIONS.replace(num_blocks=54, block_size=4, swap_space=40 * 2048 / 2**30)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig(DecoderConfig):
    """Two windows to one global layer."""

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        full = AttentionKind(self.head_dim**-0.5)
        narrow = dataclasses.replace(full, sliding_window=WINDOW)
        return tuple(LayerKind(full if index % 3 == 2 else narrow) for index in range(self.num_layers))


FIELDS = {field.name: getattr(tiny_model.CONFIG, field.name) for field in dataclasses.fields(tiny_model.CONFIG)}
MODEL = Model(MixedConfig(**FIELDS | {"num_layers": NUM_LAYERS}), jnp.dtype("float32"))


@functools.cache
def executor_of(layer_mode: LayerMode = "loop", backend: str = "auto", kv_cache_dtype: str = "auto") -> JaxExecutor:
    options = OPTIONS.replace(attention_backend=backend, kv_cache_dtype=kv_cache_dtype)
    with programs_on_demand():
        executor = JaxExecutor.create(MODEL, tiny_model.params(layer_mode, of=MODEL), options)
        executor.warm_up(tiny_model.quiet)
    return executor


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny_model.CONFIG.vocab_size, length).tolist()


class Server:
    """An engine over an executor that others use too, one after the other."""

    def __init__(self, executor: JaxExecutor, **options: Any) -> None:
        config = EngineConfig().replace(**options)
        self.engine = Engine(executor, ByteTokenizer(), config, eos_token_ids=frozenset(), clock=lambda: 0.0)
        self.events: dict[str, list[OutputEvent]] = defaultdict(list)

    def submit(self, name: str, prompt: list[int], **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | sampling)
        request = Request(name, tuple(prompt), params)
        self.engine.submit(request, self.events[name].append)

    def run(self) -> None:
        while self.engine.step():
            self.engine.check()

    def tokens(self, name: str, index: int = 0) -> list[int]:
        assert self.events[name][-1].error is None
        return [token for event in self.events[name] if event.index == index for token in event.token_ids]


@functools.cache
def alone(length: int, seed: int = 0) -> list[int]:
    """What a dense pass says, which knows no blocks, up to 64 tokens: all of one shape."""
    return dense.greedy(MODEL, tiny_model.params(of=MODEL), prompt_of(length, seed), 64 - length)


LENGTHS = (3, 40, 21, 33)


@pytest.mark.parametrize(
    ("layer_mode", "backend"),
    [
        ("loop", "auto"),
        pytest.param("scan", "xla", marks=pytest.mark.deep),
    ],
)
@pytest.mark.long
def test_tokens_are_those_of_a_model_whose_blocks_are_all_kept(layer_mode: LayerMode, backend: str) -> None:
    executor = executor_of(layer_mode, backend)
    assert executor.geometry.windows == (None, WINDOW, WINDOW)
    server = Server(executor, num_scheduler_steps=4)
    for i, length in enumerate(LENGTHS):  # prompts of several chunks, beside others, and more than there is room for
        server.submit(f"r{i}", prompt_of(length, i), max_tokens=20)
    server.run()
    load = server.engine.load()
    for i, length in enumerate(LENGTHS):
        assert server.tokens(f"r{i}") == alone(length, i)[:20]
    assert load.num_preemptions > 0
    assert executor.num_compiles_after_warm_up == 0


@pytest.mark.long
def test_a_prefix_is_found_whose_windows_have_moved_on() -> None:
    server = Server(executor_of())
    server.submit("first", prompt_of(40, 1), max_tokens=9)
    server.run()
    server.submit("again", [*prompt_of(40, 1), *alone(40, 1)[:4]], max_tokens=8)
    server.run()
    assert server.tokens("again") == alone(40, 1)[4:12]
    usage = server.events["again"][-1].usage
    assert usage is not None
    assert usage.cached_tokens == 43


@pytest.mark.parametrize(
    "shape", [{"beam_width": 3, "n": 3}, {"n": 3, "temperature": 1.0, "seed": 7}], ids=["beams", "samples"]
)
@pytest.mark.long
def test_forks_are_those_of_a_memory_that_keeps_everything(shape: dict[str, Any]) -> None:
    told = []
    for options in ({}, {"kv_policy": "reserve-oracle"}, {"overlap": False, "num_scheduler_steps": 1}):
        server = Server(executor_of(), **options)
        server.submit("a", prompt_of(13), max_tokens=6, **shape)
        server.run()
        told.append([server.tokens("a", index) for index in range(3)])
    assert told[0] == told[1] == told[2]
    assert len({tuple(tokens) for tokens in told[0]}) > 1


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.long
def test_who_had_to_leave_goes_on_as_if_nothing_had_happened(preemption_mode: str) -> None:
    server = Server(executor_of(), preemption_mode=preemption_mode, num_scheduler_steps=1)
    for i in range(4):
        server.submit(f"r{i}", prompt_of(20, i), max_tokens=30)
    server.run()
    load = server.engine.load()
    assert load.num_preemptions > 0
    assert (load.num_recomputed_tokens > 0) == (preemption_mode == "recompute")
    for i in range(4):
        assert server.tokens(f"r{i}") == alone(20, i)[:30]


@pytest.mark.long
def test_scales_of_8_bits_are_each_layer_s_own() -> None:
    """A group's layers have their scales where attention looks for them, in whatever order they are grouped."""
    told = []
    for layer_mode, backend in (("loop", "auto"), ("scan", "xla")):
        server = Server(executor_of(layer_mode, backend, "int8"))
        server.submit("a", prompt_of(40), max_tokens=12)
        server.run()
        told.append(server.tokens("a"))
    assert told[0] == told[1]
