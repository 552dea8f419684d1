"""The TPU kernels with one mistake in them: the suite has to notice each."""

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
from tests.kernels.tpu.tpu_checks import (
    chunk_ids_outside,
    chunks,
    chunks_of_8_bits,
    chunks_on_two_cores,
    decodes,
    decodes_in_a_window,
    decodes_of_8_bits,
    ids_outside,
    latents,
    mixed,
    padding,
    pairs,
    poisoned,
    several_of_a_row,
    two_chunks,
    update,
    window,
)
from tests.kernels.tpu_interpreter import COMPILER_OPTIONS, Early, Interpreted, Late

TABLES = "tables"
ITEMS, STAGES, DECODE = "decode.items", "decode.stages", "decode.kernel"
CHUNK_STAGES, CHUNKS = "chunks.stages", "chunks.kernel"
FILES = (TABLES, ITEMS, STAGES, DECODE, CHUNK_STAGES, CHUNKS)
"""The kernels' modules, each behind those that it uses."""
FOLDER = Path(package.__file__).parent / "tpu"
SOURCES = {name: (FOLDER / f"{name.replace('.', '/')}.py").read_text() for name in FILES}

Check = Callable[[Interpreted], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """An edit of a kernel, and a check that notices it."""

    name: str
    file: str
    before: str
    after: str
    check: Check
    suite: Interpreted


WAIT = "            fetch(scalars, core, step, c, refs, kept, plan)[1](buffer_of(this_turn))\n"
UNPACK = "            unpack(kept, buffer_of(this_turn), chunk, segments.begin[step], segments.end[step], plan)\n"

FAULTS = (
    Fault(
        "the last pieces of a latent are its value where a row decodes",
        STAGES,
        "_pieces(numbers, plan.value_lanes)",
        "_pieces(numbers, plan.key_lanes)[-plan.value_lanes // words.LANES :]",
        latents,
        Late(),
    ),
    Fault(
        "the last pieces of a latent are its value in a chunk",
        CHUNK_STAGES,
        "kept.rows[item.value_row, :, : plan.value_lanes]",
        "kept.rows[item.value_row, :, -plan.value_lanes :]",
        latents,
        Late(),
    ),
    Fault(
        "single tokens are not waited for",
        ITEMS,
        "_repeat(num_singles, lambda _: copy_token(0, 0, 0).wait())",
        "pass",
        update,
        Early(),
    ),
    Fault(
        "whole blocks are not waited for",
        ITEMS,
        "_repeat(num_blocks, lambda _: copy_block(0, 0).wait())",
        "pass",
        update,
        Late(),
    ),
    Fault(
        "a whole block is stored a token too late",
        ITEMS,
        "new_ref.at[pl.ds(t, block_size)]",
        "new_ref.at[pl.ds(t + 1, block_size)]",
        update,
        Late(),
    ),
    *(
        Fault(
            f"a decode's buffer is read before its blocks have come ({name})",
            DECODE,
            "            items.receive(scalars, segment, item, buffer, kept, plan)\n",
            "",
            decodes,
            suite,
        )
        for name, suite in (("late", Late()), ("early", Early()))
    ),
    Fault(
        "an item of whole blocks is not waited for",
        ITEMS,
        "wait(plan.fetch_blocks)",
        "pass",
        several_of_a_row,
        Early(),
    ),
    Fault(
        "half of a row's last blocks are waited for",
        ITEMS,
        "for i in reversed(range(plan.fetch_blocks.bit_length()))",
        "for i in reversed(range(plan.fetch_blocks.bit_length() - 2))",
        several_of_a_row,
        Early(),
    ),
    Fault(
        "a block comes into a buffer that is read",
        ITEMS,
        "return jnp.where(buffer + 1 == plan.sizes.ring, 0, buffer + 1)",
        "return jnp.where(buffer + 1 >= plan.sizes.ring - 3, 0, buffer + 1)",
        several_of_a_row,
        Early(),
    ),
    Fault(
        "a decode's layer is not counted",
        ITEMS,
        "refs.pool.at[pl.ds(scalars.layer[0] * layout.blocks_per_layer, layout.blocks_per_layer)]",
        "refs.pool",
        decodes,
        Late(),
    ),
    Fault("a decode sees a key too few", STAGES, "(token < end)", "(token < end - 1)", decodes, Late()),
    Fault("a decode sees a key too many", STAGES, "(token < end)", "(token <= end)", decodes, Late()),
    Fault(
        "a decode sees a key before its window",
        STAGES,
        "(token >= begin)",
        "(token >= begin - 1)",
        decodes_in_a_window,
        Late(),
    ),
    Fault(
        "a decode's output does not fade",
        STAGES,
        "kept.o[place, bundle] * fade_rd",
        "kept.o[place, bundle]",
        several_of_a_row,
        Late(),
    ),
    Fault(
        "a row goes on where the one before ended",
        STAGES,
        "m_rl = jnp.where(is_first, LOWEST, kept.m[place, bundle])",
        "m_rl = kept.m[place, bundle]",
        decodes,
        Late(),
    ),
    Fault(
        "a token of no row gets what its place had",
        DECODE,
        "    stages.clear(kept, plan)\n\n    @pl.when(num_items > 0)",
        "    @pl.when(num_items > 0)",
        padding,
        Late(),
    ),
    Fault(
        "a head's outputs are put where the next one's are",
        STAGES,
        "words.gather(kept.q, row)",
        "words.gather(kept.q, row ^ 1)",
        decodes,
        Late(),
    ),
    Fault(
        "a head that has the other half of the lanes has its queries where the first one has",
        STAGES,
        "head // plan.group % 2 == 1",
        "False",
        pairs,
        Late(),
    ),
    Fault(
        "a head that has its lanes alone gets its keys for values",
        STAGES,
        " and kv_head < layout.num_kv_heads - 1",
        "",
        pairs,
        Late(),
    ),
    Fault(
        "a tile's decodes are looked for in the tile before",
        DECODE,
        "tiles.first[at_first], tiles.first[at_first + 1]",
        "tiles.first[jnp.maximum(at_first - 1, 0)], tiles.first[at_first]",
        mixed,
        Late(),
    ),
    Fault(
        "values that are not seen stay",
        ITEMS,
        "_clean(*seen(scalars, segment, item, plan), buffer, kept, plan)",
        "pass",
        poisoned,
        Late(),
    ),
    Fault(
        "a decode's values' scale for keys",
        STAGES,
        "jnp.tile(refs.scale[0, bundle]",
        "jnp.tile(refs.scale[1, bundle]",
        decodes_of_8_bits,
        Late(),
    ),
    Fault(
        "an id outside of the layer is another's block",
        ITEMS,
        "@pl.when(special & _STRANGE > 0)",
        "@pl.when(special & _STRANGE > 2)",
        ids_outside,
        Late(),
    ),
    *(
        Fault(
            f"a page is used before it has come ({name})",
            TABLES,
            "    pltpu.make_async_copy(pages.ids.at[place], pages.ids.at[place], pages.come.at[slot]).wait()\n",
            "",
            check,
            suite,
        )
        for name, suite, check in (("late", Late(), decodes), ("early", Early(), decodes), ("chunks", Early(), chunks))
    ),
    Fault(
        "a page comes into the slot that is in use",
        TABLES,
        "jnp.where(slot + 1 == paging.ring, 0, slot + 1)",
        "jnp.where(slot + 1 == paging.ring - paging.held, 0, slot + 1)",
        decodes,
        Early(),
    ),
    Fault(
        "another page's slot",
        TABLES,
        "return slot * paging.page_blocks",
        "return _slot_after(slot, paging) * paging.page_blocks",
        decodes,
        Late(),
    ),
    Fault(
        "a row's first page, again",
        TABLES,
        "_first_page(segments, after, paging), page + 1)",
        "_first_page(segments, after, paging), page)",
        several_of_a_row,
        Late(),
    ),
    Fault("a row has a page too many", TABLES, "is_last = (page + 1)", "is_last = page", several_of_a_row, Late()),
    Fault("a stale page", ITEMS, " | (item & (paging.chunks - 1) == 0)", "", several_of_a_row, Late()),
    Fault("a tile's stale page", CHUNK_STAGES, " | (lax.rem(chunk, paging.chunks) == 0)", "", two_chunks, Late()),
    Fault(
        "an id outside of the layer is looked for in the next item's page",
        ITEMS,
        "kept.pages.ids[kept.ids[1 + buffer] + j]",
        "kept.pages.ids[kept.ids[0] + j]",
        ids_outside,
        Late(),
    ),
    *(
        Fault(
            f"a chunk is taken apart before its blocks have come ({name})",
            CHUNKS,
            WAIT + UNPACK,
            UNPACK + WAIT,
            chunks,
            suite,
        )
        for name, suite in (("late", Late()), ("early", Early()))
    ),
    Fault(
        "a chunk of whole blocks is not waited for",
        CHUNK_STAGES,
        "pltpu.make_async_copy(whole, whole, kept.fetched.at[buffer]).wait()",
        "pass",
        chunks,
        Late(),
    ),
    Fault(
        "a tile's next chunk comes into the buffer that is read",
        CHUNKS,
        "return turn & 1",
        "return 0 * turn",
        chunks,
        Early(),
    ),
    Fault(
        "a chunk's values are overwritten before they are multiplied",
        CHUNKS,
        "lax.rem(c, num_buffers(plan.num_kv_heads))",
        "lax.rem(c, 1)",
        chunks,
        Late(),
    ),
    Fault("the pipeline keeps its last items", CHUNKS, "jnp.where(is_last, 2, 0)", "is_last", chunks, Late()),
    Fault(
        "items behind the last one count",
        CHUNKS,
        "slot = jnp.where(i < chunk.num_items, part * plan.num_kv_heads + head, plan.num_slots)",
        "slot = part * plan.num_kv_heads + head",
        chunks,
        Late(),
    ),
    Fault(
        "a chunk that is seen in part is taken for one that is seen whole",
        CHUNKS,
        "    is_whole &= position + jnp.maximum(lo, first_part << shift) >= last_key\n",
        "",
        chunks,
        Late(),
    ),
    Fault(
        "a tile's layer is not counted",
        CHUNK_STAGES,
        "copy(first_block + block_id, buffer",
        "copy(block_id, buffer",
        chunks,
        Late(),
    ),
    Fault(
        "a tile's values' scale for keys",
        CHUNK_STAGES,
        "scalars.scales[2 * (chunk.first_head + head)]",
        "scalars.scales[2 * (chunk.first_head + head) + 1]",
        chunks_of_8_bits,
        Late(),
    ),
    Fault("a tile sees a key too few", CHUNK_STAGES, "<= position_r1", "< position_r1", chunks, Late()),
    Fault("a tile sees a key too many", CHUNK_STAGES, "<= position_r1", "<= position_r1 + 1", chunks, Late()),
    Fault("the window is one too wide", CHUNK_STAGES, "key_1w < window", "key_1w <= window", window, Late()),
    Fault(
        "a tile's stale maximum",
        CHUNK_STAGES,
        "jnp.exp2(m_rl - m_new_rl)",
        "jnp.ones_like(m_rl)",
        two_chunks,
        Late(),
    ),
    Fault(
        "a tile's values are not masked",
        CHUNK_STAGES,
        "functools.partial(unpack_words, is_masked=is_masked)",
        "functools.partial(unpack_words, is_masked=False)",
        chunks,
        Late(),
    ),
    Fault(
        "a tile's other queries are lost",
        CHUNKS,
        "is_ours_q1 = (query_q1 >= lo) & (query_q1 < hi)",
        "is_ours_q1 = query_q1 >= 0",
        chunks,
        Late(),
    ),
    *(
        Fault(
            f"what a tile's other queries have has not come yet ({name})",
            CHUNKS,
            "        others.wait()\n",
            "        pass\n",
            mixed,
            suite,
        )
        for name, suite in (("late", Late()), ("early", Early()))
    ),
    Fault(
        "a tile's other queries are left behind where another row begins it",
        CHUNKS,
        "is_shared = (lo > 0) | (hi < plan.tile)",
        "is_shared = lo > 0",
        chunks,
        Late(),
    ),
    Fault(
        "an id outside of the layer leaves what a tile's buffer had",
        CHUNK_STAGES,
        "kept.chunk[buffer, place] = jnp.zeros(kept.chunk.shape[2:], kept.chunk.dtype)",
        "pass",
        chunk_ids_outside,
        Late(),
    ),
    Fault(
        "a core fetches the heads of another",
        CHUNK_STAGES,
        "pl.ds(core * plan.token_shape[0], plan.token_shape[0])",
        "pl.ds(0, plan.token_shape[0])",
        chunks_on_two_cores,
        Late(),
    ),
    Fault(
        "a core whose heads share a row of tiles with another's has the other's",
        CHUNKS,
        "buffer + first_head * plan.head_rows",
        "buffer",
        chunks_on_two_cores,
        Late(),
    ),
    Fault(
        "a core leaves its outputs in the lanes of another",
        CHUNKS,
        ".segments.tile[step], core",
        ".segments.tile[step], 0",
        chunks_on_two_cores,
        Late(),
    ),
    Fault(
        "a core reads what a tile's other queries have for another's heads",
        CHUNKS,
        "core * plan.output_lanes, plan.output_lanes)",
        "0 * plan.output_lanes, plan.output_lanes)",
        chunks_on_two_cores,
        Late(),
    ),
)


def plant(patch: pytest.MonkeyPatch, sources: dict[str, str]) -> None:
    """Makes the backend use kernels of these sources, and compiles nothing from what was compiled before."""
    for name in FILES:
        full_name = f"jpaged.kernels.paged_attention.tpu.{name}"
        module = types.ModuleType(full_name)
        folder, _, last = full_name.rpartition(".")
        patch.setitem(sys.modules, full_name, module)
        patch.setattr(sys.modules[folder], last, module, raising=False)
        exec(compile(sources[name], full_name, "exec"), module.__dict__)
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


def test_every_fault_is_one_edit_of_the_kernels_as_they_are() -> None:
    assert [fault.name for fault in FAULTS if SOURCES[fault.file].count(fault.before) != 1] == []


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = SOURCES[fault.file].replace(fault.before, fault.after)
    plant(monkeypatch, SOURCES | {fault.file: faulty})
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        fault.check(fault.suite)


@pytest.mark.deep
@pytest.mark.parametrize("suite", [Late(), Early()], ids=["late", "early"])
@pytest.mark.parametrize("check", [decodes, chunks, update])
def test_without_a_fault_nothing_is_noticed(check: Check, suite: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planting itself harms neither program; that the kernel passes every check is what the suites see."""
    plant(monkeypatch, SOURCES)
    check(suite)
