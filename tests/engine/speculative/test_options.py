"""`--speculative-config`: what it takes, and what it refuses by name."""

from __future__ import annotations

import pytest

from jpaged import json_text
from jpaged.config import SpeculativeOptions
from jpaged.config.speculative import WITHOUT_EFFECT
from jpaged.engine.speculative.drafter import make_proposer
from jpaged.engine.speculative.ngram import NgramProposer
from jpaged.engine.speculative.suffix import SuffixProposer
from jpaged.errors import InternalError, InvalidArgument


def parse(**values):
    return SpeculativeOptions.parse(json_text.dumps(values))


def test_each_method_is_read_with_vllms_defaults():
    ngram = parse(method="ngram", num_speculative_tokens=5)
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max, ngram.num_speculative_tokens) == (5, 5, 5)
    suffix = parse(method="suffix")
    assert (suffix.suffix_decoding_max_tree_depth, suffix.num_speculative_tokens) == (24, 24)
    assert (suffix.suffix_decoding_max_cached_requests, suffix.suffix_decoding_max_spec_factor) == (10000, 1.0)
    assert suffix.suffix_decoding_min_token_prob == 0.1
    draft = parse(method="draft_model", model="a/b", num_speculative_tokens=4, disable_by_batch_size=8)
    assert (draft.model, draft.num_speculative_tokens, draft.disable_by_batch_size) == ("a/b", 4, 8)
    assert parse(method="eagle3", model="a/b", num_speculative_tokens=2).method == "eagle3"


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "qwen3_next_mtp"])
def test_mtp_needs_no_checkpoint_and_has_vllms_older_names(method):
    found = parse(method=method, num_speculative_tokens=2)
    assert (found.method, found.model, found.num_speculative_tokens) == ("mtp", None, 2)
    pinned = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    assert parse(method=method, num_speculative_tokens=2, **pinned).synthetic_acceptance_length == 2.5


def test_one_bound_of_the_ngrams_stands_for_both_and_null_is_left_out():
    one = parse(method="ngram", num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=None, model=None)
    assert (one.prompt_lookup_min, one.prompt_lookup_max) == (3, 3)
    both = parse(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2)
    assert (both.prompt_lookup_min, both.prompt_lookup_max) == (2, 4)


def test_a_model_without_a_method_is_a_draft_model_or_a_head_by_its_name():
    assert parse(model="a/b", num_speculative_tokens=4).method == "draft_model"
    assert parse(model="a/B-EAGLE3", num_speculative_tokens=4).method == "eagle3"
    for given in (
        {"model": "[ngram]"},
        {"model": "ngram"},
        {"method": "[ngram]"},
        {"method": "ngram", "model": "ngram"},
    ):
        found = parse(num_speculative_tokens=5, prompt_lookup_max=4, **given)
        assert (found.method, found.model, found.prompt_lookup_max) == ("ngram", None, 4)


def test_keys_of_vllm_that_only_choose_how_draft_tokens_are_computed_have_no_effect():
    plain = parse(method="eagle3", model="a/b", num_speculative_tokens=2)
    keys = {"draft_tensor_parallel_size": 1, "enforce_eager": True, "quantization": None, "parallel_drafting": False}
    assert parse(method="eagle3", model="a/b", num_speculative_tokens=2, **keys) == plain
    assert all(parse(method="suffix", **{key: 1}) == parse(method="suffix") for key in WITHOUT_EFFECT)


def test_the_tree_bounds_what_suffix_proposes_unless_a_number_is_given():
    assert parse(method="suffix", suffix_decoding_max_tree_depth=12).num_speculative_tokens == 12
    assert parse(method="suffix", suffix_decoding_max_tree_depth=200).num_speculative_tokens == 32
    assert parse(method="suffix", num_speculative_tokens=7).num_speculative_tokens == 7


NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
DRAFT = {"method": "draft_model", "model": "a/b", "num_speculative_tokens": 3}
PINNED = {**DRAFT, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("values", "field", "problem"),
    [
        ({}, ".method", "is missing: must be one of ngram, suffix"),
        ({"method": "medusa"}, ".method", "'medusa' is not one of ngram"),
        ({"method": 3}, ".method", "3 is not of type str"),
        ({"method": "ngram"}, ".num_speculative_tokens", "is missing: must be from 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": 0}, ".num_speculative_tokens", "0 is below the limit of 1"),
        ({"method": "suffix", "num_speculative_tokens": 33}, ".num_speculative_tokens", "33 is above the limit of 32"),
        ({"method": "suffix", "num_speculative_tokens": True}, ".num_speculative_tokens", "True is not of type int"),
        ({"method": "suffix", "num_speculative_tokens": 2.0}, ".num_speculative_tokens", "2.0 is not of type int"),
        ({**NGRAM, "model": "a/b"}, ".model", "'a/b' applies only to draft_model and eagle3; the method is ngram"),
        ({"method": "suffix", "model": "a/b"}, ".model", "the method is suffix"),
        ({"method": "draft_model", "num_speculative_tokens": 1}, ".model", "is missing: draft_model requires"),
        ({"method": "eagle3", "num_speculative_tokens": 1, "model": ""}, ".model", "is empty"),
        ({"method": "eagle3", "model": "a/b"}, ".num_speculative_tokens", "is missing"),
        ({"method": "mtp"}, ".num_speculative_tokens", "is missing: must be from 1 to 32"),
        ({"method": "ernie_mtp", "num_speculative_tokens": 1}, ".method", "'ernie_mtp' is not one of ngram"),
        (
            {"method": "mimo_mtp", "num_speculative_tokens": 1, "model": "a/b"},
            ".model",
            "'a/b' applies only to draft_model and eagle3; the method is mtp",
        ),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, ".prompt_lookup_min", "4 is above"),
        ({**NGRAM, "prompt_lookup_max": 33}, ".prompt_lookup_max", "33 is above the limit of 32"),
        (
            {"method": "suffix", "prompt_lookup_max": 3},
            ".prompt_lookup_max",
            "3 applies only to ngram; the method is suffix",
        ),
        (
            {**NGRAM, "suffix_decoding_max_tree_depth": 24},
            ".suffix_decoding_max_tree_depth",
            "24 applies only to suffix",
        ),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
            ".suffix_decoding_min_token_prob",
            "1.5 is above",
        ),
        ({**NGRAM, "disable_by_batch_size": 1}, ".disable_by_batch_size", "1 is below the limit of 2"),
        (
            {**NGRAM, "rejection_sample_method": "synthetic"},
            ".rejection_sample_method",
            "applies only to draft_model and eagle3",
        ),
        (
            {**DRAFT, "rejection_sample_method": "typical"},
            ".rejection_sample_method",
            "'typical' is not one of standard",
        ),
        ({**DRAFT, "rejection_sample_method": "synthetic"}, ".synthetic_acceptance_length", "is missing"),
        ({**DRAFT, "synthetic_acceptance_length": 2.0}, ".synthetic_acceptance_length", "2.0 applies only to"),
        ({**PINNED, "synthetic_acceptance_length": 0.9}, ".synthetic_acceptance_length", "0.9 is below the limit of 1"),
        (
            {**PINNED, "synthetic_acceptance_length": 4.5},
            ".synthetic_acceptance_length",
            "4.5 is above the 4 tokens of a round",
        ),
        ({**NGRAM, "num_tokens": 3}, ".num_tokens", "is unknown: must be one of method, model"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(values, field, problem):
    with pytest.raises(InvalidArgument) as refused:
        parse(**values)
    assert refused.value.field == f"speculative_config{field}"
    assert problem in refused.value.problem


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("ngram", "", "is not JSON"),
        ("[]", "", "is not a JSON object"),
        ("null", "", "is not a JSON object"),
        ('{"method": "suffix"', "", "is not JSON"),
        ("[" * 100_000, "", "is not JSON"),
        ("9" * 10_000, "", "is not JSON"),
        ('{"method": "suffix", "method": "ngram"}', ".method", "is given twice"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": NaN}', "", "NaN"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": 1e999}', "", "1e999"),
    ],
)
def test_what_is_no_object_of_keys_is_refused(text, field, problem):
    with pytest.raises(InvalidArgument) as refused:
        SpeculativeOptions.parse(text)
    assert refused.value.field == f"speculative_config{field}"
    assert problem in refused.value.problem
    assert len(refused.value.problem) < 400


def test_a_method_of_the_host_has_a_proposer_and_one_of_the_device_none():
    assert isinstance(make_proposer(parse(**NGRAM)), NgramProposer)
    assert isinstance(make_proposer(parse(method="suffix")), SuffixProposer)
    with pytest.raises(InternalError, match="on the device"):
        make_proposer(parse(method="draft_model", model="a/b", num_speculative_tokens=4))


def test_a_pinned_acceptance_is_a_length_of_a_draft_models_rounds():
    assert parse(**DRAFT).synthetic_acceptance_length is None
    options = parse(**PINNED, synthetic_acceptance_length=2.5)
    assert (options.rejection_sample_method, options.synthetic_acceptance_length) == ("synthetic", 2.5)
    assert parse(**DRAFT, rejection_sample_method="standard").synthetic_acceptance_length is None
