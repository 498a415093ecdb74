"""Whether a block draft is for a target, as far as both config.json say it. Imports no torch: what
`engine.models` compares when it loads the two, for families that it does not have as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.models.fields import refuse

Config = Mapping[str, Any]


def check_made_for(draft: Config, target: Config) -> None:
    """Raises CheckpointError naming key, value and what the target has."""
    size = _body(target)
    for key, value, of_target in _said(draft):
        expected = size.get(of_target)
        if value is not None and expected is not None and value != expected:
            raise refuse(key, value, f"{expected}, the target's")
    layers = size.get("num_hidden_layers")
    for values, key, most in (
        (_nested(draft), "target_layer_ids", 0),
        (draft, "target_layer_ids", 0),
        (draft, "aux_hidden_state_layer_ids", 1),  # of layers that a state enters
    ):
        ids = values.get(key)
        if not isinstance(ids, list) or any(type(one) is not int for one in ids):
            continue
        if type(layers) is int and max(ids, default=0) >= layers + most:
            raise refuse(key, ids, f"ids below {layers + most}: the target has {layers} layers")


def _said(draft: Config) -> Iterator[tuple[str, Any, str]]:
    """Key and value of the draft, and the key that the target has it under."""
    if _nested(draft):  # this layout has the target's embedding and head
        yield "hidden_size", draft.get("hidden_size"), "hidden_size"
    yield "target_hidden_size", draft.get("target_hidden_size"), "hidden_size"
    yield "num_target_layers", draft.get("num_target_layers"), "num_hidden_layers"
    yield "vocab_size", _body(draft).get("vocab_size"), "vocab_size"


def _nested(draft: Config) -> Config:
    return draft.get("dflash_config") or {}


def _body(config: Config) -> Config:
    return config.get("transformer_layer_config") or config.get("text_config") or config
