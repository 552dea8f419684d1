"""Values that cross layers: requests and results. Frozen; no jax, no grpc.

values.py   requests, events, outputs, sequences that resume after another server's tokens

Sampling parameters and stop conditions are in `jpaged.sampling_params`, and exported from here too.
"""

from typing import TYPE_CHECKING

from jpaged.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_NUM_SAMPLES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MAX_TOP_N_SIGMA,
    SamplingParams,
    is_loopback,
    param,
    require_whole_characters,
    text_bytes,
)
from jpaged.types.values import (
    MAX_CHAT_MESSAGES,
    MAX_DETOKENIZE_IDS,
    MIN_MAX_CHAT_BYTES,
    MIN_MAX_TOKENIZE_BYTES,
    POOLINGS,
    Adapter,
    CompletionOutput,
    Embedding,
    EmbeddingOutput,
    FinishReason,
    LoadedAdapter,
    LoRARequest,
    ModelInfo,
    OutputEvent,
    Pooling,
    PositionLogprobs,
    PriorOutput,
    Prompt,
    Request,
    RequestOutput,
    RequestStateStats,
    RequestTimes,
    ResumedSequence,
    Score,
    SequenceDelta,
    SequenceFinish,
    TextState,
    TokenLogprob,
    Usage,
)
from jpaged.version import alias_names

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_CHARS",
    "MAX_BEAM_WIDTH",
    "MAX_CACHE_SALT_CHARS",
    "MAX_CHAT_MESSAGES",
    "MAX_DETOKENIZE_IDS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGIT_BIASES",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_NUM_SAMPLES",
    "MAX_PENALTY",
    "MAX_REPETITION_PENALTY",
    "MAX_SEED",
    "MAX_STOP_STRINGS",
    "MAX_STOP_STRING_CHARS",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TOP_LOGPROBS",
    "MAX_TOP_N_SIGMA",
    "MIN_MAX_CHAT_BYTES",
    "MIN_MAX_TOKENIZE_BYTES",
    "POOLINGS",
    "Adapter",
    "CompletionOutput",
    "Embedding",
    "EmbeddingOutput",
    "FinishReason",
    "LoRARequest",
    "LoadedAdapter",
    "ModelInfo",
    "OutputEvent",
    "Pooling",
    "PositionLogprobs",
    "PriorOutput",
    "Prompt",
    "Request",
    "RequestOutput",
    "RequestStateStats",
    "RequestTimes",
    "ResumedSequence",
    "SamplingParams",
    "Score",
    "SequenceDelta",
    "SequenceFinish",
    "TextState",
    "TokenLogprob",
    "Usage",
    "is_loopback",
    "param",
    "require_whole_characters",
    "text_bytes",
]


_FORMER_NAMES = {
    "Continued": "ResumedSequence",
    "Generated": "PriorOutput",
    "MAX_TOP_TOLD": "MAX_TOP_LOGPROBS",
}
"""Public names of the previous release. They go with the next one."""

if not TYPE_CHECKING:
    __getattr__ = alias_names(__name__, _FORMER_NAMES)
