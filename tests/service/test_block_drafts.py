"""Block drafts as on a GPU: proposals and context equal those of torch's operators.

Under Triton's interpreter; `bench_gpu_draft --check` does the same on a GPU, with graphs.
"""

from __future__ import annotations

import pytest

from tests.engine.interpreted import run


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run("tests.service.block_draft_check")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "check",
    [
        "sessions_beside_padding",
        "scaled_and_interleaved_rotation",
        "a_mask_vector",
        "a_trimmed_head",
        "markov_heads",
        "more_sessions_than_a_graph_holds",
        "a_backend_without_a_fixed_form",
        "padding_writes_to_the_scratch_page_alone",
        "what_cannot_be_is_refused",
        "the_handshake",
    ],
)
def test_on_tritons_kernels(found: dict[str, str], check: str) -> None:
    assert not found[f"check_{check}"]
