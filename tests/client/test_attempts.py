"""How often a call is tried, and that all tries share one timeout."""

import grpc
import pytest

from jpaged.client.channel import CHANNEL_OPTIONS, MAX_ATTEMPTS, Attempts

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def test_the_waits_grow_and_end():
    attempts = Attempts(None)
    waits = [attempts.wait_s(UNAVAILABLE) for _ in range(MAX_ATTEMPTS)]
    assert waits[-1] is None
    grown = [wait for wait in waits if wait is not None]
    assert len(grown) == MAX_ATTEMPTS - 1
    assert grown == sorted(grown)
    assert attempts.remaining_s is None


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not UNAVAILABLE] + [None])
def test_nothing_else_is_tried_again(code):
    assert Attempts(None).wait_s(code) is None


def test_no_try_is_left_when_the_time_is_up():
    attempts = Attempts(0.01)
    assert attempts.remaining_s is not None
    assert attempts.remaining_s <= 0.01
    assert attempts.wait_s(UNAVAILABLE) is None  # the first wait is longer than what is left


def test_grpcs_own_retries_are_off():
    assert dict(CHANNEL_OPTIONS)["grpc.enable_retries"] == 0
