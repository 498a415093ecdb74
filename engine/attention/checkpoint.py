"""The attention of a checkpoint, read from its config.json alone. Imports no torch.

Keys are z-lab's, DeepSpec's and speculators'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.attention.capabilities import Kind
from engine.attention.graphs import BLOCK_DRAFTERS
from engine.attention.layers import draft_modes, model_modes, optional_flag
from engine.attention.mode import LayerMode
from engine.attention.request import AttentionShape, Latent, dtype_name
from engine.errors import CheckpointError
from engine.models.fields import check_kinds, positive

_ACCEPTED = "a directory with a config.json, or that file (not a .gguf file, not `default`)"
_DSV4_LAYERS, _DSV4_WINDOW, _DSV4_HEAD = 3, 128, 512


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`method` is how it drafts, "draft_model" for an ordinary model. `next_token`: a block of K
    rows proposes K tokens; else it has an anchor more. `config`: what it was read from."""

    shape: AttentionShape
    method: str
    next_token: bool = False
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def query_tokens(self, draft_tokens: int) -> int:
        """Rows of one request in a step of the draft."""
        if self.method not in BLOCK_DRAFTERS:
            return 1
        return draft_tokens if self.next_token else draft_tokens + 1


def read_checkpoint(source: Path, *, draft: bool) -> Checkpoint:
    """Reads `source`, a directory with a config.json or that file. Raises CheckpointError, which
    names it as it was given: for whoever typed it."""
    path = source / "config.json" if source.is_dir() else source
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"no config.json in '{source}': {error.strerror}; accepted: {_ACCEPTED}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"'{path}' is no JSON; accepted: {_ACCEPTED}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"'{path}' is no JSON object; accepted: {_ACCEPTED}")
    return parse_checkpoint(config, draft=draft)


def parse_checkpoint(config: Mapping[str, Any], *, draft: bool) -> Checkpoint:
    """The same of a config already read."""
    check_kinds(config, ("transformer_layer_config", "text_config", "dflash_config"))
    method = _method(config) if draft else ""
    body = config.get("transformer_layer_config") or config.get("text_config") or config
    if "num_attention_heads" not in body and "num_attention_heads" in config:
        body = config
    if _is_v4(body):
        return _deepseek_v4(body, method, draft)
    modes = draft_modes(config) if method in BLOCK_DRAFTERS else model_modes(body)
    latent = _latent(body)
    heads = positive(body, "num_attention_heads")
    if latent is None:
        kind, kv_heads = Kind.MHA, positive(body, "num_key_value_heads", heads)
        head_size = positive(body, "head_dim", positive(body, "hidden_size") // heads)
    else:
        kind = Kind.SPARSE_MLA if latent.index_topk else Kind.MLA
        kv_heads, head_size = 1, latent.rank + latent.rope
    nested = config.get("dflash_config") or {}
    shape = AttentionShape(
        name=str(body.get("model_type", "")),
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        modes=modes,
        dtype=_dtype(config, body),
        sinks=_sinks(config, nested, body),
        latent=latent,
        override="" if draft else _override(config),
        block_size=_block_size(config, nested),
        confidence_head=bool(config.get("enable_confidence_head")),
    )
    return Checkpoint(shape, method, _next_token(config, nested, method), config)


def _method(config: Mapping[str, Any]) -> str:
    named = config.get("speculators_model_type")
    if named in BLOCK_DRAFTERS:
        return str(named)
    words = " ".join(config.get("architectures") or []).lower()
    nested = config.get("dflash_config") or {}
    if "dspark" in words or nested.get("projector_type") == "dspark":
        return "dspark"
    if "dflash" in words or nested:
        return "dflash"
    return "dspark" if _is_v4(config) else "draft_model"


def _next_token(config: Mapping[str, Any], nested: Mapping[str, Any], method: str) -> bool:
    """DSpark blocks begin to propose at the anchor unless they say otherwise."""
    for values in (config, nested):
        explicit = optional_flag(values, "sample_from_anchor")
        if explicit is not None:
            return explicit
    return method == "dspark"


def _block_size(config: Mapping[str, Any], nested: Mapping[str, Any]) -> int:
    for values, key in (
        (config, "block_size"),
        (nested, "block_size"),
        (config, "dspark_block_size"),
    ):
        if values.get(key) is not None:
            return positive(values, key)
    return 0


def _dtype(config: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    for values in (config, body):
        for key in ("dtype", "torch_dtype"):
            if isinstance(values.get(key), str):
                return dtype_name(values[key].removeprefix("torch."))
    return "bfloat16"


def _latent(body: Mapping[str, Any]) -> Latent | None:
    if body.get("kv_lora_rank") is None:
        return None
    return Latent(
        rank=positive(body, "kv_lora_rank"),
        rope=positive(body, "qk_rope_head_dim", 64),
        nope=positive(body, "qk_nope_head_dim", 128),
        index_topk=positive(body, "index_topk") if body.get("index_topk") is not None else 0,
    )


def _sinks(config: Mapping[str, Any], nested: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    keys = (nested.get("attention_sink_bias"), config.get("add_swa_attention_sink_bias"))
    return any(keys) or body.get("model_type") == "gpt_oss"


def _override(config: Mapping[str, Any]) -> str:
    """vLLM forces TRITON_ATTN on Gemma 4, whose layers differ in head size."""
    return "TRITON_ATTN" if str(config.get("model_type", "")).startswith("gemma4") else ""


def _is_v4(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type", "")).startswith("deepseek_v4")


def _deepseek_v4(body: Mapping[str, Any], method: str, draft: bool) -> Checkpoint:
    """A DSpark draft of DeepSeek-V4 lies in the target's checkpoint: layers with a window only."""
    if draft:
        count = positive(body, "n_mtp_layers", _DSV4_LAYERS)
        window = positive(body, "sliding_window", _DSV4_WINDOW)
        modes = (LayerMode(False, window),) * count
    else:
        modes = (LayerMode(),) * positive(body, "num_hidden_layers")
    shape = AttentionShape(
        name=str(body["model_type"]),
        kind=Kind.DSV4,
        heads=positive(body, "num_attention_heads"),
        kv_heads=1,
        head_size=positive(body, "head_dim", _DSV4_HEAD),
        modes=modes,
        dtype=_dtype(body, body),
        sinks=True,
        block_size=_block_size(body, {}),
        confidence_head=bool(body.get("enable_confidence_head")),
    )
    return Checkpoint(shape, method, next_token=method == "dspark", config=body)
