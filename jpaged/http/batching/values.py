"""A stored file, a batch: as stored, and as OpenAI's API returns them. No I/O."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jpaged.access.keys import Key, Role
from jpaged.errors import InvalidArgument

LIVE = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""Statuses of unfinished batches; the others are completed, failed, expired and cancelled."""
MAX_WINDOW_S = 30 * 86400
MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_VALUE = 512
_WINDOW = re.compile(r"([0-9]{1,7})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def new_id(kind: str) -> str:
    """Return a unique id: `file-...`, `batch_...`."""
    return f"{kind}{uuid.uuid4().hex}"


def window_s_of(text: Any) -> int:
    """Return the seconds of a completion window.

    Raises:
        InvalidArgument: it is not a time such as 24h or 30m, up to 30 days.
    """
    match = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 1 <= seconds <= MAX_WINDOW_S:
        raise InvalidArgument(
            "body.completion_window", f"{str(text)[:80]!r} is not a time from 1s to 30d, such as 24h or 30m"
        )
    return seconds


def metadata_of(value: Any) -> dict[str, str]:
    """Return a caller's metadata within OpenAI's limits; None becomes empty.

    Raises:
        InvalidArgument: values are not strings, too many or too long.
    """
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise InvalidArgument("body.metadata", f"must be an object of at most {MAX_METADATA} strings")
    for name, text in value.items():
        if not isinstance(text, str) or len(name) > MAX_METADATA_NAME or len(text) > MAX_METADATA_VALUE:
            limits = f"names may have {MAX_METADATA_NAME} characters, strings {MAX_METADATA_VALUE}"
            raise InvalidArgument(
                f"body.metadata.{name[:MAX_METADATA_NAME]}", f"is not a string, or too long: {limits}"
            )
    return value


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a caller uploaded, or that a batch has written.

    Attributes:
        purpose: `batch` or `batch_output`.
    """

    id: str
    num_bytes: int
    created_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """Return the file in OpenAI's format."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchError:
    """Reason why a batch could not run; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of finished lines of a batch."""

    completed: int = 0
    failed: int = 0

    @property
    def num_done(self) -> int:
        """Lines that need no further run."""
        return self.completed + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as stored.

    Attributes:
        owner: scope of the batch and the files; `tenant` is the tenant of the requests.
        key_id, role: of the key that created it, whose permissions apply to the lines; None on a server without keys.
        output_id, error_id: ids of the output files, whether or not they exist.
        has_output, has_errors: those files exist.
        times: time of entering each status, by OpenAI's field names.
        num_lines: lines of the input, once they are counted.
        num_takes: number of resumes since a line last completed.
    """

    id: str
    owner: str
    tenant: str
    endpoint: str
    input_id: str
    output_id: str
    error_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    metadata: Mapping[str, str] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[BatchError, ...] = ()
    num_lines: int = 0
    counts: Counts = Counts()
    has_output: bool = False
    has_errors: bool = False
    num_takes: int = 0
    model: str | None = None
    key_id: str | None = None
    role: str | None = None

    @property
    def key(self) -> Key | None:
        """The key that created it; None on a server without keys."""
        if self.key_id is None or self.role is None:
            return None
        return Key(self.key_id, self.tenant, Role[self.role.upper()])

    @property
    def is_live(self) -> bool:
        """True if it is unfinished."""
        return self.status in LIVE

    def as_json(self) -> dict[str, Any]:
        """Return the batch as stored on disk."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Batch:
        """Parse a stored batch; raise TypeError, KeyError or ValueError for anything else."""
        known = {one.name for one in fields(cls)}
        value = {"key_id": None, "role": None, **value}  # batches of earlier releases have neither
        if value.keys() != known:
            raise ValueError(f"fields {sorted(value.keys() ^ known)}")
        errors = tuple(BatchError(**one) for one in value["errors"])
        return cls(**{**value, "errors": errors, "counts": Counts(**value["counts"])})

    def shown(self) -> dict[str, Any]:
        """Return the batch in OpenAI's format."""
        stamps = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        counts = self.counts
        errors = [{"code": e.code, "message": e.message, "line": e.line, "param": e.param} for e in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in stamps},
            "request_counts": {"total": self.num_lines, "completed": counts.completed, "failed": counts.failed},
            "metadata": dict(self.metadata) or None,
        }
