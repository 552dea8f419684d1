"""The TPU kernel of sampling with one mistake in it: what is asked of it has to notice each."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from jpaged.engine.executor import Detail
from jpaged.kernels.sampling.tpu import kernel, sampling
from tests.device.step.test_sampling import run_sampling
from tests.kernels.sampling.test_sampling_cpu import assert_same, how_of, random_logits, random_rows
from tests.kernels.sampling.test_sampling_tpu import sample, sample_anew
from tests.kernels.sampling.test_sampling_tpu import test_what_is_kept_is_kept_in_every_draw as kept

MODULE = "jpaged.kernels.sampling.tpu.faulty_kernel"
SOURCE = Path(kernel.__file__).read_text(encoding="utf-8")


def mixed() -> None:
    logits, how = random_logits(0, 1537), how_of(random_rows(0, 1537))
    assert_same(sample(logits, how, Detail.TOP_LOGPROBS), run_sampling(logits, how, Detail.TOP_LOGPROBS, None))


@dataclass(frozen=True, slots=True)
class Fault:
    """An edit of the kernel, and what notices it."""

    name: str
    before: str
    after: str
    check: Callable[[], None]


FAULTS = (
    Fault("the first bound that suffices is the k-th", "total == need)", "total >= need)", kept),
    Fault("two tokens pass for one", "< 1.5 * weight", "< 6 * weight", kept),
    Fault(
        "a share of all that there is", "jnp.where(x >= floor, jnp.exp(x - largest), 0)", "jnp.exp(x - largest)", kept
    ),
    Fault("one word of noise for both halves", "_gumbel(words[half])", "_gumbel(words[0])", mixed),
    Fault("another token is banned", "token - plan.half + plan.half_width)", "token)", kept),
    Fault("ties go to the last", "(score > best)", "(score >= best)", kept),
    Fault("padding is a token", "ids < plan.vocab_size - plan.half)", "ids <= plan.vocab_size - plan.half)", mixed),
    Fault("a rank of none likelier is 0", "return 1 + num_likelier", "return num_likelier", mixed),
    Fault("greedy rows are noisy", "jnp.where(is_greedy, 0.0, _gumbel", "jnp.where(is_greedy, 0.1, 2 * _gumbel", mixed),
)


def plant(patch: pytest.MonkeyPatch, source: str) -> None:
    """Makes the call use a kernel of this source, compiled anew and in short turns."""
    module = types.ModuleType(MODULE)
    patch.setitem(sys.modules, MODULE, module)
    exec(compile(source, MODULE, "exec"), module.__dict__)
    module.__dict__.update(PASS=8 * kernel.LANES, DRAW=2 * kernel.LANES)
    patch.setattr(sampling, "kernel", module)
    sample_anew(patch)


def test_every_fault_is_one_edit_of_the_kernel_as_it_is() -> None:
    assert [fault.name for fault in FAULTS if SOURCE.count(fault.before) != 1] == []


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, SOURCE.replace(fault.before, fault.after))
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        fault.check()


@pytest.mark.deep
@pytest.mark.parametrize("check", [mixed, kept])
def test_without_a_fault_nothing_is_noticed(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, SOURCE)
    check()
