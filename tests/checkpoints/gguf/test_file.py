"""GGUF files are found by their names and in folders, and what is broken or unknown in them is named."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.checkpoints import hub
from jpaged.checkpoints.conversion import ConversionOptions, convert_folder
from jpaged.checkpoints.gguf import file as files
from jpaged.checkpoints.gguf.config import hf_config
from jpaged.checkpoints.gguf.file import open_gguf
from jpaged.checkpoints.gguf.tensors import places
from jpaged.checkpoints.tensor_files import StableFile
from jpaged.checkpoints.weights import load_params
from jpaged.errors import InvalidArgument, JpagedError, NotFound, Unsupported
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from tests.checkpoints.gguf.files import checkpoint, of_kind, write_gguf
from tests.checkpoints.gguf.test_types import FLOAT

MODEL = checkpoint("llama_mha", num_hidden_layers=1)


def write(path: Path, **more: Any) -> Path:
    write_gguf(MODEL, path, of_kind("F32"), more=more)
    return path


def test_a_file_is_named_or_alone_in_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"what sees")
    (tmp_path / "config.json").write_text("{}")
    assert hub.find_folder(str(file)) == hub.find_folder(str(tmp_path)) == file
    assert hub.find_local(str(file)) == file
    shutil.copyfile(file, tmp_path / "other.gguf")
    with pytest.raises(InvalidArgument, match=r"has 2 GGUF models: choose one of other.gguf, tiny.gguf"):
        hub.find_folder(str(tmp_path))
    with pytest.raises(NotFound, match=r"missing.gguf"):
        hub.find_folder("missing.gguf")


@pytest.mark.parametrize(
    "more",
    [{"general.type": "mmproj"}, {"general.architecture": "clip"}, {"general.type": "imatrix"}],
    ids=lambda more: next(iter(more.values())),
)
def test_what_is_published_beside_a_model_is_none(more: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "tiny-q8_0.gguf")
    write(tmp_path / "tiny-beside.gguf", **more)
    assert hub.find_folder(str(tmp_path)) == file


def test_a_model_in_parts_is_one(tmp_path: Path) -> None:
    write_gguf(MODEL, tmp_path / "tiny.gguf", of_kind("F32"), split_max_tensors=4)
    first, *others = sorted(tmp_path.iterdir())
    assert re.search(r"-00001-of-0000\d.gguf$", first.name)
    assert len(others) > 1
    assert hub.find_folder(str(tmp_path)) == hub.find_folder(str(others[0])) == first
    (tmp_path / "whole").mkdir()
    whole = write(tmp_path / "whole" / "tiny.gguf")
    assert open_gguf(first).tensors.keys() == open_gguf(whole).tensors.keys()
    load_params(Model(hub.read_config(first), FLOAT), first, "loop")
    assert hub.fingerprint(first) != hub.fingerprint(whole)
    others[-1].unlink()
    with pytest.raises(InvalidArgument, match=rf"but {others[-1].name} is missing"):
        hub.read_config(first)
    shutil.copyfile(others[0], others[-1])
    with pytest.raises(InvalidArgument, match=r"tensor .* is also in .*gguf"):
        hub.read_config(first)


def test_a_part_by_another_name_is_refused(tmp_path: Path) -> None:
    write_gguf(MODEL, tmp_path / "tiny.gguf", of_kind("F32"), split_max_tensors=4)
    first, second, *_ = sorted(tmp_path.iterdir())
    swapped = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(swapped)
    with pytest.raises(InvalidArgument, match=rf"{first.name}: is part 2 by its metadata, but part 1 by its name"):
        hub.read_config(first)


def test_a_file_that_is_changed_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    assert hub.read_config(file).max_position_embeddings == 256
    write(file, **{"llama.context_length": 1024, "general.description": "longer"})
    assert hub.read_config(file).max_position_embeddings == 1024


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 3000, -8])
def test_a_file_that_is_cut_is_refused(kept: int, tmp_path: Path) -> None:
    whole = write(tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:kept])
    with pytest.raises(
        InvalidArgument,
        match=r"cut.gguf: is not a complete GGUF file: its .* bytes are truncated or damaged; download it again$",
    ):
        hub.read_config(cut)


@pytest.mark.parametrize("version", [1, 4])
def test_a_file_of_another_version_is_not_called_damaged(version: int, tmp_path: Path) -> None:
    whole = write(tmp_path / "tiny.gguf").read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(whole[:4] + version.to_bytes(4, "little") + whole[8:])
    with pytest.raises(InvalidArgument, match=rf"is a GGUF file of version {version}; supported versions: 2 and 3"):
        hub.read_config(other)


def test_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(InvalidArgument, match=r"other.gguf: is not a GGUF file: it begins with "):
        hub.read_config(other)


@pytest.mark.parametrize(("number", "name"), [(31, "Q4_0_4_4"), (38, "IQ4_NL_8_8"), (99, "unknown")])
def test_a_type_that_is_not_known_is_told_with_its_tensor(number: int, name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    stored = bytearray(file.read_bytes())
    begin = stored.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight")
    (num_axes,) = struct.unpack_from("<I", stored, begin)
    struct.pack_into("<I", stored, begin + 4 + 8 * num_axes, number)
    file.write_bytes(stored)
    message = (
        rf"tiny.gguf: tensor blk.0.attn_q.weight has unsupported type {number} \({name}\); supported GGUF types: F32"
    )
    with pytest.raises(Unsupported, match=message):
        hub.read_config(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("attn_q.weight", "attn_qkv.weight", "fused queries, keys and values; convert the model without --fuse-qkv"),
        ("ffn_up.weight", "ffn_gate_up_exps.weight", "fused gate and up matrices; convert the model without"),
        ("ffn_up.weight", "ffn_up.3.weight", "a single expert; convert the model with a newer llama.cpp"),
    ],
)
def test_a_layout_that_is_not_read_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    whole = open_gguf(file)
    tensors = {name.replace(old, new): tensor for name, tensor in whole.tensors.items()}
    with pytest.raises(Unsupported, match=rf"tiny.gguf: tensor blk.0.{new} is not supported: it has {message}"):
        places(dataclasses.replace(whole, tensors=tensors), from_hf(hf_config(whole)))


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"general.architecture": "mamba"}, Unsupported, "architecture 'mamba' is not supported; supported: llama"),
        ({"general.type": "adapter"}, Unsupported, "general.type is 'adapter'"),
        ({"llama.attention.clamp_kqv": 8.0}, Unsupported, "unknown setting attention.clamp_kqv=8.0"),
        ({"llama.block_count": None}, InvalidArgument, "llama block_count: is missing"),
        ({"llama.attention.causal": False}, Unsupported, "attention.causal is False"),
        ({"llama.attention.value_length": 32}, Unsupported, "attention.value_length is not attention.key_length, 16"),
        ({"llama.rope.dimension_count": 8}, Unsupported, "rope.dimension_count is 8; only fully rotated heads"),
        (
            {"llama.rope.scaling.type": "su"},
            Unsupported,
            "rope.scaling.type is 'su', but there is no tensor of factors",
        ),
        ({"llama.attention.head_count_kv": [4, 2]}, Unsupported, "attention.head_count_kv differs between layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.thinned(3)
def test_what_is_not_computed_is_refused(
    more: dict[str, Any], error: type[JpagedError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        hub.read_config(write(tmp_path / "tiny.gguf", **more))


def test_a_tensor_that_nobody_reads_is_named(tmp_path: Path) -> None:
    config, tensors = checkpoint("llama_gqa_bias", num_hidden_layers=1)
    write_gguf((config, tensors), tmp_path / "tiny.gguf", of_kind("F32"))
    file = open_gguf(tmp_path / "tiny.gguf")
    assert file.tensors["blk.0.attn_q.bias"].kind == "F32"
    del tensors["model.layers.0.self_attn.q_proj.bias"]
    write_gguf((config, tensors), tmp_path / "less.gguf", of_kind("F32"))
    model = Model(hub.read_config(tmp_path / "less.gguf"), FLOAT)
    with pytest.raises(InvalidArgument, match=r"model.layers.0.self_attn.k_proj.bias"):
        load_params(model, tmp_path / "less.gguf", "loop")


def test_a_file_is_converted_to_the_checkpoint_that_it_was_made_of(tmp_path: Path) -> None:
    config, tensors = checkpoint("mixtral", hidden_size=64)
    kinds = {"ffn_gate_exps": "Q8_0", "token_embd": "Q4_0", "attn_v": "F16"}
    plain = write_gguf((config, tensors), tmp_path / "tiny.gguf", lambda name, _: kinds.get(name.split(".")[-2], "F32"))
    convert_folder(tmp_path / "tiny.gguf", tmp_path / "folder", ConversionOptions("safetensors"))
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    assert stored.keys() == plain.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor.astype(np.float32), plain[name])
    want = dataclasses.replace(hub.read_config(tmp_path / "tiny.gguf"), quantization=None)
    assert hub.read_config(tmp_path / "folder") == want


def test_a_file_that_changes_after_it_was_opened_fails_the_read(tmp_path: Path) -> None:
    """A mapped page of a file that was made shorter would end the process."""
    file = write(tmp_path / "tiny.gguf")
    tensor = next(iter(open_gguf(file).tensors.values()))
    np.testing.assert_array_equal(tensor.read(), gguf.GGUFReader(file).tensors[0].data)
    os.truncate(tensor.path, 100)
    with pytest.raises(InvalidArgument, match=r"tiny\.gguf: changed while it was read"):
        tensor.read()
    write(tmp_path / "tiny.gguf")
    os.utime(tensor.path, ns=(1, 1))
    with pytest.raises(InvalidArgument, match=r"tiny\.gguf: changed while it was read"):
        tensor.read()


@pytest.mark.parametrize("num_reads", [0, 1, 2])
def test_a_file_that_is_cut_while_its_header_is_read_is_an_error(
    num_reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped page of a file that was made shorter would end the process."""
    file = write(tmp_path / "tiny.gguf", **{"general.description": "long " * 4000})
    num_done = 0
    fill = StableFile.fill

    def cutting(stable: StableFile, array: np.ndarray, begin: int) -> None:
        nonlocal num_done
        if num_done == num_reads:
            os.truncate(file, 0)
        num_done += 1
        fill(stable, array, begin)

    monkeypatch.setattr(StableFile, "fill", cutting)
    monkeypatch.setattr(files, "_FIRST_BYTES", 100)
    with pytest.raises(InvalidArgument, match=r"tiny\.gguf: changed while it was read"):
        open_gguf(file)
    assert num_done == num_reads + 1


def test_a_header_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "tiny.gguf", **{"general.description": "long " * 4000})
    monkeypatch.setattr(files, "MAX_HEADER_BYTES", 10_000)
    with pytest.raises(InvalidArgument, match=r"tiny\.gguf: its header is damaged, or over the limit of 10000 bytes"):
        open_gguf(file)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((), "has 0 axes; it must have 1 to 4"),
        ((1,) * 99, "has 99 axes; it must have 1 to 4"),
        ((1 << 63,) * 5, "has 5 axes; it must have 1 to 4"),
        ((1 << 62, 0, 64), r"has shape \[4611686018427387904, 0, 64\]; every axis must be above 0"),
    ],
    ids=["none", "many", "large", "empty"],
)
def test_a_tensor_that_no_file_can_hold_is_refused(shape: tuple[int, ...], problem: str, tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 4) + b"many" + struct.pack("<I", len(shape))
    header += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", 0, 0)
    (tmp_path / "tiny.gguf").write_bytes(header + bytes(64))
    with pytest.raises(InvalidArgument, match=f"tiny.gguf: tensor many {problem}"):
        open_gguf(tmp_path / "tiny.gguf")


def test_an_alignment_below_1_is_refused(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 17) + b"general.alignment"
    for alignment, is_valid in ((32, True), (-32, False)):
        file = tmp_path / f"{is_valid}.gguf"
        file.write_bytes(header + struct.pack("<Ii", 5, alignment) + bytes(64))
        if is_valid:
            assert open_gguf(file).metadata == {"general.alignment": alignment}
            continue
        with pytest.raises(InvalidArgument, match=r"False\.gguf: is not a complete GGUF file"):
            open_gguf(file)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"split.no": "x"}, "is part 'x' by its metadata, but part 1 by its name"),
        ({"llama.block_count": 2**31 - 1}, "block_count: is 2147483647; the limit is 4096"),
    ],
    ids=["part", "layers"],
)
def test_metadata_without_meaning_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", **more)
    with pytest.raises(InvalidArgument, match=message):
        hub.read_config(file)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.attn_q.weight", (4096,), r"q_proj.weight has shape \[4096\]; config.json requires \[64, 64\]"),
        ("blk.0.attn_q.weight", (1, 64, 64), r"q_proj.weight has shape \[1, 64, 64\]; config.json requires \[64, 64\]"),
        ("blk.0.attn_q.weight", (64, 32), r"q_proj.weight has shape \[64, 32\]; config.json requires \[64, 64\]"),
        ("token_embd.weight", (8384,), r"embed_tokens.weight has shape \[8384\]; config.json requires \[8384, 64\]"),
        ("rope_freqs.weight", (2, 4), r"rope_freqs.weight is F32 \[2, 4\]; it must be a vector of F32, F16, BF16"),
    ],
)
def test_a_quantized_tensor_of_another_shape_is_refused(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(other: str, of_one: tuple[int, ...]) -> str:
        return "Q8_0" if len(of_one) > 1 and other in ("blk.0.attn_q.weight", "token_embd.weight") else "F32"

    write_gguf(MODEL, tmp_path / "tiny.gguf", choose)
    whole = open_gguf(tmp_path / "tiny.gguf")
    tensor = whole.tensors.get(name, whole.tensors["output_norm.weight"])
    tensors = {**whole.tensors, name: dataclasses.replace(tensor, shape=shape)}
    changed = dataclasses.replace(whole, tensors=tensors)
    monkeypatch.setattr("jpaged.checkpoints.gguf.tensors.open_gguf", lambda _: changed)
    with pytest.raises(InvalidArgument, match=message):
        load_params(Model(hub.read_config(tmp_path / "tiny.gguf"), FLOAT), tmp_path / "tiny.gguf", "loop")
