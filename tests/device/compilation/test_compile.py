"""Ahead-of-time compilation, the cache on disk, and the count of programs that were compiled too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# The options that JAX gives to XLA have no public name.
from jax._src.compiler import get_compile_options

from jpaged.config import EngineConfig
from jpaged.device.compilation import compile as ahead
from jpaged.device.compilation.compile import ProgramSpec, least_programs, program_specs, told
from jpaged.device.executor import JaxExecutor, waits_for_all_programs
from jpaged.device.sampling import SamplingStages
from jpaged.engine.executor import BucketTable, Detail
from jpaged.kernels.matrix_format import MatrixFormat
from tests.device import tiny_model
from tests.device.driver import Driver, Row


def _lower(size: int, factor: float = 2.0) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * factor + size).lower(jax.ShapeDtypeStruct((size,), jnp.float32))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    ahead.set_up_compile_cache(tmp_path / "programs")
    yield tmp_path / "programs"
    ahead.set_up_compile_cache(None)


def test_the_list_of_programs() -> None:
    buckets = BucketTable.build(max_num_batched_tokens=32, max_num_seqs=9)
    tells = ["tell[64, logprobs]", "tell[8, all-logprobs]", "tell[64, hidden]"]
    least = ["forward[32]", "sample[9, top]", "edited[9]", *tells, "count[256]", "copy[8]"]
    steps = ["forward[8]", "forward[16]", "sample[8, top]", "sample[8]", "sample[9]"]
    steps += ["sample[8, logprobs]", "sample[9, logprobs]"]
    names = list(map(str, program_specs(buckets, (8, 64), has_host_blocks=False)))
    assert names == [*least, *steps, "copy[64]"]
    swaps = ["swap_out[8]", "swap_in[8]", "swap_out[64]", "swap_in[64]"]
    with_images = list(map(str, program_specs(buckets, (8, 64), has_host_blocks=False, image_sizes=(64, 128))))
    assert set(with_images) - set(names) == {"encode[64]", "encode[128]"}
    assert not {"encode[64]", "encode[128]"} & set(with_images[: len(least)])  # a start does not wait for them
    with_swaps = list(map(str, program_specs(buckets, (8, 64), has_host_blocks=True)))
    assert with_swaps[: len(least) + 2] == [*least, "swap_out[8]", "swap_in[8]"]
    assert len(with_swaps) == len(set(with_swaps))
    assert sorted(with_swaps) == sorted([*names, *swaps])


def test_every_second_number_of_rows_has_a_program_that_edits() -> None:
    buckets = BucketTable.build(max_num_batched_tokens=32, max_num_seqs=100)
    assert buckets.rows == (8, 16, 32, 64, 100)
    specs = program_specs(buckets, (8,), has_host_blocks=False)
    assert [str(spec) for spec in specs if spec.kind == "edited"] == ["edited[100]", "edited[32]", "edited[8]"]


def test_the_list_of_programs_without_branches() -> None:
    """Two more for each number of rows and for each that edits, and none of several steps."""
    buckets = BucketTable.build(max_num_batched_tokens=32, max_num_seqs=64, max_num_steps=2)
    with_branches, without = (
        program_specs(buckets, (8,), has_host_blocks=False, has_branches=has_branches) for has_branches in (True, False)
    )
    names = list(map(str, without))
    assert names[:3] == ["forward[32]", "sample[64, top]", "edited[64, top]"]
    assert {name for name in names if name.startswith(("sample[8", "edited[16"))} == {
        *("sample[8, greedy]", "sample[8, random]", "sample[8]", "sample[8, logprobs]", "sample[8, top]"),
        *("edited[16, random]", "edited[16]", "edited[16, top]"),
    }
    assert not any(name.startswith("decode") for name in names)
    num_rows, num_edited = len(buckets.rows), 2
    assert len(without) == len(with_branches) + 2 * num_rows + 2 * num_edited - len(buckets.decodes)
    least = least_programs(buckets, (8,), has_host_blocks=False, has_branches=False)
    assert without[: len(least)] == least


def test_programs_that_compute_more_stand_in_the_least_first() -> None:
    spec = ProgramSpec("sample", 8, Detail.LOGPROBS, stages=SamplingStages.RANDOM)
    assert list(map(str, spec.stand_ins)) == ["sample[8, logprobs]", "sample[8, random, top]", "sample[8, top]"]
    assert list(map(str, ProgramSpec("sample", 8).stand_ins)) == ["sample[8, logprobs]", "sample[8, top]"]
    assert ProgramSpec("sample", 8, Detail.TOP_LOGPROBS).stand_ins == ()


def test_several_steps_are_compiled_last_but_for_the_fewest_rows() -> None:
    buckets = BucketTable.build(max_num_batched_tokens=32, max_num_seqs=9, max_num_steps=2)
    assert buckets.decodes == buckets.rows == (8, 9)
    names = list(map(str, program_specs(buckets, (8,), has_host_blocks=False)))
    single = program_specs(BucketTable(buckets.tokens, buckets.rows), (8,), has_host_blocks=False)
    assert [name for name in names if not name.startswith("decode")] == list(map(str, single))
    assert names.index("decode[8]") < names.index("sample[9]")
    assert names.index("decode[9]") > names.index("copy[8]")
    behind = names[names.index("decode[9]") + 1 :]
    assert behind == [name for name in names[names.index("copy[8]") :] if name.startswith("edited")]


def test_the_list_begins_with_what_any_step_can_be_padded_to() -> None:
    buckets = BucketTable.build(max_num_batched_tokens=64, max_num_seqs=16)
    for has_host_blocks in (True, False):
        least = least_programs(buckets, (8,), has_host_blocks=has_host_blocks)
        assert program_specs(buckets, (8,), has_host_blocks=has_host_blocks)[: len(least)] == least


def test_programs_are_kept_on_disk_and_found_again(cache: Path) -> None:
    hits: list[str] = []

    def listen(event: str, **_: str | int) -> None:
        hits.extend([event] if event == "/jax/compilation_cache/cache_hits" else [])

    jax.monitoring.register_event_listener(listen)
    try:
        _lower(6, 3.0).compile()
        assert hits == []
        assert list(cache.iterdir())
        jax.clear_caches()
        _lower(6, 3.0).compile()
        assert len(hits) == 1
    finally:
        jax.monitoring.unregister_event_listener(listen)


def test_no_folder_means_no_cache(tmp_path: Path) -> None:
    ahead.set_up_compile_cache(tmp_path)
    ahead.set_up_compile_cache(None)
    _lower(7, 5.0).compile()
    assert not list(tmp_path.iterdir())


def devices_of(platform: str, *ids: int) -> list[Any]:
    return [SimpleNamespace(platform=platform, id=index) for index in ids]


def test_tpus_without_device_0_run_no_program_from_a_cache(tmp_path: Path) -> None:
    """jax-ml/jax issue 38004: a warm start would halt them."""
    kept = tmp_path / "kept"
    assert ahead.program_caches(tmp_path, [devices_of("tpu", 0, 1)]) == (tmp_path, [kept])
    assert ahead.program_caches(tmp_path, [devices_of("tpu", 0, 1), devices_of("tpu", 2, 3)]) == (None, [kept, None])
    for platform in ("cpu", "gpu"):
        replicas = [devices_of(platform, 0), devices_of(platform, 1)]
        assert ahead.program_caches(tmp_path, replicas) == (tmp_path, [kept, kept])
    assert ahead.program_caches(None, [devices_of("gpu", 0)]) == (None, [None])


def test_programs_compiled_one_after_another_share_the_tiles_that_were_timed(cache: Path) -> None:
    """Replicas of a process, and later starts: XLA for GPUs reads and writes a folder beside the programs."""
    options = get_compile_options(1, 1)  # owns those that it returns
    folder = options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir
    assert folder == str(cache / "xla_gpu_per_fusion_autotune_cache_dir")


@pytest.mark.parametrize(
    ("platform", "chosen", "want"),
    [("gpu", None, True), ("gpu", False, False), ("tpu", None, False), ("cpu", True, True)],
)
def test_gpus_wait_for_all_programs_unless_an_option_says_otherwise(
    platform: str, chosen: bool | None, want: bool
) -> None:
    mesh: Any = SimpleNamespace(devices=np.array(devices_of(platform, 0)))
    options = EngineConfig.load({} if chosen is None else {"wait_for_all_programs": chosen})
    assert waits_for_all_programs(options, mesh) is want


def test_a_folder_that_cannot_be_written_turns_the_cache_off(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "file").write_text("no folder")
    ahead.set_up_compile_cache(tmp_path / "file" / "programs")
    assert jax.config.values["jax_compilation_cache_dir"] is None
    _lower(11, 5.0).compile()
    assert not recwarn.list


def test_compiles_of_other_threads_are_not_counted() -> None:
    num_before = told.num_compiled
    thread = threading.Thread(target=lambda: _lower(9).compile())
    thread.start()
    thread.join()
    assert told.num_compiled == num_before
    _lower(10).compile()
    assert told.num_compiled == num_before + 1


@pytest.mark.long
def test_executors_one_after_the_other_count_for_themselves() -> None:
    """A second executor's warm-up and other work in the process are nobody's late compile."""
    first = tiny_model.compiled_executor()
    driver = Driver(first)
    driver.run([Row(driver.sequence([1, 2, 3]), 3)])
    first.shutdown()
    second = JaxExecutor.create(tiny_model.model(), tiny_model.params(), tiny_model.OPTIONS)
    assert (first.num_compiles_after_warm_up, second.num_compiles_after_warm_up) == (0, 0)
    second.shutdown()


@pytest.mark.long
def test_a_late_compile_in_a_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), tiny_model.OPTIONS)

    def late(spec: ProgramSpec) -> object:
        width = 3 if spec.kind == "sample" else 32
        return lambda *arguments: (arguments[1] if width == 32 else 0, jnp.zeros((8, width), jnp.int32) + spec.size)

    monkeypatch.setattr(executor._programs, "find", late)
    driver = Driver(executor)
    jax.clear_caches()
    driver.run([Row(driver.sequence([1]), 1)])
    assert executor.num_compiles_after_warm_up >= 1
    executor.shutdown()


_FP8 = MatrixFormat("fp8", activations="fp8")


@pytest.mark.parametrize(
    ("kind", "formats", "is_for_cublas"),
    [
        ("NVIDIA H200", (), False),
        ("NVIDIA H200", (_FP8,), True),
        ("NVIDIA H200", (_FP8, MatrixFormat("int4", 128)), True),
        ("NVIDIA H200", (_FP8, MatrixFormat("int8")), False),
        ("NVIDIA H200", (MatrixFormat("int8"),), False),
        ("NVIDIA H200", (MatrixFormat("fp8", 128, activations="fp8-groups"),), False),
        ("NVIDIA A100-SXM4-80GB", (_FP8,), False),
        ("NVIDIA A100-SXM4-80GB", (MatrixFormat("int8", activations="int8"),), True),
        ("TPU v6 lite", (_FP8,), False),
    ],
)
def test_xla_leaves_products_of_8_bits_to_cublas_where_it_would_widen_them(
    kind: str, formats: tuple[MatrixFormat, ...], is_for_cublas: bool
) -> None:
    device: Any = SimpleNamespace(platform="tpu" if "TPU" in kind else "gpu", device_kind=kind)
    wanted = {"xla_gpu_enable_triton_gemm": "False"} if is_for_cublas else None
    assert ahead.compiler_options(device, formats) == wanted


def test_only_programs_for_tpus_that_sum_in_parts_overlap_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce runs within matmuls, and by itself: combined with others it would wait for all of them."""
    monkeypatch.setattr(ahead, "_accepts_options", lambda device, options: True)
    kinds = (("tpu", "TPU v6 lite"), ("tpu", "TPU7x"), ("cpu", "cpu"))
    devices: list[Any] = [SimpleNamespace(platform=platform, device_kind=kind) for platform, kind in kinds]
    v6e, tpu7x, cpu = devices
    options: Any = ahead.compiler_options(v6e, overlaps_sums=True)
    assert options["xla_enable_async_all_reduce"] == "true"
    assert options["xla_jf_crs_combiner_threshold_count"] == "1"
    assert ahead.compiler_options(v6e) is None
    assert ahead.compiler_options(cpu, overlaps_sums=True) is None
    assert ahead.compiler_options(tpu7x, overlaps_sums=True) == options | (ahead.compiler_options(tpu7x) or {})


def test_a_compiler_without_one_of_the_options_gets_none_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU's compiler has none of the options for TPUs, and reports that as libtpu does."""
    probe = ahead._accepts_options
    probe.cache_clear()
    monkeypatch.setattr(ahead, "_accepts_options", lambda device, options: probe(jax.devices()[0], options))
    v6e: Any = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
    mesh = jax.sharding.AbstractMesh((2,), ("model",))
    with caplog.at_level("WARNING"), jax.sharding.use_abstract_mesh(mesh):
        assert ahead.compiler_options(v6e, overlaps_sums=True) is None
        assert ahead.compiler_options(v6e, overlaps_sums=True) is None
    assert [record.getMessage() for record in caplog.records] == [
        "the compiler for cpu does not accept option xla_enable_async_all_reduce: "
        "sums over devices do not overlap with matmuls"
    ]


def test_a_compiler_with_all_options_gets_them() -> None:
    device = jax.devices()[0]
    assert ahead._accepts_options(device, (("xla_cpu_enable_fast_math", "False"),))
