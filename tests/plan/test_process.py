"""The child that compiles: what becomes of a plan when its compiler crashes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from jpaged.errors import InternalError
from jpaged.plan import compilation
from jpaged.plan.compilation import CompiledPlan, Question, compile_plan

QUESTION = Question("llama-3.1-8b", "h200", {}, all_programs=False)


def test_a_crash_is_answered_by_one_program_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = object.__new__(CompiledPlan)
    asked: list[Question] = []

    def ask(question: Question, say: object) -> CompiledPlan:
        asked.append(question)
        if len(asked) == 1:
            raise compilation._Crashed(11, "Raising signal 11")
        return plan

    monkeypatch.setattr(compilation, "_ask", ask)
    said: list[str] = []
    assert compile_plan(QUESTION, said.append) is plan
    assert [question.num_threads for question in asked] == [None, 1]
    assert said == ["the compiler crashed (signal 11): retrying with one program at a time"]


def test_a_compiler_that_crashes_twice_is_an_error_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\necho something is wrong >&2\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    with pytest.raises(InternalError, match=r"h200: .* crashed twice, by signal 11: something is wrong"):
        compile_plan(QUESTION, lambda line: None)


def test_a_child_that_ends_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="h200: the compiler process exited with code 1: no output"):
        compile_plan(QUESTION, lambda line: None)
