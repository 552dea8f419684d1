"""The parts that samples of perf are counted in."""

import pytest

from benchmarks.cpu.profile import part_of, shares

REPORT = """
# Overhead       Samples  Shared Object       Symbol
# ........  ............  ..................  .......................
#
    60.00%            60  libjpaged_cpu.so    [.] jpaged::product::(anonymous namespace)::multiply_strip<Singles, 12>
            |
            --- jpaged::product
    20.00%            20  libjpaged_cpu.so    [.] jpaged::(anonymous namespace)::score<4>
    15.00%            15  libpython3.11.so    [.] _PyEval_EvalFrameDefault
     5.00%             5  [kernel.kallsyms]   [k] clear_page_erms
"""


def test_each_sample_is_counted_in_one_part():
    found = shares(REPORT.splitlines())
    assert found == {"products": 0.6, "attention": 0.2, "Python": 0.15, "libraries and kernel": 0.05}


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("libjpaged_cpu.so  [.] jpaged::product::(anonymous namespace)::finish", "norms, RoPE, activations, sums"),
        ("libjpaged_cpu.so  [.] jpaged::(anonymous namespace)::draw_of_all", "sampling"),
        ("libjpaged_cpu.so  [.] jpaged::(anonymous namespace)::attend_to<F32>", "attention"),
        ("libjax_common.so  [.] xla::cpu::ThunkExecutor::Execute", "other operations of XLA"),
        ("[JIT] tid 7  [.] 0x00007efcf4ac61c3", "other operations of XLA"),
        ("libc.so.6  [.] malloc", "libraries and kernel"),
    ],
)
def test_libraries_and_symbols_name_their_part(where, part):
    assert part_of(where) == part
