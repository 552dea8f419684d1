"""One real executor for many engines: compiled once, and each engine sees as much of its pools as it is told."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoints.weights import load_params
from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import MeshPlacement, serving_meshes
from jpaged.engine.data_parallel import DataParallelEngine
from jpaged.engine.engine import Engine
from jpaged.engine.executor import (
    I32,
    BlockMoves,
    DecodeInterrupt,
    DeviceRates,
    Geometry,
    MaskChannel,
    Progress,
    SamplingInputs,
    Sleeper,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.aux_io import AuxInputs
from jpaged.engine.executor.io import CascadeCosts, RopeLengthLimits
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.server_load import EngineLoad
from jpaged.service.input_processor import InputProcessor
from jpaged.types import Adapter, OutputEvent, Prompt, SamplingParams
from tests.models.tiny import TinyCase, tiny_case, write_checkpoint
from tests.on_demand import programs_on_demand

VOCAB_SIZE = 131
BLOCK_SIZE = 8
MAX_TOKENS = 32
"""Tokens of a step at most."""
CHECKPOINT = TinyCase(
    "sharing", {**tiny_case("llama_mha").config, "num_hidden_layers": 2, "max_position_embeddings": 1280}, 24
)
"""Small, and with room for a prompt of 1 000 tokens."""
ANY_SHARING = CascadeCosts(
    granule_tokens=BLOCK_SIZE, tile_queries=64, tile_tokens=1.0, query_share=0.0, query_tokens=0.0, step_tokens=0.0
)
"""Two rows that have a block in common read it together: far more often than would be quicker."""


def make_executor(case: TinyCase, folder: Path, **options: Any) -> JaxExecutor:
    """An executor of a tiny checkpoint in float32 with few shapes, warmed up; in the quick suite on demand."""
    (executor,) = make_executors(case, folder, **options)
    return executor


def make_executors(case: TinyCase, folder: Path, **options: Any) -> list[JaxExecutor]:
    """One for each replica."""
    with programs_on_demand():
        executors = cold_executors(case, folder, **options)
        for executor in executors:
            executor.warm_up(lambda what, done, total: None)
    return executors


def cold_executors(case: TinyCase, folder: Path, **options: Any) -> list[JaxExecutor]:
    """With parameters and pools, and no program yet."""
    model = Model(from_hf(case.config), np.dtype(np.float32))
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": MAX_TOKENS, "block_size": BLOCK_SIZE, "num_blocks": 200}
    config = EngineConfig.load({**defaults, "swap_space": 0.005, "wait_for_all_programs": True, **options})
    parallel = config.parallel
    sizes = parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.context_parallel_size
    meshes = serving_meshes(*sizes, parallel.pipeline_parallel_size)
    where, *_ = places = [MeshPlacement.of(model, mesh, "loop") for mesh in meshes]
    folder = write_checkpoint(case, folder)
    params = load_params(model, folder, where.layer_mode, num_parts=where.num_parts, shardings=where.shardings)
    return [JaxExecutor.create(model, place.put(params), config, mesh=place.mesh) for place in places]


class Share:
    """Implements `Executor` on the first blocks of another one, which it does not own."""

    def __init__(
        self, executor: JaxExecutor, num_blocks: int, num_host_blocks: int, cascade: CascadeCosts | None
    ) -> None:
        self._executor = executor
        self.geometry: Geometry = dataclasses.replace(
            executor.geometry, num_blocks=num_blocks, num_host_blocks=num_host_blocks, cascade=cascade
        )
        self.rates: DeviceRates = executor.rates
        self.host_blocks = executor.host_blocks
        self.sleeper: Sleeper | None = None  # the blocks are another executor's
        self.routed_experts: None = None

    @property
    def expert_stats(self) -> None:
        return None

    @property
    def num_compiles_after_warm_up(self) -> int:
        return self._executor.num_compiles_after_warm_up

    def warm_up(self, progress: Progress) -> None:
        """The executor is warm."""

    def move_blocks(self, moves: BlockMoves) -> None:
        self._executor.move_blocks(moves)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._executor.load_adapter(slot, adapter)

    def forward(self, inputs: StepInputs) -> Any:
        return self._executor.forward(inputs)

    def sample(self, hidden: Any, inputs: SamplingInputs) -> Any:
        return self._executor.sample(hidden, inputs)

    def compute_aux(self, hidden: Any, inputs: AuxInputs) -> Any:
        return self._executor.compute_aux(hidden, inputs)

    def decode(self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int) -> Any:
        return self._executor.decode(inputs, sampling, ending_token_ids_rx, num_steps)

    def decode_interruptibly(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[Any, DecodeInterrupt]:
        return self._executor.decode_interruptibly(inputs, sampling, ending_token_ids_rx, num_steps)

    def decode_with_masks(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[Any, MaskChannel]:
        return self._executor.decode_with_masks(inputs, sampling, ending_token_ids_rx, num_steps)

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> Any:
        return self._executor.speculate(inputs, sampling, ending_token_ids_rx, num_left_r, num_rounds, unseen)

    def is_done(self, handle: Any) -> bool:
        return self._executor.is_done(handle)

    def collect(self, handle: Any) -> StepOutputs:
        return self._executor.collect(handle)

    def shutdown(self) -> None:
        """The executor goes on for others."""


@dataclass
class Answer:
    """Everything that came of a request: of each sequence its tokens and, where told, cumulative log-probability."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    cumulative_logprobs: dict[int, float] = field(default_factory=dict)
    num_cached_tokens: int = 0
    is_done: bool = False

    def add(self, event: OutputEvent) -> None:
        if event.error is not None:
            raise event.error
        assert not self.is_done
        self.token_ids.setdefault(event.index, []).extend(event.token_ids)
        if event.cumulative_logprob is not None:
            self.cumulative_logprobs[event.index] = event.cumulative_logprob
        self.num_cached_tokens = event.usage.cached_tokens
        self.is_done = event.is_last

    @property
    def sequences(self) -> list[list[int]]:
        return [self.token_ids[index] for index in range(len(self.token_ids))]


class Rig:
    """An engine over a share of the executor, stepped by hand; its blocks are counted after every step.

    With several executors there is one over a share of each, as replicas.
    """

    def __init__(
        self,
        executor: JaxExecutor | Sequence[JaxExecutor],
        *,
        num_blocks: int = 200,
        num_host_blocks: int = 0,
        max_cached_tokens: int | None = None,
        outgrown_len: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        cascade: CascadeCosts | None = ANY_SHARING,
        **options: Any,
    ) -> None:
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": MAX_TOKENS, "enable_prefix_caching": False, **options}
        executors = [executor] if isinstance(executor, JaxExecutor) else executor
        tokenizer = NoTokenizer(VOCAB_SIZE)
        engines = [
            Engine(
                Share(one, num_blocks, num_host_blocks, cascade),
                tokenizer,
                EngineConfig().replace(**settings),
                lengths=RopeLengthLimits(max_cached_tokens, outgrown_len),
                eos_token_ids=eos_token_ids,
            )
            for one in executors
        ]
        self.engine = engines[0] if isinstance(executor, JaxExecutor) else DataParallelEngine(engines)
        self._input_processor = InputProcessor(tokenizer, self.engine.geometry, eos_token_ids=eos_token_ids)
        self._ids = itertools.count()

    def submit(self, prompt: list[int], params: SamplingParams) -> Answer:
        answer = Answer()
        request = self._input_processor.make_request(
            request_id=str(next(self._ids)), sampling=params, prompt=Prompt(token_ids=prompt)
        )
        self.engine.submit(request, answer.add)
        return answer

    def run(self) -> EngineLoad:
        while self.engine.step():
            self.engine.check()
        load = self.engine.load()
        assert load.num_blocks_used == 0
        assert load.num_compiles_after_warm_up == 0
        return load

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        answer = self.submit(prompt, params)
        self.run()
        assert answer.is_done
        return answer
