"""The OpenAI batch file format: one JSON object per line, in and out. No I/O.

    in    {"custom_id", "method": "POST", "url": one of `URLS`, "body": {...}}
    out   {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}
          {"id", "custom_id", "response": null, "error": {"code", "message"}}    a line that never ran

A line ends only with a line feed: texts may contain any other character. An invalid line of input becomes a failed line
of output, with a custom_id of null if it has none.

`bodies.py` and `scoring.py` define the bodies. A line has one prompt and one unstreamed answer, without token ids.
Log-probabilities of the prompt are `prompt_logprobs` of each choice, or of the whole answer for a chat: one entry per
token, as in vLLM.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jpaged import json_text
from jpaged.errors import InvalidArgument, JpagedError, RequestTooLong, StorageError, reason_of
from jpaged.openai.bodies import Job, chat_job, check_values, completion_job, loaded, shown
from jpaged.openai.choices import Heading, TokenText, answer_of
from jpaged.openai.scoring import ScoringJob, embed_job, score_job
from jpaged.types import RequestOutput

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URL = "/v1/score"
URLS = (COMPLETIONS_URL, CHAT_URL, EMBEDDINGS_URL, SCORE_URL)
STATUSES = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "not_found_error"),
    "ALREADY_EXISTS": (409, "conflict_error"),
    "FAILED_PRECONDITION": (409, "conflict_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled_error"),
    "INTERNAL": (500, "server_error"),
    "UNKNOWN": (500, "server_error"),
    "UNIMPLEMENTED": (501, "unsupported_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
"""HTTP status and error type by gRPC status. 499 is nginx's status for a client that has disconnected."""
_CODES = {"REQUEST_TOO_LONG": "context_length_exceeded", "MODEL_NOT_FOUND": "model_not_found"}
"""OpenAI's error codes that clients handle; other errors have jpaged's names."""
_BODIES = frozenset({"body", "body.file"})
_LINE_FIELDS = {"custom_id", "method", "url", "body"}


def status_code_of(error: JpagedError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, StorageError):
        return 507
    return 413 if _is_large_body(error) else STATUSES[error.grpc_status][0]


def error_body(error: JpagedError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    param, message, code = None, str(error), reason_of(error)
    if isinstance(error, InvalidArgument):
        param = _name_in_body(error.field)
        message = f"{param}: {error.problem}"
    if not _is_large_body(error):
        code = _CODES.get(code, code)
    return {"error": {"message": message, "type": STATUSES[error.grpc_status][1], "param": param, "code": code}}


def _is_large_body(error: JpagedError) -> bool:
    return isinstance(error, RequestTooLong) and error.field in _BODIES


def _name_in_body(field: str) -> str:
    """Return the body's name of a request field."""
    for prefix in ("sampling.", "chat."):
        field = field.removeprefix(prefix)
    return "prompt" if field == "prompt.token_ids" else field


@dataclass(frozen=True, slots=True)
class Line:
    """One request of an input file, unparsed. `number` counts from 1."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line of an input file, with the error and the custom_id if there is one."""

    number: int
    custom_id: str | None
    error: InvalidArgument


def parse_file(data: bytes) -> list[Line | BadLine]:
    """Parse all lines of an input file, as `parse_lines`.

    Raises:
        InvalidArgument: it is not UTF-8, or as in `parse_lines`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgument(f"line {number}", f"is not UTF-8: byte 0x{data[error.start]:02x}") from error
    return parse_lines(text.split("\n"))


def parse_lines(texts: Sequence[str]) -> list[Line | BadLine]:
    """Parse all lines of an input file; skip empty ones.

    Raises:
        InvalidArgument: no line has a custom_id, or two share one; nothing has been sent yet.
    """
    lines: list[Line | BadLine] = []
    first: dict[str, int] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        line = parse_line(number, text)
        lines.append(line)
        if line.custom_id is None:
            continue
        if line.custom_id in first:
            raise InvalidArgument(
                f"line {number}: custom_id", f"{line.custom_id!r} is also that of line {first[line.custom_id]}"
            )
        first[line.custom_id] = number
    if lines and isinstance(lines[0], BadLine) and not first:
        raise lines[0].error
    return lines


def parse_line(number: int, text: str) -> Line | BadLine:
    """Parse one line of an input file; `number` is the line number."""
    try:
        value = loaded(f"line {number}", text)
    except InvalidArgument as error:
        return BadLine(number, None, error)
    return line_of(number, value)


def line_of(number: int, value: Mapping[str, Any]) -> Line | BadLine:
    """Return the line of a parsed object."""
    given = value.get("custom_id")
    try:
        _check_line(f"line {number}", value)
    except InvalidArgument as error:
        return BadLine(number, given if isinstance(given, str) and given else None, error)
    return Line(number, value["custom_id"], value["url"], value["body"])


def _check_line(where: str, value: Mapping[str, Any]) -> None:
    for name in value.keys() - _LINE_FIELDS:
        raise InvalidArgument(
            f"{where}: {name[:80]}", f"unknown field; the fields are {', '.join(sorted(_LINE_FIELDS))}"
        )
    for name in sorted(_LINE_FIELDS - value.keys()):
        raise InvalidArgument(f"{where}: {name}", "is missing")
    check_values(where, value, f"{where}: ")
    if not isinstance(value["custom_id"], str) or not value["custom_id"]:
        raise InvalidArgument(f"{where}: custom_id", f"{shown(value['custom_id'])} is not a non-empty string")
    if value["method"] != "POST":
        raise InvalidArgument(f"{where}: method", f"{shown(value['method'])} is not POST")
    if value["url"] not in URLS:
        raise InvalidArgument(f"{where}: url", f"{shown(value['url'])} is not one of {', '.join(URLS)}")
    if not isinstance(value["body"], dict):
        raise InvalidArgument(f"{where}: body", "is not a JSON object")


@contextmanager
def of_body() -> Iterator[None]:
    """Prefix the fields of errors raised inside with `body.`."""
    try:
        yield
    except InvalidArgument as error:
        raise type(error)(f"body.{error.field}", error.problem) from error


def job_of(line: Line) -> Job:
    """Parse the body of a line of completions or chats.

    Raises:
        InvalidArgument: a field of the body is unknown, invalid, or not supported in a file.
    """
    with of_body():
        job = chat_job(line.body) if line.url == CHAT_URL else completion_job(line.body)
        if len(job.prompts) > 1:
            raise InvalidArgument(
                "prompt", "must be one string or one list of token ids: write one line for each prompt"
            )
        elsewhere = {
            "stream": job.streaming,
            "echo": job.has_echo,
            "return_token_ids": job.has_token_ids,
        }
        for name, is_asked in elsewhere.items():
            if is_asked:
                raise InvalidArgument(name, f"{line.body[name]!r} is not supported in a file")
    return job


def scoring_job_of(line: Line) -> ScoringJob:
    """Parse the body of a line of embeddings or scores; raise as `job_of`."""
    with of_body():
        return embed_job(line.body) if line.url == EMBEDDINGS_URL else score_job(line.body)


def success_line(line: Line, output: RequestOutput, *, model: str, token_text: TokenText) -> str:
    """Return the output line of a finished request; `token_text` must cover the tokens of the log-probabilities."""
    body = answer_of(Heading(output.request_id, model), job_of(line), [output], token_text)
    return response_line(line.custom_id, output.request_id, body)


def response_line(custom_id: str, request_id: str, body: Mapping[str, Any]) -> str:
    """Return the output line of an answered request."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return _dumped({"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None})


def failure_line(custom_id: str | None, error: JpagedError) -> str:
    """Return the output line of a failed request, with the same status and body as over HTTP."""
    if isinstance(error, InvalidArgument):
        error = type(error)(error.field.removeprefix("body."), error.problem)
    number = uuid.uuid4().hex
    response = {"status_code": status_code_of(error), "request_id": number, "body": error_body(error)}
    return _dumped({"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": None})


def _dumped(value: Mapping[str, Any]) -> str:
    custom_id = value["custom_id"]
    try:
        (custom_id or "").encode()
    except UnicodeEncodeError:  # an unpaired surrogate in a custom_id, or in the error that names it
        return json_text.dumps(value) + "\n"
    return b"".join((*json_text.pieces(value), b"\n")).decode()
