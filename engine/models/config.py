"""The explicit internal description of a Llama-family target; nothing is inferred from names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    tied_head: bool
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]


def refuse(key: str, value: object, accepted: str) -> CheckpointError:
    return CheckpointError(f"config {key} = {value!r} is not supported; accepted: {accepted}")


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise refuse(key, value, "a positive integer")
    return value


def rope_theta(config: Mapping[str, Any], default: float) -> float:
    """One source of theta: `rope_theta` or `rope_parameters`; two that disagree are refused."""
    found: dict[str, float] = {}
    if config.get("rope_theta") is not None:
        found["rope_theta"] = float(config["rope_theta"])
    for key in ("rope_parameters", "rope_scaling"):
        values = config.get(key)
        if values is None:
            continue
        kind = values.get("rope_type", values.get("type", "default"))
        if kind != "default":
            raise refuse(f"{key}.rope_type", kind, "default")
        if values.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = float(values["rope_theta"])
    if len(set(found.values())) > 1:
        raise CheckpointError(f"config gives conflicting rope theta: {found}")
    return next(iter(found.values()), default)


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` may be absent, one id or a list."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise refuse("eos_token_id", value, "an id or a list of ids")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a Hugging Face config.json of the Llama family; refuses by name what the engine does
    not do.
    """
    if config.get("model_type") != "llama":
        raise refuse("model_type", config.get("model_type"), "llama")
    for key, accepted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, accepted) != accepted:
            raise refuse(key, config[key], repr(accepted))
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("partial_rotary_factor", config["partial_rotary_factor"], "1.0")
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"a divisor of {heads}")
    head_dim = config.get("head_dim")
    return ModelConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        layer_count=positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads if head_dim is None else positive(config, "head_dim"),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta(config, default=10000.0),
        max_positions=positive(config, "max_position_embeddings", 2048),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=config.get("bos_token_id"),
        pad_token_id=config.get("pad_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id")),
    )
