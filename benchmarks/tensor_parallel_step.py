"""What the host spends on a decoding step of 256 rows when the model is split over devices: virtual ones, of a CPU.

    step       Engine.step: schedule, pack, dispatch, collect, publish
    dispatch   of it: the packed inputs go to every device, and two programs are started on all of them
    collect    of it: the outputs of the step before, which are whole on every device, are read from one

CPU time of the engine's thread, which neither computes nor counts the wait for a device: what grows with the number of
devices is handing a call to each. The model is tiny, so that the devices, which share the machine's cores, are done
when the host is. Medians over steps; the runs of the sizes take turns, and of each the quickest counts.

    python -m benchmarks.tensor_parallel_step [--rows 256] [--devices 1 2 4 8]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from benchmarks.host_step import NUM_STEPS
from benchmarks.record import machine, save
from jpaged.checkpoints.weights import random_params
from jpaged.config import EngineConfig
from jpaged.device.compilation.compile import set_up_compile_cache
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import MeshPlacement, serving_mesh
from jpaged.engine.engine import Engine
from jpaged.engine.executor import SamplingInputs, StepInputs, StepOutputs
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.models.decoder import DecoderConfig
from jpaged.models.model import Model
from jpaged.models.rope_config import RopeConfig
from jpaged.types import OutputEvent, Request, SamplingParams

NUM_RUNS = 5
PROMPT_LEN = 4
CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    max_position_embeddings=256,
    norm_eps=1e-5,
    ropes=(RopeConfig(theta=10000.0),),
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of the engine's thread in one step; the median over steps."""

    num_devices: int
    num_rows: int
    step_ms: float
    dispatch_ms: float
    collect_ms: float


class Stopwatch:
    """A JaxExecutor whose verbs of a step are timed. What it does not name is the executor's own."""

    def __init__(self, executor: JaxExecutor) -> None:
        self._executor = executor
        self.geometry, self.rates = executor.geometry, executor.rates
        self.load_adapter, self.decode, self.compute_aux = executor.load_adapter, executor.decode, executor.compute_aux
        self.move_blocks, self.shutdown, self.warm_up = executor.move_blocks, executor.shutdown, executor.warm_up
        self.dispatch_s: list[float] = []
        self.collect_s: list[float] = []

    @property
    def num_compiles_after_warm_up(self) -> int:
        return self._executor.num_compiles_after_warm_up

    def forward(self, inputs: StepInputs) -> jax.Array:
        begin = time.thread_time()
        hidden = self._executor.forward(inputs)
        self.dispatch_s.append(time.thread_time() - begin)
        return hidden

    def sample(self, hidden: jax.Array, inputs: SamplingInputs) -> jax.Array:
        begin = time.thread_time()
        handle = self._executor.sample(hidden, inputs)
        self.dispatch_s[-1] += time.thread_time() - begin
        return handle

    def is_done(self, handle: jax.Array) -> bool:
        return self._executor.is_done(handle)

    def collect(self, handle: jax.Array) -> StepOutputs:
        begin = time.thread_time()
        outputs = self._executor.collect(handle)
        self.collect_s.append(time.thread_time() - begin)
        return outputs


def make_executor(num_devices: int, num_rows: int, cache: Path) -> JaxExecutor:
    """The tiny model on so many devices, warm."""
    options = EngineConfig.load(
        {
            "max_num_seqs": num_rows,
            "max_num_batched_tokens": num_rows * PROMPT_LEN,
            "tensor_parallel_size": num_devices,
            "num_blocks": 16 * num_rows,
            "swap_space": 0.0,
            "wait_for_all_programs": True,
        }
    )
    model = Model(CONFIG, jax.numpy.dtype("float32"))
    where = MeshPlacement.of(model, serving_mesh(num_devices))
    params = random_params(where.model, where.layer_mode, seed=0, shardings=where.shardings)
    set_up_compile_cache(cache)
    executor = JaxExecutor.create(model, params, options, mesh=where.mesh)
    executor.warm_up(lambda what, done, total: None)
    return executor


def measure(executor: JaxExecutor, num_devices: int, num_rows: int) -> StepCost:
    """One run: all rows are admitted, then decode; the first two steps are left out."""
    watch = Stopwatch(executor)
    options = EngineConfig().replace(max_num_seqs=num_rows, max_num_batched_tokens=num_rows * PROMPT_LEN)
    engine = Engine(watch, NoTokenizer(CONFIG.vocab_size), options)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + 4, ignore_eos=True)
    for i in range(num_rows):
        prompt = tuple((i + j) % CONFIG.vocab_size for j in range(PROMPT_LEN))
        engine.submit(Request(f"r{i}", prompt, sampling), _ignore)
    steps: list[float] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM_STEPS):
            begin = time.thread_time()
            engine.step()
            steps.append(time.thread_time() - begin)
    finally:
        gc.enable()
    while engine.step():
        pass
    median_ms = [1e3 * statistics.median(times[2:NUM_STEPS]) for times in (steps, watch.dispatch_s, watch.collect_s)]
    return StepCost(num_devices, num_rows, *median_ms)


def _ignore(event: OutputEvent) -> None:
    """Nobody listens."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensor_parallel_step",
        description="What the host spends on a decoding step when the model is split over virtual devices.",
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as folder:
        executors = {n: make_executor(n, options.rows, Path(folder)) for n in options.devices}
        runs = [{n: measure(executor, n, options.rows) for n, executor in executors.items()} for _ in range(NUM_RUNS)]
    best = [min((run[n] for run in runs), key=lambda cost: cost.step_ms) for n in options.devices]
    print(f"{'devices':>7} {'rows':>5} {'step ms':>8} {'dispatch ms':>12} {'collect ms':>11} {'step / one device':>18}")
    for cost in best:
        ratio = cost.step_ms / best[0].step_ms
        print(
            f"{cost.num_devices:>7} {cost.num_rows:>5} {cost.step_ms:>8.3f} {cost.dispatch_ms:>12.3f} "
            f"{cost.collect_ms:>11.3f} {ratio:>18.2f}"
        )
    command = "python -m benchmarks.tensor_parallel_step"
    path = save("tensor_parallel_step", command, {"costs": [asdict(cost) for cost in best]})
    print(f"written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
