"""What the configuration of a transformers model says about layers whose attention has a window."""

from __future__ import annotations

from typing import Any

# Values of `layer_types` in transformers' configs.
FULL, SLIDING, CONVOLUTION, LINEAR = "full_attention", "sliding_attention", "conv", "linear_attention"
_HYBRID, _OTHERS = "hybrid", frozenset({"mlp", "moe"})  # both in one layer, and layers that mix no tokens

VARIES = "varies"  # instead of a setting that differs between layers


def layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ())


def _setting(config: Any, name: str) -> Any:
    """Returns a value in a config, None if it has none, or VARIES if its layers have different ones."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return VARIES


def _window_size(config: Any) -> int | None:
    size = _setting(config, "sliding_window")
    return None if size == VARIES else size or None


def causal_window(config: Any) -> int | None:
    """Returns how many tokens a decoder's windowed layers attend to; None if unknown or without windows."""
    types = set(layer_types(config))
    has_windows = SLIDING in types if types else not _setting(config, "attention_chunk_size")
    return _window_size(config) if has_windows and types <= {FULL, SLIDING} else None


def has_windows(config: Any) -> bool:
    """Returns True if any layer has windowed attention."""
    types = layer_types(config)
    if types:
        return any(layer_type != FULL for layer_type in types)
    return any(_setting(config, name) for name in ("sliding_window", "local_attention", "attention_chunk_size"))


def encoder_window(config: Any) -> int | None:
    """Returns how many tokens to each side an encoder's windowed layers attend to; None if unknown or without windows.

    The window is that of transformers' `create_bidirectional_sliding_window_mask`, which ModernBERT uses. Gemma's
    decoders that are encoders, such as EmbeddingGemma, count the token itself.
    """
    types, size = set(layer_types(config)), _window_size(config)
    if size is None or not types <= {FULL, SLIDING} or SLIDING not in types:
        return None
    return size - 1 if getattr(config, "use_bidirectional_attention", None) else size


def has_convolutions(config: Any) -> bool:
    """Returns True for decoders with layers of full attention and layers of short convolutions, such as LFM2."""
    return set(layer_types(config)) == {FULL, CONVOLUTION}


def has_recurrences(config: Any) -> bool:
    """Returns True for decoders with recurrent layers, whose other layers, if any, have full attention."""
    types = set(layer_types(config)) - _OTHERS
    return bool(types & {LINEAR, _HYBRID}) and types <= {FULL, LINEAR, _HYBRID}


def attending_share(config: Any) -> float:
    """Returns the share of the layers that have attention, among them those that also have a recurrence."""
    types = layer_types(config)
    without = _OTHERS | {LINEAR, CONVOLUTION}
    return sum(kind not in without for kind in types) / len(types) if types else 1.0
