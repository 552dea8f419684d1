"""What the comparison runs of jpaged: tokens, times and counts by the public face, and nothing kept from run to run."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.checkpoints import make
from benchmarks.peers.workers.jpaged_offline import COUNTS, Jpaged
from benchmarks.peers.workers.protocol import Settings, check_lengths
from benchmarks.peers.workloads import Job
from tests.peers.shapes import TINY

OPTIONS = {"max_model_len": 64, "block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("model")
    make(replace(TINY, num_layers=2, width=128, num_heads=2), folder)
    worker = Jpaged(Settings(str(folder), "float32", 0, dict(OPTIONS)))
    yield worker
    worker.close()


@pytest.mark.long
def test_samples_and_beams_come_back_whole(engine):
    jobs = [Job([5, 6, 7], 6, n=3, temperature=1.0), Job([8], 4, beam_width=2)]
    check_lengths(jobs, engine.run(jobs).outputs)


@pytest.mark.long
def test_a_run_has_times_and_counts(engine):
    answer = engine.run([Job([5, 6, 7], 6)])
    assert 0 < answer.ttft_s[0] < answer.wall_s
    assert 0 < answer.tpot_s[0] * 5 < answer.wall_s
    assert answer.counts.keys() == set(COUNTS) - {"num_compiles_after_warm_up"}
    assert answer.counts["num_steps"] >= 1
    assert engine.about().keys() == {"jpaged", "jax"}


def test_a_prompt_that_ran_before_is_computed_again_once_it_is_forgotten(engine):
    jobs = [Job(list(range(10, 22)), 2)]
    first = engine.run(jobs)
    found = engine.run(jobs)
    engine.forget()
    forgotten = engine.run(jobs)
    assert [answer.counts["num_prefix_hit_tokens"] for answer in (first, found, forgotten)] == [0, 11, 0]
    assert first.outputs == found.outputs == forgotten.outputs


@pytest.mark.long
def test_a_program_that_compiles_while_it_is_timed_is_refused(engine, monkeypatch):
    loads = iter([engine._llm.load(), replace(engine._llm.load(), num_compiles_after_warm_up=2)])
    monkeypatch.setattr(engine._llm, "load", lambda: next(loads))
    with pytest.raises(RuntimeError, match="2 programs were compiled in what is timed"):
        engine.run([Job([5], 2)])
