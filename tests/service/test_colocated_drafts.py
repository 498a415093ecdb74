"""A drafter in its target's process as on a GPU: context written behind the step, proposals and
text as with torch's operators. Under Triton's interpreter, which takes its time."""

from __future__ import annotations

import pytest

from tests.engine.interpreted import run

SLOW = pytest.mark.slow


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "check",
    [
        "check_dflash_drafts_for_its_target",
        pytest.param("check_more_rounds", marks=SLOW),
        pytest.param("check_dspark_drafts_for_its_target", marks=SLOW),
        pytest.param("check_sessions_that_are_not_drafted_for", marks=SLOW),
    ],
)
def test_on_tritons_kernels(check: str) -> None:
    assert run("tests.service.colocated_draft_check", check) == {check: ""}
