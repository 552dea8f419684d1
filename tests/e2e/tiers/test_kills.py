"""A server with a disk is killed with -9, again and again: no answer is wrong, and every start succeeds."""

from pathlib import Path

import pytest

from benchmarks.tiers.kills import kill


@pytest.mark.long
def test_a_server_that_is_killed_starts_again_with_what_it_had(tmp_path: Path) -> None:
    """Six lives; `python -m benchmarks.tiers.kills` has two hundred."""
    done = kill(6, 0.3, str(tmp_path / "kv"), seed=3, most_answers=16)
    assert done.kills == 6 and done.answers > 6
    assert done.dropped == 0  # the page cache has outlived each: nothing is torn
