"""What tells gave: all of it arrives, and no more lies on the device than may."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device import model_runner
from jpaged.device.model_runner import PendingHostCopies

NUM_BYTES = 4 * 100


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> PendingHostCopies:
    """With room for three."""
    monkeypatch.setattr(model_runner, "MOST_BYTES", 3 * NUM_BYTES)
    return PendingHostCopies()


def test_no_more_lies_on_the_device_than_may(arrays: PendingHostCopies) -> None:
    waits = []
    for i in range(7):
        waits.append(arrays.add(jnp.full(100, float(i))))
        assert arrays.num_bytes == min(i + 1, 3) * NUM_BYTES
    for i in (6, 0, 5, 4, 3, 2, 1):
        np.testing.assert_array_equal(waits[i](), np.full(100, float(i)))
        np.testing.assert_array_equal(waits[i](), np.full(100, float(i)))
    assert arrays.num_bytes == 0


def test_one_that_is_larger_than_may_be_is_alone(arrays: PendingHostCopies) -> None:
    arrays.add(jnp.zeros(100))
    wait = arrays.add(jnp.ones(1000))
    assert arrays.num_bytes == 4000
    assert wait().sum() == 1000


def test_what_nobody_waits_for_is_let_go(arrays: PendingHostCopies) -> None:
    for _ in range(3):
        arrays.add(jnp.zeros(100))
    arrays.release()
    assert arrays.num_bytes == 0
