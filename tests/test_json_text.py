"""Whatever is written as JSON can be read as JSON."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged import json_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: st.lists(parts) | st.tuples(parts) | st.dictionaries(st.text(), parts),
)


def refused(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def expected(value):
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [expected(part) for part in value]
        case dict():
            return {key: expected(part) for key, part in value.items()}
        case _:
            return value


@given(VALUES)
def test_what_is_not_finite_is_null_and_all_else_as_it_was(value):
    assert json.loads(json_text.dumps(value), parse_constant=refused) == expected(value)


def test_it_is_laid_out_as_asked():
    value = {"b": [math.inf, 1.5], "a": "é"}
    assert json_text.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")) == (
        '{"a":"é","b":[null,1.5]}'
    )
    assert json_text.dumps({"a": -math.inf}, indent=2) == '{\n  "a": null\n}'


@pytest.mark.parametrize("value", [{1, 2}, {"a": object()}])
def test_what_is_no_json_is_an_error(value):
    with pytest.raises(TypeError):
        json_text.dumps(value)
