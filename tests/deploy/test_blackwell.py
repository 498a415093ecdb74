"""The co-located deployment on a Blackwell node, resolved here: what each of the two runs with the
settings of the compose file. Simulated devices, `config.json` and nothing else. The images run our
own engine; the limits that vLLM declares are asked beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.attention.asked import Asked, answer
from engine.attention.request import KVGroup
from tests.deploy.compose_file import ROOT, load, of_profile

PROFILE = "gpu-colocated"
SHIPPED = ROOT / "draft_svc" / "checkpoints" / "smollm2-135m-dflash"
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
QWEN3_DFLASH = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    """(target, draft): the default pair, and one of 8B."""
    for name, config in (("smollm2", SMOLLM2), ("qwen3", QWEN3), ("dflash", QWEN3_DFLASH)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {
        "default": (tmp_path / "smollm2", SHIPPED),
        "8B": (tmp_path / "qwen3", tmp_path / "dflash"),
    }


def beside(device: str, model: Path, draft: Path, **more: Any) -> Asked:
    """The draft in its target's process."""
    return Asked(
        device, role="draft", model=str(draft), targets=(str(model),), colocated=True, **more
    )


def settings() -> tuple[str | None, str]:
    """Attention backend and KV dtype that the file asks for; it leaves them open."""
    (target,) = (s for s in of_profile(load(), PROFILE).values() if s["command"][2] == "target_svc")
    environment = target["environment"]
    backend = environment.get("SPECWIRE_TARGET_ATTENTION_BACKEND")
    return backend, environment.get("SPECWIRE_TARGET_KV_DTYPE", "auto")


ENGINES = pytest.mark.parametrize("engine", ["native", "vllm"])
DEVICES = pytest.mark.parametrize("device", ["sm100", "sm120"])


@ENGINES
@DEVICES
@pytest.mark.parametrize("name", ["default", "8B"])
def test_both_roles_resolve_and_neither_binds_the_other(
    pairs: dict[str, tuple[Path, Path]], name: str, device: str, engine: str
) -> None:
    """AB-4, AB-9: the block of the draft is not causal, its pages are the target's; each role has a
    backend of its own, the pages have one size, and the target is as it would be alone."""
    model, draft = pairs[name]
    backend, kv_dtype = settings()
    asked = beside(
        device,
        model,
        draft,
        target_attention_backend=backend,
        target_kv_dtype=kv_dtype,
        engine=engine,
    )
    (pair,) = answer(asked)
    assert pair.target is not None and pair.resolved, (pair.target.refusal, pair.outcome.refusal)
    target, inside = pair.target.resolution, pair.outcome.resolution
    assert target is not None and inside is not None
    assert inside.request.kv_group is KVGroup.POOLED
    assert inside.geometry.page_tokens == target.geometry.page_tokens
    assert target.graphs.mode != "NONE" and inside.graphs.mode != "NONE"
    assert not any(mode.causal for mode in inside.request.shape.modes)
    tokens = target.request.query_tokens - 1
    (alone,) = answer(Asked(device, model=str(model), draft_tokens=tokens, engine=engine))
    assert alone.outcome.resolution == target


@DEVICES
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_our_own_engine_has_its_kernels_for_both(
    pairs: dict[str, tuple[Path, Path]], device: str, kv_dtype: str
) -> None:
    """One backend of ours for both roles, blocks in graphs; the KV dtype is each role's own."""
    model, draft = pairs["8B"]
    asked = beside(
        device,
        model,
        draft,
        target_kv_dtype=kv_dtype,
        engine="native",
    )
    (pair,) = answer(asked)
    assert pair.target is not None and pair.target.resolution is not None
    assert pair.outcome.resolution is not None
    for one in (pair.target.resolution, pair.outcome.resolution):
        assert (one.chosen, one.graphs.decode) == ("TRITON_ATTN", "FULL")
        assert one.request.shape.dtype == "bfloat16"
    assert pair.outcome.resolution.geometry.dtype == "bfloat16"
    stored = "fp8_e4m3" if kv_dtype == "fp8" else "bfloat16"
    assert pair.target.resolution.geometry.dtype == stored


@ENGINES
@DEVICES
def test_a_draft_backend_that_cannot_is_refused_before_anything_starts(
    pairs: dict[str, tuple[Path, Path]], device: str, engine: str
) -> None:
    """AB-3: what is asked for and not possible is refused by name, with the device."""
    model, draft = pairs["8B"]
    asked = beside(
        device,
        model,
        draft,
        attention_backend="CPU_ATTN",
        engine=engine,
    )
    (pair,) = answer(asked)
    assert pair.target is not None and pair.target.resolved and not pair.resolved
    assert "CPU_ATTN" in str(pair.outcome.refusal) and device in str(pair.outcome.refusal)
