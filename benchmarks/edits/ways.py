"""What is asked for in each way, as fields of `SamplingParams`; plain JSON, for it goes to processes of other trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
"""Ways that a tree without edits has, too: what they cost must not have grown."""

EDITED: Mapping[str, Mapping[str, Any]] = {
    "logit_bias": {"temperature": 0.0, "logit_bias": {str(token): 0.5 for token in range(40, 60)}},
    "allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": [*range(1500)]},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "top_n_sigma": {"temperature": 0.8, "top_n_sigma": 1.5},
    "typical_p": {"temperature": 0.8, "typical_p": 0.9},
    "penalties, logprobs": {"temperature": 0.0, "frequency_penalty": 0.3, "logprobs": 5},
}
