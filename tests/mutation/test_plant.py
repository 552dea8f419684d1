"""The quick tests turn red when the engine is broken in ways that matter."""

import pytest

from tests.mutation import plant_gpu, plant_triton, planting
from tests.mutation.plant import BED, FAULTS, NO_FAULT


@pytest.mark.parametrize(
    ("bed", "faults"),
    [(BED, FAULTS), (plant_gpu.BED, plant_gpu.FAULTS), (plant_triton.BED, plant_triton.FAULTS)],
    ids=["engine", "gpu", "triton"],
)
def test_every_fault_is_one_edit_of_the_code_as_it_is_and_a_program(bed, faults):
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        compile(bed.faulty(fault), fault.path, "exec")


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault):
    outcome = BED.plant(fault)
    assert outcome.is_caught, outcome.message


@pytest.mark.long
def test_without_a_fault_the_same_tests_pass():
    outcome = BED.plant(NO_FAULT)
    assert outcome.exit_status == 0, outcome.message


@pytest.mark.long
def test_tests_that_hang_have_caught_nothing(monkeypatch):
    monkeypatch.setattr(planting, "_HUNG_S", 0.0)
    outcome = BED.plant(NO_FAULT)
    assert outcome.exit_status is None and not outcome.is_caught
