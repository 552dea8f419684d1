"""`--speculative-config` in vLLM's format: one JSON object with a method and the method's options.

    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    {"method": "suffix"}

Keys, meanings and defaults are those of vLLM's `SpeculativeConfig`
(https://docs.vllm.ai/en/latest/api/vllm/config/speculative/); draft_model and eagle3 read a separate checkpoint, and
mtp reads the model's own. The limits are jpaged's: a key that is unknown, or that the method does not use, is an error.
Keys of vLLM that only choose how draft tokens are computed have no effect: draft tokens never change the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jpaged.config.option import checked_keys, option, parse_json_object
from jpaged.errors import InvalidArgument

NAME = "speculative_config"
METHODS = ("ngram", "suffix", "draft_model", "eagle3", "mtp")
MODEL_METHODS = ("draft_model", "eagle3")
"""Methods that read a separate checkpoint."""
HEAD_METHODS = ("eagle3", "mtp")
"""Methods whose proposer uses hidden states of the model."""
DEVICE_METHODS = ("draft_model", *HEAD_METHODS)
"""Methods whose proposer runs on the device, next to the model."""
_OF_MTP = (
    *("deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"),
    *("qwen3_next_mtp", "qwen3_5_mtp"),
)
"""Older names of the method mtp in vLLM, one for each family."""
MAX_NUM_SPECULATIVE_TOKENS = 32
_DEFAULT_LOOKUP = 5
WITHOUT_EFFECT = frozenset(
    {
        *("attention_backend", "code_revision", "disable_eagle_block_drop", "disable_lookahead_block_hashes"),
        *("disable_padded_drafter_batch", "draft_lm_head_quantization", "draft_load_config", "draft_sample_method"),
        *("draft_tensor_parallel_size", "enable_adaptive_verification", "enforce_eager"),
        *("index_share_for_mtp_iteration", "kv_cache_dtype", "max_model_len", "moe_backend"),
        *("num_speculative_tokens_per_batch_size", "parallel_drafting", "quantization"),
        *("tensor_parallel_size", "use_heterogeneous_vocab", "use_local_argmax_reduction"),
    }
)
"""Keys of vLLM's object that are accepted and ignored."""
_NGRAM = ("ngram", "[ngram]")
"""Names of the method ngram, which vLLM also takes as the model."""
_KEYS_OF = {
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
    "model": MODEL_METHODS,
    "rejection_sample_method": DEVICE_METHODS,
    "synthetic_acceptance_length": DEVICE_METHODS,
}


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """Options of speculative decoding. Created by `of` or `parse`, which validate them.

    Options of other methods keep their defaults and are ignored.
    """

    method: str = option(None, "speculation method", choices=METHODS)
    model: str | None = option(None, "draft model or EAGLE head: a folder or a Hugging Face Hub id")
    num_speculative_tokens: int = option(
        None,
        "maximum number of draft tokens per sequence and step",
        low=1,
        high=MAX_NUM_SPECULATIVE_TOKENS,
        unit="tokens",
    )
    prompt_lookup_min: int = option(None, "shortest n-gram to look up", low=1, high=32, unit="tokens")
    prompt_lookup_max: int = option(None, "longest n-gram to look up", low=1, high=32, unit="tokens")
    suffix_decoding_max_tree_depth: int = option(
        24, "maximum length of a match plus its draft tokens", low=4, high=256, unit="tokens"
    )
    suffix_decoding_max_cached_requests: int = option(
        10000, "earlier requests kept as a source of draft tokens; 0 keeps none", low=0, high=1_000_000
    )
    suffix_decoding_max_spec_factor: float = option(1.0, "draft tokens per matched token", low=0.01, high=100.0)
    suffix_decoding_min_token_prob: float = option(
        0.1, "minimum fraction of earlier occurrences that continue with the draft token", low=0.0, high=1.0
    )
    disable_by_batch_size: int | None = option(
        None, "largest number of decoding sequences with speculation; off above it", low=2, high=1_000_000, unit="rows"
    )
    rejection_sample_method: str = option(
        "standard",
        "rule that accepts draft tokens: standard, those that the model samples; synthetic, for benchmarks only, a "
        "fixed number whatever the model samples",
        choices=("standard", "synthetic"),
    )
    synthetic_acceptance_length: float | None = option(
        None,
        "mean tokens per round with rejection_sample_method synthetic: accepted draft tokens and the one after them",
        low=1.0,
        high=MAX_NUM_SPECULATIVE_TOKENS + 1.0,
        unit="tokens",
    )

    @property
    def has_head(self) -> bool:
        """True if the proposer uses hidden states of the model (EAGLE-3, MTP)."""
        return self.method in HEAD_METHODS

    @classmethod
    def parse(cls, text: str) -> SpeculativeOptions:
        """Parse the options of a JSON object.

        Raises:
            InvalidArgument: it is not a JSON object, or `of` rejects its contents.
        """
        return cls.of(parse_json_object(NAME, text, '{"method": "suffix"}'))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SpeculativeOptions:
        """Build the options from keys and values; None counts as absent.

        Without a method, the name of the model decides between eagle3 and draft_model, as in vLLM.

        Raises:
            InvalidArgument: a key is unknown, missing, out of range, or not one of the method's.
        """
        kept = {key: value for key, value in values.items() if key not in WITHOUT_EFFECT}
        if kept.get("method") in (None, *_NGRAM) and kept.get("model") in _NGRAM:
            kept |= {"method": "ngram", "model": None}
        elif kept.get("method") in (*_NGRAM, *_OF_MTP):
            kept["method"] = "ngram" if kept["method"] in _NGRAM else "mtp"
        given = checked_keys(cls, NAME, kept)
        if "method" not in given and "model" in given:
            given["method"] = "eagle3" if "eagle3" in given["model"].lower() else "draft_model"
        if "method" not in given:
            raise InvalidArgument(f"{NAME}.method", f"is missing: must be one of {', '.join(METHODS)}")
        method: str = given["method"]
        for key, methods in _KEYS_OF.items():
            if key in given and method not in methods:
                problem = f"{given[key]!r} applies only to {' and '.join(methods)}; the method is {method}"
                raise InvalidArgument(f"{NAME}.{key}", problem)
        _check_synthetic(given)
        return cls(**given | _resolved(method, given))


def _check_synthetic(given: Mapping[str, Any]) -> None:
    """Check that the synthetic rule and a length come together, and that rounds can have this length."""
    length, rule = given.get("synthetic_acceptance_length"), given.get("rejection_sample_method")
    if rule == "synthetic" and length is None:
        raise InvalidArgument(f"{NAME}.synthetic_acceptance_length", "is missing: the method synthetic requires it")
    if length is None:
        return
    if rule != "synthetic":
        problem = f"{length} applies only to rejection_sample_method synthetic"
        raise InvalidArgument(f"{NAME}.synthetic_acceptance_length", problem)
    most = given.get("num_speculative_tokens", MAX_NUM_SPECULATIVE_TOKENS) + 1
    if length > most:
        problem = f"{length} is above the {most} tokens of a round (num_speculative_tokens + 1)"
        raise InvalidArgument(f"{NAME}.synthetic_acceptance_length", problem)


def _resolved(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of absent keys."""
    found: dict[str, Any] = {}
    if method in MODEL_METHODS and "model" not in given:
        raise InvalidArgument(f"{NAME}.model", f"is missing: {method} requires a checkpoint")
    if method == "suffix":
        # Only an upper limit: each match determines the number, see `max_tree_depth`.
        depth = given.get("suffix_decoding_max_tree_depth", 24)
        found["num_speculative_tokens"] = given.get("num_speculative_tokens", min(depth, MAX_NUM_SPECULATIVE_TOKENS))
    elif "num_speculative_tokens" not in given:
        problem = f"is missing: must be from 1 to {MAX_NUM_SPECULATIVE_TOKENS}"
        raise InvalidArgument(f"{NAME}.num_speculative_tokens", problem)
    if method == "ngram":
        least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        least, most = least or most or _DEFAULT_LOOKUP, most or least or _DEFAULT_LOOKUP
        if least > most:
            raise InvalidArgument(f"{NAME}.prompt_lookup_min", f"{least} is above prompt_lookup_max ({most})")
        found |= {"prompt_lookup_min": least, "prompt_lookup_max": most}
    return found
