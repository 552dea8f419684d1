"""Authenticator of every port of one server: keys, quotas, audit.

`AuditLog` writes a line of JSON per call with caller, time, method, outcome and usage. It never has a prompt or an
answer.

A thread writes the lines, so that calls never wait for a disk. The file is appended to, and reopened if it was moved,
so that log rotation needs no signal. Lines that cannot be written are counted and lost.

`Quotas` limit requests and tokens per minute, and concurrent streams, of each tenant.

Requests and tokens are token buckets that hold one minute's worth and refill continuously. A request takes one request
and, once its size is known, the tokens of the prompt and of all that it may generate; at the end it returns unused
tokens. A request over quota fails with a retry delay; a request larger than the quota fails permanently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from jpaged import json_text
from jpaged.access.call_context import Entry
from jpaged.access.keys import Keys, Limits, read_keys
from jpaged.access.tls import BackgroundLook, CertificateFiles, FileWatch, is_pipe
from jpaged.config import AccessOptions
from jpaged.errors import InvalidArgument, PermissionDenied, QuotaExceeded, RequestTooLong, sentence_of

_LOG = logging.getLogger(__name__)

_MAX_WAITING = 10_000
"""Maximum queued lines; further ones are lost."""
_MAX_BATCH = 500
_MODE = 0o640
Line = Mapping[str, Any]


class AuditLog:
    """The audit file, and the thread that writes it.

    Attributes:
        num_written: lines written.
        num_lost: lines not written because the disk was full, or too slow.

    Raises:
        InvalidArgument: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.num_written = 0
        self.num_lost = 0
        self._path = path
        self._is_failing = False
        self._is_cut = False
        try:
            self._file = self._opened()
        except OSError as error:
            raise InvalidArgument("audit_log", f"cannot be written: {sentence_of(error)}") from error
        self._waiting: queue.Queue[Line | None] = queue.Queue(_MAX_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="jpaged-audit", daemon=True)
        self._writer.start()

    def write(self, line: Line) -> None:
        """Queue a line; never blocks."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lose(1, "the disk is too slow")

    def close(self, timeout_s: float) -> None:
        """Write the queued lines within the timeout, and close the file."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._writer.join(timeout_s)

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            lines = [self._waiting.get()]
            while len(lines) < _MAX_BATCH and lines[-1] is not None:
                try:
                    lines.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            if lines[-1] is None:
                lines.pop()
                is_open = False
            if lines:
                self._write([line for line in lines if line is not None])
        os.close(self._file)

    def _write(self, lines: list[Line]) -> None:
        content = "".join(json_text.dumps(line) + "\n" for line in lines).encode()
        try:
            self._follow()
            self._append(b"\n" + content if self._is_cut else content)
        except OSError as error:
            self._lose(len(lines), sentence_of(error))
            return
        self.num_written += len(lines)
        if self._is_failing:
            self._is_failing = False
            _LOG.warning("audit_log: %s is writable again; %d lines were lost", self._path, self.num_lost)

    def _append(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            written = os.write(self._file, left)
            self._is_cut = left[:written].tobytes()[-1:] != b"\n"
            left = left[written:]

    def _follow(self) -> None:
        """Reopen the file if its path now has another file, or none."""
        mine = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            file = self._opened()
            os.close(self._file)
            self._file, self._is_cut = file, False

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def _lose(self, num_lines: int, why: str) -> None:
        self.num_lost += num_lines
        if not self._is_failing:
            self._is_failing = True
            _LOG.error("audit_log: cannot write %s, lines are lost: %s", self._path, why)


_MINUTE_S = 60.0
_STREAM_RETRY_S = 1.0
"""Retry delay if all streams are in use: their end cannot be predicted."""
_MAX_ACCOUNTS = 4096
"""Number of remembered tenants at which those with full quotas are dropped."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Remaining amount of one quota; negative if more was taken than available."""

    level: float = math.inf
    filled_s: float = 0.0

    def fill(self, per_minute: int, now_s: float) -> float:
        """Refill it for the elapsed time, up to a minute's worth; return the level."""
        gained = (now_s - self.filled_s) * per_minute / _MINUTE_S
        self.level, self.filled_s = min(float(per_minute), self.level + gained), now_s
        return self.level

    def take(self, amount: float) -> None:
        """Take an amount, even if less is left; a negative amount is returned."""
        self.level -= amount


@dataclass(slots=True, eq=False)
class Account:
    """Quota state of one tenant."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    num_streams: int = 0

    def begin(self) -> None:
        """Count a stream, and take one request."""
        self.num_streams += 1
        self.requests.take(1)

    def end(self) -> None:
        """Remove a stream."""
        self.num_streams -= 1


@dataclass(frozen=True, slots=True)
class Left:
    """State of one quota: limit, remainder, and seconds until it is full again."""

    limit: int
    remaining: int
    reset_s: float


class Stay:
    """Quota usage of one request, from admission to its end."""

    def __init__(self, tenant: str, limits: Limits, account: Account, clock: Callable[[], float], part: bool) -> None:
        self._tenant, self._limits, self._account, self._clock = tenant, limits, account, clock
        self._is_part = part
        self._reserved = 0

    def reserve(self, num_prompt_tokens: int, counted: str, num_sequences: int, max_tokens: int) -> None:
        """Reserve the maximum tokens of the request.

        Args:
            counted: the parameter that sets the number of sequences: n, best_of or beam_width.

        Raises:
            InvalidArgument: it exceeds the tenant's limits; names the limit.
            QuotaExceeded: too few tokens are left.
        """
        limits, whose = self._limits, f"tenant {self._tenant!r}"
        if limits.max_prompt_tokens is not None and num_prompt_tokens > limits.max_prompt_tokens:
            problem = f"{num_prompt_tokens} tokens are over max_prompt_tokens of {whose} ({limits.max_prompt_tokens})"
            raise RequestTooLong("prompt", problem)
        if limits.max_n is not None and num_sequences > limits.max_n:
            raise InvalidArgument(f"sampling.{counted}", f"{num_sequences} is over max_n of {whose} ({limits.max_n})")
        per_minute = limits.tokens_per_minute
        if per_minute is None:
            return
        needed = num_prompt_tokens + num_sequences * max_tokens
        if not self._is_part:
            what = f"{num_prompt_tokens} prompt tokens and {num_sequences} x {max_tokens} to generate make {needed}"
            if needed > per_minute:
                raise RequestTooLong("sampling.max_tokens", f"{what}, over tokens_per_minute of {whose} ({per_minute})")
            left = self._account.tokens.fill(per_minute, self._clock())
            if needed > left:
                self._account.requests.take(-1)  # a refused request costs nothing
                raise _exceeded(f"{what} tokens; {whose} has {max(0, int(left))} left", needed - left, per_minute)
        else:
            self._account.tokens.fill(per_minute, self._clock())
        self._account.tokens.take(needed)
        self._reserved = needed

    def settle(self, num_tokens: int) -> None:
        """Return reserved tokens that were not used. Only the first call counts."""
        if self._reserved:
            self._account.tokens.take(num_tokens - self._reserved)
            self._reserved = 0


class Quotas:
    """Quotas of all tenants. Bound to one event loop.

    Args:
        limits_of: returns a tenant's current limits.
        clock: seconds.
    """

    def __init__(
        self, limits_of: Callable[[str], Limits] = lambda tenant: Limits(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._forget_at = _MAX_ACCOUNTS

    @contextlib.contextmanager
    def stay(self, tenant: str, *, is_part: bool = False) -> Iterator[Stay]:
        """Admit a request for the duration of the context.

        Args:
            is_part: it is part of an admitted call: its tokens are taken even if too few are left.

        Raises:
            QuotaExceeded: the tenant has no request or stream left, or a token debt.
        """
        limits, account = self._limits_of(tenant), self._account(tenant)
        if not is_part:
            self._require(tenant, limits, account)
            account.begin()
        stay = Stay(tenant, limits, account, self._clock, is_part)
        try:
            yield stay
        finally:
            stay.settle(0)
            if not is_part:
                account.end()

    def left(self, tenant: str) -> dict[str, Left]:
        """Return the state of a tenant's quotas of "requests" and "tokens" per minute, if limited."""
        limits, account = self._limits_of(tenant), self._accounts.get(tenant) or Account()
        buckets = {
            "requests": (limits.requests_per_minute, account.requests),
            "tokens": (limits.tokens_per_minute, account.tokens),
        }
        found = {}
        for name, (limit, bucket) in buckets.items():
            if limit is not None:
                level = bucket.fill(limit, self._clock())
                found[name] = Left(limit, max(0, math.floor(level)), (limit - level) * _MINUTE_S / limit)
        return found

    def _require(self, tenant: str, limits: Limits, account: Account) -> None:
        now_s, whose = self._clock(), f"tenant {tenant!r}"
        if limits.max_streams is not None and account.num_streams >= limits.max_streams:
            what = f"max_streams of {whose} ({limits.max_streams}) is reached"
            raise QuotaExceeded(what, retry_after_s=_STREAM_RETRY_S)
        if (per_minute := limits.tokens_per_minute) is not None:
            left = account.tokens.fill(per_minute, now_s)
            if left < 1:
                raise _exceeded(f"tokens_per_minute of {whose} ({per_minute}) is used up", 1 - left, per_minute)
        if (per_minute := limits.requests_per_minute) is not None:
            left = account.requests.fill(per_minute, now_s)
            if left < 1:
                raise _exceeded(f"requests_per_minute of {whose} ({per_minute}) is used up", 1 - left, per_minute)

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._forget_at:
                self._forget()
            account = self._accounts[tenant] = Account()
        return account

    def _forget(self) -> None:
        """Drop tenants with full quotas: a new account is equal."""
        kept = {tenant: one for tenant, one in self._accounts.items() if one.num_streams or not self._is_whole(tenant)}
        self._accounts = kept
        self._forget_at = max(_MAX_ACCOUNTS, 2 * len(kept))

    def _is_whole(self, tenant: str) -> bool:
        return all(left.remaining == left.limit for left in self.left(tenant).values())


def _exceeded(what: str, missing: float, per_minute: int) -> QuotaExceeded:
    return QuotaExceeded(what, retry_after_s=missing * _MINUTE_S / per_minute)


RELOAD_INTERVAL_S = 1.0
"""Interval of checks for changed files."""
_MAX_TENANT_CHARS = 128


def default_limits(options: AccessOptions) -> Limits:
    """Return the limits of tenants that the file of keys does not name."""
    return Limits(
        requests_per_minute=options.tenant_requests_per_minute,
        tokens_per_minute=options.tenant_tokens_per_minute,
        max_streams=options.tenant_max_streams,
        max_n=options.tenant_max_n,
        max_prompt_tokens=options.tenant_max_prompt_tokens,
    )


class Gate:
    """Keys and quotas of one server; keys are reloaded when they change. Bound to the server's event loop.

    Attributes:
        quotas: quotas of the tenants.
        certificates: TLS certificates of the ports; None without TLS.
    """

    def __init__(self, options: AccessOptions) -> None:
        self.options = options
        self.quotas = Quotas(self._limits_of)
        self.certificates: CertificateFiles | None = None
        self._defaults = default_limits(options)
        self._keys: Keys | None = None
        self._watch: FileWatch | None = None
        self._audit: AuditLog | None = None
        self._is_due = asyncio.Event()

    def read(self) -> None:
        """Read the files for the first time.

        Raises:
            InvalidArgument: one is missing, cannot be read or parsed, or the audit log cannot be written.
        """
        self.options.check()
        if self.options.audit_log is not None:
            self._audit = AuditLog(self.options.audit_log)
        if self.options.tls_cert is not None:
            self.certificates = CertificateFiles(self.options)
        if self.options.api_keys is not None:
            self._watch = FileWatch([self.options.api_keys])
            self._keys = read_keys(self.options.api_keys)

    def _limits_of(self, tenant: str) -> Limits:
        return self._defaults if self._keys is None else self._keys.limits_of(tenant).over(self._defaults)

    def open(self, entry: Entry, authorization: Sequence[str], tenants: Sequence[str]) -> None:
        """Authenticate a call by its headers `authorization` and `x-jpaged-tenant`.

        Raises:
            Unauthenticated: it has no valid key.
            PermissionDenied: it names a tenant that is not its key's.
        """
        if self._keys is None:
            # The frontend validates the tenant's name, with errors in its protocol's terms.
            entry.let_in(None, tenants[0][:_MAX_TENANT_CHARS] if len(tenants) == 1 else "")
            return
        key = self._keys.key_of(list(authorization))
        entry.let_in(key, key.tenant)
        for named in tenants:
            if named != key.tenant:
                raise PermissionDenied(f"x-jpaged-tenant: {named[:_MAX_TENANT_CHARS]!r} is not the tenant of this key")

    def close(self, entry: Entry, status: str | int) -> None:
        """Write the audit line of a call that has ended, whether it was accepted or not.

        Args:
            status: its response status: a gRPC name, or an HTTP number.
        """
        entry.close()
        if self._audit is not None:
            self._audit.write(_line_of(entry, status))

    def end(self, timeout_s: float) -> None:
        """Flush the audit log within the timeout; no call may be closed afterwards."""
        if self._audit is not None:
            self._audit.close(timeout_s)

    def look_again(self) -> None:
        """Reload changed files; an invalid file changes nothing, and is logged."""
        self._look_at_certificates()
        self._look_at_keys()

    def _look_at_certificates(self) -> None:
        if self.certificates is not None:
            self.certificates.look_again()

    def _look_at_keys(self) -> None:
        path = self.options.api_keys
        if path is None or self._watch is None or not self._watch.has_changed():
            return
        try:
            if is_pipe(path):
                raise InvalidArgument("api_keys", f"{path} is a pipe, which is read only at startup")
            self._keys = read_keys(path)
        except InvalidArgument as error:
            _LOG.error("the API keys were not reloaded: %s", error)
        else:
            _LOG.warning("api_keys: reloaded %s: %d keys", path, len(self._keys.digests))

    def reload(self) -> None:
        """Make the next look, which starts at once, reload all files."""
        if self._watch is not None:
            self._watch.expire()
        if self.certificates is not None:
            self.certificates.expire()
        self._is_due.set()

    async def watch(self) -> None:
        """Look periodically, until cancelled; a file that blocks delays neither other looks nor shutdown."""
        looks = (
            BackgroundLook("tls_cert", self._look_at_certificates),
            BackgroundLook("api_keys", self._look_at_keys),
        )
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELOAD_INTERVAL_S):
                    await self._is_due.wait()
            self._is_due.clear()
            await asyncio.gather(*(look.run(RELOAD_INTERVAL_S) for look in looks))


def _line_of(entry: Entry, status: str | int) -> dict[str, Any]:
    return {
        "time": datetime.fromtimestamp(entry.began_s, UTC).isoformat(timespec="milliseconds"),
        "face": entry.face,
        "method": entry.method,
        "peer": entry.peer,
        "tenant": entry.tenant,
        "key": "" if entry.key is None else entry.key.id,
        "status": status,
        "error": entry.error,
        "duration_s": round(max(0.0, time.time() - entry.began_s), 6),
        "request_id": entry.request_id,
        "model": entry.model,
        "adapter": entry.adapter,
        "prompt_tokens": entry.prompt_tokens,
        "completion_tokens": entry.completion_tokens,
        "act": entry.act,
    }
