"""Data sets: the lengths that were asked for, the same requests for the same seed, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jpaged.bench.datasets import DatasetOptions, FolderVocabulary, NumberedVocabulary, Sample
from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument
from tests.bench.words import Letters


def made(**options) -> list[Sample]:
    return DatasetOptions(**options).make(Letters())


def test_random_prompts_have_the_lengths_that_were_asked_for_and_no_special_token():
    samples = made(num_prompts=50, random_input_len=20, random_output_len=7, random_prefix_len=3)
    assert [(len(s.prompt), s.prompt_len, s.output_len) for s in samples] == [(23, 23, 7)] * 50
    assert len({s.prompt[:3] for s in samples}) == 1
    assert len({s.prompt[3:] for s in samples}) == 50
    assert all(isinstance(token, int) and 3 <= token < 128 for s in samples for token in s.prompt)


def test_a_range_draws_lengths_on_both_sides_of_what_was_asked_for():
    samples = made(num_prompts=400, random_input_len=10, random_output_len=4, random_range_ratio=0.5)
    assert {s.prompt_len for s in samples} == set(range(5, 16))
    assert {s.output_len for s in samples} == set(range(2, 7))


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_a_seed_decides_what_is_sent(name):
    assert made(dataset_name=name, seed=1, num_prompts=10) == made(dataset_name=name, seed=1, num_prompts=10)
    assert made(dataset_name=name, seed=1, num_prompts=10) != made(dataset_name=name, seed=2, num_prompts=10)


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_prefixes_repeat_evenly(is_shuffled):
    samples = made(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
        prefix_repetition_output_len=9,
        disable_shuffle=not is_shuffled,
    )
    prefixes = [s.prompt[:8] for s in samples]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert (prefixes == sorted(prefixes, key=prefixes.index)) is not is_shuffled
    assert {(s.prompt_len, s.output_len) for s in samples} == {(12, 9)}
    assert len({s.prompt[8:] for s in samples}) == 12


def test_random_prompts_become_texts_of_no_more_tokens():
    samples = made(num_prompts=5, random_input_len=20, prompt_format="text")
    assert all(isinstance(s.prompt, str) and s.prompt_len == len(s.prompt) == 20 for s in samples)


def test_the_demos_own_tokens_make_texts_of_the_length_that_is_told():
    vocabulary = FolderVocabulary(FOLDER)
    assert vocabulary.size == 3072
    assert 0 in vocabulary.special_ids
    for sample in DatasetOptions(num_prompts=5, random_input_len=40, prompt_format="text").make(vocabulary):
        assert isinstance(sample.prompt, str)
        assert sample.prompt_len == len(vocabulary.encode(sample.prompt))
        assert sample.prompt_len >= 1


CONVERSATIONS = [
    {"conversations": [{"value": "q" * 10}, {"value": "a" * 6}, {"value": "again"}]},
    {"conversations": [{"value": "short"}, {"value": "a"}]},
    {"conversations": [{"value": "q" * 1025}, {"value": "a" * 6}]},
    {"conversations": [{"value": "q" * 1000}, {"value": "a" * 1049}]},
    {"conversations": [{"value": "q" * 1000}, {"value": "a" * 1048}]},
    {"conversations": [{"value": "alone"}]},
    {"conversations": "none"},
    {"conversations": [{"value": None}, {"value": 3}]},
    "nothing",
]


def test_sharegpt_takes_two_turns_of_conversations_of_a_fitting_length(tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(CONVERSATIONS))
    samples = made(dataset_name="sharegpt", dataset_path=path, num_prompts=9, no_oversample=True, disable_shuffle=True)
    assert samples == [Sample("q" * 10, 10, 6), Sample("q" * 1000, 1000, 1048)]
    fixed = made(dataset_name="sharegpt", dataset_path=path, num_prompts=3, sharegpt_output_len=2)
    assert {s.output_len for s in fixed} == {2}
    assert {s.prompt_len for s in fixed} <= {10, 5, 1000}
    repeated = made(dataset_name="sharegpt", dataset_path=path, num_prompts=9)
    assert len(repeated) == 9
    assert set(repeated) == set(samples)


def test_a_line_of_json_is_a_request(tmp_path: Path):
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "hello", "output_tokens": 3}\n\n{"prompt_token_ids": [5, 6]}\n')
    options = {"dataset_name": "custom", "dataset_path": path, "disable_shuffle": True, "custom_output_len": 9}
    assert made(**options, num_prompts=2) == [Sample("hello", None, 3), Sample((5, 6), 2, 9)]
    assert made(**options, num_prompts=1) == [Sample("hello", None, 3)]
    path.write_text('{"prompt": "a\u2028b"}\r\n', encoding="utf-8")
    assert made(**options, num_prompts=1) == [Sample("a\u2028b", None, 9)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: is not JSON"),
        ("[" * 100_000, "line 1: is not JSON"),
        ("[]", "line 1: is not a JSON object"),
        ('{"prompt": ""}', "line 1: one of prompt and prompt_token_ids is expected"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 1: one of prompt and prompt_token_ids"),
        ('{"prompt_token_ids": [-1]}', "line 1: one of prompt and prompt_token_ids"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens: 0 is not from 1"),
        ("", "has no request that could be sent"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line, message):
    path = tmp_path / "custom.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidArgument, match=message) as caught:
        made(dataset_name="custom", dataset_path=path)
    assert caught.value.field == "--dataset-path"


@pytest.mark.parametrize("name", ["sharegpt", "custom"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name):
    with pytest.raises(InvalidArgument, match="nowhere cannot be read"):
        made(dataset_name=name, dataset_path=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"num_prompts": 0}, "--num-prompts", "0 is out of range: must be from 1"),
        ({"random_output_len": 0}, "--random-output-len", "0 is out of range"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio", "1.0 is out of range: must be from 0 to below 1"),
        ({"random_range_ratio": float("nan")}, "--random-range-ratio", "nan is out of range"),
        ({"random_input_len": 1, "random_range_ratio": 0.5}, "--random-input-len", "a prompt may come out empty"),
        ({"dataset_name": "custom"}, "--dataset-path", "is missing"),
        ({"dataset_path": Path("x")}, "--dataset-path", "random has none"),
        ({"dataset_name": "prefix_repetition", "num_prompts": 9}, "--num-prompts", "9 is below the limit of 10"),
        ({"sharegpt_output_len": 0}, "--sharegpt-output-len", "0 is out of range"),
    ],
)
def test_bad_sizes_are_named(options, field, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        DatasetOptions(**options)
    assert caught.value.field == field


def test_a_folder_without_a_tokenizer_and_a_server_without_one_are_named(tmp_path: Path):
    with pytest.raises(InvalidArgument, match=r"has no tokenizer\.json"):
        FolderVocabulary(tmp_path)
    with pytest.raises(InvalidArgument, match="--tokenizer: is missing"):
        DatasetOptions(prompt_format="text", num_prompts=1).make(NumberedVocabulary(100))
    assert len(DatasetOptions(num_prompts=4).make(NumberedVocabulary(100))) == 4
