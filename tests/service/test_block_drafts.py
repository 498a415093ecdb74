"""Block drafts as on a GPU: proposals and context equal those of torch's operators.

Under Triton's interpreter, which takes its time; `bench_gpu_draft --check` does the same on a GPU,
with graphs.
"""

from __future__ import annotations

import pytest

from tests.engine.interpreted import run

QUICK = (
    "check_sessions_beside_padding",
    "check_a_trimmed_head",
    "check_markov_heads",
    "check_padding_writes_to_the_scratch_page_alone",
    "check_what_cannot_be_is_refused",
    "check_the_handshake",
)
SLOW = (
    "check_a_trimmed_head_behind_a_walk",
    "check_scaled_and_interleaved_rotation",
    "check_a_mask_vector",
    "check_more_sessions_than_a_graph_holds",
    "check_a_backend_without_a_fixed_form",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("checks", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_on_tritons_kernels(checks: tuple[str, ...]) -> None:
    assert run("tests.service.block_draft_check", *checks) == dict.fromkeys(checks, "")
