"""Causality and window of every layer, from the keys of a config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.attention.mode import LayerMode
from engine.models.fields import positive, refuse

FULL, SLIDING = "full_attention", "sliding_attention"
_QWEN_WINDOW_LAYERS = 28


def optional_flag(values: Mapping[str, Any], key: str) -> bool | None:
    """None where it is absent."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise refuse(key, value, "true or false")
    return value


def layer_types(config: Mapping[str, Any], count: int) -> list[str] | None:
    """`layer_types`, checked; None where the config has none."""
    types = config.get("layer_types")
    if not types:
        return None
    known = isinstance(types, list) and all(kind in (FULL, SLIDING) for kind in types)
    if not known or len(types) != count:
        raise refuse("layer_types", types, f"{count} of {FULL}, {SLIDING}")
    return list(types)


def draft_modes(config: Mapping[str, Any]) -> tuple[LayerMode, ...]:
    """Modes of a block draft. Causality: `is_causal` > `dflash_config.causal` > sliding layers
    causal, full layers not. A speculators checkpoint says `sliding_window_non_causal`, of its
    sliding layers only.

    A window stands on sliding layers; with `use_swa` and no sliding layer, on every layer. Raises
    CheckpointError naming the key.
    """
    body = config.get("transformer_layer_config") or config
    nested = config.get("dflash_config") or {}
    count = positive(body, "num_hidden_layers")
    types = layer_types(body, count) or [FULL] * count
    forced = bool(optional_flag(nested, "use_swa")) and SLIDING not in types
    explicit = optional_flag(config, "is_causal")
    if explicit is None:
        explicit = optional_flag(nested, "causal")
    sliding_causal = not optional_flag(config, "sliding_window_non_causal")
    modes = []
    for kind in types:
        sliding = kind == SLIDING
        window = None
        if sliding or forced:
            own = nested.get("swa_window_size") is not None
            window = positive(nested, "swa_window_size") if own else _window(body)
        causal = (sliding and sliding_causal) if explicit is None else explicit
        modes.append(LayerMode(causal, window))
    return tuple(modes)


def _window(config: Mapping[str, Any]) -> int:
    return positive(config, "sliding_window")


def model_modes(config: Mapping[str, Any]) -> tuple[LayerMode, ...]:
    """Modes of an ordinary decoder: causal, with windows where the config puts them. The engine's
    own reader (`models.config`) refuses what contradicts itself before it asks here.
    """
    count = positive(config, "num_hidden_layers")
    types = layer_types(config, count)
    if types is not None:
        windowed = [kind == SLIDING for kind in types]
    elif config.get("sliding_window") is None:
        windowed = [False] * count
    elif "use_sliding_window" in config or str(config.get("model_type")).startswith("qwen"):
        first = config.get("max_window_layers", _QWEN_WINDOW_LAYERS)
        first = first if config.get("use_sliding_window") else count
        windowed = [index >= first for index in range(count)]
    else:
        windowed = [config.get("model_type") == "mistral"] * count
    window = _window(config) if any(windowed) else None
    return tuple(LayerMode(True, window if here else None) for here in windowed)
