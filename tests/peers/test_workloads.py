"""The requests of the comparison: the same for ever, of the lengths that the table says, read as they were written."""

import pytest

from benchmarks.peers.workloads import FIRST_ID, VOCAB_SIZES, WORKLOADS, digest, make, read, shortened, write

# Results name their jobs by these: another digest is another benchmark.
DIGESTS = {
    ("S", "W1"): "f56fd0978059",
    ("S", "W2"): "a85f81c9d8f3",
    ("S", "W3"): "f6da78e5539e",
    ("S", "W4"): "a6a7132007c4",
    ("S", "W5"): "aafb5018574b",
    ("S", "T1"): "096107e651a2",
    ("M", "W1"): "09cf80a56007",
    ("M", "W2"): "11a6196fb1b8",
    ("M", "W3"): "9539c789ecd4",
    ("M", "W4"): "30c4ab9f76ff",
    ("M", "W5"): "850421bcffff",
    ("M", "T1"): "c24a90ab194a",
}


@pytest.mark.parametrize("model", VOCAB_SIZES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_jobs_are_the_same_for_ever(model, workload):
    assert digest(make(model, workload)) == DIGESTS[model, workload]


@pytest.mark.parametrize(
    ("model", "workload", "num_jobs", "num_prompt", "num_output"),
    [
        ("S", "W1", 128, 20608, 43261),
        ("S", "W2", 64, 64 * 371, 64 * 32),
        ("S", "W3", 16, 16 * 128, 16 * 6 * 64),
        ("S", "W4", 8, 8 * 128, 8 * 32),  # the best beam of each
        ("S", "W5", 1, 32, 128),
        ("M", "W1", 24, 3071, 2302),
    ],
)
def test_a_workload_has_the_tokens_that_the_table_names(model, workload, num_jobs, num_prompt, num_output):
    jobs = make(model, workload)
    assert len(jobs) == num_jobs
    assert sum(len(job.prompt) for job in jobs) == num_prompt
    assert sum(job.num_output_tokens for job in jobs) == num_output


@pytest.mark.parametrize("model", VOCAB_SIZES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_prompt_has_a_special_token_or_one_out_of_the_vocabulary(model, workload):
    ids = [token for job in make(model, workload) for token in job.prompt]
    assert min(ids) >= FIRST_ID
    assert max(ids) < VOCAB_SIZES[model]


def test_the_short_chats_are_the_first_half_of_the_chats():
    chats, short = make("S", "W1"), make("S", "T1")
    assert [job.prompt for job in short] == [job.prompt for job in chats[:64]]
    assert [job.max_tokens for job in short] == [max(4, job.max_tokens // 4) for job in chats[:64]]


def test_jobs_are_read_as_they_were_written(tmp_path):
    for workload in WORKLOADS:
        write(tmp_path / "jobs" / workload, make("S", workload))
        assert read(tmp_path / "jobs" / workload) == make("S", workload)


def test_what_runs_before_the_clock_is_few_tokens_of_few_jobs():
    few = shortened(make("S", "W3"))
    assert [(job.max_tokens, job.n) for job in few] == [(4, 6)] * 8
