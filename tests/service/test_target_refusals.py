"""What the target service says about a model that it cannot serve: typed, named, without a path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specwire.errors import Reason, SpecwireError
from target_svc.engines.native import load_native
from target_svc.settings import TargetSettings
from tests.engine.tiny import rewrite_config, write_llama

Damage = Callable[[Path], object]


def write_large_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 4096}}}))


def cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


DAMAGES: dict[str, tuple[Damage, str]] = {
    "architecture": (
        lambda directory: rewrite_config(directory, {"model_type": "mixtral"}),
        r"model_type = 'mixtral' .* accepted: llama, mistral, qwen2, qwen3",
    ),
    "rope": (
        lambda directory: rewrite_config(
            directory, {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}
        ),
        r"rope_scaling\.rope_type = 'longrope' .* accepted: default, linear",
    ),
    "quantised": (
        lambda directory: rewrite_config(
            directory, {"quantization_config": {"quant_method": "awq"}}
        ),
        r"quantization_config\.quant_method = 'awq' .* accepted: weights in bf16",
    ),
    "tokenizer": (write_large_tokenizer, r"does not belong .* 4096; accepted: ids in \[0, 96\)"),
    "no-tokenizer": (
        lambda directory: (directory / "tokenizer.json").unlink(),
        r"no tokenizer\.json; accepted",
    ),
    "cut": (cut_weights, r"model\.safetensors cannot be read"),
    "no-weights": (
        lambda directory: (directory / "model.safetensors").unlink(),
        r"neither model\.safetensors nor .* accepted: safetensors",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_checkpoint_that_cannot_be_served(tmp_path: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    write_llama(tmp_path)
    damage(tmp_path)
    with pytest.raises(SpecwireError, match=words) as refusal:
        load_native(TargetSettings(model=str(tmp_path), kernels="torch", kv_pages=8))
    assert refusal.value.reason == Reason.CHECKPOINT_INVALID
    assert str(tmp_path) not in str(refusal.value)


def test_a_setting_the_engine_does_not_know(tmp_path: Path) -> None:
    """Behind the settings' own check: an unknown dtype is never replaced by a default."""
    write_llama(tmp_path)
    settings = TargetSettings(model=str(tmp_path), kv_pages=8)
    with pytest.raises(SpecwireError, match=r"kv=int4.* accepted: auto, fl") as refusal:
        load_native(settings.model_copy(update={"kv_dtype": "int4"}))
    assert refusal.value.reason == Reason.BACKEND_UNAVAILABLE


def test_a_pool_of_one_page_is_enough(tmp_path: Path) -> None:
    """What runs at start needs no more pages than there are."""
    write_llama(tmp_path)
    for pages, page_tokens in ((1, 4), (3, 1)):
        settings = TargetSettings(
            model=str(tmp_path), kernels="torch", kv_pages=pages, page_tokens=page_tokens
        )
        engine = load_native(settings).engine
        assert engine.stats().free == engine.stats().total == pages
