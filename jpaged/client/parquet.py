"""Parquet as input and output of a batch. Row groups are streamed: of a file only its ids stay in memory.

    in    columns custom_id (a string or an integer), method, url and body: JSON text, or a struct whose nulls count as
          absent fields
    out   columns id, custom_id, response {status_code, request_id, body} and error {code, message}; body is JSON text

A Parquet file cannot be appended to, because its index is at the end. So results are collected as lines in a journal
(`get_journal_path`), which is converted to the output when every line has its result; an existing output is first
converted back to a journal. After a crash the old or the new output exists, and the journal until the new output is
complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jpaged import json_text
from jpaged.client.results import OutputError, replace_file
from jpaged.errors import InvalidArgument
from jpaged.openai.lines import BadLine, Line, parse_request_line

SUFFIX = ".parquet"
COLUMNS = ("custom_id", "method", "url", "body")
OUTPUT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("custom_id", pa.string()),
        (
            "response",
            pa.struct([("status_code", pa.int32()), ("request_id", pa.string()), ("body", pa.string())]),
        ),
        ("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
    ]
)
_BATCH_ROWS = 256
MAX_BODY_BYTES = 64 << 20
"""No server accepts a larger body."""
_GROUP_ROWS = 4096
_GROUP_BYTES = 32 << 20


class ParquetLines:
    """The rows of a Parquet file, or of all in a folder in the order of their names, as lines; row 1 is line 1.

    Attributes:
        ids: the custom_ids.
        num_lines: number of rows, including those without an id.

    Raises:
        InvalidArgument: it cannot be read, a column is missing or unknown, no row has a custom_id, or two share one.
    """

    def __init__(self, path: Path) -> None:
        self._paths = files_in(path)
        self.num_lines = 0
        numbers: dict[str, int] = {}
        for file in self._paths:
            with _reading(file), _opened(file) as opened:
                _check_columns(file, opened.schema_arrow.names)
                for batch in opened.iter_batches(_BATCH_ROWS, columns=["custom_id"]):
                    self._number((_get_id(one.as_py()) for one in batch.column(0)), numbers)
        if self.num_lines and not numbers:
            raise InvalidArgument("--input", f"{path}: no row has a custom_id")
        self.ids = numbers.keys()

    def __iter__(self) -> Iterator[Line | BadLine]:
        rows = (row for file in self._paths for _, row in get_rows(file))
        return (row_line(number, row) for number, row in enumerate(rows, start=1))

    def _number(self, custom_ids: Iterable[Any], numbers: dict[str, int]) -> None:
        for custom_id in custom_ids:
            self.num_lines += 1
            if not isinstance(custom_id, str) or not custom_id:
                continue
            first = numbers.setdefault(custom_id, self.num_lines)
            if first != self.num_lines:
                where = f"line {self.num_lines}: custom_id"
                raise InvalidArgument(where, f"{custom_id!r} is also that of line {first}")


def files_in(path: Path) -> list[Path]:
    """Return the Parquet files of an input, sorted by name."""
    files = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise InvalidArgument("--input", f"{path} has no file whose name ends in {SUFFIX}")
    return files


def get_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of an input, each with the row group's number; only a few rows are in memory at a time.

    Raises:
        InvalidArgument: it cannot be read, or a column is missing or unknown.
    """
    with _reading(path), _opened(path) as file:
        _check_columns(path, file.schema_arrow.names)
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=list(COLUMNS)):
                columns = {name: batch.column(name) for name in COLUMNS}
                for i in range(batch.num_rows):
                    yield group, {name: column[i].as_py() for name, column in columns.items()}


def _opened(path: Path) -> pq.ParquetFile:
    """Open a file with dictionary-encoded texts, so that rows share them: a small file may expand to a huge one."""
    metadata = pq.read_metadata(path)
    columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    return pq.ParquetFile(path, metadata=metadata, read_dictionary=texts)


def _get_id(value: Any) -> Any:
    """Return a custom_id, with an integer converted to a string."""
    return str(value) if type(value) is int else value


def row_line(number: int, row: Mapping[str, Any]) -> Line | BadLine:
    """Convert a row to the line of that number."""
    body, custom_id = row["body"], _get_id(row["custom_id"])
    try:
        if isinstance(body, str) and len(body) > MAX_BODY_BYTES:
            problem = f"{len(body)} characters are over the limit of {MAX_BODY_BYTES}"
            raise InvalidArgument(f"line {number}: body", problem)
        body = (
            json_text.load_object(f"line {number}: body", body)
            if isinstance(body, str)
            else _json(f"line {number}: body", body)
        )
    except InvalidArgument as error:
        return BadLine(number, custom_id or None, error)
    return parse_request_line(number, {**row, "custom_id": custom_id, "body": body})


def get_journal_path(output: Path) -> Path:
    """Return the path where results are collected before conversion to Parquet."""
    return output.with_name(output.name + ".jsonl")


def pack(journal: Path, output: Path) -> None:
    """Convert the journal to the output, and remove the journal.

    Raises:
        OutputError: it cannot be written; the journal, and an existing output, are unchanged.
    """

    def write(new: Path) -> None:
        with journal.open("rb") as lines, pq.ParquetWriter(new, OUTPUT_SCHEMA) as writer:
            for group in _groups(lines):
                writer.write_table(pa.Table.from_pylist([_row(json.loads(line)) for line in group], OUTPUT_SCHEMA))

    _replace(output, write)
    journal.unlink()


def unpack(output: Path, journal: Path) -> None:
    """Convert an output back to a journal.

    Raises:
        InvalidArgument: it is not an output of a batch.
        OutputError: the journal cannot be written.
    """

    def write(new: Path) -> None:
        with pq.ParquetFile(output) as opened, new.open("w", encoding="utf-8") as lines:
            if opened.schema_arrow.names != OUTPUT_SCHEMA.names:
                raise InvalidArgument(str(output), "is not the output of a batch: move the file away")
            for batch in opened.iter_batches(_BATCH_ROWS):
                lines.writelines(_result_line(row) for row in batch.to_pylist())

    _replace(journal, write)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    try:
        replace_file(path, write)
    except pa.ArrowException as error:
        raise OutputError(f"--output: {path} cannot be written: {error}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise InvalidArgument("--input", f"{path} cannot be read: {error}") from error


def _check_columns(path: Path, names: Iterable[str]) -> None:
    for name in COLUMNS:
        if name not in names:
            raise InvalidArgument(f"{path}: {name}", "is missing")
    for name in names:
        if name not in COLUMNS:
            raise InvalidArgument(f"{path}: {name}", f"unknown column; the columns are {', '.join(COLUMNS)}")


def _json(path: str, value: Any) -> Any:
    """Return a value of a struct without nulls, which are fields that other rows have."""
    if isinstance(value, dict):
        return {name: _json(f"{path}.{name}", one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_json(path, one) for one in value]
    if value is not None and not isinstance(value, str | bool | int | float):
        raise InvalidArgument(path, f"{value!r} is not a JSON value")
    return value


def _groups(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group lines by the target number of rows and bytes of a row group."""
    group: list[bytes] = []
    num_bytes = 0
    for line in lines:
        group.append(line)
        num_bytes += len(line)
        if len(group) == _GROUP_ROWS or num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _row(line: dict[str, Any]) -> dict[str, Any]:
    response, error = line["response"], line["error"]
    if response is not None:
        response = {**response, "body": _json_text(response["body"])}
    if error is not None:
        error = {name: text.encode(errors="backslashreplace").decode() for name, text in error.items()}
    custom_id = line["custom_id"]
    return {
        "id": line["id"],
        # Parquet cannot store unpaired surrogates, which JSON can; such a line cannot run anyway.
        "custom_id": custom_id if custom_id is not None and _is_utf8(custom_id) else None,
        "response": response,
        "error": error,
    }


def _result_line(row: dict[str, Any]) -> str:
    if row["response"] is not None:
        row = {**row, "response": {**row["response"], "body": json.loads(row["response"]["body"])}}
    return _json_text(row) + "\n"


def _json_text(value: object) -> str:
    text = json_text.dumps(value, ensure_ascii=False)
    return text if _is_utf8(text) else json_text.dumps(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
