"""Encoders as they are served: vectors and scores equal a pass over one prompt in NumPy, whatever else a batch has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, PoolingParams, TokensPrompt
from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.types import POOLINGS
from tests.e2e.rig import open_llm
from tests.models.encoders import (
    BERT,
    XLM_ROBERTA,
    hidden_states,
    make_head,
    make_tensors,
    make_tokenizer,
    write_encoder,
    write_modules,
)

TEXTS = ["fish", "a b c", "the quick brown fox jumps", "zz"]
DENSE = make_head({"linear": (12, 32)})
SIZES: dict[str, Any] = {"max_num_batched_tokens": 64}


def random_ids(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 56, length).tolist() for length in lengths]


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    """As in sentence-transformers."""
    num = len(states)
    weights = np.arange(1, num + 1)[:, None]
    found: dict[str, np.ndarray] = {
        "last": states[-1],
        "cls": states[0],
        "mean": states.mean(0),
        "max": states.max(0),
        "mean_sqrt_len_tokens": states.sum(0) / num**0.5,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
    }
    return found[pooling]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """With the modules of sentence-transformers: the first token, a matrix with Tanh, and length 1."""
    folder = write_encoder(tmp_path_factory.mktemp("bert"), BERT, make_tensors(BERT), "BertModel")
    write_modules(folder, "cls_token", DENSE)
    with open_llm(folder, **SIZES) as llm:
        yield llm


def test_vectors_equal_a_pass_in_numpy_for_each_pooling(bert: LLM):
    prompts, tensors = random_ids([5, 40, 1, 17, 33, 2]), make_tensors(BERT)
    for pooling in POOLINGS:
        if pooling == "all":
            continue
        found = bert.embed([TokensPrompt(prompt_token_ids=ids) for ids in prompts], pooling=pooling)
        for ids, vector in zip(prompts, found, strict=True):
            want = pooled(hidden_states(BERT, tensors, ids), pooling)
            np.testing.assert_allclose(vector.values, want, rtol=0, atol=1e-5)


def test_hidden_states_of_all_tokens_are_returned(bert: LLM):
    (ids,), tensors = random_ids([40]), make_tensors(BERT)
    (found,) = bert.encode(TokensPrompt(prompt_token_ids=ids), PoolingParams(task="token_embed", use_activation=False))
    np.testing.assert_allclose(found.outputs.data, hidden_states(BERT, tensors, ids), rtol=0, atol=1e-5)


def test_bits_of_a_vector_do_not_depend_on_other_prompts(bert: LLM):
    alone, *others = ([TokensPrompt(prompt_token_ids=ids)] for ids in random_ids([9, 31, 12, 7, 26, 30], seed=3))
    for pooling in ("mean", "max", "weightedmean"):
        want = bert.embed(alone, pooling=pooling)[0].values
        several = [prompt for prompts in (*others[:3], alone, *others[3:]) for prompt in prompts]
        assert bert.embed(several, pooling=pooling)[3].values == want


def test_the_model_pools_multiplies_and_normalizes_as_its_modules_say(bert: LLM):
    tensors, tokenizer = make_tensors(BERT), make_tokenizer()
    for name, prompt in ((None, "a "), ("query", "find "), ("document", "a ")):
        for text, vector in zip(TEXTS, bert.embed(TEXTS, prompt_name=name), strict=True):
            state = hidden_states(BERT, tensors, tokenizer.encode(prompt + text).ids)[0]
            want = np.tanh(DENSE["linear.weight"] @ state + DENSE["linear.bias"])
            np.testing.assert_allclose(vector.values, want / np.linalg.norm(want), rtol=0, atol=1e-5)


def test_vectors_are_cut_to_dimensions_and_have_length_1(bert: LLM):
    whole = bert.embed(TEXTS, normalize=False)
    for long, short in zip(whole, bert.embed(TEXTS, pooling_params=PoolingParams(dimensions=5)), strict=True):
        want = np.array(long.values[:5])
        np.testing.assert_allclose(short.values, want / np.linalg.norm(want), rtol=0, atol=1e-6)
    with pytest.raises(InvalidArgument, match="13 is not supported: the model's vectors have 12 or fewer dimensions"):
        bert.embed("a", pooling_params=PoolingParams(dimensions=13))


def test_what_an_encoder_cannot_do_is_named(bert: LLM):
    with pytest.raises(Unsupported, match="embeds or classifies texts and generates none"):
        bert.generate("a")
    with pytest.raises(InvalidArgument, match="'title' is not a prompt of this model: query, document"):
        bert.embed("a", prompt_name="title")
    with pytest.raises(RequestTooLong, match=r"41 prompt tokens, over max_model_len \(40\)"):
        bert.embed(TokensPrompt(prompt_token_ids=random_ids([41])[0]))
    with pytest.raises(Unsupported, match="no classification head"):
        bert.classify("a")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_num_batched_tokens": 16}, "max_num_batched_tokens: 16 is below max_model_len"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: is int8, but BertModel is an encoder, which requires auto"),
    ],
)
def test_options_that_an_encoder_does_not_support_are_refused(options: dict[str, Any], problem: str, tmp_path: Path):
    folder = write_encoder(tmp_path, BERT, make_tensors(BERT), "BertModel")
    with pytest.raises(InvalidArgument, match=problem):
        LLM(str(folder), **options)


def score_of(tensors: dict[str, np.ndarray], first: str, second: str) -> float:
    """What a cross-encoder says of a pair."""
    pair = make_tokenizer().encode(first, second)
    plain = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    state = hidden_states(BERT, plain, pair.ids, pair.type_ids)[0]
    state = np.tanh(plain["pooler.dense.weight"] @ state + plain["pooler.dense.bias"])
    return float(1 / (1 + np.exp(-(plain["classifier.weight"] @ state + plain["classifier.bias"])))[0])


@pytest.mark.long
def test_a_cross_encoder_scores_pairs_of_texts(tmp_path: Path):
    head = {"bert.pooler.dense": (32, 32), "classifier": (1, 32)}
    tensors = make_tensors(BERT, "bert.") | make_head(head)
    folder = write_encoder(tmp_path, BERT, tensors, "BertForSequenceClassification", num_labels=1)
    with open_llm(folder, **SIZES) as llm:
        found = [one.outputs.score for one in llm.score("fish", TEXTS)]
        np.testing.assert_allclose(found, [score_of(tensors, "fish", text) for text in TEXTS], rtol=0, atol=1e-6)
        (cut,) = llm.score("a" * 30, "b" * 40, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
        assert cut.outputs.score == pytest.approx(score_of(tensors, "a" * 22, "b" * 23), abs=1e-6)
        with pytest.raises(Unsupported, match="classifies texts"):
            llm.embed("a")


@pytest.mark.long
def test_probabilities_of_labels_are_those_of_xlm_roberta(tmp_path: Path):
    head = make_head({"classifier.dense": (32, 32), "classifier.out_proj": (3, 32)})
    tensors, tokenizer = make_tensors(XLM_ROBERTA), make_tokenizer()
    stored = make_tensors(XLM_ROBERTA, "roberta.") | head
    labels = {"id2label": {"0": "no", "1": "perhaps", "2": "yes"}}
    folder = write_encoder(tmp_path, XLM_ROBERTA, stored, "XLMRobertaForSequenceClassification", **labels)
    with open_llm(folder, **SIZES) as llm:
        assert llm._serving.pooler is not None and llm._serving.pooler.labels == ("no", "perhaps", "yes")
        for text, found in zip(TEXTS, llm.classify(TEXTS), strict=True):
            state = hidden_states(XLM_ROBERTA, tensors, tokenizer.encode(text).ids)[0]
            state = np.tanh(head["classifier.dense.weight"] @ state + head["classifier.dense.bias"])
            logits = head["classifier.out_proj.weight"] @ state + head["classifier.out_proj.bias"]
            want = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(found.outputs.probs, want, rtol=0, atol=1e-6)
        with pytest.raises(Unsupported, match="3 labels"):
            llm.score("a", "b")
