"""The conformance suite on the accelerator that is here, compiled, not interpreted.

Not collected by name, since the machines that run the other suites have no accelerator:

    JAX_PLATFORMS=cuda python -m pytest tests/accelerator/attention.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels import cuda_library as library
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import Queries, choose
from jpaged.kernels.paged_attention.measure import SHAPES
from tests.kernels import attention_oracle as oracle
from tests.kernels.attention_conformance import RAGGED, PagedAttentionConformance, Shape, make_case, real_shape
from tests.kernels.cuda.test_paged_attention_cuda import Emulated as EmulatedCuda
from tests.kernels.test_paged_attention_gpu import SUPPORT as GPU_SUPPORT
from tests.kernels.tpu_interpreter import Interpreted as InterpretedTpu

DEVICE = jax.devices()[0]
BFLOAT16 = jnp.dtype("bfloat16")
CHOICE = choose("auto", DEVICE, KVLayout(1, 8, 16, 2, 128, BFLOAT16), Queries(4, BFLOAT16, 8, 8, 8))


def test_this_is_an_accelerator() -> None:
    assert DEVICE.platform != "cpu", "set JAX_PLATFORMS: this suite is for machines with an accelerator"


class TestXlaHere(PagedAttentionConformance):
    backend = "xla"
    form = "gpu"


class TestOwnKernelHere(PagedAttentionConformance):
    backend = CHOICE.backend
    form = CHOICE.layout.form
    supports = {"pallas-gpu": GPU_SUPPORT, "pallas-tpu": InterpretedTpu.supports}.get(
        CHOICE.backend, PagedAttentionConformance.supports
    )

    def test_it_is_not_the_fallback(self) -> None:
        assert self.backend != "xla", CHOICE.passed_over

    @pytest.mark.parametrize("name", SHAPES)
    def test_real_head_shapes(self, name: str) -> None:
        self.check(RAGGED["mixed"], real_shape(name, "bfloat16"))

    @pytest.mark.parametrize("num_rows", [1, 8])
    def test_long_contexts(self, num_rows: int) -> None:
        """Long enough that a context is split over processors."""
        shape = Shape(dtype="bfloat16", head_dim=128, max_len=8192, num_tokens=16)
        case = make_case([(1, 8000 // num_rows)] * num_rows, shape, num_slots=8192)
        o_thd, lse_th = self.run(case, shape)
        want_o_thd, want_lse_th = oracle.attention(case)
        np.testing.assert_allclose(o_thd, want_o_thd, rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(lse_th, want_lse_th, rtol=1e-4, atol=1e-4)


if DEVICE.platform == "gpu":

    class TestCudaHere(TestOwnKernelHere):
        """The kernels of CUDA C++, which `auto` does not choose while jax has Pallas Triton."""

        backend = "cuda"
        form = "gpu"
        supports = EmulatedCuda.supports

        def test_it_is_not_the_fallback(self) -> None:
            assert library.missing_reason() is None
