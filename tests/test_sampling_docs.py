"""The table of docs/sampling.md has every field of a request, with its default and the bounds that hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jpaged.errors import InvalidArgument
from jpaged.sampling_params import request_fields
from jpaged.types import SamplingParams

PAGE = Path(__file__).parents[1] / "docs" / "sampling.md"
TABLE = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", TABLE, re.MULTILINE)
RANGES = [(name, *found.groups()) for name, _, text in ROWS if (found := re.fullmatch(r"(-?\d+) to (-?\d+)", text))]
ABOVE = [(name, found[1]) for name, _, text in ROWS if (found := re.fullmatch(r"above 0, to (\d+)", text))]
BESIDE: dict[str, dict[str, Any]] = {"length_penalty": {"beam_width": 2}}


def params_of(name: str, value: float) -> SamplingParams:
    given: dict[str, Any] = {name: value, **BESIDE.get(name, {})}
    return SamplingParams(**given)


def test_every_field_is_there_with_its_default() -> None:
    assert [(name, default) for name, default, _ in ROWS] == [(f.name, repr(f.default)) for f in request_fields()]


@pytest.mark.parametrize(("name", "low", "high"), RANGES)
def test_bounds_are_what_they_say(name: str, low: str, high: str) -> None:
    for value in (int(low), int(high)):
        kept = value % 2**64 if name == "seed" else value
        assert getattr(params_of(name, value), name) == kept
    for value in (int(low) - 1, int(high) + 1):
        with pytest.raises(InvalidArgument, match=f"{name}: {value}"):
            params_of(name, value)


@pytest.mark.parametrize(("name", "high"), ABOVE)
def test_what_is_above_0_is_not_0(name: str, high: str) -> None:
    assert getattr(params_of(name, float(high)), name) == float(high)
    for value in (0.0, float(high) + 0.5):
        with pytest.raises(InvalidArgument, match=f"{name}: {value}"):
            params_of(name, value)


def test_most_bounds_are_held_here() -> None:
    assert {name for name, *_ in RANGES} >= {
        "temperature",
        "presence_penalty",
        "top_n_sigma",
        "n",
        "beam_width",
        "seed",
    }
    assert {name for name, _ in ABOVE} == {"top_p", "typical_p", "repetition_penalty"}
