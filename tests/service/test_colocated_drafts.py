"""A drafter in its target's process as on a GPU: context written behind the step, proposals and
text as with torch's operators. Under Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.engine.interpreted import run


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run("tests.service.colocated_draft_check")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "check",
    [
        "dflash_drafts_for_its_target",
        "dspark_drafts_for_its_target",
        "sessions_that_are_not_drafted_for",
    ],
)
def test_on_tritons_kernels(found: dict[str, str], check: str) -> None:
    assert not found[f"check_{check}"]
