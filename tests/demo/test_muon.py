"""Muon's updates are orthogonal matrices along the gradient, whatever the shape of the kernel."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.demo_model.muon import orthogonal, scale_by_muon


@pytest.mark.parametrize("shape", [(32, 32), (24, 96), (96, 24)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    matrix = np.random.default_rng(0).standard_normal(shape, np.float32)
    near = np.asarray(orthogonal(jnp.asarray(matrix)))
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    in_its_basis = u.T @ near @ vt.T
    diagonal = np.diagonal(in_its_basis)
    assert diagonal.min() > 0.5
    assert diagonal.max() < 1.4
    assert np.abs(in_its_basis - np.diag(diagonal)).max() < 0.05


@pytest.mark.long
def test_an_update_has_the_shape_of_its_kernel_and_the_same_size_for_every_shape():
    rng = np.random.default_rng(1)
    gradients = {
        "wide": rng.standard_normal((32, 2, 64), np.float32),
        "tall": rng.standard_normal((128, 32), np.float32),
    }
    optimizer = scale_by_muon()
    updates, _ = optimizer.update(gradients, optimizer.init(gradients))
    for name, update in updates.items():
        assert update.shape == gradients[name].shape
        assert np.sqrt(np.square(update).mean()) == pytest.approx(0.2, rel=0.3)


def test_the_scale_of_a_gradient_does_not_matter_and_momentum_keeps_its_direction():
    gradient = np.random.default_rng(2).standard_normal((16, 48), np.float32)
    optimizer = scale_by_muon(momentum=0.9)
    first, state = optimizer.update(gradient, optimizer.init(gradient))
    scaled, _ = optimizer.update(100 * gradient, optimizer.init(gradient))
    np.testing.assert_allclose(first, scaled, atol=0.02)
    after, _ = optimizer.update(np.zeros_like(gradient), state)
    np.testing.assert_allclose(first, after, atol=0.02)
