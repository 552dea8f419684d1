"""Whatever is written as JSON can be read as JSON."""

import datetime
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.json_text import PIECE_BYTES, Items, check_values, load_object

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


@pytest.mark.long
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


@pytest.mark.long
@given(VALUES)
def test_encoded_values_are_those_that_python_writes(value):
    whole = json.loads(json_text.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    assert json.loads(json_text.encode(value)) == whole
    assert json.loads(b"".join(json_text.pieces(value))) == whole


@pytest.mark.long
@given(VALUES, st.integers(0, 40))
def test_items_are_written_as_the_list_that_they_are(value, num):
    expected = {"a": [value] * num, "b": {"c": [{"d": [num] * num}]}}
    lazy = {"a": Items(lambda: [value] * num), "b": {"c": Items(lambda: iter([{"d": Items(lambda: [num] * num)}]))}}
    text = json_text.dumps(expected, ensure_ascii=False).encode("utf-8", "replace")
    for written in (json_text.encode(lazy), b"".join(json_text.pieces(lazy)), json_text.dumps(lazy).encode()):
        assert json.loads(written.decode().encode("utf-8", "replace")) == json.loads(text)


@pytest.mark.parametrize(
    "value",
    [
        [1.25] * 200_000,
        {str(i): [i] * 3 for i in range(100_000)},
        {"choices": Items(lambda: ({"logprobs": Items(lambda: [{"a": "b" * 60}] * 5000)} for _ in range(10)))},
        {"data": [{"embedding": [0.5] * 200_000}, {"embedding": []}]},
        {i: {"rank": i} for i in range(50_000)},
    ],
    ids=range(5),
)
def test_a_large_value_is_written_in_pieces_of_bounded_size(value):
    pieces = list(json_text.pieces(value))
    assert len(pieces) > 2
    assert max(map(len, pieces)) < 1.5 * PIECE_BYTES
    assert json.loads(b"".join(pieces)) == json.loads(json_text.dumps(value))


def test_items_are_made_while_they_are_written():
    made = []

    def items():
        for number in range(100_000):
            made.append(number)
            yield {"number": number, "text": "x" * 100}

    pieces = json_text.pieces({"items": Items(items)})
    next(pieces)
    assert len(made) < 10_000


def test_half_of_a_character_and_large_integers_are_written():
    text = b"".join(json_text.pieces({"a": "\ud800", "b": 2**70, "c": "\u20ac"}))
    assert json.loads(text) == {"a": "?", "b": 2**70, "c": "\u20ac"}


READABLE = st.dictionaries(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text() | st.just("\ud800"),
        lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
        max_leaves=8,
    ),
)


@settings(max_examples=40)
@given(READABLE, st.booleans())
def test_what_is_read_fast_is_what_pythons_reader_reads(value, is_ascii):
    text = json.dumps(value, ensure_ascii=is_ascii)
    read = json_text.loads_plain(text, 64)
    assert read is None or repr(read) == repr(json.loads(text))


def nested(depth):
    value: list[object] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_usual_objects_are_read_fast_and_no_others():
    usual = {"a": [1, -(2**63), 2**64 - 1, 9.2e18, True, None, "é\U0001f600"], "b": {}, "c": [[{}], [[]]]}
    for value in (usual, {"a": nested(63)}, {}):
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
            assert json_text.loads_plain(text, 64) == value
    for other in (
        {"a": nested(64)},
        {"a": [2**64]},
        {"a": -(2**63) - 1},
        {"a": "\ud800"},
        {"\udfff": 1},
        [1],
        "a",
        None,
    ):
        assert json_text.loads_plain(json.dumps(other), 64) is None
    for text in ('{"a": NaN}', '{"a": 1e400}', "{", '{"a": 1,}', "", b"\xff{}", b"\xef\xbb\xbf{}"):
        assert json_text.loads_plain(text, 64) is None


def test_what_only_python_can_write_is_not_plain():
    assert json_text.encode_plain({"a": [1, "é", None, (2.5,)]}) == '{"a":[1,"é",null,[2.5]]}'.encode()
    for value in (2**64, "\ud800", {1: 2}, object(), datetime.datetime(2026, 1, 1)):
        assert json_text.encode_plain({"a": [value]}) is None


HARD = [
    *('{"a":1e400}', '{"a":-0}', '{"a":-0.0}', '{"a":1}x', '{"a":1} \n', '\ufeff{"a":1}', '{"b":1,"a":1,"b":2}'),
    *('{"a":Infinity}', '{"a":18446744073709551616}', '{"a":1e19}', '{"a":9.3e18}', '{"a":9007199254740993.0}'),
    *(
        '{"a":"\\udc00\\ud800"}',
        '{"a":"\\ud83d\\ude00"}',
        '{"a":01}',
        '{"a":1.}',
        '{"a":.5}',
        '{"a":"\t"}',
        '{"a":"\x7f"}',
    ),
    *('{"a":"\\u0000"}', '{"a":1}\x00', "\x0b{}", "\u00a0{}", '{"a":' + "9" * 5000 + "}", '{"a":1' + "0" * 308 + ".0}"),
    *('{"input":"\\ud800"}', '{"messages":[{"content":"\\ud800"}]}', '{"a":1e-400}', '{"a":2.2250738585072011e-308}'),
    *('{"a":' * depth + "1" + "}" * depth for depth in (63, 64, 65, 100_000)),
    *(b'{"a":"\xed\xa0\xbd\xed\xb8\x80"}', b'{"a":"\xc0\x80"}', b'{"a":1}\xff', '{"a":1}'.encode("utf-16")),
]


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_bodies_are_accepted_and_refused_as_if_python_had_read_them(text, monkeypatch):
    def read():
        try:
            value = load_object("body", text)
            check_values("body", value)
        except InvalidArgument as error:
            return str(error)
        return repr(dict(value))

    fast = read()
    monkeypatch.setattr(json_text, "loads_plain", lambda text, max_depth: None)
    assert read() == fast
