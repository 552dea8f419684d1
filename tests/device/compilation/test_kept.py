"""Programs from one run to the next: found without a trace, made again whenever anything they depend on differs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.device.compilation import aot_bundle, lowering
from jpaged.device.compilation.aot_bundle import AOTBundle, CompileTarget, save_programs
from jpaged.device.compilation.compile import ProgramSpec, set_up_compile_cache, told
from jpaged.device.compilation.executable_cache import ExecutableCache, ProgramBucket
from jpaged.device.compilation.lowering import ServerPrograms, abstract_serving, program_lowerings
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import serving_mesh
from jpaged.device.step import Step
from jpaged.device.vision import JaxVisionEncoder, call_sizes, random_params
from jpaged.engine.executor import Geometry
from jpaged.errors import InvalidArgument
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.vision.processors import read_processor
from tests.device import tiny_model
from tests.device.driver import Driver, Row
from tests.models.vision import CASES, PREPROCESSORS, VOCABULARY, device, pictures

SPEC = ProgramSpec("forward", 3)


@pytest.fixture(autouse=True)
def without_other_cache() -> Iterator[None]:
    """What comes from jax's cache is not kept on CPUs."""
    before = jax.config.values["jax_compilation_cache_dir"]
    set_up_compile_cache(None)
    yield
    set_up_compile_cache(None if before is None else Path(before))


def start(keep: Path, options: EngineConfig = tiny_model.OPTIONS) -> JaxExecutor:
    executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), options, keep=keep)
    executor.warm_up(tiny_model.quiet)
    return executor


def origins(executor: JaxExecutor) -> set[str]:
    return {program.origin for program in executor._programs.ready.values()}


def some_tokens(executor: JaxExecutor) -> list[int]:
    driver = Driver(executor)
    first, second = driver.sequence([5, 6, 7, 8, 9]), driver.sequence([1, 2], temperature=1.0, seed=3)
    sampled: list[int] = driver.run([Row(first, 5), Row(second, 2)]).token_ids_rn[:2, 0].tolist()
    first.tokens.append(sampled[0])
    return sampled + driver.run([Row(first, 1)]).token_ids_rn[:1, 0].tolist()


def refuse_to_lower(step: Step, params: Params, geometry: Geometry) -> dict[ProgramSpec, Callable[[], None]]:
    specs = program_lowerings(step, params, geometry)
    return {spec: functools.partial(pytest.fail, f"{spec} was lowered") for spec in specs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "programs"
    set_up_compile_cache(None)
    executor = start(folder)
    assert origins(executor) == {"compiled"}
    executor.shutdown()
    return folder


@pytest.mark.long
def test_a_second_start_traces_nothing_and_says_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_model.compiled_executor()
    monkeypatch.setattr(lowering, "program_lowerings", refuse_to_lower)
    executor = start(folder)
    assert origins(executor) == {"cache"}
    assert len(executor._programs.ready) == len(executor._programs.specs)
    assert some_tokens(executor) == some_tokens(plain)
    executor.shutdown()
    plain.shutdown()


@pytest.mark.long
def test_a_program_whose_code_was_edited_to_the_same_is_found_once_it_is_lowered(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "kept"
    shutil.copytree(folder, other)
    shutil.rmtree(other / "named")
    executor = start(other)
    assert origins(executor) == {"cache"}
    executor.shutdown()
    assert {path.name for path in (other / "named").iterdir()} == {path.name for path in (folder / "named").iterdir()}


@pytest.mark.long
def test_other_options_have_programs_of_their_own(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "kept"
    shutil.copytree(folder, other)
    cache = dataclasses.replace(tiny_model.OPTIONS.cache, num_blocks=40)
    executor = start(other, dataclasses.replace(tiny_model.OPTIONS, cache=cache))
    made = {program.spec.kind: program.origin for program in executor._programs.ready.values()}
    assert (made["forward"], made["sample"]) == ("compiled", "cache")  # what samples knows nothing of the pool
    executor.shutdown()


@pytest.fixture
def kept(tmp_path: Path) -> ExecutableCache:
    return kept_at(tmp_path / "kept")


def kept_at(folder: Path) -> ExecutableCache:
    step, geometry, params = abstract_serving(tiny_model.model(), tiny_model.OPTIONS, serving_mesh(1), "loop")
    return ExecutableCache.of(folder, step, geometry, params)


class Lowering:
    """Lowers x * factor, and counts how often."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor, self.num_times = factor, 0

    def __call__(self) -> jax.stages.Lowered:
        self.num_times += 1
        return jax.jit(lambda x: x * self.factor).lower(jax.ShapeDtypeStruct((3,), jnp.float32))


def result(program: jax.stages.Compiled) -> list[float]:
    return np.asarray(program(np.ones(3, np.float32))).tolist()


def test_a_program_is_lowered_once(kept: ExecutableCache) -> None:
    lowering = Lowering()
    assert [result(kept.make(SPEC, lowering)) for _ in range(3)] == [[2.0] * 3] * 3
    assert lowering.num_times == 1
    assert result(kept.make(dataclasses.replace(SPEC, size=4), Lowering(3.0))) == [3.0] * 3


def test_shapes_of_arguments_that_a_program_does_not_use_count(kept: ExecutableCache, tmp_path: Path) -> None:
    """They are no part of its text, and it takes no others."""
    double = jax.jit(lambda x, unused: x * 2.0)
    for place, unused in enumerate((np.ones(3), np.ones(4))):
        here = dataclasses.replace(kept, traced_from=f"{kept.traced_from} {place}")
        program = here.make(SPEC, functools.partial(double.lower, np.float32(1), unused))
        assert float(program(np.float32(1), unused)) == 2.0


@pytest.mark.parametrize("part", ["named", "made"])
@pytest.mark.parametrize("content", [b"", b"x" * 40, b"\xff" * 10_000, None])
def test_a_damaged_file_is_made_again_and_mended(kept: ExecutableCache, part: str, content: bytes | None) -> None:
    lowering = Lowering()
    kept.make(SPEC, lowering)
    (path,) = (kept.folder / part).iterdir()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert [result(kept.make(SPEC, lowering)) for _ in range(2)] == [[2.0] * 3] * 2
    assert lowering.num_times == 2


def test_a_file_of_another_program_is_not_taken_for_one(kept: ExecutableCache) -> None:
    """The digest is of the bytes; what a pickle of something else holds is no program either."""
    kept.make(SPEC, Lowering())
    (path,) = (kept.folder / "made").iterdir()
    content = pickle.dumps((b"no program", None, None))
    path.write_bytes(hashlib.sha256(content).digest() + content)
    assert result(kept.make(SPEC, Lowering())) == [2.0] * 3


def test_a_folder_that_cannot_be_written_keeps_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    lowering = Lowering()
    kept = kept_at(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        assert [result(kept.make(SPEC, lowering)) for _ in range(2)] == [[2.0] * 3] * 2
    assert lowering.num_times == 2
    assert caplog.text.count("cannot cache compiled programs in") == 1


def test_what_came_from_jaxs_own_cache_is_not_kept_on_cpus(kept: ExecutableCache, tmp_path: Path) -> None:
    """Loaded and written again it would lack functions, and fail when it runs."""
    set_up_compile_cache(tmp_path / "jax")
    lowering = Lowering()
    kept.make(SPEC, lowering)
    shutil.rmtree(kept.folder)
    jax.clear_caches()
    num_before = told.num_from_cache
    assert result(kept.make(SPEC, lowering)) == [2.0] * 3
    assert told.num_from_cache == num_before + 1
    assert not kept.folder.exists()


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_what_compilers_are_told_by_the_environment_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = kept_at(tmp_path)
    monkeypatch.setenv(name, "--another")
    second = kept_at(tmp_path)
    assert first.traced_from != second.traced_from
    assert first.given_besides != second.given_besides


def test_what_jax_is_set_to_counts(tmp_path: Path) -> None:
    first = kept_at(tmp_path)
    with jax.default_matmul_precision("highest"):
        assert kept_at(tmp_path).traced_from != first.traced_from
    assert kept_at(tmp_path) == first


def test_all_code_that_programs_are_traced_from_counts() -> None:
    root = Path(aot_bundle.__file__).parents[2]
    files = {str(path.relative_to(root)) for pattern in aot_bundle._SOURCES for path in root.glob(pattern)}
    traced = {"device/step.py", "models/decoder/modules.py", "kernels/paged_attention/api.py"}
    assert {*traced, "engine/executor/io.py", "device/sampling.py"} <= files
    assert aot_bundle.digest_of_sources() != hashlib.sha256().hexdigest()[:16]


# --- object storage ---------------------------------------------------------------------------------------------------


class Refused(Exception):
    """What the client of a bucket raises: no OSError."""


class RefusingFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Object storage that refuses every call, and counts them."""

    protocol = "refusing"
    num_calls = 0

    def _refuse(self, *arguments: object, **options: object) -> None:
        type(self).num_calls += 1
        raise Refused("401 Anonymous caller")

    cat_file = pipe_file = _refuse


@functools.cache
def _programs() -> ExecutableCache:
    return kept_at(Path("unused"))


def bucket_at(folder: Path) -> ExecutableCache:
    """The programs of a server with this folder, and with the bucket of the environment."""
    return dataclasses.replace(_programs(), folder=folder, bucket=ProgramBucket.from_environment())


@pytest.fixture
def bucket_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket that JPAGED_CACHE_URL names."""
    url = f"{getattr(request, 'param', 'memory')}://{tmp_path}/bucket"
    monkeypatch.setenv("JPAGED_CACHE_URL", f"{url}/")
    return url


def objects(url: str) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root): files.cat_file(path) for path in files.find(root)}


@pytest.mark.parametrize("bucket_url", ["memory", "file"], indirect=True)
def test_another_server_reads_programs_from_the_bucket(bucket_url: str, tmp_path: Path) -> None:
    bucket_at(tmp_path / "one").make(SPEC, Lowering())
    found = objects(bucket_url)
    assert {path.split("/")[1] for path in found} == {"made", "named"} and len(found) == 2
    lowering, num_before = Lowering(), told.num_from_cache
    assert result(bucket_at(tmp_path / "two").make(SPEC, lowering)) == [2.0] * 3
    assert (lowering.num_times, told.num_from_cache) == (0, num_before + 1)
    fsspec.core.url_to_fs(bucket_url)[0].rm(fsspec.core.url_to_fs(bucket_url)[1], recursive=True)
    assert result(bucket_at(tmp_path / "two").make(SPEC, lowering)) == [2.0] * 3  # its folder has them now
    assert lowering.num_times == 0


@pytest.mark.parametrize("part", ["named", "made"])
@pytest.mark.parametrize("content", [b"", b"x" * 40, b"../../etc/passwd" * 100])
def test_a_damaged_object_is_made_again_and_mended(bucket_url: str, tmp_path: Path, part: str, content: bytes) -> None:
    bucket_at(tmp_path / "one").make(SPEC, Lowering())
    before = objects(bucket_url)
    (path,) = (path for path in before if path.startswith(f"/{part}/"))
    fsspec.core.url_to_fs(bucket_url)[0].pipe_file(f"{bucket_url}{path}", content)
    lowering = Lowering()
    assert result(bucket_at(tmp_path / "two").make(SPEC, lowering)) == [2.0] * 3
    assert lowering.num_times == 1
    assert objects(bucket_url).keys() == before.keys() and objects(bucket_url)[path] != content


def test_a_folder_that_cannot_be_written_leaves_the_bucket(bucket_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    bucket_at(tmp_path / "file").make(SPEC, Lowering())
    lowering = Lowering()
    assert result(bucket_at(tmp_path / "file").make(SPEC, lowering)) == [2.0] * 3
    assert lowering.num_times == 0


def test_a_bucket_that_refuses_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fsspec.register_implementation("refusing", RefusingFiles, clobber=True)
    monkeypatch.setenv("JPAGED_CACHE_URL", "refusing://user:secret@bucket/x")
    monkeypatch.setattr(RefusingFiles, "num_calls", 0)
    kept, lowering = bucket_at(tmp_path / "kept"), Lowering()
    with caplog.at_level(logging.WARNING):
        assert [result(kept.make(SPEC, lowering)) for _ in range(2)] == [[2.0] * 3] * 2
    assert (lowering.num_times, RefusingFiles.num_calls) == (1, 1)
    assert caplog.text.count("which is not used any more: 401 Anonymous caller") == 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("url", "message"), [("gs://bucket/x", "gcsfs"), ("what://bucket", "what")])
def test_a_url_that_nothing_reads_is_named(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InvalidArgument, match=rf"JPAGED_CACHE_URL: {url}: .*{message}"):
        ProgramBucket(url)


def test_several_processes_of_a_server_use_no_bucket(
    bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert kept_at(tmp_path).bucket is not None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with caplog.at_level(logging.WARNING):
        assert ProgramBucket.from_environment() is None
    assert "JPAGED_CACHE_URL is not used by a server of several processes" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("num_devices", [1, 2])
def test_programs_of_a_vision_encoder_are_cached_and_saved(num_devices: int, tmp_path: Path) -> None:
    """They run on the first device of a mesh, wherever they come from."""
    config = from_hf(CASES["qwen2_5_vl"])
    assert config.vision is not None
    set_up_compile_cache(None)
    model, mesh = Model(config, np.dtype(np.float32)), serving_mesh(num_devices)
    step, geometry, params = abstract_serving(model, tiny_model.OPTIONS, mesh, "loop")

    def programs(saved: AOTBundle | None = None) -> ServerPrograms:
        return ServerPrograms.of(step, geometry, params, saved, tmp_path / "kept")

    specs = [spec for spec in programs().sources if spec.kind == "encode"]
    assert [spec.size for spec in specs] == list(call_sizes(4 * geometry.max_model_len))
    made = programs().compile(specs[:1])
    save_programs(tmp_path / "saved", CompileTarget.of(step, geometry), made)
    found = {"compiled": made, "cache": programs().compile(specs[:1])}
    found["saved"] = programs(AOTBundle.open(tmp_path / "saved")).compile(specs[:1])
    encoder = JaxVisionEncoder(config.vision, random_params(config.vision, model.dtype, device(), 1), 64)
    processor = read_processor(config.vision, (PREPROCESSORS["qwen2_5_vl"], {}), VOCABULARY)
    images = [processor.prepare(image) for image in pictures((20, 20))]
    (want,) = encoder.encode(images)
    for origin, compiled in found.items():
        store = ProgramStore({specs[0]: programs().sources[specs[0]]})
        store.ready = dict(compiled)
        encoder.set_programs(store)
        (rows,) = encoder.encode(images)
        assert {program.origin for program in compiled.values()} == {origin}
        np.testing.assert_array_equal(rows, want)
