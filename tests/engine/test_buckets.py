"""The sizes that steps are padded to."""

from dataclasses import replace
from typing import Any

import pytest

from jpaged.engine.executor import BucketTable, Geometry, SamplingInputs, StepInputs
from jpaged.testing import FakeExecutor, FedExecutor, SeveralStepsExecutor
from jpaged.testing.fake_model import FakeGrammar
from tests.engine.harness import Harness


def test_from_256_tokens_on_there_are_sizes_between_powers_of_two_where_they_are_asked_for() -> None:
    plain = BucketTable.build(max_num_batched_tokens=2048, max_num_seqs=512)
    halves = BucketTable.build(max_num_batched_tokens=2048, max_num_seqs=512, halves_from=256)
    assert plain.tokens == (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    assert halves.tokens == (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    assert (halves.rows, plain.num_tokens(1100), halves.num_tokens(1100)) == (plain.rows, 2048, 1536)
    odd = BucketTable.build(max_num_batched_tokens=700, max_num_seqs=8, halves_from=256)
    assert odd.tokens == (8, 16, 32, 64, 128, 256, 384, 512, 700)
    assert BucketTable.build(max_num_batched_tokens=256, max_num_seqs=8, halves_from=256).tokens[-2:] == (128, 256)


@pytest.mark.parametrize("kind", [SeveralStepsExecutor, FedExecutor])
def test_the_inputs_of_one_program_have_one_size_while_programs_are_added(kind: type[FakeExecutor]) -> None:
    sizes: list[tuple[int, int]] = []

    class Growing(kind):  # type: ignore[misc, valid-type]
        """Every second look finds a smaller program."""

        num_looks = 0

        @property
        def geometry(self) -> Geometry:
            self.num_looks += 1
            buckets = self._geometry.buckets
            most = buckets.decodes if self.num_looks % 2 else buckets.decodes[-1:]
            return replace(self._geometry, buckets=replace(buckets, decodes=most))

        def decode(self, inputs: StepInputs, sampling: SamplingInputs, *rest: Any) -> Any:
            sizes.append((len(inputs.token_ids_t), len(sampling.rows_r)))
            return super().decode(inputs, sampling, *rest)

        def decode_with_masks(self, inputs: StepInputs, sampling: SamplingInputs, *rest: Any) -> Any:
            sizes.append((len(inputs.token_ids_t), len(sampling.rows_r)))
            return super().decode_with_masks(inputs, sampling, *rest)

    executor = Growing(max_num_seqs=32)
    assert len(executor._geometry.buckets.decodes) > 1
    h = Harness(executor=executor, num_scheduler_steps=4)
    grammar = FakeGrammar(executor._geometry.vocab_size, 256, 90)
    for name in "ab":
        h.submit(name, [1, 2, 3], max_tokens=20, **({"grammar": grammar} if kind is FedExecutor else {}))
    h.run()
    assert len(sizes) >= 3 and all(num_tokens == num_rows for num_tokens, num_rows in sizes)
