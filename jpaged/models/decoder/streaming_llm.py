"""A model that drops old tokens (StreamingLLM): every layer sees the first tokens and a window of the last ones.

Tokens keep their positions in the text. So the distance between a query and the first tokens grows with the text, as
in the original model, and a text is limited to the model's positions.
"""

from __future__ import annotations

import dataclasses

from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import DecoderConfig
from jpaged.models.layer_kinds import LayerKind

WINDOW = "lossy_kv_window"


def as_asked(config: ModelConfig, options: EngineConfig) -> ModelConfig:
    """Return the config to serve: as published, or with the window and the sink tokens that the options request.

    Raises:
        InvalidArgument: the window hides nothing, or layers have windows already.
        Unsupported: the model's layers have no configurable attention kinds.
    """
    window, num_sinks = options.lossy.lossy_kv_window, options.lossy.num_sinks
    if window is None:
        return config
    if not isinstance(config, DecoderConfig):
        raise Unsupported(f"{WINDOW}: {config.architecture} does not support other kinds of attention")
    max_model_len = min(options.model.max_model_len or config.max_model_len, config.max_model_len)
    if window + num_sinks >= max_model_len:
        raise InvalidArgument(
            WINDOW,
            f"{window} tokens and the first {num_sinks} (lossy_kv_sinks) cover a whole sequence of max_model_len "
            f"({max_model_len}): remove the option",
        )
    widths = {kind.sliding_window for kind in config.attention_kinds}
    own = sorted(width for width in widths if width is not None and width < max_model_len)
    if own:
        told = ", ".join(map(str, own))
        raise InvalidArgument(
            WINDOW, f"{window}: {config.architecture} has layers with their own windows of {told} tokens"
        )

    def narrowed(kind: AttentionKind) -> AttentionKind:
        return dataclasses.replace(kind, sliding_window=window, num_sink_tokens=num_sinks)

    kinds: tuple[LayerKind, ...] = tuple(
        dataclasses.replace(kind, attention=narrowed(kind.attention)) for kind in config.layer_kinds
    )
    return dataclasses.replace(config, kinds=kinds)


def describe_lossy_cache(options: EngineConfig) -> list[str]:
    """Return a line that reports the lossy cache at startup; empty if it is off."""
    window, num_sinks = options.lossy.lossy_kv_window, options.lossy.num_sinks
    if window is None:
        return []
    return [
        f"LOSSY: tokens attend only to the first {num_sinks} and the last {window} tokens; answers differ from the "
        "model's"
    ]
