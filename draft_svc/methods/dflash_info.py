"""What a block draft tells of itself."""

from __future__ import annotations

from draft_svc.methods.base import MethodInfo, RowNeeds
from engine.attention.base import LayerMode
from engine.device import device_name
from engine.models.draft_loading import LoadedDraft


def info_of(
    method: str, loaded: LoadedDraft, max_draft_tokens: int, max_length: int, tokenizer_hash: str
) -> MethodInfo:
    """`max_draft_tokens` is what was asked for: never more than a block has."""
    config = loaded.model.config
    return MethodInfo(
        method=method,
        name=loaded.name,
        max_draft_tokens=min(max_draft_tokens, loaded.model.max_draft_tokens),
        max_length_tokens=max_length,
        fingerprint=loaded.fingerprint,
        rows=RowNeeds(config.tap_ids, config.row_width, projected_width=config.hidden_size),
        target_hidden_size=config.target_hidden_size,
        target_layer_count=config.target_layer_count,
        target_vocab_size=config.vocab_size,
        target_fingerprint=loaded.target_fingerprint,
        tokenizer_hash=tokenizer_hash,
        slot_mode=config.slot_mode,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        d2t_hash=loaded.model.vocabulary.d2t_hash,
        rope_style=config.rope_style,
        rope_theta=config.rope.theta,
        rope_scaling=config.rope.described,
        device=device_name(loaded.model.device),
        attention=loaded.model.attention,
        layer_attention=tuple(map(_describe, config.modes)),
    )


def _describe(mode: LayerMode) -> str:
    kind = "causal" if mode.causal else "non-causal"
    return kind if mode.window is None else f"{kind} window={mode.window}"
