"""Groups for a memory without an engine around it."""

from __future__ import annotations

from jpaged.engine.sequence import Group, Status
from jpaged.types import Request, SamplingParams


def group_of(num_prompt_tokens, first=0, **sampling):
    """A group whose prompt is so many tokens that count up from the first."""
    prompt = tuple(range(first, first + num_prompt_tokens))
    return Group(Request("g", prompt, SamplingParams(max_tokens=8, **sampling)), 0, 0.0, print, 8)


def computed(memory, group):
    """Runs a group's prompt, forks, and samples a token for each."""
    leader, *others = group.live
    num_cached = memory.admit(group)
    group.move_to(Status.RUNNING)
    memory.grow(leader, leader.num_prompt_tokens - num_cached)
    leader.num_computed_tokens = leader.num_prompt_tokens
    for other in others:
        memory.fork(leader, other)
    group.is_forked = True
    for sequence in group.live:
        sequence.token_ids.append(200)
    return group
