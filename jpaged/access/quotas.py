"""Quotas: limits on requests and tokens per minute, and on concurrent streams, of each tenant.

Requests and tokens are token buckets that hold one minute's worth and refill continuously. A request takes one request
and, once its size is known, the tokens of the prompt and of all that it may generate; at the end it returns unused
tokens. A request over quota fails with a retry delay; a request larger than the quota fails permanently.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jpaged.access.keys import TenantLimits
from jpaged.errors import InvalidArgument, QuotaExceeded, RequestTooLong

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
class QuotaStatus:
    """State of one quota: limit, remainder, and seconds until it is full again."""

    limit: int
    remaining: int
    reset_s: float


class QuotaLease:
    """Quota usage of one request, from admission to its end."""

    def __init__(
        self, tenant: str, limits: TenantLimits, account: Account, clock: Callable[[], float], part: bool
    ) -> None:
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
        get_limits: returns a tenant's current limits.
        clock: seconds.
    """

    def __init__(
        self,
        limits_of: Callable[[str], TenantLimits] = lambda tenant: TenantLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._forget_at = _MAX_ACCOUNTS

    @contextlib.contextmanager
    def acquire(self, tenant: str, *, is_part: bool = False) -> Iterator[QuotaLease]:
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
        stay = QuotaLease(tenant, limits, account, self._clock, is_part)
        try:
            yield stay
        finally:
            stay.settle(0)
            if not is_part:
                account.end()

    def left(self, tenant: str) -> dict[str, QuotaStatus]:
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
                found[name] = QuotaStatus(limit, max(0, math.floor(level)), (limit - level) * _MINUTE_S / limit)
        return found

    def _require(self, tenant: str, limits: TenantLimits, account: Account) -> None:
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
