"""jpaged: a JAX/XLA serving engine for large language models with a paged KV cache.

The public names. Each is imported on first use, so that values, errors and the client do not import jax.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jpaged.version import __version__

if TYPE_CHECKING:
    from jpaged.client import AsyncClient, Client
    from jpaged.errors import (
        AlreadyExists,
        Cancelled,
        DeadlineExceeded,
        InternalError,
        InvalidArgument,
        JpagedError,
        LimitExceeded,
        NotFound,
        PermissionDenied,
        QueueFull,
        QuotaExceeded,
        RequestTooLong,
        TryLater,
        Unauthenticated,
        Unavailable,
        Unsupported,
    )
    from jpaged.llm import (
        LLM,
        AsyncEngineArgs,
        AsyncLLM,
        AsyncLLMEngine,
        EmbedsPrompt,
        EngineArgs,
        LLMEngine,
        PromptType,
        TextPrompt,
        TokensPrompt,
    )
    from jpaged.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jpaged.sampling_params import (
        BeamSearchParams,
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from jpaged.types import FinishReason, LoRARequest

__all__ = [
    "LLM",
    "AlreadyExists",
    "AsyncClient",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "Cancelled",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "Client",
    "CompletionOutput",
    "DeadlineExceeded",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "FinishReason",
    "InternalError",
    "InvalidArgument",
    "JpagedError",
    "LLMEngine",
    "LimitExceeded",
    "LoRARequest",
    "NotFound",
    "PermissionDenied",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "QueueFull",
    "QuotaExceeded",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTooLong",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "TryLater",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "__version__",
]

_HOME = {
    **dict.fromkeys(
        (
            *("AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "EngineArgs", "LLM", "LLMEngine"),
            *("EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"),
        ),
        "jpaged.llm",
    ),
    **dict.fromkeys(("AsyncClient", "Client"), "jpaged.client"),
    **dict.fromkeys(
        (
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "CompletionOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "PoolingOutput",
            "PoolingRequestOutput",
            "RequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        ),
        "jpaged.outputs",
    ),
    **dict.fromkeys(
        ("BeamSearchParams", "PoolingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
        "jpaged.sampling_params",
    ),
    **dict.fromkeys(("FinishReason", "LoRARequest"), "jpaged.types"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    was_enabled = gc.isenabled()
    gc.disable()  # an import makes many objects that stay: collections would add a quarter
    try:
        return getattr(import_module(_HOME.get(name, "jpaged.errors")), name)
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return __all__
