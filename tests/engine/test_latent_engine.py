"""DeepSeek targets on Triton's kernels, and what is said where no CUDA graph can be had."""

from __future__ import annotations

import pytest

from engine.attention.base import LayerMode
from engine.attention.capabilities import Kind
from engine.attention.devices import simulated
from engine.attention.request import AttentionShape, Latent, Request
from engine.attention.resolve import resolve
from engine.errors import BackendUnavailable
from engine.kernels.triton import unavailable_reason
from tests.engine import interpreted

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
