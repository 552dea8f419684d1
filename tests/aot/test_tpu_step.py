"""Cycles of a step's parts, read off a program's text."""

from __future__ import annotations

import pytest

from benchmarks.tpu_step import SMALLEST_FUSION, StepCycles, count, layer_operations

TEXT = """
%product (p.0: bf16[64,64]) -> bf16[64,64] {
  ROOT %dot.1 = bf16[64,64]{1,0} convolution(%p.0, %p.0), dim_labels=bf_io->bf
}
%root (p.0: f32[64]) -> f32[64] {
  ROOT %rsqrt.1 = f32[64]{0} rsqrt(%p.0)
}
%turned (p.0: bf16[64,64]) -> bf16[64,64] {
  ROOT %multiply.1 = bf16[64,64]{1,0} multiply(%p.0, %p.0)
}
%nothing (p.0: bf16[64,64]) -> bf16[64,64] {
  %p.0 = bf16[64,64]{1,0} parameter(0)
}
%much (p.0: bf16[64,64]) -> bf16[64,64] {
  ROOT %fusion.9 = bf16[64,64]{1,0} fusion(%p.0), calls=%turned, backend_config={"estimated_cycles":"90000"}
}
%layer (arguments: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %get.1 = bf16[64,64]{1,0} get-tuple-element(%arguments), index=1
  %fusion.1 = bf16[64,64]{1,0} fusion(%get.1), calls=%product, backend_config={"estimated_cycles":"1000"}
  %fusion.2 = f32[64]{0} fusion(%fusion.1), calls=%root, backend_config={"estimated_cycles":"200"}
  %fusion.3 = bf16[64,64]{1,0} fusion(%fusion.1), calls=%turned, backend_config={"estimated_cycles":"30"}
  %copy-start.1 = (bf16[64,64], bf16[64,64]{1,0:S(1)}, u32[]) copy-start(%fusion.3)
  %copy-done.1 = bf16[64,64]{1,0} copy-done(%copy-start.1)
  %gather.1 = bf16[64,64]{1,0} fusion(%copy-done.1), calls=%turned
  %paged_attention_decode.1 = bf16[64,64]{1,0} custom-call(%gather.1), custom_call_target="tpu_custom_call"
  %all-reduce.1 = bf16[64,64]{1,0} all-reduce(%gather.1), backend_config={"estimated_cycles":"4"}
  %conditional.1 = bf16[64,64]{1,0} conditional(%p, %gather.1, %gather.1), branch_computations={%much, %nothing}
}
ENTRY %main (p.0: bf16[64,64]) -> bf16[64,64] {
  %while.1 = (s32[], bf16[64,64]{1,0}) while(%p.0), condition=%turned, body=%layer
}
"""


def test_the_operations_of_a_layer_by_their_kinds() -> None:
    step = StepCycles("v6e:1x1", 64, tuple(layer_operations(TEXT)))
    assert [step.cycles(kind) for kind in ("products", "norms", "exchange", "attention")] == [1000, 200, 4, 0]
    gathered = SMALLEST_FUSION + 2 * 64 * 64 * 2 // 765
    assert step.cycles("glue") == 30 + gathered, "a copy is hidden, and the branch that does something is not taken"
    assert (step.num_small, step.num_copies) == (2, 1)
    assert step.glue_share == pytest.approx((30 + gathered) / (1204 + 30 + gathered))


def test_a_program_without_a_loop() -> None:
    with pytest.raises(ValueError, match="no loop over layers"):
        layer_operations("ENTRY %main (p.0: f32[]) -> f32[] {\n  %a = f32[] add(%p.0, %p.0)\n}")


@pytest.mark.parametrize(
    ("topology", "num_tokens"),
    [
        pytest.param("v6e:1x1", 64, marks=pytest.mark.long),
        pytest.param("v6e:1x1", 2048, marks=pytest.mark.deep),
        pytest.param("v6e:2x4", 64, marks=pytest.mark.deep),
        pytest.param("v6e:2x4", 2048, marks=pytest.mark.long),
    ],
)
def test_heads_turned_are_all_the_glue_of_a_layer(topology: str, num_tokens: int) -> None:
    (step,) = count(topology, [num_tokens])
    glue = [operation for operation in step.operations if operation.kind == "glue"]
    assert step.glue_share < 0.03, glue
    assert step.num_small <= 2, glue
    (turned,) = (operation for operation in glue if operation.name.startswith("turn_heads"))
    assert "bf16" in turned.result
