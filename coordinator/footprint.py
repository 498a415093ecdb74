"""Bytes of a checkpoint: weights, KV of a token, hidden-state rows. From config.json and the sizes
of the files beside it: no weight is read, and no torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.errors import SpecwireError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
_LARGEST = 2**31 - 1
_NOT_DENSE = (
    "kv_lora_rank",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "quantization_config",
    "compression_config",
)
SAME_CACHE, POOLED, PRIVATE = "same_cache", "pooled", "private"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one checkpoint. `kv_layer_bytes`: KV of one token in one layer. `weights_bytes` is 0 where
    neither the files nor the config tell; `embedding_bytes` are embedding and head. A draft that
    reads rows has `taps`, and takes embedding and head from its target.
    """

    layers: int
    hidden: int
    kv_kind: str
    kv_layer_bytes: int
    dtype_bytes: int
    weights_bytes: int
    embedding_bytes: int
    taps: int = 0
    max_draft_tokens: int = 0
    vocab: int = 0
    # What a draft with taps says of its target, 0 where it does not: hidden size, layers, and the
    # layers that there must be at least.
    target_hidden: int = 0
    target_layers: int = 0
    least_layers: int = 0

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token."""
        return self.layers * self.kv_layer_bytes

    def row_bytes(self, target: Footprint) -> int:
        """One hidden-state row that this draft reads of `target`."""
        return self.taps * target.hidden * target.dtype_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """What fits into one device. `tokens` is None where weights are unknown."""

    arrangement: str
    weights_bytes: int
    kv_bytes: int
    tokens: int | None


def read_footprint(flag: str, source: str, kv_dtype: str = "auto") -> Footprint:
    """`source`: a checkpoint directory, or a config.json. Raises FIELD_INVALID for `flag`."""
    path = Path(source)
    config_path = path / "config.json" if path.is_dir() else path
    accepted = "a directory with a config.json, or that file"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SpecwireError.field(flag, source, accepted) from None
    if not isinstance(config, dict):
        raise SpecwireError.field(flag, source, accepted)
    files = sum(f.stat().st_size for f in config_path.parent.glob("*.safetensors"))
    return footprint(flag, config, kv_dtype, files)


def check_made_for(flag: str, draft: Footprint, target: Footprint) -> None:
    """Raises FIELD_INVALID where a draft that reads rows is for another target: the services refuse
    to load it."""
    if not draft.taps:
        return
    for what, value, expected in (
        ("vocabulary", draft.vocab, target.vocab),
        ("hidden size of the target", draft.target_hidden, target.hidden),
        ("number of target layers", draft.target_layers, target.layers),
    ):
        if value and expected and value != expected:
            raise SpecwireError.field(f"{flag} config: {what}", value, f"{expected}, the target's")
    if draft.least_layers > target.layers:
        accepted = f"ids of the target's {target.layers} layers"
        field, value = f"{flag} config: highest layer read", draft.least_layers - 1
        raise SpecwireError.field(field, value, accepted)


def footprint(flag: str, config: Mapping[str, Any], kv_dtype: str, files_bytes: int) -> Footprint:
    """`files_bytes`: of the weights on disk; 0: estimated from the config, where it is dense."""
    body = config.get("transformer_layer_config") or config.get("text_config") or config
    if not isinstance(body, Mapping):
        raise SpecwireError.field(f"{flag} config", type(body).__name__, "an object")
    size = _Sizes(flag, body)
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise SpecwireError.field(f"{flag} config dflash_config", nested, "an object")
    tap_ids, entered = _taps(flag, config, nested)
    taps = len(tap_ids)
    hidden, vocab = size("hidden_size"), size("vocab_size", 0)
    dtype_bytes = _dtype_bytes(config, body)
    kv_each = dtype_bytes if kv_dtype == "auto" else DTYPE_BYTES[kv_dtype]
    kind, values = _kv_values(size, body)
    layers = size("num_hidden_layers")
    tables = 1 if body.get("tie_word_embeddings") else 2
    embedding = tables * vocab * hidden * dtype_bytes
    weights = files_bytes or _dense_bytes(size, body, dtype_bytes, config, taps)
    if not files_bytes and weights and not taps:
        weights += embedding
    block = config.get("block_size") or nested.get("block_size") or 0
    next_token = bool(config.get("sample_from_anchor", nested.get("sample_from_anchor", False)))
    return Footprint(
        layers=layers,
        hidden=hidden,
        kv_kind=f"{kind} {kv_each}-byte",
        kv_layer_bytes=values * kv_each,
        dtype_bytes=dtype_bytes,
        weights_bytes=weights,
        embedding_bytes=embedding,
        taps=taps,
        max_draft_tokens=max(0, block - (not next_token)) if isinstance(block, int) else 0,
        vocab=vocab,
        # A draft of this layout has the target's embedding and head.
        target_hidden=hidden if nested else _told(config, "target_hidden_size"),
        target_layers=_told(config, "num_target_layers"),
        least_layers=max(tap_ids, default=-1) + 1 - entered,
    )


class _Sizes:
    """Reads positive numbers of a config, naming the flag it came from where they are none."""

    def __init__(self, flag: str, body: Mapping[str, Any]) -> None:
        self._flag, self._body = flag, body

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self._body.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST:
            return value
        accepted = f"a positive integer, at most {_LARGEST}"
        raise SpecwireError.field(f"{self._flag} config {key}", value, accepted)


def _taps(flag: str, config: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[list[int], int]:
    """Target layers that a draft reads, and what is to be taken off an id to name a layer by its
    output; none: an ordinary model."""
    for values, key, entered in (
        (nested, "target_layer_ids", 0),
        (config, "target_layer_ids", 0),
        (config, "aux_hidden_state_layer_ids", 1),
    ):
        ids = values.get(key)
        if ids is not None:
            if not isinstance(ids, list) or any(type(i) is not int for i in ids):
                raise SpecwireError.field(f"{flag} config {key}", ids, "a list of layer ids")
            return ids, entered
    return [], 0


def _told(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if type(value) is int else 0


def _dtype_bytes(config: Mapping[str, Any], body: Mapping[str, Any]) -> int:
    for values in (config, body):
        for key in ("dtype", "torch_dtype"):
            name = str(values.get(key, "")).removeprefix("torch.")
            if name in DTYPE_BYTES:
                return DTYPE_BYTES[name]
    return 2


def _kv_values(size: _Sizes, body: Mapping[str, Any]) -> tuple[str, int]:
    """The layout's name, and the values that one token has in one layer."""
    if body.get("kv_lora_rank") is not None:
        rank, rope = size("kv_lora_rank"), size("qk_rope_head_dim", 64)
        return f"latent {rank}+{rope}", rank + rope
    heads = size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", max(1, size("hidden_size") // heads))
    return f"{kv_heads} heads of {head_dim}", 2 * kv_heads * head_dim


def _dense_bytes(
    size: _Sizes, body: Mapping[str, Any], each: int, config: Mapping[str, Any], taps: int
) -> int:
    """Layers (and a draft's projection of its rows) of a dense model with plain heads; 0 where the
    config has something else, such as experts, that this would get wrong."""
    if any(body.get(key) or config.get(key) for key in _NOT_DENSE):
        return 0
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", max(1, hidden // heads))
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * size("intermediate_size")
    values = size("num_hidden_layers") * (attention + mlp + 2 * hidden) + hidden
    values += taps * hidden * hidden
    rank = config.get("markov_rank")
    if isinstance(rank, int):
        values += 2 * size("vocab_size") * rank
    return values * each


def rooms(
    target: Footprint, draft: Footprint, memory_bytes: int, draft_memory_bytes: int
) -> list[Room]:
    """Tokens of context that fit, arrangement by arrangement."""
    # A draft that reads rows has no embedding and head of its own: alone it loads the target's.
    loaded = draft.weights_bytes + (target.embedding_bytes if draft.taps else 0)
    known = bool(target.weights_bytes and draft.weights_bytes)

    def room(arrangement: str, memory: int, weights: int, kv: int) -> Room:
        tokens = max(0, (memory - weights) // kv) if known else None
        return Room(arrangement, weights if known else 0, kv, tokens)

    both = target.weights_bytes + draft.weights_bytes
    kv = target.kv_bytes + draft.kv_bytes
    found = [
        room("separate: target's device", memory_bytes, target.weights_bytes, target.kv_bytes),
        room("separate: draft's device", draft_memory_bytes, loaded, draft.kv_bytes),
        room("separate, on one device", memory_bytes, target.weights_bytes + loaded, kv),
    ]
    if draft.kv_kind == target.kv_kind:
        found.append(room(f"co-located, {SAME_CACHE}", memory_bytes, both, kv))
    found.append(room(f"co-located, {POOLED}", memory_bytes, both, kv))
    found.append(room(f"co-located, {PRIVATE}", memory_bytes, both, kv))
    return found
