"""When requests are sent: the rate on average, gaps as bursty as asked for, and rates that grow."""

import numpy as np
import pytest

from jpaged.bench.load_generator import ArrivalProcess, Ramp
from jpaged.errors import InvalidArgument

COUNT = 20_000


def times(seed: int = 0, count: int = COUNT, **options) -> np.ndarray:
    return ArrivalProcess(**options).times_s(count, np.random.default_rng(seed))


def test_without_a_rate_all_are_sent_at_once():
    assert times(count=3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_of_a_gamma_distribution_of_that_shape(burstiness):
    gaps = np.diff(times(rate=50.0, burstiness=burstiness))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.01)
    # Variance over squared mean is 1 / shape.
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.08)
    if burstiness == 1.0:  # Poisson: half of the gaps are shorter than ln 2 over the rate
        assert np.median(gaps) == pytest.approx(np.log(2) / 50, rel=0.03)


def test_the_last_request_comes_when_the_rate_says_whatever_the_seed():
    assert {round(float(times(seed, 40, rate=8.0)[-1]), 9) for seed in range(5)} == {5.0}


def test_endless_burstiness_is_a_clock():
    assert times(count=4, rate=2.0, burstiness=float("inf")).tolist() == [0.5, 1.0, 1.5, 2.0]


def test_a_seed_decides_the_times():
    assert times(1, 9, rate=2.0).tolist() == times(1, 9, rate=2.0).tolist()
    assert times(1, 9, rate=2.0).tolist() != times(2, 9, rate=2.0).tolist()


def test_a_ramp_goes_from_one_rate_to_another():
    assert Ramp("linear", 1, 5).rates(5).tolist() == [1, 2, 3, 4, 5]
    assert Ramp("exponential", 1, 16).rates(5) == pytest.approx([1, 2, 4, 8, 16])
    assert Ramp("linear", 2, 9).rates(1).tolist() == [2]
    gaps = np.diff(times(ramp=Ramp("linear", 10, 100), burstiness=4.0))
    assert gaps[:200].mean() == pytest.approx(1 / 10, rel=0.15)
    assert gaps[-200:].mean() == pytest.approx(1 / 100, rel=0.15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArrivalProcess(rate=0.0), "--request-rate: 0.0 is not above the limit of 0"),
        (lambda: ArrivalProcess(rate=float("nan")), "--request-rate: nan is not above"),
        (lambda: ArrivalProcess(burstiness=-1.0), "--burstiness: -1.0 is not above the limit of 0"),
        (lambda: Ramp("linear", 0, 5), "--ramp-up-start-rps: 0 is not above the limit of 0 and finite"),
        (lambda: Ramp("linear", 1, float("inf")), "--ramp-up-end-rps: inf is not above"),
    ],
)
def test_rates_that_are_none_are_named(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
