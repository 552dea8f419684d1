"""The process of a batch is killed in the middle; another goes on, and every line has one result."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jpaged.client.parquet import get_journal_path
from jpaged.testing import FakeExecutor
from tests.client.test_batch import results, simple, write_input
from tests.processes import ROOT
from tests.server.harness import eventually, running


async def begin(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jpaged", "batch", *words, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
async def test_a_batch_that_is_killed_is_gone_on_with(tmp_path, name):
    source, out = write_input(tmp_path / "in.jsonl", simple(40)), tmp_path / name
    gathered = get_journal_path(out) if out.suffix == ".parquet" else out
    narrow = [FakeExecutor(max_num_seqs=2) for _ in range(2)]
    async with running(executor=narrow[0]) as first, running(executor=narrow[1]) as second:
        words = [str(source), str(out), "--target", f"{first.target},{second.target}"]
        for harness in (first, second):
            # A request takes 6 to 8: they are enough for 4 one after the other, and for 12 in two rows.
            harness.faults.hold_after(36)
        process = await begin(*words)
        await eventually(lambda: num_lines(gathered) >= 4)
        process.kill()
        _, told = await process.communicate()
        assert process.returncode == -signal.SIGKILL
        for harness in (first, second):
            harness.faults.release()
        before = num_lines(gathered)
        assert 4 <= before < 40
        with gathered.open("a") as file:
            file.write('{"id": "batch_req_')  # a line that it was writing
        process = await begin(*words)
        _, told = await process.communicate()
        assert process.returncode == 0, told
    said = told.decode().splitlines()
    assert f"{40 - before} succeeded, 0 failed, {before} kept from before" in said[-2]
    assert said[-1].startswith(f"answered by {first.target} ")
    if out.suffix == ".parquet":
        ids = [one["custom_id"] for one in pq.read_table(out).to_pylist()]
        texts = [json.loads(one["response"]["body"])["choices"][0]["text"] for one in pq.read_table(out).to_pylist()]
        assert all(texts)
    else:
        ids = list(results(out))
    assert sorted(ids) == sorted(f"c{i}" for i in range(40))
