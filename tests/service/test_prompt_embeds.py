"""Embeddings of prompts are read without torch: what is not one tensor that fits the model is named, and never runs."""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest

from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.service.input_processor import InputProcessor
from jpaged.service.prompt_embeds import check_finite, read_embeds, with_digests
from jpaged.testing import ByteTokenizer, FakeExecutor, with_embeds
from jpaged.types import EmbeddedSpan, Prompt, Request, SamplingParams
from tests.service.torch_files import VALUES, WIDTH, Call, Named, storage, tensor, torch_file

GEOMETRY = dataclasses.replace(
    with_embeds(width=WIDTH)(max_model_len=16, block_size=4).geometry, embed_max=float(np.finfo(np.float32).max)
)


def read(content: bytes) -> np.ndarray:
    return read_embeds(base64.b64encode(content).decode(), GEOMETRY)


def bfloat16_bits(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("FloatStorage", VALUES.tobytes()),
        ("HalfStorage", VALUES.astype(np.float16).tobytes()),
        ("DoubleStorage", VALUES.astype(np.float64).tobytes()),
        ("BFloat16Storage", bfloat16_bits(VALUES)),
    ],
)
def test_a_saved_tensor_of_any_floating_type_is_read(kind, content):
    np.testing.assert_array_equal(read(torch_file(tensor(storage(kind)), content)), VALUES)


def test_views_parameters_and_batches_of_one_are_read():
    np.testing.assert_array_equal(read(torch_file(tensor(storage(), (2, 4), offset=4))), VALUES[1:])
    np.testing.assert_array_equal(read(torch_file(tensor(storage(), (1, 3, 4), (12, 4, 1)))), VALUES)
    columns = VALUES.reshape(4, 3).T
    np.testing.assert_array_equal(read(torch_file(tensor(storage(), (3, 4), (1, 3)))), columns)
    parameter = Call(
        Named("torch._utils", "_rebuild_parameter"), tensor(storage()), True, Call(Named("collections", "OrderedDict"))
    )
    np.testing.assert_array_equal(read(torch_file(parameter)), VALUES)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_what_torch_itself_saves_is_read(dtype):
    torch = pytest.importorskip("torch")
    given, written = torch.arange(12).reshape(3, WIDTH).to(getattr(torch, dtype)), io.BytesIO()
    torch.save(given, written)
    np.testing.assert_array_equal(read(written.getvalue()), VALUES)
    written = io.BytesIO()
    torch.save(torch.nn.Parameter(given)[1:], written)
    np.testing.assert_array_equal(read(written.getvalue()), VALUES[1:])


def with_description(pickled: bytes) -> bytes:
    """A file whose description is this pickle."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return written.getvalue()


def pairs_of_pairs(depth: int) -> bytes:
    """A pickle of a few hundred bytes that names a tuple whose text has 2 ** depth parts."""
    pair = b"".join(b"h%ch%c\x86\x94" % (number, number) for number in range(depth))
    return b"\x80\x04)\x94" + pair + b"\x8c\x01a\x93."


class Hostile:
    """Runs a command where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/jpaged-was-here",)


HOSTILE = {
    "empty": b"",
    "random bytes": b"\x00\x01not a tensor",
    "truncated": torch_file(tensor(storage()))[:60],
    "no description": torch_file(tensor(storage())).replace(b"data.pkl", b"data.pkm"),
    "a number": torch_file(42),
    "two tensors": torch_file((tensor(storage()), tensor(storage()))),
    "a pickle": pickle.dumps(VALUES),
    "a command": torch_file(Hostile()),
    "a command of the newest pickle": pickle.dumps(Hostile(), 4),
    "eval": torch_file(Call(Named("builtins", "eval"), "1")),
    "a sparse tensor": torch_file(Call(Named("torch._utils", "_rebuild_sparse_tensor"), 1, (storage(),))),
    "integers": torch_file(tensor(storage("LongStorage"))),
    "a dictionary": torch_file({"embeds": tensor(storage())}),
    "an ordered dictionary": torch_file(Call(Named("collections", "OrderedDict"))),
    "compressed": torch_file(tensor(storage()), compression=zipfile.ZIP_DEFLATED),
    "a long description": torch_file(["x" * 5000]),
    "a storage elsewhere": torch_file(tensor(storage(key="../data.pkl"))),
    "a storage that is missing": torch_file(tensor(storage(key="1"))),
    "a short storage": torch_file(tensor(storage(size=13))),
    "a long storage": torch_file(tensor(storage(size=1 << 40))),
    "beyond the storage": torch_file(tensor(storage(), strides=(5, 1))),
    "before the storage": torch_file(tensor(storage(), offset=-1)),
    "backwards": torch_file(tensor(storage(), strides=(-4, 1), offset=8)),
    "a number of strides": torch_file(tensor(storage(), strides=(4,))),
    "text as a size": torch_file(tensor(storage(), shape=("3", "4"))),
    "a call of a call": torch_file(Call(tensor(storage()), 1)),
    "a storage as a tensor": torch_file(storage()),
    "a name of exponential length": with_description(pairs_of_pairs(80)),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_anything_else_is_an_error_of_bounded_size_and_nothing_runs(content):
    for one in (content, content + b"A" * 500):
        with pytest.raises(InvalidArgument, match=r"is not a file of torch\.save") as caught:
            read(one)
        assert caught.value.field == "prompt_embeds"
        assert len(str(caught.value)) < 400
    assert not os.path.exists("/tmp/jpaged-was-here")


def test_damaged_files_are_errors_whatever_byte_is_damaged():
    content, rng = torch_file(tensor(storage())), np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 3):
            damaged[place] = rng.integers(256)
        try:
            values = read(bytes(damaged))
        except InvalidArgument:
            continue
        assert values.shape[1] == WIDTH and values.dtype == np.float32


def test_shapes_types_and_sizes_are_named_with_their_limit():
    for shape in ((3, 5), (12,), (2, 3, 4), (3, 1, 4), ()):
        with pytest.raises(InvalidArgument, match=r"the model takes \(tokens, 4\)"):
            read_embeds(np.zeros(shape, np.float32), GEOMETRY)
    with pytest.raises(InvalidArgument, match=r"has the shape \(2, 6\); the model takes"):
        read(torch_file(tensor(storage(), (2, 6), (6, 1))))
    with pytest.raises(InvalidArgument, match="is empty"):
        read_embeds(np.zeros((0, WIDTH), np.float32), GEOMETRY)
    with pytest.raises(InvalidArgument, match="has the type int64; must be one of float32"):
        read_embeds(np.zeros((3, WIDTH), np.int64), GEOMETRY)
    with pytest.raises(RequestTooLong, match=r"17 tokens are over max_model_len \(16\)"):
        read_embeds(np.zeros((17, WIDTH), np.float32), GEOMETRY)
    with pytest.raises(RequestTooLong, match=r"17 tokens are over max_model_len \(16\)"):
        read(torch_file(tensor(storage(), (17, 4), (0, 1))))
    with pytest.raises(RequestTooLong, match=r"70000 bytes, over the limit of 66048 for max_model_len \(16\) tokens"):
        read_embeds(bytes(70000), GEOMETRY)
    with pytest.raises(InvalidArgument, match="is not base64"):
        read_embeds("invalid_base64!", GEOMETRY)
    with pytest.raises(Unsupported, match=r"the model was loaded without --enable-prompt-embeds \(enable"):
        read_embeds(VALUES, FakeExecutor().geometry)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e39])
def test_numbers_that_the_model_cannot_hold_are_named_with_their_place(number):
    values = VALUES.astype(np.float64)
    values[1, 2] = number
    with pytest.raises(InvalidArgument, match=r"at \[1, 2\]: numbers must be finite"):
        check_finite(read_embeds(values, GEOMETRY), GEOMETRY)


def test_the_callers_array_may_change_afterwards():
    given = VALUES.copy()
    values = read_embeds(given, GEOMETRY)
    given[:] = -1
    np.testing.assert_array_equal(values, VALUES)


def test_digests_distinguish_numbers_and_places_in_a_block():
    def digests(start: int, values: np.ndarray) -> tuple[bytes, ...]:
        return with_digests([EmbeddedSpan(start, values)], 10, 4).block_digests

    assert [bool(one) for one in digests(5, VALUES)] == [False, True, False]
    assert digests(5, VALUES)[1] != digests(4, VALUES)[1]
    assert digests(3, VALUES)[0] == digests(3, np.concatenate([VALUES[:1], VALUES[2:]]))[0]
    other = VALUES.copy()
    other[2, 3] += 1
    assert digests(4, VALUES)[1] != digests(4, other)[1]


def make(embeds: Any = VALUES, **sampling: Any) -> Request:
    fields = {name: sampling.pop(name) for name in ("pooling", "text", "truncation_side") if name in sampling}
    processor = InputProcessor(ByteTokenizer(), GEOMETRY, max_logprobs=-1)
    prompt = Prompt(embeds=embeds, **fields)
    return processor.make_request(
        request_id="", sampling=SamplingParams(**{"max_tokens": 2, **sampling}), prompt=prompt
    )


def test_a_request_has_placeholders_in_place_of_tokens():
    request = make()
    assert request.prompt_token_ids == (0, 0, 0)
    assert request.embeds is not None
    np.testing.assert_array_equal(request.embeds.spans[0].values_te, VALUES)
    assert request.embeds.hide([0, 0, 0, 7]) == [-1, -1, -1, 7]


def test_truncation_keeps_rows_of_either_side():
    for side, rows in (("left", VALUES[1:]), ("right", VALUES[:2])):
        request = make(truncate_prompt_tokens=2, truncation_side=side)
        assert request.embeds is not None
        np.testing.assert_array_equal(request.embeds.spans[0].values_te, rows)


def test_what_embedded_positions_cannot_have_is_refused_by_name():
    with pytest.raises(InvalidArgument, match="not compatible with prompt_logprobs"):
        make(prompt_logprobs=1)
    with pytest.raises(InvalidArgument, match="not compatible with a pooling"):
        make(pooling="last")
    with pytest.raises(InvalidArgument, match="give exactly one of text, token ids, chat messages and prompt_embeds"):
        make(text="a")
    with pytest.raises(RequestTooLong, match="3 prompt tokens and 14 to generate make 17, over max_model_len"):
        make(max_tokens=14)
