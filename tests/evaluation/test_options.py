"""What --model_args says is read, and what it cannot mean is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jpaged.errors import InvalidArgument
from jpaged.evaluation.runner import EvaluationOptions


def test_what_is_no_option_of_the_harness_is_the_engines() -> None:
    options = EvaluationOptions.of(
        {"pretrained": "demo", "dtype": "float32", "max_num_seqs": 8, "seed": 3, "max_length": 64, "device": None}
    )
    assert (options.model, options.max_length, options.seed) == ("demo", 64, 3)
    assert options.engine == {"dtype": "float32", "max_num_seqs": 8, "seed": 3}


def test_what_the_harness_adds_has_no_effect() -> None:
    given = {
        "target": "localhost:50051",
        "batch_size": 1,
        "max_batch_size": None,
        "device": "cuda:0",
        "trust_remote_code": False,
    }
    options = EvaluationOptions.of({**given, "timeout": 5.0, "seed": 4})
    assert (options.target, options.engine, options.timeout_s, options.seed) == ("localhost:50051", {}, 5.0, 4)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "model"),
        ({"model": "demo", "target": "localhost:1"}, "model"),
        ({"model": "demo", "pretrained": "demo"}, "pretrained"),
        ({"target": "localhost:1", "dtype": "float32"}, "dtype"),
        ({"model": "demo", "max_length": 0}, "max_length"),
        ({"model": "demo", "max_gen_toks": "many"}, "max_gen_toks"),
        ({"model": "demo", "max_concurrency": True}, "max_concurrency"),
        ({"model": "demo", "seed": -1}, "seed"),
        ({"model": "demo", "prefix_token_id": "<s>"}, "prefix_token_id"),
        ({"model": "demo", "add_bos_token": "maybe"}, "add_bos_token"),
        ({"model": "demo", "enable_thinking": True}, "think_end_token"),
        ({"model": "demo", "chat_template_args": "x"}, "chat_template_args"),
        ({"target": "localhost:1", "timeout": 0}, "timeout_s"),
    ],
)
def test_what_cannot_be_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        EvaluationOptions.of(arguments)
    assert raised.value.field == field
