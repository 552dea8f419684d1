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
    from jpaged.llm import LLM
    from jpaged.types import CompletionOutput, FinishReason, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "AlreadyExists",
    "AsyncClient",
    "Cancelled",
    "Client",
    "CompletionOutput",
    "DeadlineExceeded",
    "FinishReason",
    "InternalError",
    "InvalidArgument",
    "JpagedError",
    "LimitExceeded",
    "NotFound",
    "PermissionDenied",
    "QueueFull",
    "QuotaExceeded",
    "RequestOutput",
    "RequestTooLong",
    "SamplingParams",
    "TryLater",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "__version__",
]

_HOME = {
    "LLM": "jpaged.llm",
    "AsyncClient": "jpaged.client",
    "Client": "jpaged.client",
    "CompletionOutput": "jpaged.types",
    "FinishReason": "jpaged.types",
    "RequestOutput": "jpaged.types",
    "SamplingParams": "jpaged.types",
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
