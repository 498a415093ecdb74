"""TRITON_MLA on a GPU: the sizes of DeepSeek models against fp64, rows alone, and captured."""

from __future__ import annotations

import pytest
import torch

from tests.engine import latent_gpu, mla_checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("bfloat16", "bfloat16"), ("fp8_ds_mla", "bfloat16"), ("float32", "float32")],
)
def test_matches_fp64(layout: str, dtype: str, heads: int) -> None:
    mla_checks.large(heads, layout, getattr(torch, dtype))


def test_small_sizes() -> None:
    mla_checks.check_all_modes_match_fp64()
    mla_checks.check_layouts()


def test_stored_rows() -> None:
    mla_checks.check_stored_rows_are_the_reference()


def test_rows_stand_alone() -> None:
    mla_checks.check_rows_stand_alone()


@pytest.mark.parametrize("layout", ["bfloat16", "fp8_ds_mla"])
def test_a_replay_equals_eager_on_another_batch(layout: str) -> None:
    """AB-10: a graph captured for 4 spans of 8 rows, replayed for 3 of other lengths."""
    mla_checks.replay(layout)


def test_a_target() -> None:
    assert latent_gpu.main() == 0
