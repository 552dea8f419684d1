"""No test is lost between the quick ones, the long ones and their parts."""

from typing import Any

import pytest

from tests.choosing import is_in_part, is_long, is_long_file, part_of, thin

NAMES = [f"tests/test_{i % 7}.py::test_{i % 31}[{i}]" for i in range(500)]


class Case:
    """A collected test."""

    def __init__(self, nodeid, *marks):
        self.nodeid = nodeid
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        self.marks[mark.name] = mark.mark


@pytest.mark.parametrize("num_parts", [1, 2, 4, 9])
def test_every_test_is_in_one_part_and_none_has_most_of_a_tests_cases(num_parts):
    parts = [[name for name in NAMES if is_in_part(name, part + 1, num_parts)] for part in range(num_parts)]
    assert sorted(name for part in parts for name in part) == sorted(NAMES)
    assert max(map(len, parts)) < 1.5 * len(NAMES) / num_parts


@pytest.mark.parametrize("asked", ["", "1", "0/4", "5/4", "-1/4", "1/0", "a/b", "1/4/2", "1.0/4"])
def test_what_is_no_part_is_refused(asked):
    with pytest.raises(pytest.UsageError, match="--part"):
        part_of(asked)


@pytest.mark.parametrize(
    ("line", "is_whole"),
    [
        ("pytestmark = pytest.mark.long", True),
        ('pytestmark = [pytest.mark.deep, pytest.mark.usefixtures("a")]', True),
        ('pytestmark = pytest.mark.usefixtures("a")', False),
        ("@pytest.mark.long", False),
        ("    pytestmark = pytest.mark.long", False),
    ],
)
def test_a_file_is_long_if_all_of_its_tests_are(line, is_whole, tmp_path):
    path = tmp_path / "test_a.py"
    path.write_text(f"import pytest\n\n{line}\ndef test_a():\n    pass\n")
    assert is_long_file(path) is is_whole


def test_a_function_or_a_class_is_long_if_it_is_marked_itself():
    @pytest.mark.thinned(3)
    @pytest.mark.deep
    def marked():
        """Do nothing."""

    @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.long), 2])
    def of_some_cases(n):
        """Do nothing."""

    class Marked:
        pytestmark = pytest.mark.long

    class Derived(Marked):
        """Without marks of its own."""

    assert [is_long(tests) for tests in (marked, Marked, Derived)] == [True] * 3
    assert [is_long(tests) for tests in (of_some_cases, Case, pytest.mark.long, None)] == [False] * 4


def test_parts_are_counted_from_1():
    assert part_of("4/4") == (4, 4)


def test_every_nth_case_stays_quick_and_no_mark_is_taken_away():
    thinned, long, deep = pytest.mark.thinned(3).mark, pytest.mark.long.mark, pytest.mark.deep.mark
    grid = [Case(f"a.py::test_a[{i}]", thinned) for i in range(8)]
    marked = [Case("a.py::test_b[0]", thinned, deep), *(Case(f"a.py::test_b[{i}]", thinned) for i in (1, 2))]
    others = [Case("a.py::test_c", long), Case("a.py::test_d")]
    items: Any = [*grid, *marked, *others]
    thin(items)
    assert ["long" in case.marks for case in grid] == [False, True, True, False, True, True, False, True]
    assert [sorted(case.marks) for case in marked] == [["deep", "thinned"], ["thinned"], ["long", "thinned"]]
    assert [sorted(case.marks) for case in others] == [["long"], []]
