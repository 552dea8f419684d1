"""Programs in a folder: what was compiled once runs elsewhere as it is, or is refused for a reason with a name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.config import EngineConfig, StartupOptions
from jpaged.device.compilation.aot_bundle import MANIFEST, AOTBundle, CompileTarget, save_programs
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.lowering import abstract_serving
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import serving_mesh
from jpaged.engine.executor import Detail
from jpaged.errors import InternalError, InvalidArgument
from jpaged.kernels.paged_attention import cpu
from tests.device import tiny_model
from tests.device.driver import Driver, Row


def save(folder: Path, executor: JaxExecutor, target: CompileTarget) -> None:
    save_programs(folder, target, executor._programs.ready)


def target_of(options: EngineConfig = tiny_model.OPTIONS) -> CompileTarget:
    step, geometry, _ = abstract_serving(tiny_model.model(), options, serving_mesh(1), "loop")
    return CompileTarget.of(step, geometry)


def from_folder(folder: Path, options: EngineConfig = tiny_model.OPTIONS) -> JaxExecutor:
    startup = StartupOptions(wait_for_all_programs=True, compiled=str(folder))
    return JaxExecutor.create(tiny_model.model(), tiny_model.params(), dataclasses.replace(options, startup=startup))


def without_num_blocks(options: EngineConfig) -> EngineConfig:
    return dataclasses.replace(options, cache=dataclasses.replace(options.cache, num_blocks=None))


def some_tokens(executor: JaxExecutor) -> list[int]:
    driver = Driver(executor)
    first, second = driver.sequence([5, 6, 7, 8, 9]), driver.sequence([1, 2], temperature=1.0, seed=3)
    sampled: list[int] = (
        driver.run([Row(first, 5), Row(second, 2)], detail=Detail.TOP_LOGPROBS).token_ids_rn[:2, 0].tolist()
    )
    first.tokens.append(sampled[0])
    return sampled + driver.run([Row(first, 1)]).token_ids_rn[:1, 0].tolist()


@pytest.fixture(scope="module")
def warm() -> JaxExecutor:
    return tiny_model.compiled_executor()


@pytest.fixture(scope="module")
def folder(warm: JaxExecutor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "programs"
    save(folder, warm, target_of())
    return folder


@pytest.mark.long
def test_saved_programs_run_as_those_that_were_compiled(warm: JaxExecutor, folder: Path) -> None:
    cpu.kernel.cache_clear()  # another process has not traced anything that calls it
    said: list[str] = []
    executor = from_folder(folder, without_num_blocks(tiny_model.OPTIONS))
    executor.warm_up(lambda what, done, total: said.append(what))
    assert {program.origin for program in executor._programs.ready.values()} == {"saved"}
    assert set(executor._programs.ready) == set(warm._programs.ready)
    num_programs = len(executor._programs.specs)
    assert said[-1] == f"{num_programs} programs: {num_programs} from the folder of saved programs"
    assert executor.geometry.num_blocks == 56
    assert some_tokens(executor) == some_tokens(warm)
    executor.shutdown()


@pytest.mark.long
def test_what_was_not_saved_is_compiled(warm: JaxExecutor, tmp_path: Path) -> None:
    missing, ready = ProgramSpec("forward", 8), warm._programs.ready
    save_programs(tmp_path / "most", target_of(), {spec: ready[spec] for spec in ready if spec != missing})
    executor = from_folder(tmp_path / "most")
    executor.warm_up(tiny_model.quiet)
    assert executor._programs.ready.keys() == ready.keys()
    assert {spec for spec, program in executor._programs.ready.items() if program.origin != "saved"} == {missing}
    executor.shutdown()


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("cache", "num_blocks", 55),
        ("cache", "block_size", 16),
        ("cache", "kv_cache_dtype", "bfloat16"),
        ("cache", "enable_cascade_attention", False),
        ("scheduler", "max_num_seqs", 3),
        ("scheduler", "max_num_batched_tokens", 24),
        ("model", "max_model_len", 48),
        ("model", "attention_backend", "xla"),
        ("model", "linear_backend", "xla"),
    ],
)
@pytest.mark.long
def test_what_differs_is_named(folder: Path, section: str, name: str, value: object) -> None:
    changed = dataclasses.replace(getattr(tiny_model.OPTIONS, section), **{name: value})
    shown = {"enable_cascade_attention": "cascade"}.get(name, name)
    with pytest.raises(InvalidArgument, match=rf"compiled: the programs in .* are for {shown} .*, but this server has"):
        from_folder(folder, dataclasses.replace(tiny_model.OPTIONS, **{section: changed}))


def test_every_field_of_the_target_is_held_to(folder: Path) -> None:
    saved, target = AOTBundle.open(folder), target_of()
    saved.check(target)
    for field in dataclasses.fields(CompileTarget):
        changes: dict[str, Any] = {field.name: -1 if field.type == "int" else "another"}
        other = dataclasses.replace(target, **changes)
        with pytest.raises(InvalidArgument, match=f"are for {field.name} "):
            saved.check(other)


def test_programs_of_gpus_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    target = dataclasses.replace(target_of(), platform="gpu")
    with pytest.raises(InvalidArgument, match=r"^save: saved programs are not supported for GPUs"):
        save_programs(tmp_path / "programs", target, {})
    assert not (tmp_path / "programs").exists()
    with pytest.raises(InvalidArgument, match=r"^compiled: saved programs are not supported for GPUs"):
        AOTBundle(tmp_path, target, {}).check(target)


def test_what_a_sequence_ends_with_is_no_part_of_a_program() -> None:
    model = tiny_model.model()
    other = type(model)(dataclasses.replace(model.config, eos_token_ids=(5,), checkpoint_dtype="float16"), model.dtype)
    step, geometry, _ = abstract_serving(other, tiny_model.OPTIONS, serving_mesh(1), "loop")
    assert CompileTarget.of(step, geometry) == target_of()


def test_another_number_of_devices_is_another_target() -> None:
    step, geometry, _ = abstract_serving(tiny_model.model(), tiny_model.OPTIONS, serving_mesh(2), "loop")
    assert CompileTarget.of(step, geometry).tensor_parallel_size == 2
    step, geometry, _ = abstract_serving(tiny_model.model(), tiny_model.OPTIONS, serving_mesh(1, 1, 3), "loop")
    target = CompileTarget.of(step, geometry)
    assert (target.tensor_parallel_size, target.pipeline_parallel_size) == (1, 3)


def test_damage_is_named(folder: Path, warm: JaxExecutor, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"compiled: .*nothing has no saved programs"):
        AOTBundle.open(tmp_path / "nothing")
    broken = tmp_path / "broken"
    save(broken, warm, target_of())
    path = broken / "forward-8.program"
    path.write_bytes(path.read_bytes()[:100])
    executor = from_folder(broken)
    with pytest.raises(InvalidArgument, match=r"forward-8.program cannot be loaded as forward\[8\]"):
        executor.warm_up(tiny_model.quiet)
    executor.shutdown()
    manifest = json.loads((broken / MANIFEST).read_text())
    for damage, said in (({"format": 7}, "has format 7; supported: 2"), ({"target": {"jax": "1"}}, "is damaged")):
        (broken / MANIFEST).write_text(json.dumps({**manifest, **damage}))
        with pytest.raises(InvalidArgument, match=said):
            AOTBundle.open(broken)


def test_what_was_loaded_is_not_saved_again(folder: Path, tmp_path: Path) -> None:
    executor = from_folder(folder)
    executor.warm_up(tiny_model.quiet)
    with pytest.raises(
        InternalError, match=r"programs that were loaded instead of compiled cannot be saved: .*forward\[16\]"
    ):
        save(tmp_path / "again", executor, target_of())
    assert not (tmp_path / "again").exists()
    executor.shutdown()


def test_a_folder_that_holds_something_is_left_alone(folder: Path, warm: JaxExecutor) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidArgument, match=r"save: .* is not empty"):
        save(folder, warm, target_of())
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
