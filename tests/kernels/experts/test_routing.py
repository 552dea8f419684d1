"""Which experts rows choose: every rule against plain sorting in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import InvalidArgument
from jpaged.kernels.experts import route
from jpaged.kernels.mixture_kind import Routing

RULES = {
    "softmax": Routing(12, 3),
    "softmax, normalised": Routing(12, 3, normalises=True),
    "chosen": Routing(12, 3, "chosen"),
    "sigmoid": Routing(12, 4, "sigmoid", normalises=True, scale=2.5),
    "sigmoid in groups": Routing(12, 4, "sigmoid", True, 2.5, num_groups=4, top_groups=2, num_best=2),
    "softmax in groups": Routing(12, 3, scale=16.0, num_groups=3, top_groups=1),
}


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def expected(logits: np.ndarray, routing: Routing, bias: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The experts of one row, the best first, and their weights."""
    scores = {"softmax": softmax, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "chosen": lambda x: x}[routing.scores](
        logits
    )
    ranked = scores + bias
    size = len(logits) // routing.num_groups
    groups = [np.sort(ranked[i : i + size])[-routing.num_best :].sum() for i in range(0, len(logits), size)]
    allowed = set(np.argsort(groups)[::-1][: routing.top_groups].tolist())
    order = [int(i) for i in np.argsort(-ranked, kind="stable") if i // size in allowed]
    ids = order[: routing.top_k]
    weights = softmax(scores[ids]) if routing.scores == "chosen" else scores[ids]
    return ids, (weights / weights.sum() if routing.normalises else weights) * routing.scale


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_go_where_plain_sorting_sends_them(name: str, has_bias: bool) -> None:
    routing, rng = RULES[name], np.random.default_rng(7)
    logits = rng.standard_normal((40, 12)).astype(np.float32)
    bias = (rng.standard_normal(12) * has_bias * (routing.scores == "sigmoid")).astype(np.float32)
    routes = route(jnp.asarray(logits), routing, jnp.int32(40), jnp.asarray(bias) if has_bias else None)
    for row in range(40):
        ids, weights = expected(logits[row].astype(np.float64), routing, bias)
        assert routes.ids_tk[row].tolist() == ids
        np.testing.assert_allclose(routes.weights_tk[row], weights, rtol=1e-5)


def test_rows_that_are_not_in_use_are_sent_nowhere() -> None:
    routes = route(jnp.full((4, 5), jnp.nan).at[:2].set(1.0), Routing(5, 2), jnp.int32(2))
    assert routes.ids_tk.tolist() == [[0, 1], [0, 1], [5, 5], [5, 5]]
    assert routes.weights_tk[2:].tolist() == [[0, 0], [0, 0]]


def test_logits_of_bfloat16_are_weighed_in_float32() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((6, 8)), jnp.bfloat16)
    weights = route(logits, Routing(8, 8), jnp.int32(6)).weights_tk
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


def test_a_part_of_the_routes_counts_experts_from_its_first() -> None:
    routes = route(jnp.asarray([[0.0, 3.0, 2.0, 1.0]]), Routing(4, 3), jnp.int32(1))
    assert routes.ids_tk.tolist() == [[1, 2, 3]]
    assert routes.part(jnp.int32(2), 2).ids_tk.tolist() == [[2, 0, 1]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 0, "top_k": 1}, "num_experts: is 0"),
        ({"num_experts": 8, "top_k": 9}, "top_k: is 9; it must be from 1 to 8 experts"),
        ({"num_experts": 8, "top_k": 0}, "top_k: is 0"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 3}, "num_groups: is 3; it must divide 8 experts"),
        (
            {"num_experts": 8, "top_k": 2, "num_groups": 2, "top_groups": 3},
            "top_groups: is 3; it must be from 1 to the number of groups, 2",
        ),
        ({"num_experts": 8, "top_k": 5, "num_groups": 2}, "top_k: is 5; it must be from 1 to 4 experts"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 2, "num_best": 5}, "num_best: is 5; a group has 4 experts"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 2, "scores": "chosen"}, "groups are not supported for logits"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Routing(**settings)  # type: ignore[arg-type]
