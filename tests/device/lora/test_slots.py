"""Adapter slots of an executor: rows of several adapters and none in one step, and slots that are filled meanwhile."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.checkpoints.adapters import AdapterReader
from jpaged.checkpoints.weights import load_params
from jpaged.config import EngineConfig
from jpaged.device.compilation.compile import LOAD_ADAPTER
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import MeshPlacement, serving_mesh
from jpaged.engine.executor import BANNED_WIDTH, Detail
from jpaged.errors import InternalError
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from tests.device import tiny_model
from tests.device.driver import Driver, Row, Sequence
from tests.models import dense
from tests.models.adapters import TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint
from tests.on_demand import programs_on_demand

CASE = tiny_case("llama_gqa_bias")
MODEL = Model(from_hf(CASE.config), np.dtype(np.float32))
ADAPTERS = (
    TinyAdapter(CASE, "first"),
    TinyAdapter(CASE, "second", 5, 2.0, "q_proj|down_proj"),
    TinyAdapter(CASE, "third", 2),
)
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 40,
    "block_size": 8,
    "max_model_len": 64,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 5,
    "wait_for_all_programs": True,
}
NUM_TOKENS = 6


class Served:
    """An executor, a driver of it, and its adapters in files."""

    def __init__(self, folder: Path, adapters: tuple[TinyAdapter, ...] = ADAPTERS, **options: Any) -> None:
        chosen = EngineConfig.load({**OPTIONS, **options})
        parallel = chosen.parallel
        where = MeshPlacement.of(MODEL, serving_mesh(parallel.tensor_parallel_size, 1, parallel.pipeline_parallel_size))
        params = load_params(
            MODEL,
            write_checkpoint(CASE, folder / "base"),
            where.layer_mode,
            num_parts=where.num_parts,
            shardings=where.shardings,
        )
        with programs_on_demand():
            self.executor = JaxExecutor.create(MODEL, params, chosen, mesh=where.mesh)
            self.executor.warm_up(tiny_model.quiet)
        read = AdapterReader(
            MODEL,
            where.layer_mode,
            where.num_parts,
            5,
            has_vectors=chosen.lora.enable_dora,
            has_output=chosen.lora.enable_lm_head_lora,
            has_input=chosen.lora.enable_embedding_lora,
            checkpoint=folder / "base",
        )
        self.adapters = [read(adapter.write(folder / adapter.name)) for adapter in adapters]
        self.driver = Driver(self.executor)

    def sequence(self, slot: int) -> Sequence:
        sequence = self.driver.sequence(CASE.prompt()[:6])
        sequence.adapter = slot
        return sequence

    def step(self, sequences: list[Sequence]) -> None:
        rows = [Row(each, len(each.tokens) - each.num_computed) for each in sequences]
        outputs = self.driver.run(rows, detail=Detail.TOKENS)
        for each, token_id in zip(sequences, outputs.token_ids_rn[:, 0], strict=False):
            each.tokens.append(int(token_id))


@functools.cache
def merged_tokens(folder: Path, index: int | None) -> list[int]:
    """What the checkpoint with an adapter merged into it says, and without one its own."""
    written = write_checkpoint(CASE, folder) if index is None else ADAPTERS[index].write_merged(folder / str(index))
    return dense.greedy(MODEL, load_params(MODEL, written, "loop"), CASE.prompt()[:6], NUM_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served(folder / "served")


def check_mixed(served: Served, folder: Path) -> None:
    served.executor.load_adapter(1, served.adapters[0])
    served.executor.load_adapter(2, served.adapters[1])
    sequences = [served.sequence(slot) for slot in (2, 0, 1, 2)]
    for _ in range(NUM_TOKENS):
        served.step(sequences)
    for sequence, index in zip(sequences, (1, None, 0, 1), strict=True):
        assert sequence.tokens[6:] == merged_tokens(folder, index)
        served.driver.release(sequence)


@pytest.mark.long
def test_rows_of_several_adapters_and_none_run_in_one_step(served: Served, folder: Path) -> None:
    check_mixed(served, folder)
    assert len({tuple(merged_tokens(folder, index)) for index in (None, 0, 1, 2)}) == 4, "they differ"


def test_a_slot_is_filled_while_rows_of_others_run_and_nothing_compiles(served: Served, folder: Path) -> None:
    served.executor.load_adapter(1, served.adapters[0])
    served.executor.load_adapter(2, served.adapters[1])
    first, second = served.sequence(1), served.sequence(2)
    served.step([first, second])
    served.driver.release(second)
    before = served.driver.start([Row(first, 1)], detail=Detail.TOKENS)
    served.executor.load_adapter(2, served.adapters[2])  # behind a step that is not collected
    first.num_computed += 1
    first.tokens.append(int(served.executor.collect(before).token_ids_rn[0, 0]))
    third = served.sequence(2)
    served.step([first, third])
    for _ in range(NUM_TOKENS - 3):
        served.step([third, first])
    served.step([third])
    served.step([third])
    assert first.tokens[6:] == merged_tokens(folder, 0)
    assert third.tokens[6:] == merged_tokens(folder, 2)
    assert served.executor.num_compiles_after_warm_up == 0
    for each in (first, third):
        served.driver.release(each)


def test_several_decode_steps_in_one_dispatch_keep_each_rows_adapter(served: Served, folder: Path) -> None:
    served.executor.load_adapter(2, served.adapters[2])
    sequences, driver = [served.sequence(slot) for slot in (2, 0)], served.driver
    served.step(sequences)
    rows = [Row(each, 1) for each in sequences]
    ends = np.full((driver.geometry.buckets.num_rows(2), BANNED_WIDTH), -1, np.int32)
    handle = served.executor.decode(driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS), ends, 5)
    outputs = served.executor.collect(handle)
    for row, index in ((0, 2), (1, None)):
        got = [sequences[row].tokens[6], *outputs.token_ids_rn[row, :5].tolist()]
        assert got == merged_tokens(folder, index)
        driver.release(sequences[row])


def test_there_are_as_many_programs_however_many_adapters(served: Served) -> None:
    specs = [spec for spec in served.executor._programs.specs if spec.kind in ("load_adapter", "forward")]
    assert sum(spec == LOAD_ADAPTER for spec in specs) == 1
    assert sum(spec.kind == "forward" for spec in specs) == len(served.executor.geometry.buckets.tokens)


def test_a_slot_that_is_not_there_is_refused(served: Served) -> None:
    for slot in (0, 3):
        with pytest.raises(InternalError, match=f"adapter slot {slot} does not exist: there are 2 slots"):
            served.executor.load_adapter(slot, served.adapters[0])


@pytest.mark.parametrize("options", [{"linear_backend": "xla"}, {"tensor_parallel_size": 2}], ids=["xla", "tp2"])
@pytest.mark.long
def test_xla_and_several_devices_give_the_same_tokens(folder: Path, options: dict[str, Any]) -> None:
    served = Served(folder / str(options), **options)
    check_mixed(served, folder)
    served.executor.shutdown()


FORMS = (
    TinyAdapter(CASE, "dora and lm_head", settings={"use_dora": True}, has_output=True),
    TinyAdapter(CASE, "biases", 5, 2.0, "q_proj|down_proj", {"bias": "all", "lora_bias": True}),
    TinyAdapter(CASE, "embeddings", 3, 6.0, "q_proj|lm_head|embed_tokens", has_output=True, has_input=True),
    TinyAdapter(CASE, "rows", 2, 6.0, "q_proj", tokens=(CASE.prompt()[1], CASE.prompt()[4], 5)),
)


@pytest.mark.parametrize(
    "options",
    [{}, {"linear_backend": "xla"}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}],
    ids=["packed", "xla", "tp2", "pp3"],
)
@pytest.mark.long
def test_other_forms_run_next_to_each_other_and_the_base(tmp_path: Path, options: dict[str, Any]) -> None:
    room = {"enable_dora": True, "enable_lm_head_lora": True, "enable_embedding_lora": True, "max_loras": 4}
    served = Served(tmp_path, FORMS, **room, max_num_seqs=5, **options)
    for slot, adapter in enumerate(served.adapters, 1):
        served.executor.load_adapter(slot, adapter)
    prompt, folders = CASE.prompt()[:6], [tmp_path / "base"]
    folders += [adapter.write_merged(tmp_path / f"{adapter.name}-merged") for adapter in FORMS]
    want = [dense.greedy(MODEL, load_params(MODEL, one, "loop"), prompt, NUM_TOKENS) for one in folders]
    assert len(set(map(tuple, want))) == len(want), "they differ"
    slots, driver = (2, 3, 0, 1, 4), served.driver
    sequences = [served.sequence(slot) for slot in slots]
    for _ in range(2):
        served.step(sequences)
    rows = [Row(each, 1) for each in sequences]
    ends = np.full((driver.geometry.buckets.num_rows(len(rows)), BANNED_WIDTH), -1, np.int32)
    inputs, sampling = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    outputs = served.executor.collect(served.executor.decode(inputs, sampling, ends, NUM_TOKENS - 2))
    for row, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
        assert [*sequence.tokens[6:], *outputs.token_ids_rn[row, : NUM_TOKENS - 2].tolist()] == want[slot]
        driver.release(sequence)
    served.executor.shutdown()
