"""The quick tests turn red when the engine or a kernel is broken in ways that matter."""

import pytest

from tests.mutation import planting
from tests.mutation.plant import BEDS, PAGE, with_table


@pytest.mark.parametrize("name", BEDS)
def test_every_fault_is_one_edit_of_the_code_as_it_is_and_a_program(name):
    faults = BEDS[name].faults
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        compile(BEDS[name].faulty(fault), fault.path, "exec")


def test_the_page_lists_todays_faults():
    page = PAGE.read_text()
    assert with_table(page) == page, "python -m tests.mutation.plant --table"


def test_the_first_failure_is_the_summarys_whatever_a_log_says():
    log = "-- Captured log call --\nERROR    jpaged:x.py:1 no::test\nFAILED to\n"
    summary = "=== short test summary info ===\n"
    ended = f"{log}{summary}FAILED tests/a.py::test_one - assert\nERROR tests/a.py::test_two\n"
    assert planting.first_failure(ended) == "test_one - assert"
    assert planting.first_failure(f"{log}{summary}ERROR tests/a.py::test_two - no room\n") == "test_two - no room"
    for nothing in (log, "ERROR: usage", f"{log}1 passed", summary):
        assert planting.first_failure(nothing) is None


@pytest.mark.deep
@pytest.mark.parametrize(
    ("bed", "fault"),
    [pytest.param(bed, fault, id=f"{name}: {fault.name}") for name, bed in BEDS.items() for fault in bed.faults],
)
def test_a_planted_fault_is_caught(bed, fault):
    outcome = bed.plant(fault)
    assert outcome.is_caught, outcome.message


@pytest.mark.deep
@pytest.mark.parametrize("name", BEDS)
def test_without_a_fault_the_same_tests_pass(name):
    outcome = BEDS[name].plant(BEDS[name].no_fault)
    assert outcome.exit_status == 0, outcome.message


@pytest.mark.deep
def test_tests_that_hang_have_caught_nothing(monkeypatch):
    monkeypatch.setattr(planting, "_HUNG_S", 0.0)
    outcome = BEDS["engine"].plant(BEDS["engine"].no_fault)
    assert outcome.exit_status is None and not outcome.is_caught
