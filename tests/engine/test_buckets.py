"""The sizes that steps are padded to."""

from jpaged.engine.executor import BucketTable


def test_from_256_tokens_on_there_are_sizes_between_powers_of_two_where_they_are_asked_for() -> None:
    plain = BucketTable.build(max_num_batched_tokens=2048, max_num_seqs=512)
    halves = BucketTable.build(max_num_batched_tokens=2048, max_num_seqs=512, halves_from=256)
    assert plain.tokens == (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    assert halves.tokens == (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    assert (halves.rows, plain.num_tokens(1100), halves.num_tokens(1100)) == (plain.rows, 2048, 1536)
    odd = BucketTable.build(max_num_batched_tokens=700, max_num_seqs=8, halves_from=256)
    assert odd.tokens == (8, 16, 32, 64, 128, 256, 384, 512, 700)
    assert BucketTable.build(max_num_batched_tokens=256, max_num_seqs=8, halves_from=256).tokens[-2:] == (128, 256)
