"""What people already have: vLLM's speculative config and its attention backend flag."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.attention.asked import Asked, UsageError


def with_speculative_config(asked: Asked, text: str) -> Asked:
    """Adds what a vLLM `--speculative-config` JSON says; a flag that says otherwise is refused."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UsageError(f"speculative-config is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError("speculative-config is no JSON object")
    tokens = values.get("num_speculative_tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int)):
        raise UsageError(f"num_speculative_tokens is {tokens!r}; accepted: a number")
    asked = _add(asked, "draft_tokens", values, "num_speculative_tokens")
    if asked.role != "draft":
        return asked  # the rest is the draft's
    if values.get("model") not in (None, "", asked.model) and asked.model and not asked.targets:
        asked = replace(asked, model="", targets=(asked.model,))  # --model as vLLM means it
    if values.get("enable_adaptive_verification"):
        asked = replace(asked, adaptive_verification=True)
    for field, key in (
        ("method", "method"),
        ("model", "model"),
        ("attention_backend", "attention_backend"),
        ("kv_dtype", "kv_cache_dtype"),
    ):
        asked = _add(asked, field, values, key)
    return asked


def _add(asked: Asked, field: str, values: Mapping[str, Any], key: str) -> Asked:
    value, given = values.get(key), getattr(asked, field)
    if value is None:
        return asked
    if field != "draft_tokens" and not isinstance(value, str):
        raise UsageError(f"speculative-config {key} is {value!r}; accepted: text")
    if given not in (None, "", "auto") and given != value:
        raise UsageError(f"{key} is {value!r} in speculative-config and {given!r} as a flag")
    changes: dict[str, Any] = {field: value}
    return replace(asked, **changes)


def with_target_backend(asked: Asked, name: str) -> Asked:
    """vLLM's `--attention-config.backend` is the target's, whichever role is asked about."""
    field = "target_attention_backend" if asked.role == "draft" else "attention_backend"
    given = getattr(asked, field)
    if name and given and given != name:
        raise UsageError(f"--attention-config.backend is {name!r}, another flag says {given!r}")
    changes: dict[str, Any] = {field: name}
    return replace(asked, **changes) if name else asked
