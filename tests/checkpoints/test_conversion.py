"""Checkpoints go from safetensors to Orbax and back without losing a bit, and any mesh restores what any mesh saved."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from safetensors.numpy import load_file, save_file

from benchmarks.demo_model.saving import save_params
from jpaged.checkpoints import conversion, hub
from jpaged.checkpoints.conversion import ConversionOptions, convert_folder, write_orbax
from jpaged.checkpoints.orbax import MANIFEST_FILE, MAX_MANIFEST_BYTES, PARAMS_FOLDER, OrbaxTensors, write_manifest
from jpaged.checkpoints.tensor_files import MAX_INDEX_BYTES, StoredTensor, TensorFiles
from jpaged.checkpoints.weights import load_params
from jpaged.errors import InvalidArgument, Unavailable, Unsupported
from jpaged.models.hf_config import from_hf, to_hf
from tests.device.sharded import model_of, place
from tests.models.tiny import TinyCase, tensors, tiny_case, tiny_cases, write_checkpoint

TO_ORBAX = ConversionOptions("orbax")
TO_SAFETENSORS = ConversionOptions("safetensors")


def assert_same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert tensor.tobytes() == right[name].tobytes(), name


def write_mixed(case: TinyCase, folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint in bfloat16 with norms in float32, which holds a NaN, infinities and a negative zero."""
    write_checkpoint(case, folder)
    stored = {
        name: tensor if "norm" in name else tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors(case).items()
    }
    embeddings = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings")
    first = next(name for name in stored if name.split(".")[-2] in embeddings)
    stored[first].reshape(-1)[:4] = [np.nan, np.inf, -np.inf, -0.0]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return stored


@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
@pytest.mark.thinned(35)
def test_a_checkpoint_comes_back_bit_by_bit(case: TinyCase, tmp_path: Path) -> None:
    stored = write_mixed(case, tmp_path / "once")
    convert_folder(tmp_path / "once", tmp_path / "orbax", TO_ORBAX)
    convert_folder(tmp_path / "orbax", tmp_path / "again", TO_SAFETENSORS)
    assert_same_bits(load_file(tmp_path / "again" / "model.safetensors"), stored)
    for folder in ("orbax", "again"):
        assert (tmp_path / folder / "config.json").read_bytes() == (tmp_path / "once" / "config.json").read_bytes()


def test_orbax_itself_reads_what_is_written(tmp_path: Path) -> None:
    case = tiny_case("qwen3")
    stored = write_mixed(case, tmp_path / "once")
    convert_folder(tmp_path / "once", tmp_path / "orbax", TO_ORBAX)
    with ocp.PyTreeCheckpointer() as reader:
        assert_same_bits(reader.restore(tmp_path / "orbax" / "params"), stored)
    manifest = json.loads((tmp_path / "orbax" / "jpaged.json").read_text())
    assert manifest["architecture"] == "Qwen3ForCausalLM"
    assert (manifest["format_version"], manifest["dtype"]) == (1, "mixed")
    names = {path.name for path in (tmp_path / "orbax").rglob("*")}
    assert "commit_success.txt" not in names


def test_every_small_file_of_the_model_goes_along(tmp_path: Path) -> None:
    source = write_checkpoint(tiny_case("llama_mha"), tmp_path / "once")
    small = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "merges.txt"]
    for name in (*small, "tokenizer.model", "LICENSE", "additional_chat_templates/tools.jinja"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(json.dumps({"eos_token_id": [3]}) if name == "generation_config.json" else name)
    (source / "pytorch_model.bin").write_bytes(b"never copied")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    convert_folder(source, tmp_path / "orbax", TO_ORBAX)
    convert_folder(tmp_path / "orbax", tmp_path / "again", TO_SAFETENSORS)

    def listing(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    assert listing(tmp_path / "again") == listing(source) - {"pytorch_model.bin", "pytorch_model.bin.index.json"}
    assert hub.read_config(tmp_path / "orbax").eos_token_ids == (3,)


def test_shards_are_those_of_hugging_face(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    stored = tensors(case)
    write_checkpoint(case, tmp_path / "once")
    limit = 2 * max(tensor.nbytes for tensor in stored.values()) - 1
    convert_folder(tmp_path / "once", tmp_path / "shards", ConversionOptions("safetensors", max_shard_bytes=limit))
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    read: dict[str, np.ndarray] = {}
    for name in files:
        part = load_file(tmp_path / "shards" / name)
        assert sum(tensor.nbytes for tensor in part.values()) <= limit
        assert {index["weight_map"][tensor] for tensor in part} == {name}
        read |= part
    assert_same_bits(read, stored)
    convert_folder(tmp_path / "shards", tmp_path / "orbax", TO_ORBAX)
    convert_folder(tmp_path / "orbax", tmp_path / "tiny", ConversionOptions("safetensors", max_shard_bytes=1024))
    assert len(list((tmp_path / "tiny").glob("*.safetensors"))) > len(files)
    load_params(model_of(case.name), tmp_path / "tiny", "loop")


def test_a_repeated_embedding_and_unused_tensors_are_kept(tmp_path: Path) -> None:
    case = tiny_case("qwen3_tied")
    stored = tensors(case)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_checkpoint(case, tmp_path / "once")
    save_file(stored, tmp_path / "once" / "model.safetensors")
    convert_folder(tmp_path / "once", tmp_path / "orbax", TO_ORBAX)
    convert_folder(tmp_path / "orbax", tmp_path / "again", TO_SAFETENSORS)
    assert_same_bits(load_file(tmp_path / "again" / "model.safetensors"), stored)
    assert "lm_head" not in load_params(model_of(case.name), tmp_path / "orbax", "loop")


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_tensors_are_cast_and_the_config_says_so(to, tmp_path: Path) -> None:
    case = tiny_case("llama_mqa_wide")  # its config has torch_dtype
    write_checkpoint(case, tmp_path / "once")
    convert_folder(tmp_path / "once", tmp_path / "cast", ConversionOptions(to, "bfloat16"))
    convert_folder(tmp_path / "cast", tmp_path / "again", TO_SAFETENSORS)
    want = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors(case).items()}
    assert_same_bits(load_file(tmp_path / "again" / "model.safetensors"), want)
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert hub.read_config(tmp_path / "cast").checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_type_that_is_too_narrow_is_refused_and_nothing_is_left(to, tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    stored = tensors(case)
    stored["model.norm.weight"][:3] = 1e6
    write_checkpoint(case, tmp_path / "once")
    save_file(stored, tmp_path / "once" / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"float16 cannot represent 3 numbers of tensor model\.norm\.weight"):
        convert_folder(tmp_path / "once", tmp_path / "narrow", ConversionOptions(to, "float16"))
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        (MANIFEST_FILE, MAX_MANIFEST_BYTES),
        (f"{PARAMS_FOLDER}/_METADATA", MAX_INDEX_BYTES),
        (f"{PARAMS_FOLDER}/manifest.ocdbt", MAX_INDEX_BYTES),
    ],
)
def test_a_file_of_names_that_is_too_large_is_refused_before_it_is_read(name: str, limit: int, tmp_path: Path) -> None:
    (tmp_path / PARAMS_FOLDER).mkdir()
    write_manifest(tmp_path, "LlamaForCausalLM", "float32")
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, limit + 1)
    with pytest.raises(
        InvalidArgument, match=rf"^{tmp_path / name}: has {limit + 1} bytes; the limit for this file is {limit} bytes"
    ):
        OrbaxTensors(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("way", ["there", "back"])
def test_few_tensors_are_in_memory_at_any_time(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is read when the one before is written: with the cast, three arrays are alive at the most."""
    alive: set[int] = set()
    most = 0
    num_read = 0

    def watch(kind: type[TensorFiles] | type[OrbaxTensors]) -> None:
        read = kind.read

        def watched(files, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
            nonlocal most, num_read
            gc.collect()
            tensor = read(files, name, shape, index)
            num_read += 1
            alive.add(num_read)
            weakref.finalize(tensor, alive.discard, num_read)
            most = max(most, len(alive))
            return tensor

        monkeypatch.setattr(kind, "read", watched)

    source = write_checkpoint(tiny_case("llama_mha"), tmp_path / "once")
    if way == "back":
        convert_folder(source, tmp_path / "orbax", TO_ORBAX)
        source = tmp_path / "orbax"
    watch(TensorFiles)
    watch(OrbaxTensors)
    gc.collect()
    gc.freeze()  # looking at every read through all that was there before takes seconds
    try:
        convert_folder(source, tmp_path / "new", ConversionOptions("safetensors" if way == "back" else "orbax"))
    finally:
        gc.unfreeze()
    assert num_read == len(tensors(tiny_case("llama_mha"))) > 20
    assert most <= 3


RESTORED = [("llama3_tied", [1, 2, 4, 8]), ("opt", [1, 4]), ("mistral_mqa", [8]), ("llama_gqa_bias", [2])]


@pytest.mark.long
@pytest.mark.parametrize(("name", "sizes"), RESTORED)
@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
def test_every_mesh_restores_what_it_reads_from_safetensors(name, sizes, layer_mode, tmp_path: Path) -> None:
    model, folder = model_of(name), write_checkpoint(tiny_case(name), tmp_path / "once")
    convert_folder(folder, tmp_path / "orbax", TO_ORBAX)
    for size in sizes:
        where = place(model, size, layer_mode)
        theirs, ours = (
            load_params(model, source, layer_mode, num_parts=size, shardings=where.shardings)
            for source in (folder, tmp_path / "orbax")
        )
        assert_same_parts(ours, theirs)


def assert_same_parts(left: object, right: object) -> None:
    """The same bytes on the same devices."""

    def check(a: jax.Array, b: jax.Array) -> None:
        assert a.sharding == b.sharding
        for mine, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert (mine.device, mine.index) == (other.device, other.index)
            np.testing.assert_array_equal(mine.data, other.data)

    jax.tree.map(check, left, right)


@pytest.mark.parametrize("name", ["llama3_tied", "mistral_mqa", "qwen3_tied", "opt", "opt_post_norm"])
@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
@pytest.mark.thinned(12)
def test_what_one_mesh_saves_is_the_published_model(name, layer_mode, tmp_path: Path) -> None:
    """Heads are repeated and the vocabulary is padded on four devices; nothing of that is in the file."""
    case, size = tiny_case(name), 2 if name == "opt_post_norm" else 4
    model, folder = model_of(name), write_checkpoint(case, tmp_path / "once")
    where = place(model, size, layer_mode)
    params = load_params(model, folder, layer_mode, num_parts=size, shardings=where.shardings)
    save_params(params, model.config, tmp_path / "safetensors", num_parts=size)
    convert_folder(tmp_path / "safetensors", tmp_path / "saved", TO_ORBAX)
    convert_folder(tmp_path / "saved", tmp_path / "again", TO_SAFETENSORS)
    assert_same_bits(load_file(tmp_path / "again" / "model.safetensors"), tensors(case))
    assert to_hf(hub.read_config(tmp_path / "saved")) == to_hf(model.config) | {"dtype": "float32"}
    one = place(model, 1, layer_mode)
    restored = load_params(model, tmp_path / "saved", layer_mode, shardings=one.shardings)
    jax.tree.map(
        np.testing.assert_array_equal, restored, load_params(model, folder, layer_mode, shardings=one.shardings)
    )


def test_a_device_reads_its_part_of_the_arrays_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = model_of("llama_mha"), write_checkpoint(tiny_case("llama_mha"), tmp_path / "once")
    convert_folder(folder, tmp_path / "orbax", TO_ORBAX)
    sizes: dict[str, list[int]] = {}
    read = OrbaxTensors.read

    def listen(files: OrbaxTensors, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        tensor = read(files, name, shape, index)
        sizes.setdefault(name, []).append(tensor.size)
        return tensor

    monkeypatch.setattr(OrbaxTensors, "read", listen)
    load_params(model, tmp_path / "orbax", "loop", num_parts=4, shardings=place(model, 4).shardings)
    for name, tensor in tensors(tiny_case("llama_mha")).items():
        if tensor.ndim == 2:
            assert len(sizes[name]) == 4
            assert sum(sizes[name]) == tensor.size
            assert max(sizes[name]) <= -(-tensor.shape[0] // 4) * tensor.shape[1] or "o_proj" in name or "down" in name
            assert max(sizes[name]) < tensor.size


def write_arrays(arrays: dict[str, np.ndarray], folder: Path) -> None:
    """What a finished folder has besides its configs."""
    stored = [StoredTensor(name, array.shape, array.dtype, array.copy) for name, array in arrays.items()]
    write_orbax(stored, folder, None)
    write_manifest(folder, "LlamaForCausalLM", "float32")


@pytest.mark.long
@pytest.mark.parametrize("axis", [0, 1])
def test_an_eighth_of_an_array_takes_an_eighth_of_its_bytes_from_the_disk(axis: int, tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    write_arrays({"w": array}, tmp_path)
    index = (slice(512, 1024),) if axis == 0 else (slice(None), slice(512, 1024))
    files = OrbaxTensors(tmp_path)
    before = bytes_read()
    np.testing.assert_array_equal(files.read("w", array.shape, index), array[index])
    assert array.nbytes // 8 <= bytes_read() - before < array.nbytes // 7


def bytes_read() -> int:
    (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return int(sum(value["value"] for value in metric["values"]))


def test_an_axis_of_prime_length_stays_whole(tmp_path: Path) -> None:
    """Orbax would cut it into rows of one, 10007 chunks."""
    array = np.zeros((10007, 128), np.float32)
    write_orbax([StoredTensor("w", array.shape, array.dtype, lambda: array)], tmp_path, None)
    with ocp.PyTreeCheckpointer() as reader:
        stored = reader.metadata(tmp_path / "params").item_metadata.tree["w"]
    assert stored.storage.chunk_shape == array.shape


def test_data_files_are_about_as_large_as_asked(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    write_orbax([StoredTensor("w", array.shape, array.dtype, array.copy)], tmp_path, 2**20)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert max(sizes) < 2.1 * 2**20
    assert sum(sizes) > array.nbytes


Change = Callable[[dict[str, np.ndarray]], object]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda stored: stored.pop("model.norm.weight"), "tensor model.norm.weight [64] is missing"),
        (
            lambda stored: stored.update({"model.norm.weight": np.zeros(63, np.float32)}),
            "tensor model.norm.weight has shape [63]; config.json requires [64]",
        ),
    ],
)
def test_a_missing_or_misshapen_array_is_named(change: Change, named: str, tmp_path: Path) -> None:
    """Both by who restores the arrays and by who converts them, before anything is written."""
    case = tiny_case("llama_mha")
    stored = tensors(case)
    change(stored)
    folder = write_checkpoint(case, tmp_path / "orbax")
    (folder / "model.safetensors").unlink()
    write_arrays(stored, folder)
    with pytest.raises(InvalidArgument) as refusal:
        load_params(model_of("llama_mha"), folder, "loop")
    assert named in str(refusal.value)
    assert str(folder / "params") in str(refusal.value)
    with pytest.raises(InvalidArgument) as refusal:
        convert_folder(folder, tmp_path / "new", TO_SAFETENSORS)
    assert named in str(refusal.value)
    assert not (tmp_path / "new").exists()


def test_an_array_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    stored = {**tensors(case), "model.norm.weight": np.zeros(64, np.int8)}
    folder = write_checkpoint(case, tmp_path / "orbax")
    write_arrays(stored, folder)
    with pytest.raises(Unsupported, match=r"tensor model\.norm\.weight is int8; supported: float64, float32"):
        load_params(model_of("llama_mha"), folder, "loop")


@pytest.fixture
def orbax(tmp_path: Path) -> Path:
    convert_folder(write_checkpoint(tiny_case("llama_mha"), tmp_path / "once"), tmp_path / "orbax", TO_ORBAX)
    return tmp_path / "orbax"


def edit_manifest(folder: Path, **changes: object) -> None:
    value = json.loads((folder / "jpaged.json").read_text())
    (folder / "jpaged.json").write_text(json.dumps(value | changes))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            lambda folder: edit_manifest(folder, format_version=2),
            "format_version is 2; this version of jpaged supports 1",
        ),
        (
            lambda folder: edit_manifest(folder, format="other"),
            "must be a JSON object whose format is 'jpaged-orbax'",
        ),
        (lambda folder: edit_manifest(folder, architecture=None), "architecture is None; it must be a string"),
        (lambda folder: (folder / "jpaged.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "jpaged.json").unlink(), "did not write it, or was interrupted"),
        (lambda folder: shutil.rmtree(folder / "params"), "has no Orbax arrays"),
        (lambda folder: (folder / "params" / "_METADATA").write_text("[]"), "cannot be read as an Orbax checkpoint"),
        (lambda folder: shutil.rmtree(folder / "params" / "ocdbt.process_0"), "cannot be read"),
    ],
)
def test_a_folder_that_is_damaged_unfinished_or_too_new_is_refused(damage, named: str, orbax: Path) -> None:
    damage(orbax)
    with pytest.raises(InvalidArgument) as refusal:
        load_params(model_of("llama_mha"), orbax, "loop")
    assert named in str(refusal.value)
    assert str(orbax) in str(refusal.value)


def test_a_list_of_arrays_that_cannot_be_read_is_an_error_and_no_trace(
    orbax: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (orbax / "params" / "d").iterdir():
        path.write_bytes(bytes(range(256)))
    for _ in range(10):
        tensors = OrbaxTensors(orbax)
        for name in tensors.names:
            with pytest.raises(InvalidArgument, match=f"tensor {name} cannot be read: "):
                tensors.shape(name)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("place_of_it", [".", "default"])
def test_an_orbax_checkpoint_of_another_program_is_refused(place_of_it: str, tmp_path: Path) -> None:
    with ocp.PyTreeCheckpointer() as saver:
        saver.save(tmp_path / "other" / place_of_it, {"a": np.ones(3)}, force=True)
    with pytest.raises(InvalidArgument, match=r"holds an Orbax checkpoint but no jpaged\.json"):
        hub.find_folder(str(tmp_path / "other"))


def test_the_destination_is_not_overwritten(tmp_path: Path) -> None:
    source = write_checkpoint(tiny_case("llama_mha"), tmp_path / "once")
    (tmp_path / "a file").write_text("")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("")
    (tmp_path / "empty").mkdir()
    force = ConversionOptions("orbax", force=True)
    for destination, options, problem in (
        ("a file", force, "exists and is not a folder"),
        ("papers", TO_ORBAX, "exists and is not empty; --force replaces a checkpoint"),
        ("papers", force, "contains something other than a checkpoint"),
        ("once", force, "is the source .*, contains it, or is inside it"),
        ("once/deeper", TO_ORBAX, "is the source .*, contains it, or is inside it"),
        (".", force, "is the source .*, contains it, or is inside it"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            convert_folder(source, tmp_path / destination, options)
    convert_folder(source, tmp_path / "empty", TO_ORBAX)
    with pytest.raises(InvalidArgument, match="exists and is not empty"):
        convert_folder(source, tmp_path / "empty", TO_SAFETENSORS)
    convert_folder(source, tmp_path / "empty", ConversionOptions("safetensors", force=True))
    assert not (tmp_path / "empty" / "params").exists()
    load_params(model_of("llama_mha"), tmp_path / "empty", "loop")
    assert (tmp_path / "papers" / "thesis.tex").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"once", "a file", "papers", "empty"}


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_disk_that_fills_up_leaves_nothing(to, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tiny_case("llama_mha"), tmp_path / "once")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(conversion, "write_orbax" if to == "orbax" else "write_tensor_files", full)
    with pytest.raises(Unavailable, match=r"new could not be written and was removed: .*No space left"):
        convert_folder(source, tmp_path / "new", ConversionOptions(to))
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


def test_a_disk_that_is_too_small_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tiny_case("llama_mha"), tmp_path / "once")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InvalidArgument, match=r"destination: .* has 0\.00 GiB free; the checkpoint takes 0\.00 GiB"):
        convert_folder(source, tmp_path / "new", TO_ORBAX)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"to": "gguf"}, "to: 'gguf' is not one of orbax, safetensors"),
        ({"to": "orbax", "dtype": "int8"}, "dtype: 'int8' is not one of float32, bfloat16, float16"),
        ({"to": "safetensors", "max_shard_bytes": 5}, "max_shard_size: 5 bytes is below the limit .*, 1024"),
        ({"to": "orbax", "max_shard_bytes": 5000}, "max_shard_size: 5000 bytes is below the limit .*, 1048576"),
    ],
)
def test_options_out_of_their_limits_are_refused(options, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        ConversionOptions(**options)


def test_a_config_that_is_not_served_is_not_converted(tmp_path: Path) -> None:
    source = write_checkpoint(tiny_case("llama_mha"), tmp_path / "once")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["BloomForCausalLM"]}))
    with pytest.raises(Unsupported, match="architecture 'BloomForCausalLM' is not supported"):
        convert_folder(source, tmp_path / "new", TO_ORBAX)
    assert from_hf(config).architecture == "LlamaForCausalLM"
