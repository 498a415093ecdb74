"""Reading values of a config.json: each reader refuses by key, value and what is accepted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from engine.errors import CheckpointError

# The most that a dimension may be, some way above any model there is: what is computed from a
# config, as one mode per layer, must not exhaust memory before the weights are looked at.
_MOST = {
    "num_hidden_layers": 4096,
    "n_mtp_layers": 4096,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 24,
}
_MOST_OTHERS = 2**31 - 1


def refuse(key: str, value: object, accepted: str) -> CheckpointError:
    return CheckpointError(f"config {key} = {value!r} is not supported; accepted: {accepted}")


def positive(
    config: Mapping[str, Any], key: str, default: int | None = None, *, prefix: str = ""
) -> int:
    """Null is absent."""
    value, most = config.get(key), _MOST.get(key, _MOST_OTHERS)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise refuse(prefix + key, value, f"a positive integer, at most {most}")
    return value


def number(
    config: Mapping[str, Any],
    key: str,
    default: float | None = None,
    *,
    least: float = 0.0,
    prefix: str = "",
) -> float:
    """A finite number, `least` or more; 0 itself is refused. `prefix` says where `config` is."""
    value = config.get(key, default)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer of JSON may be beyond every float; infinity and NaN are in no such range.
    if not known or not least <= value <= sys.float_info.max or value == 0:
        accepted = f"a number, {least:g} or more" if least else "a positive number"
        raise refuse(prefix + key, value, accepted)
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:  # absent, or null
        return default
    if not isinstance(value, bool):
        raise refuse(key, value, "true or false")
    return value


def check_kinds(config: Mapping[str, Any], objects: tuple[str, ...]) -> None:
    """Refuses what should be an object, where it is set, and `architectures` that are no names."""
    for key in objects:
        if config.get(key) and not isinstance(config[key], Mapping):
            raise refuse(key, config[key], "an object")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refuse("architectures", names, "a list of names")


def token_ids(value: object, key: str = "eos_token_id") -> tuple[int, ...]:
    """`eos_token_id` may be absent, one id or a list."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise refuse(key, value, "an id or a list of ids")
