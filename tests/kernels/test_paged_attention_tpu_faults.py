"""The TPU kernel with one mistake in it: the suite has to notice each."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

import jpaged.kernels.paged_attention as package
from tests.kernels import tpu_interpreter
from tests.kernels.attention_conformance import RAGGED, Shape
from tests.kernels.tpu_interpreter import COMPILER_OPTIONS, Early, Interpreted, Late

MODULE = "jpaged.kernels.paged_attention.tpu.kernel"
SOURCE = (Path(package.__file__).parent / "tpu" / "kernel.py").read_text()

Check = Callable[[Interpreted], None]


def decodes(suite: Interpreted) -> None:
    suite.check(RAGGED["decodes"], Shape())


def decodes_of_8_bits(suite: Interpreted) -> None:
    suite.check(RAGGED["decodes"], Shape(kv_dtype="int8"))


def chunks(suite: Interpreted) -> None:
    suite.check(RAGGED["chunk_continues"], Shape())


def two_chunks(suite: Interpreted) -> None:
    suite.check(RAGGED["longest_table"], Shape())


def window(suite: Interpreted) -> None:
    suite.check(RAGGED["chunk_continues"], Shape(sliding_window=16))


def ids_outside(suite: Interpreted) -> None:
    suite.test_block_ids_outside_of_the_layer_read_as_zeros(num_queries=1)


def update(suite: Interpreted) -> None:
    suite.test_an_update_stores_the_new_keys_and_nothing_else("full_blocks", "float32", None)


@dataclass(frozen=True, slots=True)
class Fault:
    """An edit of the kernel, and a check that notices it."""

    name: str
    before: str
    after: str
    check: Check
    suite: Interpreted


FAULTS = (
    Fault(
        "single tokens are not waited for",
        "_repeat(num_singles, lambda _: copy_token(0, 0, 0).wait())",
        "pass",
        update,
        Early(),
    ),
    Fault(
        "whole blocks are not waited for",
        "_repeat(num_blocks, lambda _: copy_block(0, 0).wait())",
        "pass",
        update,
        Late(),
    ),
    Fault(
        "a whole block is stored a token too late",
        "new_ref.at[pl.ds(t, block_size)]",
        "new_ref.at[pl.ds(t + 1, block_size)]",
        update,
        Late(),
    ),
    *(
        Fault(
            f"a buffer is read before its block has come ({name})",
            "            fetch(step, c, this_turn, is_start=False)\n"
            "            _attend(scalars, step, c, q_ref, kept.chunk.at[this_turn & 1], kept, plan)\n",
            "            _attend(scalars, step, c, q_ref, kept.chunk.at[this_turn & 1], kept, plan)\n"
            "            fetch(step, c, this_turn, is_start=False)\n",
            decodes,
            suite,
        )
        for name, suite in (("late", Late()), ("early", Early()))
    ),
    Fault(
        "the next chunk comes into the buffer that is read",
        "        buffer = turn & 1\n",
        "        buffer = 0 * turn\n",
        chunks,
        Early(),
    ),
    Fault("the layer is not counted", "pool_ref.at[first_block + block_id]", "pool_ref.at[block_id]", decodes, Late()),
    Fault("a key too few", "(key_1w <= position_r1)", "(key_1w < position_r1)", decodes, Late()),
    Fault("a key too many", "(key_1w <= position_r1)", "(key_1w <= position_r1 + 1)", chunks, Late()),
    Fault(
        "the window is one too wide", "< spec.kind.sliding_window\n", "<= spec.kind.sliding_window\n", window, Late()
    ),
    Fault("a stale maximum", "fade_r1 = jnp.exp(m_r1 - m_new_r1)", "fade_r1 = jnp.ones_like(m_r1)", two_chunks, Late()),
    Fault("values are not masked", "jnp.where(is_filled_w1, v_wd, 0.0)", "v_wd", decodes, Late()),
    Fault(
        "the values' scale for keys",
        "* scalars.scales[2 * head]",
        "* scalars.scales[2 * head + 1]",
        decodes_of_8_bits,
        Late(),
    ),
    Fault(
        "a tile's other queries are lost", "return (query >= lo) & (query < hi)", "return query >= 0", chunks, Late()
    ),
    Fault(
        "an id outside of the layer leaves what was there",
        "buffer_ref[place] = jnp.zeros(buffer_ref.shape[1:], buffer_ref.dtype)",
        "pass",
        ids_outside,
        Late(),
    ),
)


def plant(patch: pytest.MonkeyPatch, source: str) -> None:
    """Makes the backend use a kernel of this source, and compiles nothing from what was compiled before."""
    module = types.ModuleType(MODULE)
    patch.setitem(sys.modules, MODULE, module)
    exec(compile(source, MODULE, "exec"), module.__dict__)
    for name, function, place_of_spec in (
        ("_attention", package.paged_attention, 4),
        ("_update", package.paged_attention_update, 5),
    ):

        def fresh(*args, function=function, **options):
            return function(*args, **options)

        jitted = jax.jit(
            fresh, static_argnames="backend", static_argnums=place_of_spec, compiler_options=COMPILER_OPTIONS
        )
        patch.setattr(tpu_interpreter, name, jitted)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SOURCE.count(fault.before) == 1
    plant(monkeypatch, SOURCE.replace(fault.before, fault.after))
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        fault.check(fault.suite)


@pytest.mark.long
@pytest.mark.parametrize("suite", [Late(), Early()], ids=["late", "early"])
@pytest.mark.parametrize("check", [decodes, update])
def test_without_a_fault_nothing_is_noticed(check: Check, suite: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planting itself harms neither program; that the kernel passes every check is what TestLate and TestEarly see."""
    plant(monkeypatch, SOURCE)
    check(suite)
