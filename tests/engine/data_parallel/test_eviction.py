"""Each replica chooses by a policy of its own what its pool gives up; the tokens are the same."""

import pytest

from jpaged.engine.kv_cache.eviction.policies import EVICTION_POLICIES
from jpaged.testing import expected_tokens
from tests.engine.data_parallel.fleet import Fleet


@pytest.mark.long
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_replicas_give_up_blocks_by_the_policy_and_sample_the_same(policy):
    options = {"eviction_policy": policy}
    fleet = Fleet(engine_options=options, num_blocks=14, block_size=4, num_host_blocks=6, max_model_len=48)
    prompts = {f"{i}": [(11 * i + place * place) % 97 for place in range(6 + 3 * (i % 7))] for i in range(30)}
    replicas = set()
    for begin in range(0, 30, 3):
        for suffix in ("", " again"):
            some = [*prompts.items()][begin : begin + 3]
            replicas |= {fleet.place(name + suffix, prompt) for name, prompt in some}
            fleet.run()
    assert replicas == {0, 1}
    for name, prompt in prompts.items():
        assert fleet.tokens(name) == fleet.tokens(f"{name} again") == expected_tokens(prompt, 4)
    assert sum(fleet.last(f"{name} again").usage.cached_tokens for name in prompts) > 0
    assert fleet.is_at_rest()
