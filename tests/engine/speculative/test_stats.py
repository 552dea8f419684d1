"""Counts of proposals under vLLM's names."""

from __future__ import annotations

from dataclasses import fields

from jpaged.engine.stats import SpeculationStats
from jpaged.server_load import PER_POSITION, SpeculationLoad


def test_drafts_and_accepted_tokens_are_counted_by_position():
    stats = SpeculationStats(3)
    assert stats.snapshot() == SpeculationLoad(num_accepted_tokens_per_pos=(0, 0, 0))
    stats.count([3, 0, 2], [2, 0, 0])
    stats.count([3, 1], [3, 1])
    load = stats.snapshot()
    assert (load.num_drafts, load.num_draft_tokens, load.num_accepted_tokens) == (4, 9, 6)
    assert load.num_accepted_tokens_per_pos == (3, 2, 1)
    assert (load.acceptance_rate, load.mean_acceptance_len) == (6 / 9, 2.5)


def test_before_the_first_draft_there_is_no_rate():
    load = SpeculationStats(2).snapshot()
    assert (load.acceptance_rate, load.mean_acceptance_len) == (0.0, 1.0)


def test_engines_add_up():
    first, second = SpeculationStats(1), SpeculationStats(3)
    first.count([1], [1])
    second.count([3, 2], [2, 0])
    total = SpeculationLoad.total([first.snapshot(), second.snapshot()])
    assert total == SpeculationLoad(
        num_drafts=3, num_draft_tokens=6, num_accepted_tokens=3, num_accepted_tokens_per_pos=(2, 1, 0)
    )
    assert SpeculationLoad.total([]) == SpeculationLoad()


def test_the_names_are_those_of_vllm():
    names = [metric.name for one in fields(SpeculationLoad) for metric in one.metadata.values()]
    names.append(PER_POSITION.name)
    assert names == [
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    ]
