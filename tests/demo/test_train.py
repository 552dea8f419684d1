"""Training learns, repeats itself, survives an interruption, and attention stays inside a document."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.demo_model.data import Lesson, batch, encode
from benchmarks.demo_model.tokenizer import train_tokenizer
from benchmarks.demo_model.train import PHASES, Phase, TrainSettings, demo_config, loss_sum, train
from jpaged.models.model import Model

SETTINGS = TrainSettings(
    seed=3, num_rows=1, row_len=512, num_warmup_steps=4, phases=(Phase(20, 1e-2, Lesson()),), dtype="float32"
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(3, vocab_size=512, num_documents=300)


@pytest.fixture(scope="module")
def config(tokenizer):
    config = demo_config(tokenizer)
    return dataclasses.replace(
        config, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    )


def mean_loss(config, params, rows):
    total, count = loss_sum(Model(config, jnp.dtype(jnp.float32)), params, rows)
    return float(total / count)


def plain_dot(x, matrix, axis):
    return jnp.tensordot(x, matrix, ((x.ndim - 1,), (axis,)), precision="highest")


def plain_attend(mask_bst, q_thd, k_tkd, v_tkd, carry, place):
    num_rows, row_len, _ = mask_bst.shape
    num_shares = q_thd.shape[1] // k_tkd.shape[1]
    k_thd, v_thd = (x.repeat(num_shares, axis=1) for x in (k_tkd, v_tkd))
    q, k, v = (x.reshape(num_rows, row_len, *q_thd.shape[1:]) for x in (q_thd, k_thd, v_thd))
    scores = jnp.einsum("bthd,bshd->bhst", q, k, precision="highest") / np.sqrt(q.shape[-1])
    probs = jax.nn.softmax(jnp.where(mask_bst[:, None], scores, -1e30), axis=2)
    return jnp.einsum("bhst,bshd->bthd", probs, v, precision="highest").reshape(q_thd.shape), carry


@pytest.mark.long
def test_a_few_steps_reduce_the_loss(config, tokenizer):
    rows = batch(tokenizer, 99, 0, (1, 512), Lesson())
    before = Model(config, jnp.dtype(jnp.float32)).init_params(jax.random.key(SETTINGS.seed), "loop")
    after = train(config, SETTINGS, tokenizer, SETTINGS.num_steps)
    assert mean_loss(config, before, rows) == pytest.approx(np.log(512), rel=0.02)
    assert mean_loss(config, after, rows) < 5.5


@pytest.mark.long
def test_the_gradient_is_that_of_plain_float32_operations(config, tokenizer, monkeypatch):
    rows = batch(tokenizer, 5, 0, (2, 384), Lesson(emphasis=2.0))

    def gradient(dtype):
        model = Model(config, jnp.dtype(dtype))
        params = model.init_params(jax.random.key(1), "loop")
        return jax.jit(jax.grad(lambda params: loss_sum(model, params, rows)[0] / 100))(params)

    ours, low = gradient("float32"), gradient("bfloat16")
    monkeypatch.setattr("jpaged.models.layers.dot", plain_dot)
    monkeypatch.setattr("benchmarks.demo_model.train.attend", plain_attend)
    monkeypatch.setattr("benchmarks.demo_model.train.cross_entropy", optax.softmax_cross_entropy_with_integer_labels)
    want = gradient("float32")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), ours, want)
    for have, expected in zip(jax.tree.leaves(low), jax.tree.leaves(want), strict=True):
        error = np.asarray(have, np.float32) - np.asarray(expected)
        assert np.linalg.norm(error) < 0.05 * np.linalg.norm(expected)


@pytest.mark.long
def test_a_run_taken_up_again_ends_where_an_unbroken_one_does(config, tokenizer, tmp_path):
    unbroken = train(config, SETTINGS, tokenizer, 6)
    train(config, SETTINGS, tokenizer, 5, tmp_path, every=1)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    resumed = train(config, SETTINGS, tokenizer, 6, tmp_path, every=1)
    jax.tree.map(np.testing.assert_array_equal, unbroken, resumed)


def test_rows_are_a_function_of_seed_and_step(tokenizer):
    first, second, other = (batch(tokenizer, 1, step, (2, 384), Lesson()) for step in (5, 5, 6))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    assert not np.array_equal(first.token_ids, other.token_ids)


def test_every_step_has_its_lesson():
    settings = TrainSettings()
    assert settings.num_steps == PHASES[-1].until
    for before, after in itertools.pairwise(PHASES):
        assert settings.lesson(before.until - 1) == before.lesson
        assert settings.lesson(before.until) == after.lesson


def test_a_lesson_cuts_documents(tokenizer):
    rows = batch(tokenizer, 1, 0, (1, 384), Lesson(48))
    assert np.bincount(rows.segments[0]).tolist() == [0] + [48] * 8
    np.testing.assert_array_equal(rows.positions[0, :48], np.arange(48))


@pytest.mark.long
def test_a_lesson_weighs_pronouns_and_names_that_come_again():
    tokenizer = train_tokenizer(3, vocab_size=2000, num_documents=1000)
    plain, heavy = (batch(tokenizer, 1, 0, (1, 2048), Lesson(None, emphasis)) for emphasis in (1.0, 5.0))
    again = np.flatnonzero(heavy.weights[0] == 5.0)
    words = ("he", "him", "his", "himself", "she", "her", "herself")
    spaced = [tokenizer.token_to_id(f"\u0120{form}") for word in words for form in (word, word.capitalize())]
    is_pronoun = np.isin(heavy.targets[0], [token_id for token_id in spaced if token_id]) & (heavy.weights[0] > 0)
    assert is_pronoun.sum() > 5
    assert set(heavy.weights[0, is_pronoun]) == {5.0}
    names = [index for index in again if not is_pronoun[index]]
    assert len(names) > 5
    for index in names:
        document = heavy.token_ids[0, : index + 1][heavy.segments[0, : index + 1] == heavy.segments[0, index]]
        assert heavy.targets[0, index] in document
    np.testing.assert_array_equal(plain.weights > 0, heavy.weights > 0)
    np.testing.assert_array_equal(plain.weights[heavy.weights != 5.0], heavy.weights[heavy.weights != 5.0])


def test_introductions_are_every_second_document(tokenizer):
    texts = [tokenizer.decode(encode(tokenizer, 1, index, Lesson(introductions=True))[0]) for index in range(6)]
    assert [text.startswith("This is a") for text in texts][1::2] == [True] * 3
    assert texts[0] == tokenizer.decode(encode(tokenizer, 1, 0, Lesson())[0])


def test_documents_lie_in_rows_whole_and_only_answers_are_learnt(tokenizer):
    rows = batch(tokenizer, 1, 0, (1, 2048), Lesson())
    start = 0
    for segment in range(1, rows.segments.max() + 1):
        here = np.flatnonzero(rows.segments[0] == segment)
        assert here[0] == start
        start = here[-1] + 1
        np.testing.assert_array_equal(rows.positions[0, here], np.arange(len(here)))
        documents = [encode(tokenizer, 1, index, Lesson()) for index in range(8)]
        token_ids, weights = next(d for d in documents if d[0] == rows.token_ids[0, here].tolist())
        np.testing.assert_array_equal(rows.targets[0, here[:-1]], token_ids[1:])
        np.testing.assert_array_equal(rows.weights[0, here[:-1]], weights[1:])
        assert rows.weights[0, here[-1]] == 0
    assert rows.segments.max() >= 3


@pytest.mark.long
def test_attention_stays_inside_a_document(config, tokenizer):
    model = Model(config, jnp.dtype(jnp.float32))
    params = model.init_params(jax.random.key(0), "loop")
    rows = batch(tokenizer, 1, 0, (1, 2048), Lesson())
    is_second = rows.segments == 2
    only_second = dataclasses.replace(rows, weights=rows.weights * is_second)
    disturbed = dataclasses.replace(only_second, token_ids=np.where(is_second, rows.token_ids, 7).astype(np.int32))
    assert mean_loss(config, params, only_second) == pytest.approx(mean_loss(config, params, disturbed), rel=1e-6)
