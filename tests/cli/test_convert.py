"""`jpaged convert` from the command line: formats there and back, and what it says to what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.cli.convert import size_in_bytes
from jpaged.cli.main import main
from jpaged.errors import InvalidArgument
from tests.models.tiny import tensors, tiny_case, write_checkpoint


def test_the_demo_model_goes_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orbax, shards, whole = (str(tmp_path / name) for name in ("orbax", "shards", "whole"))
    assert main(["convert", "demo", orbax, "--to", "orbax"]) == 0
    assert f"written to {orbax}" in capsys.readouterr().err
    assert main(["convert", orbax, shards, "--to", "safetensors", "--max-shard-size", "2MB"]) == 0
    assert main(["convert", "demo", whole, "--to=safetensors"]) == 0
    parts = sorted(Path(shards).glob("*.safetensors"))
    assert len(parts) > 1
    assert all(part.stat().st_size < 2e6 + 20_000 for part in parts)
    read = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    want = load_file(Path(whole) / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in read.items()} == {
        name: tensor.tobytes() for name, tensor in want.items()
    }
    assert (Path(orbax) / "tokenizer.json").read_bytes() == (Path(whole) / "tokenizer.json").read_bytes()


@pytest.mark.long
def test_force_replaces_a_checkpoint_by_one_of_another_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = tiny_case("qwen2")
    source, target = str(write_checkpoint(case, tmp_path / "once")), str(tmp_path / "new")
    assert main(["convert", source, target, "--to", "orbax"]) == 0
    words = ["convert", source, target, "--to", "safetensors", "--dtype", "float16"]
    assert main(words) == 2
    assert "destination: " in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    stored = load_file(tmp_path / "new" / "model.safetensors")
    want = tensors(case)["model.norm.weight"].astype(np.float16)
    np.testing.assert_array_equal(stored["model.norm.weight"], want)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["demo", "new"], 2, "the following arguments are required: --to"),
        (["demo", "new", "--to", "gguf"], 2, "argument --to: invalid choice: 'gguf'"),
        (["demo", "new", "--to", "orbax", "--dtype", "int4"], 2, "argument --dtype: invalid choice: 'int4'"),
        (["demo", "new", "--to", "orbax", "--max-shard-size", "5 parsecs"], 2, "--max-shard-size: '5 parsecs' is not"),
        (["demo", "new", "--to", "orbax", "--max-shard-size", "5kB"], 2, "--max-shard-size: '5kB' is not a size"),
        (["demo", "new", "--to", "orbax", "--max-shard-size", "5KB"], 2, "--max-shard-size: 5000 bytes is below"),
        (["./missing", "new", "--to", "orbax"], 1, "model: folder ./missing does not exist"),
        ([".", "new", "--to", "orbax"], 2, "model: folder . has no config.json"),
        (["demo", "/proc/new", "--to", "orbax"], 1, "/proc/new could not be written"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *words]) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("10B", 10), ("5GiB", 5 * 2**30), ("1.5 KiB", 1536), ("2MB", 2_000_000), (" 1TB", 10**12)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5gib", "5 GB s", "1e9", "0x10"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a size: must be a number and one of B, KB"):
        size_in_bytes(text)
