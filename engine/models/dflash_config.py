"""The explicit internal description of a DFlash draft, read from a z-lab style config.json.

Nothing is inferred from a name, and a key without a safe default must be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engine.attention.base import LayerMode
from engine.errors import CheckpointError
from engine.models.config import FULL, SLIDING, ModelConfig, layer_types, read_heads
from engine.models.fields import number, positive, refuse
from engine.models.rope import Rope, extended_positions, parse_rope

DEFAULT_ROPE_THETA = 1e6


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """`tap_ids` are 0-based target layers whose output, before any final norm, is read.

    A block has `block_size` slots, [anchor, mask, ...]; slot s predicts the token at anchor + s
    (fill-in), so it
    proposes block_size - 1 tokens.
    """

    hidden_size: int
    intermediate_size: int
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    max_positions: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    tap_ids: tuple[int, ...]
    modes: tuple[LayerMode, ...]
    target_hidden_size: int
    target_layer_count: int

    @property
    def row_width(self) -> int:
        """Values of one hidden-state row: every tap, concatenated in the order of `tap_ids`."""
        return len(self.tap_ids) * self.target_hidden_size

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - 1


def layer_modes(config: Mapping[str, Any]) -> tuple[LayerMode, ...]:
    """Causality per layer: `is_causal` > `dflash_config.causal` > sliding layers causal, full
    layers not.

    `use_swa` puts the window `swa_window_size` on every layer; its causality still follows the
    layer type.
    """
    count = positive(config, "num_hidden_layers")
    nested = config.get("dflash_config", {})
    types = layer_types(config, count) or [FULL] * count
    explicit = config.get("is_causal")
    if explicit is None:
        explicit = nested.get("causal")
    modes = []
    for kind in types:
        sliding = kind == SLIDING
        window: int | None = None
        if nested.get("use_swa"):
            window = positive(nested, "swa_window_size", config.get("sliding_window"))
        elif sliding:
            window = positive(config, "sliding_window")
        modes.append(
            LayerMode(causal=sliding if explicit is None else bool(explicit), window=window)
        )
    return tuple(modes)


def _tap_ids(nested: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    ids = nested.get("target_layer_ids")
    if not ids:
        raise CheckpointError(
            "config dflash_config.target_layer_ids is missing; there is no default"
        )
    if any(b <= a for a, b in pairwise(ids)):
        raise refuse("dflash_config.target_layer_ids", ids, "strictly increasing layer ids")
    if ids[0] < 0 or ids[-1] >= target.layer_count:
        accepted = f"ids in [0, {target.layer_count}), the target's layers"
        raise refuse("dflash_config.target_layer_ids", ids, accepted)
    return tuple(ids)


def _mask_id(config: Mapping[str, Any], nested: Mapping[str, Any], target: ModelConfig) -> int:
    mask = nested.get("mask_token_id", config.get("mask_token_id"))
    reserved = {target.pad_token_id, target.bos_token_id, *target.eos_token_ids}
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size or mask in reserved:
        accepted = f"an id in [0, {target.vocab_size}) that is not pad, bos or eos"
        raise refuse("dflash_config.mask_token_id", mask, accepted)
    return mask


def _refuse_unsupported(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    if config.get("architectures") != ["DFlashDraftModel"]:
        raise refuse("architectures", config.get("architectures"), "['DFlashDraftModel']")
    fixed: tuple[tuple[Mapping[str, Any], str, Any], ...] = (
        (config, "hidden_act", "silu"),
        (config, "attention_bias", False),
        (config, "is_neox_style", True),
        (config, "rope_is_neox_style", True),
        (nested, "attention_sink_bias", False),
        (nested, "attention_value_scale", 1.0),
        (nested, "use_aux_hidden_state", True),
        (nested, "sample_from_anchor", False),
        (nested, "input_embedding_scale", 1.0),
        (nested, "output_multiplier", 1.0),
        (nested, "final_logit_softcapping", None),
        (config, "logit_scale", 1.0),
    )
    for values, key, accepted in fixed:
        if values.get(key, accepted) != accepted:
            raise refuse(key, values[key], repr(accepted))


def parse_dflash(config: Mapping[str, Any], target: ModelConfig) -> DFlashConfig:
    """Reads the config of a draft made for `target`. Raises CheckpointError naming key, value and
    what is accepted."""
    nested = config.get("dflash_config")
    if not isinstance(nested, dict):
        raise CheckpointError("config dflash_config is missing: not a DFlash checkpoint")
    _refuse_unsupported(config, nested)
    hidden = positive(config, "hidden_size")
    for key, value, expected in (
        ("hidden_size", hidden, target.hidden_size),
        (
            "target_hidden_size",
            config.get("target_hidden_size", target.hidden_size),
            target.hidden_size,
        ),
        (
            "num_target_layers",
            config.get("num_target_layers", target.layer_count),
            target.layer_count,
        ),
        ("vocab_size", config.get("vocab_size"), target.vocab_size),
        (
            "draft_vocab_size",
            config.get("draft_vocab_size", target.vocab_size),
            target.vocab_size,
        ),
    ):
        if value != expected:
            raise refuse(key, value, f"{expected}, the target's")
    heads, kv_heads, head_dim = read_heads(config, hidden)
    positions = positive(config, "max_position_embeddings")
    rope = parse_rope(config, head_dim, positions, DEFAULT_ROPE_THETA)
    block = positive(nested, "block_size", config.get("block_size"))
    if block < 2:
        raise refuse("block_size", block, "2 or more")
    return DFlashConfig(
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        layer_count=positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        # Keys of a draft do not turn again either: `dynamic` stays at the original length.
        max_positions=positions if rope.kind == "dynamic" else extended_positions(rope, positions),
        vocab_size=target.vocab_size,
        block_size=block,
        mask_token_id=_mask_id(config, nested, target),
        tap_ids=_tap_ids(nested, target),
        modes=layer_modes(config),
        target_hidden_size=target.hidden_size,
        target_layer_count=target.layer_count,
    )
