"""Attention over packed rows and its gradient are those of a plain masked softmax in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.demo_model.attention import attend

NUM_ROWS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 8


def plain(mask_bst, q_thd, k_tkd, v_tkd):
    num_rows, row_len, _ = mask_bst.shape
    q = q_thd.reshape(num_rows, row_len, NUM_HEADS, HEAD_DIM)
    k, v = (x.reshape(num_rows, row_len, NUM_KV_HEADS, HEAD_DIM).repeat(2, axis=2) for x in (k_tkd, v_tkd))
    scores = jnp.einsum("bthd,bshd->bhst", q, k, precision="highest") / np.sqrt(HEAD_DIM)
    probs = jax.nn.softmax(jnp.where(mask_bst[:, None], scores, -1e30), axis=2)
    return jnp.einsum("bhst,bshd->bthd", probs, v, precision="highest").reshape(q_thd.shape)


def ours(mask_bst, q_thd, k_tkd, v_tkd):
    return attend(mask_bst, q_thd, k_tkd, v_tkd, (), jnp.int32(0))[0]


@functools.partial(jax.jit, static_argnums=0)
def output_and_gradients(attention, mask_bst, qkv, weights):
    def weighed(qkv):
        output = attention(mask_bst, *qkv).astype(jnp.float32)
        return (output * weights).sum(), output

    gradients, output = jax.grad(weighed, has_aux=True)(qkv)
    return output, gradients


def case(row_len):
    rng = np.random.default_rng(row_len)
    segments = np.sort(rng.integers(1, 4, (NUM_ROWS, row_len)), axis=1)
    mask_bst = (segments[:, :, None] == segments[:, None, :]) & np.triu(np.ones((row_len, row_len), bool))
    shapes = [(NUM_ROWS * row_len, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    qkv = tuple(rng.standard_normal(shape, np.float32) for shape in shapes)
    return mask_bst, qkv, rng.standard_normal(shapes[0], np.float32)


# One block, a part of one, several, and a last one that is not full.
@pytest.mark.parametrize("row_len", [128, 40, 256, 300])
@pytest.mark.long
def test_it_is_the_plain_attention(row_len):
    mask_bst, qkv, weights = case(row_len)
    output, gradients = output_and_gradients(ours, mask_bst, qkv, weights)
    want, want_gradients = output_and_gradients(plain, mask_bst, qkv, weights)
    np.testing.assert_allclose(output, want, rtol=1e-4, atol=1e-5)
    for gradient, want_gradient in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_near_float32():
    mask_bst, qkv, weights = case(300)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), qkv)
    output, gradients = output_and_gradients(ours, mask_bst, low, weights)
    want, want_gradients = output_and_gradients(plain, mask_bst, qkv, weights)
    for have, expected in ((output, want), *zip(gradients, want_gradients, strict=True)):
        error = np.asarray(have, np.float32) - np.asarray(expected)
        assert np.linalg.norm(error) < 0.02 * np.linalg.norm(expected)
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)
