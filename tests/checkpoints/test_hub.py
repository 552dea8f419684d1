"""A model's name becomes a folder, or an error that says why not."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from jpaged.checkpoints import hub
from jpaged.checkpoints.orbax import MANIFEST_FILE, PARAMS_FOLDER
from jpaged.config import ModelOptions
from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument, NotFound, Unsupported
from jpaged.hardware import multiplies_bfloat16
from jpaged.models.config import ModelConfig
from jpaged.models.hf_config import from_hf
from jpaged.plan.compilation import find_config
from tests.models.tiny import tiny_case, write_checkpoint


def test_a_folder_in_hugging_face_layout_is_taken_as_it_is(tmp_path: Path) -> None:
    write_checkpoint(tiny_case("qwen3"), tmp_path)
    assert hub.find_folder(str(tmp_path)) == tmp_path
    assert hub.read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "top_p": 0.9}))
    assert hub.read_config(tmp_path).eos_token_ids == (5, 6)


def test_demo_is_the_packaged_model_whatever_folder_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert hub.find_folder("demo") == hub.find_local("demo") == FOLDER


def test_a_model_of_the_hub_is_not_on_this_machine() -> None:
    assert hub.find_local("someone/model") is None


@pytest.mark.parametrize("find", [hub.find_folder, find_config])
def test_a_path_of_a_user_who_is_not_known_is_refused(find: Callable[[str], object]) -> None:
    with pytest.raises(InvalidArgument, match="model: ~nosuchuser/x begins with an unknown user"):
        find("~nosuchuser/x")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"model: folder .* has no config\.json"):
        hub.find_folder(str(tmp_path))


@pytest.mark.parametrize("name", ["./missing", "/missing", "~/missing", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(NotFound, match=f"folder {name} does not exist"):
        hub.find_folder(name)


def test_a_hub_id_becomes_a_snapshot_of_the_files_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str], list[str]]] = []

    def download(model: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((model, allow_patterns, ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.find_folder("someone/model") == tmp_path
    model, allowed, ignored = asked[0]
    assert model == "someone/model"
    assert {"*.json", "*.safetensors", "tokenizer.model"} <= set(allowed)
    assert "[!0-9]*/*" in ignored  # but modules of sentence-transformers, such as 1_Pooling


def test_a_hub_id_with_a_type_is_one_gguf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        *("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.IQ2_XS.gguf", "mmproj-m-Q8_0.gguf", "m-q8_0.gguf", "README.md"),
        *(f"BF16/m-BF16-0000{part}-of-00002.gguf" for part in (1, 2)),
        *("a-Q2_K.gguf", "b-Q2_K.gguf"),
    ]
    asked: list[str] = []

    def download(model: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(model)
        for name in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = {kind: hub.find_folder(f"a/m:{kind}").name for kind in ("Q4_K_M", "IQ2_XS", "Q8_0", "BF16")}
    assert found == {
        "Q4_K_M": "m-Q4_K_M.gguf",
        "IQ2_XS": "m.IQ2_XS.gguf",
        "Q8_0": "m-q8_0.gguf",
        "BF16": "m-BF16-00001-of-00002.gguf",
    }
    assert len(list(tmp_path.glob("BF16/*"))) == 2
    assert not (tmp_path / "m-Q4_K_S.gguf").exists()
    assert set(asked) == {"a/m"}
    with pytest.raises(NotFound, match=r"model: a/m has no GGUF file of type Q4: no file matches \*\[-\.\]Q4\.gguf"):
        hub.find_folder("a/m:Q4")
    with pytest.raises(InvalidArgument, match=r"a/m:Q2_K matches 2 GGUF models: a-Q2_K\.gguf, b-Q2_K\.gguf"):
        hub.find_folder("a/m:Q2_K")


def test_a_hub_that_cannot_be_reached_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, **_: object) -> str:
        raise LocalEntryNotFoundError("cannot find the snapshot\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(NotFound) as refusal:
        hub.find_folder("someone/model")
    assert "someone/model is not a local folder" in str(refusal.value)
    assert "LocalEntryNotFoundError: cannot find the snapshot" in str(refusal.value)


def test_the_hub_gets_the_revision_the_folder_and_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(model: str, **given: Any) -> str:
        asked.append((model, given))
        return str(tmp_path / model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    options = ModelOptions(model="a/b", revision="v1", download_dir="~/hub", hf_token="hf_x")
    assert hub.find_model(options) == tmp_path / "a" / "b"
    assert hub.find_tokenizer(options, tmp_path) == tmp_path
    assert hub.find_tokenizer(replace(options, tokenizer="a/b"), tmp_path) == tmp_path
    assert len(asked) == 1
    assert hub.find_tokenizer(replace(options, tokenizer_revision="v2"), tmp_path) == tmp_path / "a" / "b"
    assert hub.find_tokenizer(replace(options, tokenizer="c/d"), tmp_path) == tmp_path / "c" / "d"
    found = [(model, given.pop("revision", None), given.pop("allow_patterns")) for model, given in asked]
    assert [(model, revision) for model, revision, _ in found] == [("a/b", "v1"), ("a/b", "v2"), ("c/d", None)]
    assert ["*.safetensors" in patterns for *_, patterns in found] == [True, False, False]
    for _, given in asked:
        assert given.pop("ignore_patterns")
        assert given == {"cache_dir": Path("~/hub").expanduser(), "token": "hf_x"}


def test_a_local_folder_has_no_revisions(tmp_path: Path) -> None:
    assert hub.find_folder("demo", revision="main") == FOLDER
    with pytest.raises(
        InvalidArgument, match=r"revision: v1: .* is local; only models on the Hugging Face Hub"
    ) as error:
        hub.find_folder("demo", revision="v1")
    assert error.value.field == "revision"
    with pytest.raises(InvalidArgument, match=r"tokenizer_revision: v1: .* is local"):
        hub.find_tokenizer(ModelOptions(tokenizer=str(tmp_path), tokenizer_revision="v1"), FOLDER)


def test_a_tokenizer_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    for name in ("demo", str(FOLDER)):
        assert hub.find_tokenizer(ModelOptions(model="m", tokenizer=name), tmp_path) == FOLDER
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hub.find_tokenizer(ModelOptions(tokenizer=str(tmp_path)), FOLDER) == tmp_path
    with pytest.raises(NotFound, match=r"tokenizer: folder \./missing does not exist"):
        hub.find_tokenizer(ModelOptions(tokenizer="./missing"), FOLDER)


LLAMA = json.loads((FOLDER / "config.json").read_text())
OLD_LLAMA = {key: value for key, value in LLAMA.items() if key != "rope_parameters"} | {"rope_theta": 5e5}
SCALED = {**OLD_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
"""Demo configs in the layouts of transformers 5 and 4."""


@pytest.mark.parametrize(
    ("config", "overrides", "edited"),
    [
        (LLAMA, {"max_position_embeddings": 64}, {"max_position_embeddings": 64}),
        (LLAMA, {"architectures": ["MistralForCausalLM"]}, {"architectures": ["MistralForCausalLM"]}),
        (LLAMA, {"eos_token_id": [4, 5]}, {"eos_token_id": [4, 5]}),
        (LLAMA, {"rope_theta": 2e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}),
        (OLD_LLAMA, {"rope_theta": 2e4}, {"rope_theta": 2e4}),
        (LLAMA, {"rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
        (LLAMA, {"rope_parameters": YARN}, {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
        (LLAMA, {"rope_scaling": YARN, "rope_theta": 7.0}, {"rope_parameters": {**YARN, "rope_theta": 7.0}}),
        (
            LLAMA,
            {"rope_parameters": {**YARN, "rope_theta": 8.0}},
            {"rope_parameters": {**YARN, "rope_theta": 8.0}},
        ),
        (OLD_LLAMA, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        (OLD_LLAMA, {"rope_parameters": YARN}, {"rope_scaling": YARN}),
        (SCALED, {"rope_parameters": YARN}, {"rope_scaling": YARN}),
        (SCALED, {"rope_scaling": None}, {"rope_scaling": None}),
        (SCALED, {"rope_theta": 9.0}, {"rope_theta": 9.0}),
    ],
)
def test_overrides_are_edits_of_the_config(
    config: dict[str, Any], overrides: dict[str, Any], edited: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    before, found = hub.read_config(tmp_path), hub.read_config(tmp_path, overrides)
    path.write_text(json.dumps({**config, **edited}))
    assert found == hub.read_config(tmp_path) != before


def test_overrides_of_a_nested_config_are_merged() -> None:
    config = {"model_type": "x", "text_config": {"a": 1, "rope_parameters": {"rope_theta": 3.0}}, "vision_config": None}
    found = hub.override_config(config, {"text_config": {"b": 2, "rope_scaling": YARN}, "vision_config": {"c": 3}})
    assert found == {
        "model_type": "x",
        "text_config": {"a": 1, "b": 2, "rope_scaling": {**YARN, "rope_theta": 3.0}},
        "vision_config": {"c": 3},
    }


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"quantization_config": {"bits": 4}}, r"hf_overrides\.quantization_config: cannot be overridden"),
        (
            {"text_config": {"rope_theta": 1.0}},
            r"hf_overrides\.text_config\.rope_theta: rope_parameters has one for each",
        ),
        (
            {"max_position_embeddings": 0},
            r"max_position_embeddings: is 0; it must be .* \(hf_overrides: max_position_emb",
        ),
        ({"architectures": ["Unknown"]}, r"Unknown.*\(hf_overrides: architectures\)"),
        ({"use_magic": True}, r"use_magic.*\(hf_overrides: use_magic\)"),
    ],
)
def test_an_override_that_cannot_be_served_is_named(overrides: dict[str, Any], problem: str, tmp_path: Path) -> None:
    nested = {"text_config": {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | (nested if "text_config" in overrides else {})))
    with pytest.raises((InvalidArgument, Unsupported), match=problem):
        hub.read_config(tmp_path, overrides)


@pytest.mark.parametrize(("text", "problem"), [("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")])
def test_a_config_that_is_not_an_object_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgument, match=problem):
        hub.read_config(tmp_path)


def test_a_folder_of_the_hub_cache_is_its_snapshot(tmp_path: Path) -> None:
    cached = tmp_path / "models--someone--model"
    (cached / "refs").mkdir(parents=True)
    for name in ("first", "second"):
        (cached / "snapshots" / name).mkdir(parents=True)
    with pytest.raises(
        InvalidArgument, match=r"hub cache and has no snapshot of a complete model; `someone/model` down"
    ):
        hub.find_folder(str(cached))
    (cached / "snapshots" / "second" / "config.json").write_text("{}")
    assert hub.find_folder(str(cached)) == cached / "snapshots" / "second"
    (cached / "snapshots" / "first" / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="has 2 snapshots: choose one of them"):
        hub.find_folder(str(cached))
    (cached / "refs" / "main").write_text("first")
    assert hub.find_folder(str(cached)) == cached / "snapshots" / "first"
    os.truncate(cached / "refs" / "main", 4097)
    with pytest.raises(InvalidArgument, match=r"main: has 4097 bytes; the limit for this file is 4096 bytes"):
        hub.find_folder(str(cached))


def test_weights_of_modelopt_are_named(tmp_path: Path) -> None:
    shutil.copytree(hub.find_folder("demo"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(Unsupported, match=r"quant_algo is 'W4A8_AWQ'; supported: FP8, .*NVFP4"):
        hub.read_config(tmp_path)


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = (hub.find_folder("demo") / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text)
    assert hub.read_config(tmp_path).architecture == hub.read_config(hub.find_folder("demo")).architecture


def test_a_fingerprint_is_of_the_contents_wherever_they_are(tmp_path: Path) -> None:
    """A copy has the same, and weights of the same sizes that were trained further another."""
    mine, copy = tmp_path / "mine", tmp_path / "copy"
    shutil.copytree(hub.find_folder("demo"), mine)
    shutil.copytree(mine, copy)
    assert hub.fingerprint(mine) == hub.fingerprint(copy) == hub.fingerprint(hub.find_folder("demo"))
    (copy / "README.md").write_text("a copy")
    assert hub.fingerprint(mine) == hub.fingerprint(copy)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2 :] = bytes(byte ^ 1 for byte in content[len(content) // 2 :])
    weights.write_bytes(content)
    assert hub.fingerprint(mine) != hub.fingerprint(copy)
    assert hub.fingerprint(mine) == hub.fingerprint(mine, {}) != hub.fingerprint(mine, {"rope_theta": 2.0})


def test_a_fingerprint_of_orbax_is_of_its_arrays(tmp_path: Path) -> None:
    for name, content in (("mine", b"1" * 9000), ("other", b"1" * 8999 + b"2"), ("again", b"1" * 9000)):
        (tmp_path / name / PARAMS_FOLDER / "d").mkdir(parents=True)
        (tmp_path / name / hub.CONFIG_FILE).write_text("{}")
        (tmp_path / name / MANIFEST_FILE).write_text("{}")
        (tmp_path / name / PARAMS_FOLDER / "d" / "0").write_bytes(content)
    found = [hub.fingerprint(tmp_path / name) for name in ("mine", "other", "again")]
    assert found[0] == found[2] != found[1]


def config_in(dtype: str | None) -> ModelConfig:
    """A config that has this type."""
    return from_hf({**tiny_case("qwen3").config, "torch_dtype": dtype})


@pytest.mark.parametrize(
    ("chosen", "stored", "on_cpu", "on_old_cpu", "on_gpu"),
    [
        ("auto", "bfloat16", "bfloat16", "float32", "bfloat16"),
        ("auto", "float16", "bfloat16", "float32", "float16"),
        ("auto", "float32", "float32", "float32", "float32"),
        ("auto", None, "float32", "float32", "bfloat16"),
        ("float", "bfloat16", "float32", "float32", "float32"),
        ("float32", "bfloat16", "float32", "float32", "float32"),
        ("bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float16", "bfloat16", "bfloat16", "bfloat16"),
        ("half", "float16", "float16", "float16", "float16"),
        ("float16", "float16", "float16", "float16", "float16"),
    ],
)
def test_the_data_type_is_the_checkpoints_if_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, chosen: str, stored: str | None, on_cpu: str, on_old_cpu: str, on_gpu: str
) -> None:
    config = config_in(stored)
    for platform, has_bfloat16, want in (("cpu", True, on_cpu), ("cpu", False, on_old_cpu), ("gpu", False, on_gpu)):
        monkeypatch.setattr(hub, "multiplies_bfloat16", lambda has_bfloat16=has_bfloat16: has_bfloat16)
        dtype, reason = hub.choose_dtype(chosen, config, platform, Path("folder"))
        assert dtype.name == want
        # The reason is given exactly if the type is not the checkpoint's, or the user's.
        assert (reason is None) == (chosen != "auto" or stored in (None, want))


def test_another_data_type_than_the_checkpoints_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "multiplies_bfloat16", lambda: False)
    _, reason = hub.choose_dtype("auto", config_in("bfloat16"), "cpu")
    assert reason == (
        "dtype float32, not bfloat16 as in the checkpoint: this processor has neither AVX512_BF16 nor AMX"
    )
    _, reason = hub.choose_dtype("auto", config_in("float16"), "tpu")
    assert reason == (
        "dtype bfloat16, not float16 as in the checkpoint: TPUs have no float16 arithmetic in their matrix unit"
    )
    monkeypatch.setattr(hub, "multiplies_bfloat16", lambda: True)
    _, reason = hub.choose_dtype("auto", config_in("float16"), "cpu")
    assert reason == (
        "dtype bfloat16, not float16 as in the checkpoint: this processor multiplies bfloat16 natively, and float16 "
        "only as float32"
    )


@pytest.mark.parametrize("chosen", ["half", "float16"])
def test_a_data_type_that_was_chosen_and_is_not_supported_is_an_error(chosen: str) -> None:
    with pytest.raises(InvalidArgument, match=f"dtype: is {chosen}, but TPUs have no float16 .*; choose bfloat16"):
        hub.choose_dtype(chosen, config_in("float16"), "tpu")
    with pytest.raises(InvalidArgument, match="dtype: is int8; supported: float32, bfloat16, float16"):
        hub.choose_dtype("int8", config_in("float16"), "gpu")


@pytest.mark.parametrize("stored", ["bfloat16", "float32", None])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_float16_in_place_of_a_type_with_a_larger_range_is_explained(platform: str, stored: str | None) -> None:
    dtype, reason = hub.choose_dtype("float16", config_in(stored), platform)
    assert (dtype.name, reason) == (
        "float16",
        f"dtype float16, not {stored or 'no type'} as in the checkpoint: float16 ends at 65504, and a request whose "
        "activations exceed that ends with an error",
    )


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_families_that_overflow_float16_do_not_run_in_it(name: str) -> None:
    config = from_hf({**tiny_case(name).config, "torch_dtype": "float16"})
    dtype, reason = hub.choose_dtype("auto", config, "gpu")
    assert dtype.name == "bfloat16"
    assert reason == (
        f"dtype bfloat16, not float16 as in the checkpoint: hidden states of {config.architecture} exceed 65504, the "
        "largest float16"
    )
    with pytest.raises(InvalidArgument, match=r"dtype: is half, but hidden states of Gemma.* exceed 65504"):
        hub.choose_dtype("half", config, "gpu")


def test_the_packaged_models_are_float32_on_every_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "multiplies_bfloat16", lambda: True)
    for name in (hub.DEMO, hub.DEMO_DRAFT, hub.DEMO_CAPTIONER):
        folder = hub.find_folder(name)
        config = hub.read_config(folder)
        assert [
            hub.choose_dtype(*how, folder)[0].name for how in (("auto", config, "cpu"), ("auto", config, "tpu"))
        ] == [
            "float32",
            "bfloat16",
        ]
        assert hub.choose_dtype("bfloat16", config, "cpu", folder)[0].name == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", True),
        ("processor: 0\nflags\t: amx_bf16\nflags\t:", True),
        ("flags\t: fpu avx512f avx512_vnni\nvmx flags: avx512_bf16", False),
        ("Features\t: asimd bf16", False),
        ("", False),
    ],
)
def test_the_features_of_the_processor_are_those_that_the_system_lists(tmp_path: Path, flags: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(flags)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") == has
    assert not multiplies_bfloat16(tmp_path / "missing")


def put_in_storage(files: Mapping[str, str], root: str) -> Any:
    storage = fsspec.filesystem("memory")
    for name, text in files.items():
        storage.pipe_file(f"/{root}/{name}", text.encode())
    return storage


def test_a_url_is_copied_once_and_again_if_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": "{}", "model.safetensors": "old", "1_Pooling/config.json": "{}"}
    others = {"consolidated.safetensors": "x", "original/params.json": "{}", "README.md": "x"}
    storage = put_in_storage(files | others, "models/tiny")
    copied: list[str] = []
    get_file = type(storage).get_file

    def count(self: Any, source: str, path: str, **more: Any) -> None:
        copied.append(source)
        get_file(self, source, path, **more)

    monkeypatch.setattr(type(storage), "get_file", count)
    folder = hub.find_folder("memory://models/tiny", download_dir=str(tmp_path))
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == files.keys()
    assert hub.find_folder("memory://models/tiny/", download_dir=str(tmp_path)).is_dir()
    assert hub.find_folder("memory://models/tiny", download_dir=str(tmp_path)) == folder
    num_before = len(copied)
    put_in_storage({"model.safetensors": "newer"}, "models/tiny")
    changed = hub.find_folder("memory://models/tiny", download_dir=str(tmp_path))
    assert (changed / "model.safetensors").read_text() == "newer"
    assert (folder / "model.safetensors").read_text() == "old"
    assert len(copied) == num_before + 3


def test_a_url_of_a_gguf_file_brings_its_parts(tmp_path: Path) -> None:
    names = [f"tiny-Q4_0-0000{part}-of-00002.gguf" for part in (1, 2)]
    put_in_storage(dict.fromkeys((*names, "tiny-Q8_0.gguf", "config.json"), "GGUF"), "models/parts")
    found = hub.find_folder(f"memory://models/parts/{names[0]}", download_dir=str(tmp_path))
    assert found.name == names[0]
    assert sorted(path.name for path in found.parent.iterdir()) == names


def test_names_in_storage_stay_inside_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = put_in_storage({"config.json": "{}"}, "models/hostile")
    outside = "/models/hostile/0/../../../outside.json"
    monkeypatch.setattr(type(storage), "find", lambda *_, **__: ["/models/hostile/config.json", outside])
    monkeypatch.setattr(type(storage), "ukey", lambda _, path: path)
    monkeypatch.setattr(type(storage), "get_file", lambda _, __, path: Path(path).write_text("{}"))
    with pytest.raises(NotFound, match=r"0/\.\./\.\./\.\./outside\.json leads out of the folder"):
        hub.find_folder("memory://models/hostile", download_dir=str(tmp_path / "cache" / "models"))
    assert list(tmp_path.rglob("*.json")) == []


def test_a_file_with_the_same_url_is_copied_again_if_its_tag_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = type(put_in_storage({"config.json": "{}"}, "models/web"))
    tags = ["a"]
    monkeypatch.setattr(storage, "ukey", lambda _, path: path)  # as the client for HTTP
    monkeypatch.setattr(storage, "info", lambda *_, **__: {"size": 2, "ETag": tags[-1], "type": "file"})
    found = []
    for tag in ("a", "a", "b"):
        tags.append(tag)
        found.append(hub.find_folder("memory://models/web", download_dir=str(tmp_path)))
    assert found[0] == found[1] != found[2]


def test_a_name_of_a_gguf_file_is_not_a_pattern(tmp_path: Path) -> None:
    put_in_storage({"tiny[Q4].gguf": "GGUF"}, "models/brackets")
    found = hub.find_folder("memory://models/brackets/tiny[Q4].gguf", download_dir=str(tmp_path))
    assert found.name == "tiny[Q4].gguf"


def test_a_full_or_unwritable_folder_for_copies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = type(put_in_storage({"config.json": "{}"}, "models/full"))

    def fill(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "get_file", fill)
    with pytest.raises(InvalidArgument, match=r"download_dir: .*has no room for memory://models/full: config\.json"):
        hub.find_folder("memory://models/full", download_dir=str(tmp_path))
    assert list(tmp_path.rglob("*.*")) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"download_dir: .*cannot be written"):
        hub.find_folder("memory://models/full", download_dir=str(tmp_path / "file"))


def test_a_url_of_a_gguf_file_lists_only_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stored" / "deeper").mkdir(parents=True)
    (tmp_path / "stored" / "tiny.gguf").write_text("GGUF")
    storage = type(fsspec.filesystem("file"))
    listed: list[str] = []
    list_folder = storage.ls

    def count(self: Any, path: str, *args: Any, **more: Any) -> Any:
        listed.append(Path(path).name)
        return list_folder(self, path, *args, **more)

    monkeypatch.setattr(storage, "ls", count)
    found = hub.find_folder(f"file://{tmp_path}/stored/tiny.gguf", download_dir=str(tmp_path / "copies"))
    assert found.read_text() == "GGUF"
    assert listed == ["stored"]


@pytest.mark.parametrize(
    ("url", "kind", "problem"),
    [
        (
            "memory://models/nothing",
            NotFound,
            "memory://models/nothing: FileNotFoundError: no file of a model is there",
        ),
        ("nonsense://models/tiny", InvalidArgument, "Protocol not known: nonsense"),
        ("memory://me:secret@models/nothing", NotFound, "^model: memory://models/nothing: FileNotFoundError"),
    ],
)
def test_a_url_without_a_model_is_refused(url: str, kind: type[Exception], problem: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=problem):
        hub.find_folder(url, download_dir=str(tmp_path))
    with pytest.raises(InvalidArgument, match="only models on the Hugging Face Hub have revisions"):
        hub.find_folder(url, revision="v2")
    assert list(tmp_path.iterdir()) == []
