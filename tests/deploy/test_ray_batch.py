"""A batch over Ray: its blocks and parts without Ray, and the whole of it on this machine with a worker killed."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jpaged.errors import InvalidArgument, JpagedError, NotFound, Unavailable
from jpaged.openai.lines import BadLine, failure_line, parse_line, response_line
from tests.processes import run_with_ray

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"
PATIENCE_S = 1800.0


@pytest.fixture(scope="module")
def blocks():
    spec = importlib.util.spec_from_file_location("blocks", FOLDER / "blocks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["blocks"] = module  # where dataclasses look for their own module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["blocks"]


def row(i: int) -> dict[str, Any]:
    return {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{i}"}}


def text_of(i: int) -> str:
    return json.dumps(row(i))


def cut(blocks: ModuleType, path: Path, block_lines: int) -> list[Any]:
    found = [blocks.spans_of(str(file), block_lines) for file in blocks.files_in(path)]
    return list(blocks.blocks_of(found, path))


def test_a_file_is_cut_into_blocks_that_are_read_as_it_is(blocks, tmp_path):
    texts = ["\ufeff" + text_of(0), text_of(1), "", "nonsense", text_of(2), "  ", text_of(3)]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(texts), encoding="utf-8")
    found = cut(blocks, source, 2)
    assert [(block.index, block.span.num_lines, block.span.first_number) for block in found] == [
        (0, 2, 1),
        (1, 2, 4),
        (2, 1, 7),
    ]
    reader = blocks.Reader()
    lines = [line for block in found for line in reader.lines(block.span)]
    assert [(line.number, line.custom_id) for line in lines] == [(1, "c0"), (2, "c1"), (4, None), (5, "c2"), (7, "c3")]
    assert isinstance(lines[2], BadLine)
    assert lines[4] == parse_line(7, texts[6])


def test_parquet_is_cut_within_its_row_groups(blocks, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.Table.from_pylist([row(i) for i in range(7)]), data / "b.parquet", row_group_size=4)
    (data / "a.jsonl").write_text(text_of(7) + "\n")
    found = cut(blocks, data, 3)
    assert [(block.span.row_group, block.span.begin, block.span.end) for block in found[1:]] == [
        (0, 0, 3),
        (0, 3, 4),
        (1, 0, 3),
    ]
    reader = blocks.Reader()
    lines = [line for block in found for line in reader.lines(block.span)]
    assert [line.custom_id for line in lines] == ["c7", *(f"c{i}" for i in range(7))]
    assert [line.number for line in lines] == [1, *range(1, 8)]


def test_a_parts_name_is_a_function_of_place_and_content(blocks, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(text_of(i) + "\n" for i in range(6)))
    names = [block.part for block in cut(blocks, source, 2)]
    assert names == [block.part for block in cut(blocks, source, 2)]
    assert len(set(names)) == 3
    source.write_text(source.read_text().replace("p3", "P3"))
    assert [a == b.part for a, b in zip(names, cut(blocks, source, 2), strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text_of(0) + "\n" + text_of(1) + "\n" + text_of(0) + "\n", "1 lines have the custom_id of another"),
        ("nonsense\n", "no line has a custom_id"),
    ],
)
def test_inputs_that_have_not_one_result_a_line_are_refused(blocks, tmp_path, text, message):
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        cut(blocks, source, 1)
    with pytest.raises(InvalidArgument, match=r"INPUT: .* is no file, and no folder of files"):
        blocks.files_in(tmp_path / "nowhere")
    (tmp_path / "bytes.jsonl").write_bytes(b"{}\n\xff\n")
    with pytest.raises(InvalidArgument, match=r"bytes\.jsonl: line 2: is not UTF-8"):
        blocks.spans_of(str(tmp_path / "bytes.jsonl"), 1)


def test_parts_that_are_there_are_left_out_and_those_that_may_pass_run_again(blocks, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(text_of(i) + "\n" for i in range(4)))
    found = cut(blocks, source, 1)
    with blocks.Parts(output, found) as parts:
        assert parts.missing() == found
        made = [blocks.Part(output, block) for block in found]
        assert [part.begin() for part in made] == [1, 1, 1, 1]
        assert made[0].begin() == 2
        made[0].write([response_line("c0", "r", {})])
        made[1].write([failure_line("c1", NotFound("never"))])
        made[2].write([failure_line("c2", Unavailable("now"))])
        assert parts.missing() == found[2:]
        with (
            pytest.raises(InvalidArgument, match=r"OUTPUT: .*out is being written by another run"),
            parts.__class__(output, found),
        ):
            pass
    (output / f".{found[3].part}.torn").write_text("half of a li")
    with blocks.Parts(output, found) as parts:
        assert sorted(path.name for path in output.glob(".part-*")) == []  # nor are tries of another run counted
        for block in found[2:]:
            blocks.Part(output, block).write([response_line(f"c{block.index}", "r", {})])
        assert parts.missing() == []
        assert parts.total() == blocks.Tally(num_succeeded=3, num_failed=1, num_passing=0)
        blocks.Part(output, found[0]).write([])
        with pytest.raises(JpagedError, match="has 0 results of 1"):
            parts.total()


def test_parts_of_another_input_are_left_alone(blocks, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text(text_of(0) + "\n")
    (block,) = cut(blocks, source, 1)
    output.mkdir()
    blocks.Part(output, dataclasses.replace(block, index=1)).write([])
    with pytest.raises(InvalidArgument, match="is of another input or --block-lines"), blocks.Parts(output, [block]):
        pass
    assert len(list(output.glob("part-*"))) == 1


@pytest.mark.long
def test_a_batch_over_two_workers_of_which_one_is_killed_is_that_of_one_process():
    lines = run_with_ray(FOLDER, "check_batch.py", PATIENCE_S)
    said = [line.removeprefix("ray batch: ") for line in lines if line.startswith("ray batch: ")]
    assert said[1].split(" ", 2)[2].startswith("was killed after its first block; 17 blocks")
    assert said[2] == "a second run did the two blocks that were missing"
