"""A model that forgets old tokens: first ones and a window of the last ones are seen in every layer.

Tokens keep the positions that they have in the text. So the distance between a query and the first tokens grows with
the text, as in the model itself, and a text is no longer than the model's positions.
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
    """The config of what is served: as published, or with the window and the first tokens that the options ask for.

    Raises:
        InvalidArgument: they hide nothing, or layers have windows of their own.
        Unsupported: the layers of the model are of one kind by their nature.
    """
    window, num_sinks = options.lossy.lossy_kv_window, options.lossy.num_sinks
    if window is None:
        return config
    if not isinstance(config, DecoderConfig):
        raise Unsupported(f"{WINDOW}: {config.architecture} has no kinds of attention to choose from")
    max_model_len = min(options.model.max_model_len or config.max_model_len, config.max_model_len)
    if window + num_sinks >= max_model_len:
        raise InvalidArgument(
            WINDOW,
            f"{window} tokens and {num_sinks} first ones (lossy_kv_sinks) are all of a sequence of max_model_len "
            f"({max_model_len}): leave it out",
        )
    widths = {kind.sliding_window for kind in config.attention_kinds}
    own = sorted(width for width in widths if width is not None and width < max_model_len)
    if own:
        told = ", ".join(map(str, own))
        raise InvalidArgument(
            WINDOW, f"{window}: {config.architecture} has layers with windows of {told} tokens of their own"
        )

    def narrowed(kind: AttentionKind) -> AttentionKind:
        return dataclasses.replace(kind, sliding_window=window, num_sink_tokens=num_sinks)

    kinds: tuple[LayerKind, ...] = tuple(
        dataclasses.replace(kind, attention=narrowed(kind.attention)) for kind in config.layer_kinds
    )
    return dataclasses.replace(config, kinds=kinds)


def told(options: EngineConfig) -> list[str]:
    """A line that names what is lossy, for whoever starts it; none where nothing is."""
    window, num_sinks = options.lossy.lossy_kv_window, options.lossy.num_sinks
    if window is None:
        return []
    return [f"LOSSY: tokens see the first {num_sinks} and the last {window} alone; answers differ from the model's"]
