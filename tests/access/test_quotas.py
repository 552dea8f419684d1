"""What a tenant has left, on a clock that moves when it is told to."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.access import quotas as quotas_module
from jpaged.access.keys import TenantLimits
from jpaged.access.quotas import Quotas, QuotaStatus
from jpaged.errors import InvalidArgument, QuotaExceeded, RequestTooLong


class Clock:
    """Seconds that pass when `pass_s` says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def limited(**limits: int) -> tuple[Quotas, Clock]:
    clock = Clock()
    return Quotas(lambda tenant: TenantLimits(**limits), clock), clock


def use(
    quotas: Quotas, prompt: int = 1, n: int = 1, max_tokens: int = 1, used: int | None = None, **more: bool
) -> None:
    with quotas.acquire("acme", **more) as stay:
        stay.reserve(prompt, "n", n, max_tokens)
        stay.settle(prompt + n * max_tokens if used is None else used)


def refused(call: Callable[[], object]) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as refusal:
        call()
    return refusal.value


def test_a_minutes_requests_may_come_at_once_and_the_next_when_there_is_one() -> None:
    quotas, clock = limited(requests_per_minute=6)
    for _ in range(6):
        use(quotas)
    error = refused(lambda: use(quotas))
    assert str(error) == "requests_per_minute of tenant 'acme' (6) is used up"
    assert error.retry_after_s == pytest.approx(10)
    clock.pass_s(error.retry_after_s - 0.1)
    assert refused(lambda: use(quotas)).retry_after_s == pytest.approx(0.1)
    clock.pass_s(0.1001)
    use(quotas)
    refused(lambda: use(quotas))
    clock.pass_s(10_000)
    for _ in range(6):  # not more than a minute's
        use(quotas)
    refused(lambda: use(quotas))


def test_tokens_are_taken_at_the_start_and_what_is_not_used_comes_back() -> None:
    quotas, clock = limited(tokens_per_minute=600)
    with quotas.acquire("acme") as stay:
        stay.reserve(100, "n", 4, 100)
        assert quotas.left("acme")["tokens"] == QuotaStatus(600, 100, 50.0)
        error = refused(lambda: use(quotas, 101, 1, 100))
        assert "101 prompt tokens and 1 x 100 to generate make 201 tokens; tenant 'acme' has 100 left" in str(error)
        assert error.retry_after_s == pytest.approx(10.1)
        stay.settle(150)
    assert quotas.left("acme")["tokens"] == QuotaStatus(600, 450, 15.0)
    clock.pass_s(15)
    assert quotas.left("acme")["tokens"].remaining == 600


def test_all_tokens_that_are_left_may_be_taken_and_the_last_one_admits() -> None:
    quotas, _ = limited(tokens_per_minute=600)
    use(quotas, 400, 1, 199)
    with quotas.acquire("acme") as stay:  # one is left
        refused(lambda: stay.reserve(1, "n", 1, 1))
        stay.reserve(1, "n", 1, 0)
    use(quotas, 1, 1, 0)
    refused(lambda: use(quotas))


def test_a_request_that_fails_gives_all_its_tokens_back() -> None:
    quotas, _ = limited(tokens_per_minute=600)

    def fail() -> None:
        with quotas.acquire("acme") as stay:
            stay.reserve(100, "n", 1, 100)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert quotas.left("acme")["tokens"].remaining == 600


def test_a_request_that_is_refused_for_its_tokens_costs_no_request() -> None:
    quotas, _ = limited(tokens_per_minute=600, requests_per_minute=2)
    use(quotas, 599)
    for _ in range(3):
        refused(lambda: use(quotas, 100))
    assert quotas.left("acme")["requests"].remaining == 1


def test_what_never_fits_is_told_so_and_by_which_limit() -> None:
    quotas, _ = limited(tokens_per_minute=600, max_n=3, max_prompt_tokens=50)
    with pytest.raises(RequestTooLong, match=r"prompt: 51 tokens are over max_prompt_tokens of tenant 'acme' \(50\)"):
        use(quotas, 51)
    with pytest.raises(InvalidArgument, match=r"sampling.n: 4 is over max_n of tenant 'acme' \(3\)"):
        use(quotas, 1, 4)
    with pytest.raises(RequestTooLong, match=r"sampling.max_tokens: .* make 601, over tokens_per_minute .*\(600\)"):
        use(quotas, 1, 1, 600)
    use(quotas, 50, 1, 550)
    quotas, _ = limited(max_n=3)
    use(quotas, 1, 3)


def test_streams_are_counted_while_they_are_open() -> None:
    quotas, _ = limited(max_streams=2)
    with quotas.acquire("acme"):
        with quotas.acquire("acme"):
            assert "max_streams of tenant 'acme' (2) is reached" in str(refused(lambda: use(quotas)))
        use(quotas)
    use(quotas)


def test_parts_of_a_call_are_one_stream_and_may_leave_a_debt() -> None:
    """A call that has begun is not cut off in the middle; the next one waits until the debt is worked off."""
    quotas, clock = limited(tokens_per_minute=60, max_streams=1, requests_per_minute=2)
    with quotas.acquire("acme"):
        for _ in range(3):
            use(quotas, 40, is_part=True, max_tokens=0)
    assert quotas.left("acme")["tokens"] == QuotaStatus(60, 0, 120.0)
    assert quotas.left("acme")["requests"].remaining == 1
    error = refused(lambda: use(quotas))
    assert error.retry_after_s == pytest.approx(61)
    clock.pass_s(62)
    use(quotas)


def test_tenants_have_accounts_of_their_own_and_limits_may_change() -> None:
    clock, limits = Clock(), {"a": TenantLimits(requests_per_minute=1), "b": TenantLimits(requests_per_minute=1)}
    quotas = Quotas(limits.__getitem__, clock)
    for tenant in ("a", "b"):
        with quotas.acquire(tenant):
            pass
    limits["a"] = TenantLimits(requests_per_minute=60)
    refused(lambda: quotas.acquire("b").__enter__())
    refused(lambda: quotas.acquire("a").__enter__())
    clock.pass_s(2)
    with quotas.acquire("a"):
        pass
    limits["b"] = TenantLimits()
    with quotas.acquire("b"):
        pass
    assert quotas.left("b") == {}


def test_tenants_that_have_all_they_may_have_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "_MAX_ACCOUNTS", 10)
    clock = Clock()
    quotas = Quotas(lambda tenant: TenantLimits(requests_per_minute=60), clock)
    with quotas.acquire("open"):
        for i in range(200):
            with quotas.acquire(f"t{i}"):
                pass
            clock.pass_s(1)
        assert len(quotas._accounts) <= 11
        assert "open" in quotas._accounts
        assert quotas.left("t199")["requests"].remaining == 60


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=40
    )
)
def test_no_more_is_used_than_comes(calls: list[tuple[int, int, int, float]]) -> None:
    quotas, clock = limited(tokens_per_minute=100)
    begin_s, total = clock(), 0
    for wait_s, prompt, max_tokens, share in calls:
        clock.pass_s(wait_s)
        used = prompt + math.floor(share * max_tokens)
        try:
            use(quotas, prompt, 1, max_tokens, used)
        except QuotaExceeded as error:
            clock.pass_s(error.retry_after_s + 1e-6)
            use(quotas, prompt, 1, max_tokens, used)  # as it was told
        total += used
        assert total <= 100 + (clock() - begin_s) * 100 / 60 + 1e-6
        assert quotas.left("acme")["tokens"].remaining >= 0
