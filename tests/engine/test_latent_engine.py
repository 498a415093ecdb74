"""DeepSeek targets on Triton's kernels, and what is said where no CUDA graph can be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention import select
from engine.attention.base import LayerMode
from engine.attention.capabilities import Kind
from engine.attention.devices import simulated
from engine.attention.request import AttentionShape, KVGroup, Latent, Request
from engine.attention.resolve import resolve
from engine.errors import BackendUnavailable
from engine.kernels.triton import unavailable_reason
from engine.models import draft_options
from engine.models.draft_dialects import parse_draft
from engine.models.draft_loading import DraftTarget
from engine.models.draft_options import DFlashOptions, choose_attention
from tests.engine import interpreted
from tests.engine.test_mla_draft import DSPARK
from tests.engine.tiny import LATENT as LATENT_TARGET
from tests.engine.tiny import write_model

LATENT = AttentionShape(
    "", Kind.MLA, 16, 1, 576, (LayerMode(),), "bfloat16", latent=Latent(512, 64, 128)
)


QUICK = (
    "check_routes_are_those_of_torch",
    "check_groups_hold_every_pair_once",
    "check_experts_are_those_of_torch",
    "check_products_by_head_are_those_of_torch",
    "check_a_text_with_experts_is_that_of_torch",
)
SLOW = (
    "check_a_dense_text_is_that_of_torch",
    "check_torch_attention_takes_the_kernels_queries",
    "check_drafts_change_nothing_over_fp8",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("checks", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_kernels_and_texts_under_the_interpreter(checks: tuple[str, ...]) -> None:
    if "not installed" in unavailable_reason():
        pytest.skip(unavailable_reason())
    outcomes = interpreted.run("tests.engine.latent_engine_checks", *checks)
    assert outcomes == dict.fromkeys(checks, "")


def test_a_verify_block_of_a_latent_target_is_captured() -> None:
    found = resolve(Request(LATENT, query_tokens=8, engine="native"), simulated("sm90"))
    assert (found.chosen, found.graphs.mode) == ("TRITON_MLA", "FULL_DECODE_ONLY")


QUICK_DRAFTS = ("check_dspark_proposes_what_torch_does",)
SLOW_DRAFTS = (
    "check_dflash_proposes_what_torch_does",
    "check_markov_heads",
    "check_a_backend_without_a_fixed_form",
    "check_an_fp8_layout",
    "check_same_cache_is_the_draft_of_a_service",
    "check_same_cache_in_the_fp8_layout",
    "check_rounds_are_those_of_torch",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "checks", [QUICK_DRAFTS, pytest.param(SLOW_DRAFTS, marks=pytest.mark.slow)]
)
def test_latent_drafts_under_the_interpreter(checks: tuple[str, ...]) -> None:
    if "not installed" in unavailable_reason():
        pytest.skip(unavailable_reason())
    outcomes = interpreted.run("tests.engine.latent_draft_checks", *checks)
    assert outcomes == dict.fromkeys(checks, "")


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_latent_drafts_block_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    """In its own pages and in its target's; with kernels that draw on the host it says why not."""
    monkeypatch.setattr(select, "cuda_device", lambda _index: simulated("sm90"))
    monkeypatch.setattr(draft_options, "kernel_mode", lambda kernels, _device: kernels)
    write_model(tmp_path, "deepseek_v2", **LATENT_TARGET | {"first_k_dense_replace": 4})
    described = parse_draft(DSPARK, DraftTarget(str(tmp_path)).described, "dspark")
    asked = DFlashOptions(torch.device("cuda", 0), kv_dtype=kv_dtype, kernels="triton")
    found = choose_attention(described, asked, "dspark")
    assert (found.chosen, found.graphs.mode) == ("TRITON_MLA", "FULL_DECODE_ONLY")
    shared = choose_attention(described, asked, "dspark", found, KVGroup.SAME_CACHE)
    assert (shared.chosen, shared.policy) == ("TRITON_MLA", "inherit")
    assert shared.graphs.mode == "FULL_DECODE_ONLY" and shared.geometry == found.geometry
    by_hand = choose_attention(described, replace(asked, kernels="torch"), "dspark")
    assert by_hand.graphs.mode == "NONE" and "on the host" in str(by_hand.notes)


def test_a_model_that_cannot_be_captured_says_why() -> None:
    """Auto goes without graphs, alone and with the reason; a mode by name is refused."""
    asked = Request(LATENT, query_tokens=8, engine="native", uncapturable="experts on the host")
    found = resolve(asked, simulated("sm90"))
    assert (found.chosen, found.graphs.mode) == ("TRITON_MLA", "NONE")
    assert found.notes == ("CUDA graphs: experts on the host",)
    asked = Request(
        LATENT, engine="native", graph_mode="FULL_DECODE_ONLY", uncapturable="experts on the host"
    )
    with pytest.raises(BackendUnavailable, match=r"TRITON_MLA: \[[^\]]*experts on the host"):
        resolve(asked, simulated("sm90"))
