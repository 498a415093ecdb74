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


@pytest.mark.timeout(600)
def test_kernels_and_texts_under_the_interpreter() -> None:
    if "not installed" in unavailable_reason():
        pytest.skip(unavailable_reason())
    outcomes = interpreted.run("tests.engine.latent_engine_checks")
    assert len(outcomes) == 8
    assert outcomes == dict.fromkeys(outcomes, "")


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
