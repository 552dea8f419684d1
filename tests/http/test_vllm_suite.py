"""The comparison of vLLM's own tests with those that are expected to fail; `make vllm-tests` runs them."""

from pathlib import Path

import pytest

from tests.http.vllm_suite.run import Expected, compare, compare_files, read_outcomes, summary

REPORT = """<testsuites><testsuite>
<testcase file="tests/entrypoints/a.py" name="test_one[x]"/>
<testcase file="tests/entrypoints/a.py" name="test_one[y]"><failure/></testcase>
<testcase file="tests/entrypoints/a.py" name="test_two"><error/></testcase>
<testcase classname="tests.entrypoints.b" name="test_three"><skipped/></testcase>
</testsuite></testsuites>"""
EXPECTED = Expected("1", {"a.py": {"test_one[y]": "why", "test_two": "why"}, "b.py": {}})


def test_a_report_is_compared_with_the_expected_failures(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    outcomes = read_outcomes(path)
    assert outcomes == {
        ("a.py", "test_one[x]"): "passed",
        ("a.py", "test_one[y]"): "failed",
        ("a.py", "test_two"): "failed",
        ("b.py", "test_three"): "skipped",
    }
    assert compare(EXPECTED, outcomes) == []
    assert [*summary(["a.py", "b.py"], outcomes)] == [
        "   1 passed    2 failed    0 skipped  a.py",
        "   0 passed    0 failed    1 skipped  b.py",
        "   1 passed    2 failed    1 skipped  in all",
    ]
    assert compare(Expected("1", {"a.py": {}}), outcomes) == [
        "failed, and should pass: a.py::test_one[y]",
        "failed, and should pass: a.py::test_two",
    ]
    assert compare(EXPECTED, {**outcomes, ("a.py", "test_two"): "passed"}) == [
        "passed, and is expected to fail: a.py::test_two"
    ]
    chance = "depends on the model: it samples"
    assert compare(Expected("1", {"a.py": {"test_one": chance, "test_two": "why", "test_old": "why"}}), outcomes) == [
        "did not run: a.py::test_old"
    ]


def test_every_file_of_vllm_is_listed_or_excluded() -> None:
    expected = Expected("1", {"a.py": {}, "old.py": {}}, {"units/": "why", "b/c.py": "why", "gone/": "why"})
    assert compare_files(expected, ["a.py", "b/c.py", "b/d.py", "units/x/e.py"]) == [
        "not listed: b/d.py",
        "not in vLLM: gone/",
        "not in vLLM: old.py",
    ]


def test_every_expected_failure_has_a_reason() -> None:
    expected = Expected.read()
    reasons = [reason for rows in expected.failures.values() for reason in rows.values()]
    assert expected.version and reasons and all(len(reason) > 10 for reason in (*reasons, *expected.not_run.values()))
    assert expected.not_run and expected.not_run.keys().isdisjoint(expected.failures)


def test_a_failure_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    path.write_text('version = "1"\n[files."a.py"]\n"" = ["test_one"]\n')
    with pytest.raises(ValueError, match=r"a\.py has a failure without a reason"):
        Expected.read(path)
