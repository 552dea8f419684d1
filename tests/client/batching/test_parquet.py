"""Parquet in and out of a batch: the same results as lines of JSON, streamed, and taken up again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jpaged.client import batch, parquet
from jpaged.client.batch import BatchOptions, run_batch
from jpaged.client.parquet import ParquetLines, get_journal_path, pack, unpack
from jpaged.client.results import OutputError
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.openai.lines import BadLine, Line
from tests.client.test_batch import failed, ignore, results, simple, write_input
from tests.server.harness import running

URL = "/v1/completions"


def row(i: int, **changes: Any) -> dict[str, Any]:
    body = {"prompt": f"prompt {i}", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"c{i}", "method": "POST", "url": URL, "body": json.dumps(body), **changes}


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def choices(line: dict[str, Any]) -> Any:
    return line["response"]["body"].get("choices")


def packed(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of an output as its lines would be."""
    rows = pq.read_table(path).to_pylist()
    assert len({one["custom_id"] for one in rows}) == len(rows)
    for one in rows:
        if one["response"] is not None:
            one["response"]["body"] = json.loads(one["response"]["body"])
    return {one["custom_id"]: one for one in rows}


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr(batch, "_FIRST_BACKOFF_S", 0.001)


async def test_results_are_those_of_the_same_lines(tmp_path):
    bodies = [*simple(5), (URL, {"prompt": "x", "echo": True}), (URL, {"prompt": "x", "logprobs": 1, "max_tokens": 2})]
    lines = write_input(tmp_path / "in.jsonl", bodies)
    rows = [json.loads(text) for text in lines.read_text().splitlines()]
    texts = write(tmp_path / "texts.parquet", [{**one, "body": json.dumps(one["body"])} for one in rows])
    structs = write(tmp_path / "structs.parquet", rows)
    async with running() as harness:
        for source in (lines, texts, structs):
            out = source.with_suffix(".out.parquet")
            summary = await run_batch(BatchOptions(source, out, harness.target), ignore)
            assert (summary.num_lines, summary.num_succeeded, summary.num_failed) == (7, 6, 1)
            assert not get_journal_path(out).exists()
        await run_batch(BatchOptions(texts, tmp_path / "out.jsonl", harness.target), ignore)
    found = packed(tmp_path / "in.out.parquet")
    assert pq.read_schema(tmp_path / "in.out.parquet") == parquet.OUTPUT_SCHEMA
    told = found["c5"]["response"]
    assert told["status_code"] == 400 and told["body"]["error"]["code"] == "INVALID_ARGUMENT"
    assert found["c0"]["response"]["status_code"] == 200
    others = (packed(tmp_path / "texts.out.parquet"), packed(tmp_path / "structs.out.parquet"))
    for other in (*others, results(tmp_path / "out.jsonl")):
        assert {name: choices(line) for name, line in other.items()} == {n: choices(line) for n, line in found.items()}


def test_structs_lose_their_nulls_and_keep_all_else(tmp_path):
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hi"}], "stop": None},
        {"messages": [{"role": "user", "content": "hi", "name": "me"}], "stop": ["a"], "top_p": 0.5},
    ]
    source = write(tmp_path / "in.parquet", [row(i, url="/v1/chat/completions", body=bodies[i]) for i in range(2)])
    lines = list(ParquetLines(source))
    assert [line.body for line in lines if isinstance(line, Line)] == [{"messages": bodies[0]["messages"]}, bodies[1]]


def test_rows_that_are_no_requests_are_failed_lines(tmp_path):
    rows = [
        row(0),
        row(1, body="{"),
        row(2, body="[1]"),
        row(3, url="/v1/x"),
        row(4, custom_id=None),
        row(5, body=None),
    ]
    lines = ParquetLines(write(tmp_path / "in.parquet", rows))
    assert (lines.num_lines, set(lines.ids)) == (6, {"c0", "c1", "c2", "c3", "c5"})
    bad = {line.number: (line.custom_id, str(line.error)) for line in lines if isinstance(line, BadLine)}
    assert bad.keys() == {2, 3, 4, 5, 6}
    assert bad[2][0] == "c1"
    assert bad[2][1].startswith("line 2: body: is not JSON: ")
    assert bad[3] == ("c2", "line 3: body: is not a JSON object")
    assert bad[5] == (None, "line 5: custom_id: None is not a non-empty string")
    assert bad[6] == ("c5", "line 6: body: is not a JSON object")


def test_a_struct_with_what_json_has_not_is_a_failed_line(tmp_path):
    table = pa.table({"custom_id": ["a"], "method": ["POST"], "url": [URL], "body": [{"prompt": b"bytes"}]})
    pq.write_table(table, tmp_path / "in.parquet")
    (line,) = ParquetLines(tmp_path / "in.parquet")
    assert isinstance(line, BadLine)
    assert str(line.error) == "line 1: body.prompt: b'bytes' is not a JSON value"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"custom_id": "a", "method": "POST", "url": URL}], "in.parquet: body: is missing"),
        ([row(0, note="x")], "in.parquet: note: unknown column; the columns are custom_id, method, url, body"),
        ([row(0), row(1), row(0)], "line 3: custom_id: 'c0' is also that of line 1"),
        ([row(0, custom_id=""), row(1, custom_id=None)], "in.parquet: no row has a custom_id"),
    ],
)
def test_files_that_are_no_input_are_refused(tmp_path, rows, message):
    source = write(tmp_path / "in.parquet", rows)
    with pytest.raises(InvalidArgument) as raised:
        ParquetLines(source)
    assert message in str(raised.value)


def test_a_file_that_is_no_parquet_and_a_folder_without_one_are_refused(tmp_path):
    (tmp_path / "in.parquet").write_text("nonsense")
    with pytest.raises(InvalidArgument, match=r"--input: .*in\.parquet cannot be read: "):
        ParquetLines(tmp_path / "in.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=r"--input: .*empty has no file whose name ends in \.parquet"):
        ParquetLines(tmp_path / "empty")


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "b.parquet", [row(2), row(3)])
    write(folder / "a.parquet", [row(0), row(1)])
    lines = ParquetLines(folder)
    assert [(line.number, line.custom_id) for line in lines] == [(1, "c0"), (2, "c1"), (3, "c2"), (4, "c3")]
    write(folder / "c.parquet", [row(1)])
    with pytest.raises(InvalidArgument, match="line 5: custom_id: 'c1' is also that of line 2"):
        ParquetLines(folder)


@pytest.mark.long
def test_of_a_file_no_more_is_in_memory_than_a_few_row_groups(tmp_path):
    text = "".join(chr(33 + i % 90) for i in range(1 << 19))
    rows = [row(i, body=json.dumps({"prompt": f"{i}{text}"})) for i in range(64)]
    source = write(tmp_path / "in.parquet", rows, row_group_size=2, use_dictionary=False, compression="none")
    assert source.stat().st_size > 30 << 20
    del rows
    before, most = pa.total_allocated_bytes(), 0
    for line in ParquetLines(source):
        assert isinstance(line, Line)
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 16 << 20


@pytest.mark.long
async def test_a_run_that_ends_in_between_leaves_lines_that_the_next_goes_on_from(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_MAX_TRIES", 2)
    source, out = (
        write(tmp_path / "in.parquet", [row(i) for i in range(20)], row_group_size=3),
        tmp_path / "out.parquet",
    )
    async with running() as harness:

        def stop_after_five(summary):
            if summary.num_succeeded == 5:
                harness.server.request_stop()

        with pytest.raises(Unavailable):
            await run_batch(BatchOptions(source, out, harness.target, max_concurrency=2), stop_after_five)
    assert not out.exists()
    num_done = len(results(get_journal_path(out)))
    assert 5 <= num_done < 20
    with get_journal_path(out).open("a") as journal:
        journal.write('{"id": "batch_req_torn')
    async with running() as harness:
        options = BatchOptions(source, out, harness.target)
        summary = await run_batch(options, ignore)
        assert (summary.num_skipped, summary.num_succeeded) == (num_done, 20 - num_done)
        whole = packed(out)
        assert whole.keys() == {f"c{i}" for i in range(20)}
        again = await run_batch(options, ignore)
        assert (again.num_skipped, again.num_succeeded) == (20, 0)
    assert packed(out) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]


async def test_what_may_pass_in_an_output_runs_again(tmp_path):
    source, out = write(tmp_path / "in.parquet", [row(i) for i in range(3)]), tmp_path / "out.parquet"
    get_journal_path(out).write_text(failed("c0", "UNAVAILABLE") + failed("c1", "NOT_FOUND"))
    pack(get_journal_path(out), out)
    async with running() as harness:
        summary = await run_batch(BatchOptions(source, out, harness.target), ignore)
    assert (summary.num_skipped, summary.num_failed_before, summary.num_succeeded) == (1, 1, 2)
    assert [name for name, line in packed(out).items() if line["error"]] == ["c1"]


def test_lines_become_rows_and_lines_again(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_GROUP_ROWS", 2)
    journal, out = tmp_path / "out.parquet.jsonl", tmp_path / "out.parquet"
    body = {"text": "a\u2028\u00e9", "logprob": -0.1, "none": None}
    response = {"status_code": 200, "request_id": "r", "body": body}
    lines = [
        {"id": "batch_req_1", "custom_id": "a", "response": response, "error": None},
        {"id": "batch_req_2", "custom_id": "b", "response": None, "error": {"code": "X", "message": "m"}},
        {"id": "batch_req_3", "custom_id": None, "response": None, "error": {"code": "X", "message": "m"}},
    ]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pack(journal, out)
    assert not journal.exists()
    assert pq.ParquetFile(out).num_row_groups == 2
    unpack(out, journal)
    assert [json.loads(text) for text in journal.read_text(encoding="utf-8").split("\n")[:-1]] == lines


def test_half_of_a_character_has_no_place_and_harms_none(tmp_path):
    journal, out = tmp_path / "out.parquet.jsonl", tmp_path / "out.parquet"
    journal.write_text(failed("\udc00", "INVALID_ARGUMENT") + failed("a", "INVALID_ARGUMENT"))
    pack(journal, out)
    assert [one["custom_id"] for one in pq.read_table(out).to_pylist()] == [None, "a"]


async def test_a_file_that_is_no_output_is_left_alone(tmp_path):
    source, out = write(tmp_path / "in.parquet", [row(0)]), write(tmp_path / "out.parquet", [row(0)])
    before = out.read_bytes()
    with pytest.raises(InvalidArgument, match=r"out\.parquet: is not the output of a batch: move the file away"):
        await run_batch(BatchOptions(source, out, "127.0.0.1:1"), ignore)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]


def test_an_output_that_cannot_be_written_leaves_the_lines(tmp_path):
    journal = tmp_path / "lines"
    journal.write_text(failed("a", "INVALID_ARGUMENT"))
    with pytest.raises(OutputError, match=r"--output: .* cannot be written"):
        pack(journal, tmp_path / "nowhere" / "out.parquet")
    assert journal.read_text() == failed("a", "INVALID_ARGUMENT")


def test_integer_ids_are_texts(tmp_path):
    table = pa.Table.from_pylist([{**row(i), "custom_id": i} for i in range(3)])
    pq.write_table(table, tmp_path / "in.parquet")
    lines = ParquetLines(tmp_path / "in.parquet")
    assert list(lines.ids) == ["0", "1", "2"]
    assert [line.custom_id for line in lines] == ["0", "1", "2"]
    pq.write_table(pa.concat_tables([table, table]), tmp_path / "twice.parquet")
    with pytest.raises(InvalidArgument, match="line 4: custom_id: '0' is also that of line 1"):
        ParquetLines(tmp_path / "twice.parquet")


BOMB = """
import resource, sys
from pathlib import Path
from jpaged.client.parquet import ParquetLines
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lines = ParquetLines(Path(sys.argv[1]))
assert sum(1 for _ in lines) == int(sys.argv[2])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.long
@pytest.mark.parametrize("is_struct", [False, True])
def test_a_small_file_that_stands_for_a_huge_one_is_read_in_little_memory(tmp_path, is_struct):
    num_rows, text = 60, "x" * 8_000_000
    body = {"prompt": text} if is_struct else json.dumps({"prompt": text})
    bodies = pa.array([body]).take(pa.array([0] * num_rows)) if is_struct else pa.array([body] * num_rows)
    columns = {"custom_id": [f"c{i}" for i in range(num_rows)], "method": ["POST"] * num_rows, "url": [URL] * num_rows}
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({**columns, "body": bodies}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    used = subprocess.run([sys.executable, "-c", BOMB, path, str(num_rows)], check=True, capture_output=True, text=True)
    assert int(used.stdout) < 400  # MiB; all rows together are 480


def test_a_body_that_no_server_takes_is_a_bad_line(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_BODY_BYTES", 100)
    (line,) = ParquetLines(write(tmp_path / "in.parquet", [row(0, body=json.dumps({"prompt": "x" * 100}))]))
    assert isinstance(line, BadLine)
    assert str(line.error) == "line 1: body: 114 characters are over the limit of 100"
