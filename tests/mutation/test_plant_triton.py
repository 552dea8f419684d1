"""The quick tests of the Triton kernels turn red when they are broken in ways that matter."""

import pytest

from tests.mutation.plant_triton import BED, FAULTS, NO_FAULT


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault):
    outcome = BED.plant(fault)
    assert outcome.is_caught, outcome.message


@pytest.mark.long
def test_without_a_fault_the_same_tests_pass():
    outcome = BED.plant(NO_FAULT)
    assert outcome.exit_status == 0, outcome.message
