"""The part of a draft's config.json that all layouts share: sizes, taps, mask, block, rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engine.attention.layers import draft_modes
from engine.errors import CheckpointError
from engine.models.config import ModelConfig
from engine.models.dflash_config import ConfidenceConfig, DFlashConfig, MarkovConfig
from engine.models.fields import flag, number, positive, refuse
from engine.models.latent_config import LatentConfig, parse_latent
from engine.models.rope import extended_positions, parse_rope

Config = Mapping[str, Any]
# Far above any draft: a number that is no size must not be allocated for.
_MOST_LAYERS, _MOST_POSITIONS = 512, 1 << 24


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a layout keeps its values, not yet checked.

    body          the object with the sizes, and what stands before its keys in a message
    taps          key, value, and what is to be taken off an id to name a layer by its output
    prefix        what stands before mask_token_id and block_size in a message
    """

    body: Config
    taps: tuple[str, Any, int]
    mask: Any
    block: Any
    next_token: bool
    draft_vocab_size: Any
    prefix: str = ""
    body_prefix: str = ""


def required_flag(config: Config, key: str) -> bool:
    """A flag whose default depends on who reads it."""
    value = config.get(key)
    if not isinstance(value, bool):
        raise refuse(key, value, "true or false; there is no default")
    return value


def read(
    config: Config,
    target: ModelConfig,
    layout: Layout,
    markov: MarkovConfig | None = None,
    confidence: ConfidenceConfig | None = None,
) -> DFlashConfig:
    """The whole internal config. Raises CheckpointError."""
    body, prefix = layout.body, layout.body_prefix
    _refuse_unsupported(config, body)
    _compare(config, layout, target)
    heads, latent = positive(body, "num_attention_heads", prefix=prefix), _latent(config, body)
    if latent is None:
        kv_heads = positive(body, "num_key_value_heads", prefix=prefix)
        if heads % kv_heads:
            raise refuse(f"{prefix}num_key_value_heads", kv_heads, f"a divisor of {heads}")
        head_dim = turned = positive(body, "head_dim", prefix=prefix)
    else:
        kv_heads, head_dim, turned = 1, latent.width, latent.rope
    positions = positive(body, "max_position_embeddings", prefix=prefix)
    layers = positive(body, "num_hidden_layers", prefix=prefix)
    for key, value, most in (
        ("max_position_embeddings", positions, _MOST_POSITIONS),
        ("num_hidden_layers", layers, _MOST_LAYERS),
    ):
        if value > most:
            raise refuse(prefix + key, value, f"{most} or less")
    rope = parse_rope(body, turned, positions, None)
    block = positive({"block_size": layout.block}, "block_size")
    if block < 2:
        raise refuse("block_size", block, "2 or more")
    return DFlashConfig(
        hidden_size=positive(body, "hidden_size", prefix=prefix),
        intermediate_size=positive(body, "intermediate_size", prefix=prefix),
        layer_count=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=number(body, "rms_norm_eps", prefix=prefix),
        rope=rope,
        rope_interleaved=latent.interleaved if latent else _interleaved(config, body),
        # Keys of a draft do not turn again either: `dynamic` stays at the original length.
        max_positions=positions if rope.kind == "dynamic" else extended_positions(rope, positions),
        vocab_size=target.vocab_size,
        draft_vocab_size=_draft_vocabulary(layout.draft_vocab_size, target),
        block_size=block,
        next_token=layout.next_token,
        mask_token_id=_mask_id(layout, target),
        tap_ids=_tap_ids(*layout.taps, target),
        modes=draft_modes(config),
        target_hidden_size=target.hidden_size,
        target_layer_count=target.layer_count,
        markov=markov,
        confidence=confidence,
        latent=latent,
    )


def _refuse_unsupported(config: Config, body: Config) -> None:
    fixed: tuple[tuple[Config, str, Any], ...] = (
        (body, "hidden_act", "silu"),
        (body, "attention_bias", False),
        (body, "mlp_bias", False),
        (config, "logit_scale", 1.0),
        (config, "add_swa_attention_sink_bias", False),
        (config, "quantization_config", None),
    )
    for values, key, accepted in fixed:
        if values.get(key) not in (None, accepted):
            raise refuse(key, values[key], repr(accepted))
    if body.get("use_sliding_window") and not body.get("layer_types"):
        raise refuse("layer_types", None, "a type for every layer where use_sliding_window is true")


def _compare(config: Config, layout: Layout, target: ModelConfig) -> None:
    """What a draft says of its target against the target."""
    prefix = layout.body_prefix
    for key, value, expected in (
        ("target_hidden_size", config.get("target_hidden_size"), target.hidden_size),
        ("num_target_layers", config.get("num_target_layers"), target.layer_count),
    ):
        if value not in (None, expected):
            raise refuse(key, value, f"{expected}, the target's")
    if layout.body.get("vocab_size") != target.vocab_size:
        value = layout.body.get("vocab_size")
        raise refuse(f"{prefix}vocab_size", value, f"{target.vocab_size}, the target's")


def _latent(config: Config, body: Config) -> LatentConfig | None:
    """Which values turn together must be said: latent layers are written both ways."""
    if body.get("kv_lora_rank") is None:
        return None
    styles = ("is_neox_style", "rope_is_neox_style")
    named = any(values.get(key) is not None for values in (config, body) for key in styles)
    own = flag(body, "rope_interleave") if body.get("rope_interleave") is not None else None
    if own is None and not named:
        raise refuse("rope_interleave", None, "true or false; there is no default")
    if own is not None and named and own != _interleaved(config, body):
        raise CheckpointError("config gives conflicting RoPE styles: rope_interleave and neox")
    return parse_latent(body, _interleaved(config, body))


def _interleaved(config: Config, body: Config) -> bool:
    """Of the draft alone: whatever the target does. The layouts are half-split; a file that is not
    says so."""
    said = {
        key: flag(values, key, True)
        for values in (config, body)
        for key in ("is_neox_style", "rope_is_neox_style")
        if values.get(key) is not None
    }
    if len(set(said.values())) > 1:
        raise CheckpointError(f"config gives conflicting RoPE styles: {said}")
    return False in said.values()


def _draft_vocabulary(value: Any, target: ModelConfig) -> int:
    size = positive({"draft_vocab_size": value}, "draft_vocab_size")
    if size > target.vocab_size:
        raise refuse("draft_vocab_size", size, f"{target.vocab_size}, the target's, or less")
    return size


def _tap_ids(key: str, ids: Any, offset: int, target: ModelConfig) -> tuple[int, ...]:
    if not ids:
        raise CheckpointError(f"config {key} is missing; there is no default")
    known = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not known or any(b <= a for a, b in pairwise(ids)):
        raise refuse(key, ids, "strictly increasing layer ids")
    if ids[0] < offset or ids[-1] >= target.layer_count + offset:
        accepted = f"ids in [{offset}, {target.layer_count + offset}), the target's layers"
        raise refuse(key, ids, accepted)
    return tuple(i - offset for i in ids)


def _mask_id(layout: Layout, target: ModelConfig) -> int:
    mask: Any = layout.mask
    reserved = {target.pad_token_id, target.bos_token_id, *target.eos_token_ids}
    if type(mask) is not int or not 0 <= mask < target.vocab_size or mask in reserved:
        accepted = f"an id in [0, {target.vocab_size}) that is not pad, bos or eos"
        raise refuse(f"{layout.prefix}mask_token_id", mask, accepted)
    return mask
