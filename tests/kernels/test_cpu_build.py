"""Building the CPU kernel: what happens where something is missing, and that its tests would notice a wrong kernel."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import pytest

from jpaged.errors import Unsupported
from jpaged.kernels.cpu import build, library
from jpaged.kernels.paged_attention import Queries, cpu
from jpaged.kernels.paged_attention.api import implementation
from tests.forking import PYTEST, forks
from tests.kernels.attention_conformance import RAGGED, PagedAttentionConformance, Shape, make_case

ROOT = Path(__file__).parents[2]


class CpuSuite(PagedAttentionConformance):
    backend = "cpu"


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the library would be, but is not."""
    path = tmp_path / "libjpaged_cpu.so"
    monkeypatch.setattr(build, "LIBRARY", path)
    cpu.kernel.cache_clear()
    library.library.cache_clear()
    yield path
    cpu.kernel.cache_clear()
    library.library.cache_clear()


def test_without_a_compiler_the_reason_is_said() -> None:
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler was found \(nowhere\+\+\)"):
        build.find_compiler("nowhere++")


def test_without_any_known_compiler_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match=r"\(c\+\+, g\+\+, clang\+\+\)"):
        build.find_compiler()


def test_without_jaxlib_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match="jaxlib is not installed"):
        build.find_headers()


def test_a_failed_build_leaves_the_old_library(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_text("old")
    compiler = build.find_compiler("false")
    with pytest.raises(build.BuildError, match=r"exit status 1 of .*false"):
        build.build(library, compiler, build.find_headers())
    assert library.read_text() == "old"
    assert list(tmp_path.iterdir()) == [library]


def test_a_backend_that_was_not_built_refuses_with_the_remedy(no_library: Path) -> None:
    case, shape = make_case(RAGGED["mixed"], Shape()), Shape()
    spec, queries = CpuSuite().spec(case, shape), Queries(shape.num_heads, jnp.dtype(shape.dtype), 8, 8, 8)
    remedy = r"attention backend cpu: libjpaged_cpu.so was not built: .* `python -m jpaged.*cpu.build` builds it now"
    with pytest.raises(Unsupported, match=remedy):
        implementation("cpu", spec, queries)


def test_a_library_that_cannot_be_loaded_refuses_too(no_library: Path) -> None:
    no_library.write_text("no library")
    reason = cpu.kernel()
    assert isinstance(reason, str)
    assert "cannot be loaded" in reason


@pytest.mark.parametrize("source", [build.define_symbol(build.DIGEST, "0123"), ""], ids=["other", "older"])
def test_a_library_of_other_sources_refuses_with_the_remedy(source: str, no_library: Path) -> None:
    """A call of a function of another version could end the process."""
    command = [build.find_compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(no_library)]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    assert library.library() == (
        "libjpaged_cpu.so cannot be loaded: it was built from other sources than the ones that are installed; "
        "rebuild it with `python -m jpaged.kernels.cpu.build`"
    )


def test_a_digest_follows_names_and_contents(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        found = build.digest_sources([path])
        path.unlink()
        return found

    digests = {digest(name, text) for name in ("core.cc", "core.h") for text in ("one", "two")}
    assert len(digests) == 4
    assert digest("core.cc", "one") in digests
    assert build.KERNELS / "matmul/cpu/core.h" in build.list_sources()


def product_cores(machine: str, monkeypatch: pytest.MonkeyPatch, *, has_avx_vnni: bool = True) -> dict[str, list[str]]:
    """The commands that compile products for a machine, by the core's name."""
    jobs: list[list[str]] = []
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(build, "_accepts", lambda compiler, flags: has_avx_vnni)
    monkeypatch.setattr(build, "_run_all", jobs.extend)
    with pytest.raises(FileNotFoundError):  # nothing was linked
        build.build(Path("library.so"), "c++", Path("headers"), operations=["Product"])
    return {Path(job[-1]).stem.removeprefix("Product"): job for job in jobs}


def test_products_are_compiled_for_each_instruction_set_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    x86 = product_cores("x86_64", monkeypatch)
    assert {"Avx512Bf16", "Avx512Vnni", "Avx512", "AvxVnni", "Avx2", "Baseline"} <= set(x86)
    assert "-mavxvnni" in x86["AvxVnni"]
    assert "-DJPAGED_HAS_AVXVNNI" in x86[""]
    for machine in ("aarch64", "arm64"):
        arm = product_cores(machine, monkeypatch)
        assert "-march=armv8.2-a+dotprod+i8mm" in arm["I8mm"]
        assert "-march=armv8.2-a+dotprod" in arm["Dotprod"]
        assert not any(flag.startswith("-m") for flag in arm["Baseline"])
    assert "Baseline" in product_cores("riscv64", monkeypatch)


def test_a_compiler_without_avx_vnni_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = product_cores("x86_64", monkeypatch, has_avx_vnni=False)
    assert "AvxVnni" not in found
    assert "Avx2" in found
    assert "-DJPAGED_HAS_AVXVNNI" not in found[""]


# --- planted faults ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """An edit of one source, and the tests that have to notice it.

    What stands there is named in full, so that a fault that no longer applies is an error.
    """

    name: str
    source: str
    before: str
    after: str
    tests: str


_CORE, _KERNEL, _PAIRS = (f"paged_attention/cpu/{name}" for name in ("core.cc", "kernel.cc", "pairs.h"))

FAULTS = (
    Fault(
        "a query sees the next token",
        _CORE,
        "lesser(position + 1, tile.end)",
        "lesser(position + 2, tile.end)",
        "ragged_rows",
    ),
    Fault(
        "the window is one longer",
        _CORE,
        "position - call.window + 1)",
        "position - call.window)",
        "sliding_window",
    ),
    Fault(
        "the window is one shorter",
        _CORE,
        "position - call.window + 1)",
        "position - call.window + 2)",
        "sliding_window",
    ),
    Fault(
        "the output keeps its scale when the maximum grows",
        _CORE,
        "load(out + d) * fade + load(more + d) * gain",
        "load(out + d) + load(more + d) * gain",
        "many_chunks",
    ),
    Fault(
        "the sum keeps its scale when the maximum grows",
        _CORE,
        "load(into.sum + first) * fades + load(later.sum + first) * gains",
        "load(into.sum + first) + load(later.sum + first) * gains",
        "many_chunks",
    ),
    Fault(
        "the scale of the keys is forgotten",
        _CORE,
        "call.scale * call.scales_k2[2 * kv_head]",
        "call.scale",
        "8_bits",
    ),
    Fault(
        "values have the scale of the keys",
        _CORE,
        "call.scales_k2[2 * kv_head + 1]",
        "call.scales_k2[2 * kv_head]",
        "8_bits",
    ),
    Fault(
        "many rows forget the soft cap",
        _CORE,
        "cap_scores(load(row), cap)",
        "load(row)",
        "soft_cap",
    ),
    Fault(
        "few rows forget the soft cap",
        _CORE,
        "cap_scores(load(scores + key), cap)",
        "load(scores + key)",
        "soft_cap",
    ),
    Fault(
        "a layer is a block too short",
        _KERNEL,
        "layer * a.blocks_per_layer : 0;",
        "layer * (a.blocks_per_layer - 1) : 0;",
        "ragged_rows",
    ),
    Fault(
        "a slot is half as large",
        _KERNEL,
        "token_size = call.num_kv_heads * head_size",
        "token_size = call.num_kv_heads * head_size / 2",
        "ragged_rows",
    ),
    Fault(
        "all heads read the first",
        _KERNEL,
        "call.pool + piece.kv_head * head_size",
        "call.pool + 0 * piece.kv_head * head_size",
        "head_groups",
    ),
    Fault(
        "negative block ids are used",
        _KERNEL,
        "if (block < 0 || block >= call.num_places)",
        "if (block >= call.num_places)",
        "outside_of_the_layer",
    ),
    Fault(
        "contexts begin with their first key",
        _KERNEL,
        "std::max(rows.begins_s[row], 0)",
        "0",
        "part_of_each_context",
    ),
    Fault(
        "the log-sum-exp forgets the maximum",
        _CORE,
        "part.max[i] + __builtin_logf",
        "__builtin_logf",
        "ragged_rows",
    ),
    Fault(
        "numbers of 16 bits are cut off",
        "cpu/numbers.h",
        "(bits + 0x7fff + (bits >> 16 & 1)) >> 16",
        "bits >> 16",
        "update_stores_what",
    ),
    Fault(
        "subnormals of 8 bits are read as normal",
        "cpu/vector.h",
        "magnitude < 8u ?",
        "magnitude < 0u ?",
        "can_hold",
    ),
    Fault(
        "tokens without a row keep what was there",
        _KERNEL,
        "  if (!is_done) clear_outputs(call);",
        "",
        "padding_tokens or no_rows",
    ),
    Fault(
        "slots behind the layer are written",
        _KERNEL,
        "if (slot < 0 || slot >= num_slots) continue;",
        "if (slot < 0) continue;",
        "update_stores_what",
    ),
    Fault(
        "contexts may be longer than their table",
        _KERNEL,
        "std::min({int64_t{rows.kv_lens_s[row]}, table_len, latest + 1})",
        "std::min(int64_t{rows.kv_lens_s[row]}, latest + 1)",
        "ends_with_its_table",
    ),
    Fault(
        "a chunk is read where the one before it lies",
        _KERNEL,
        "piece_of(task, i + 1), later)",
        "piece_of(task, i), later)",
        "single_bit",
    ),
    Fault(
        "of three rows that are left two get their values",
        _CORE,
        "case 3: return add_rows<3, kVectors>",
        "case 3: return add_rows<2, kVectors>",
        "head_groups or ragged_rows",
    ),
    Fault(
        "splits are merged when the first has ended",
        _KERNEL,
        "split.num_left.fetch_sub(1, std::memory_order_acq_rel) > 1",
        "split.num_left.fetch_sub(1, std::memory_order_acq_rel) < tile.num_chunks()",
        "single_bit",
    ),
    Fault(
        "many rows add pairs in another order",
        _PAIRS,
        "halves[half][i] = sums[0][i] + sums[1][i];",
        "halves[half][i] = sums[0][i] + sums[1][i] * 1.0001f;",
        "same_bits",
    ),
    Fault(
        "weights of a pair are exchanged",
        _PAIRS,
        "cvtne2ps_pbh(reinterpret_cast<__m512>(odd)",
        "cvtne2ps_pbh(reinterpret_cast<__m512>(even)",
        "ragged_rows",
    ),
    Fault(
        "pairs forget the soft cap", _PAIRS, "return cap > 0 ? cap_scores", "return false ? cap_scores", "cap_together"
    ),
)

_PRODUCT, _CALL = "matmul/cpu/core.cc", "matmul/cpu/kernel.cc"
_DIGITS, _PANELS = "matmul/cpu/digits.h", "matmul/cpu/panels.h"

PRODUCT_FAULTS = (
    Fault(
        "a block is two columns short",
        _PRODUCT,
        "after.num_columns - place.column < kColumns ?",
        "after.num_columns - place.column < kColumns - 2 ?",
        "float64",
    ),
    Fault(
        "the mean is of one number less",
        _PRODUCT,
        "padded) / static_cast<float>(count) + eps",
        "padded) / (count - 1.0f) + eps",
        "around",
    ),
    Fault("the layer norm forgets its mean", _PRODUCT, "x[i] -= mean;", "x[i] -= 0 * mean;", "around"),
    Fault(
        "the bias of the second part is the first's",
        _PRODUCT,
        "bias_at(after.num_columns + strip.column)",
        "bias_at(strip.column)",
        "gated",
    ),
    Fault("the gate is not squashed", _PRODUCT, "x = activate<activation>(x);", ";", "gated"),
    Fault("the GELU has no cube", _PRODUCT, "0.0713548163f * (x * x)", "0.0713548163f * x", "activation_of_the_model"),
    Fault(
        "what is added is forgotten",
        _PRODUCT,
        "if (after.residual) x = load_numbers(",
        "if (after.residual && false) x = load_numbers(",
        "around",
    ),
    Fault(
        "what is added to whole vectors is forgotten",
        _PRODUCT,
        "if (after.residual) x = load(",
        "if (after.residual && false) x = load(",
        "around",
    ),
    Fault(
        "heads turn backwards",
        _PRODUCT,
        "store(to + half + i, b * c + a * s);",
        "store(to + half + i, b * c - a * s);",
        "turned",
    ),
    Fault(
        "keys have the queries' norm", _PRODUCT, "is_query ? heads.q_scale : heads.k_scale", "heads.q_scale", "turned"
    ),
    Fault(
        "rows that are not in use keep what was there",
        _CALL,
        "(num_tokens - rows_in_use) * y_row_bytes);",
        "0);",
        "not_in_use",
    ),
    Fault(
        "rows that are not in use are computed",
        _CALL,
        "std::clamp<int64_t>(num_rows.typed_data()[0], 0, num_tokens);\n  const bool",
        "num_tokens;\n  const bool",
        "not_in_use",
    ),
    Fault(
        "the last rows of a tile are left out",
        _CALL,
        "row < end; row += tiles.rows_of_tile",
        "row + 1 < end; row += tiles.rows_of_tile",
        "float64",
    ),
    Fault("digits overlap by a bit", _DIGITS, "(left - digit) >> 8", "(left - digit) >> 7", "in_float64"),
    Fault("codes begin with 0", _DIGITS, "-offset_of(C::kCode) * totals", "-0 * totals", "code_is"),
    Fault(
        "high bits are a bit off",
        "matmul/cpu/scales.h",
        "kHighBits * i - 4;",
        "kHighBits * i - 3;",
        "five_and_six_bits",
    ),
    Fault(
        "high bits are packed among the low ones",
        _CALL,
        "number >> 4 << high_shift % 8",
        "number >> 4 << shift % 8",
        "five_and_six_bits",
    ),
    Fault("zeros are added", _DIGITS, "found -= zero", "found += zero", "in_float64"),
    Fault("panels have no zeros", _PANELS, "if (q.zeros) subtract", "if (false) subtract", "in_float64"),
    Fault(
        "subnormals of fp8 are widened as others", _PANELS, "is_rare ? widen_any(second)", "false ? second", "code_is"
    ),
    Fault(
        "listed groups are put where they are to be taken",
        _PRODUCT,
        "ordered[i] = row[before.order[i]]",
        "ordered[before.order[i]] = row[i]",
        "listed",
    ),
    Fault(
        "whole numbers are cut off", _PRODUCT, "bounded + kRound - kRound", "static_cast<int>(bounded)", "rounds_them"
    ),
    Fault("an odd depth is cut", _CALL, "(depth + deep - 1) / deep * deep", "depth / deep * deep", "float64"),
)

_ROW, _FLOORS, _NOISE = "sampling/cpu/core.cc", "sampling/cpu/floors.h", "sampling/cpu/noise.h"

SAMPLING_FAULTS = (
    Fault(
        "of equals the higher token comes first", _ROW, "values[place - 1] < kept", "values[place - 1] <= kept", "width"
    ),
    Fault(
        "a banned NaN is not seen",
        _ROW,
        "(!has_banned || is_below_where_banned(",
        "(true || is_below_where_banned(",
        "anywhere",
    ),
    Fault("what is banned has no probability", _ROW, "row.x = logits;\n    scan", "scan", "width"),
    Fault("ranks count equals", _ROW, "row.size) > chosen", "row.size) >= chosen", "width"),
    Fault("min_p is of the whole", _FLOORS, "? largest + logf(", "? logf(", "width"),
    Fault("top_k keeps one more", _FLOORS, "static_cast<float>(top_k))", "top_k + 1.0f)", "width"),
    Fault("top_p forgets top_k", _FLOORS, "has_floor ? share * weigh(kept, largest)", "false ? 0", "width"),
    Fault(
        "a share is looked for too near",
        _FLOORS,
        "if (weigh(kept, largest) >= need) break;",
        "weigh(kept, largest);\n    break;",
        "width",
    ),
    Fault("columns behind the end are kept", _FLOORS, "& (ids < static_cast<int32_t>(end))", "", "width"),
    Fault("a round of the noise is another", _NOISE, "{13, 15, 26, 6}", "{13, 15, 26, 7}", "width"),
    Fault("both halves have the first word", _NOISE, "is_first ? words.x : words.y", "words.x", "width"),
    Fault("there is less noise than there is", _NOISE, "kMostNoise = 22.9f", "kMostNoise = 2.9f", "width"),
    Fault("the bound is too low", _NOISE, "158 * kLn2", "150 * kLn2", "width"),
    Fault(
        "a thread leaves its last row out",
        "sampling/cpu/kernel.cc",
        "(task + 1) * num_rows / num_tasks;",
        "(task + 1) * num_rows / num_tasks - 1;",
        "among_others",
    ),
    Fault(
        "rows of padding are sampled",
        "sampling/cpu/kernel.cc",
        "      if (is_padding_r[r]) {",
        "      if (false) {",
        "padding_rows",
    ),
)

_RULE, _ROWS = "cpu/recurrence/core.cc", "cpu/recurrence/kernel.cc"

RECURRENCE_FAULTS = (
    Fault("a value is not corrected", _RULE, "- known.vectors[v] * decay", "", "every_length"),
    Fault("what is known does not decay", _RULE, "known.vectors[v] * decay", "known.vectors[v]", "every_length"),
    Fault(
        "the depth is cut",
        _RULE,
        "const float* state, int64_t depth) {",
        "const float* state, int64_t depth) {\n  depth = depth / 4 * 4;",
        "odd",
    ),
    Fault(
        "a row that begins has an old state",
        _ROWS,
        "row.source < 0 ? nullptr : row.copies",
        "row.copies",
        "read_before",
    ),
    Fault("a row reads what another wrote", _ROWS, "source >= 0 && source != slot", "false", "read_before"),
    Fault("heads have the first key head", _ROWS, "head / (num_heads / num_key_heads)", "0 * head", "every_length"),
    Fault("columns of the last strip are lost", _ROWS, "(width + columns - 1) / columns", "width / columns", "odd"),
)

_ALL_FAULTS = (*FAULTS, *PRODUCT_FAULTS, *SAMPLING_FAULTS, *RECURRENCE_FAULTS)

_RUN = """
import sys, pathlib
from jpaged.kernels.cpu import build, library
from jpaged.kernels.matmul import multiply
from jpaged.kernels import recurrence
from jpaged.kernels.paged_attention import cpu as attention
from jpaged.kernels.sampling import cpu as sampling
build.LIBRARY = pathlib.Path(sys.argv[1])
kernels = {"matmul": multiply.kernel, "sampling": sampling.kernel, "attention": attention.kernel}
kernels["recurrence"] = recurrence.unsupported_cpu_reason
(kernel,) = (kernel for name, kernel in kernels.items() if name in sys.argv[3])
library.read_symbol = lambda *_: build.digest_sources(build.list_sources())  # its sources have a fault
isinstance(kernel(), str) and sys.exit(9)
sys.argv[1:] = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not deep", "-k", sys.argv[2], sys.argv[3]]
"""
_HUNG_S = 600.0


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where objects lie that no fault is in, as soon as one was made: a kernel.cc takes 2 s, for XLA's headers."""
    return tmp_path_factory.mktemp("objects")


def _reads(source: str, fault: Fault) -> bool:
    """Whether a core.cc or kernel.cc reads the file with the fault: what is not the kernel's is the core's."""
    file = Path(fault.source)
    is_shared = file.parent == Path(build.SHARED) or file.name == "core.h"
    return is_shared or (file.name == "kernel.cc") == (source == "kernel.cc")


def _with_objects(objects: Path, fault: Fault) -> Callable[[Sequence[list[str]]], None]:
    """What runs a build's commands, but for those that would make an object that lies there."""
    run_all = build._run_all

    def run(jobs: Sequence[list[str]]) -> None:
        compiled = [(Path(job[-3]).name, Path(job[-1])) for job in jobs if "-c" in job]
        right = {made: objects / made.name for source, made in compiled if not _reads(source, fault)}
        found = {made: kept for made, kept in right.items() if kept.exists()}
        run_all([job for job in jobs if Path(job[-1]) not in found])
        for made, kept in right.items():
            shutil.copy(*((kept, made) if made in found else (made, kept)))

    return run


def test_every_fault_is_one_edit_of_the_kernels_as_they_are() -> None:
    def is_one(fault: Fault) -> bool:
        return (build.KERNELS / fault.source).read_text().count(fault.before) == 1

    assert [fault.name for fault in _ALL_FAULTS if not is_one(fault)] == []


@pytest.mark.deep
@pytest.mark.parametrize("fault", _ALL_FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_kernel_is_caught(fault: Fault, objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong numbers are as wrong without optimising, which is more than half of a build.
    monkeypatch.setattr(build, "_FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build._FLAGS))
    monkeypatch.setattr(build, "_run_all", _with_objects(objects, fault))
    operations = [name for name, folder in build.OPERATIONS.items() if fault.source.startswith(folder)]
    operation = operations[0] if operations else "Attention"  # which finds the faults of what all share
    for folder in (build.SHARED, build.OPERATIONS[operation]):
        ignored = shutil.ignore_patterns("*.py", "*.so")
        shutil.copytree(build.KERNELS / folder, tmp_path / folder, ignore=ignored, dirs_exist_ok=True)
    path = tmp_path / fault.source
    path.write_text(path.read_text().replace(fault.before, fault.after))
    library = tmp_path / "libfaulty.so"
    build.build(library, build.find_compiler(), build.find_headers(), tmp_path, [operation])
    status, output = _run_suite(library, operation, fault.tests)
    # A test failed, or the process crashed; an error of the run itself, which also ends with 1, is neither.
    assert (status == 1 and " failed" in output) or status < 0, f"nothing noticed: {output}"


@pytest.mark.deep
@pytest.mark.parametrize(
    ("operation", "faults"),
    [
        *(("Attention", FAULTS), ("Product", PRODUCT_FAULTS)),
        *(("Sampling", SAMPLING_FAULTS), ("Recurrence", RECURRENCE_FAULTS)),
    ],
)
def test_the_right_kernel_passes_the_same_tests(operation: str, faults: tuple[Fault, ...]) -> None:
    status, output = _run_suite(build.LIBRARY, operation, " or ".join(fault.tests for fault in faults))
    assert status == 0, output


_SUITES = {
    "Attention": "test_paged_attention_cpu.py",
    "Product": "matmul",
    "Sampling": "sampling/test_sampling_cpu.py",
    "Recurrence": "test_recurrence.py",
}


def _run_suite(library: Path, operation: str, tests: str) -> tuple[int, str]:
    """Pytest's exit status over these tests with that library, in a process that may crash."""
    ended = forks().run(_RUN + PYTEST, [str(library), tests, f"tests/kernels/{_SUITES[operation]}"], ROOT, _HUNG_S)
    assert ended.code is not None, f"no end after {_HUNG_S:g} s: {ended.output[-2000:]}"
    return ended.code, ended.output[-4000:]
