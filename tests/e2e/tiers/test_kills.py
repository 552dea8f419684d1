"""A server with a disk is killed with -9, again and again: no answer is wrong, and every start succeeds."""

from pathlib import Path

import pytest

from benchmarks.tiers.kills import kill, right_answers


@pytest.mark.long
async def test_a_server_that_is_killed_starts_again_with_what_it_had(tmp_path: Path) -> None:
    """Six lives; `python -m benchmarks.tiers.kills` has two hundred."""
    done = await kill(6, 0.3, tmp_path, seed=3, most_answers=16)
    assert done.kills == 6 and done.answers > 6 and done.in_starts > 0
    assert done.dropped == 0  # the page cache has outlived each: nothing is torn


@pytest.mark.long
async def test_an_answer_that_is_not_right_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def other_answers(folder: Path) -> dict[int, list[int]]:
        return {place: tokens[::-1] for place, tokens in (await right_answers(folder)).items()}

    monkeypatch.setattr("benchmarks.tiers.kills.right_answers", other_answers)
    with pytest.raises(SystemExit, match=r"behind 1 kills: prompt \d+ gave"):
        await kill(1, 0.1, tmp_path, most_answers=16)
