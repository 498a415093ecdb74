"""Attention backends on a GPU: against fp64, row by row, and captured. `make bench-attention` has
the whole grid."""

from __future__ import annotations

import importlib.util

import pytest

from tests.engine import attention_cases as on_gpu
from tests.engine.attention_cases import LIMITS, Case

pytestmark = pytest.mark.gpu
TRITON = [
    Case("TRITON_ATTN", 64, 3, 16),
    Case("TRITON_ATTN", 128, 4, 64),
    Case("TRITON_ATTN", 80, 1, 32),
    Case("TRITON_ATTN", 256, 8, 16),
    Case("TRITON_ATTN", 64, 3, 16, "float32"),
    Case("TRITON_ATTN", 128, 4, 16, "float16"),
    Case("TRITON_ATTN", 128, 4, 16, "bfloat16", "float8_e5m2"),
]
OTHERS = [Case(name, 64, 3, 16) for name in ("FLASH_ATTN", "TORCH_SDPA", "FLEX_ATTENTION")]
if importlib.util.find_spec("flashinfer"):
    OTHERS.append(Case("FLASHINFER", 128, 4, 16))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*TRITON, *OTHERS], ids=str)
def test_matches_fp64(case: Case) -> None:
    found = on_gpu.errors(case, on_gpu.batch_of(4096))
    assert max(found.values()) < LIMITS[case.types[0]], found


@pytest.mark.parametrize("case", TRITON, ids=str)
def test_rows_stand_alone(case: Case) -> None:
    assert not on_gpu.unequal_rows(case, on_gpu.batch_of(4096))


@pytest.mark.parametrize("case", TRITON, ids=str)
def test_a_replay_equals_eager(case: Case) -> None:
    """AB-10: on batches unlike the captured one."""
    assert not on_gpu.unequal_replays(case, 8)


def test_log_sum_exp() -> None:
    assert on_gpu.lse_error(TRITON[4]) < 1e-4
    assert on_gpu.lse_error(TRITON[0]) < 1e-2
