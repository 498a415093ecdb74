"""Every draft backend that the CPU has against every target backend, in running services: the text
of the target alone. Triton's run under its interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.kernels.cpu import ops
from engine.kernels.triton import unavailable_reason
from tests.load.grid_models import write_dense_pair, write_latent_pair
from tests.load.grid_parts import id_prompts, latent_drafts, pinned
from tests.load.grid_rows import BESIDE, Grid, Row
from tests.load.grid_run import run_grid
from tests.load.pairing_grid import parsed

K, TOKENS, PROMPTS = 3, 5, 2
NATIVE = ("CPU_ATTN",) if ops.available() else ()
TRITON = "not installed" not in unavailable_reason()
DENSE = ("TORCH_SDPA", "FLEX_ATTENTION", *NATIVE, *(("TRITON_ATTN",) if TRITON else ()))
LATENT = ("TORCH_MLA", *(("TRITON_MLA",) if TRITON else ()))

pytestmark = pytest.mark.timeout(600)


def grid(
    folder: Path,
    write: Callable[[Path], int],
    targets: Sequence[str],
    drafts: Sequence[str],
) -> list[Row]:
    vocab = write(folder)
    target, draft = str(folder / "target"), str(folder / "draft")
    small = ("--device", "cpu", "--threads", "1", "--kv-pages", "64")
    small = (*small, "--max-draft-tokens", str(K))
    of_draft = ("--draft", draft, "--target", target, "--methods", "dflash")
    # Nobody is left out for being slow.
    patient = ("--proposal-wait-min-ms", "60000", "--draft-open-ms", "60000")
    found = Grid(
        targets=pinned(targets, ("--model", target, "--max-length", "128", *small)),
        drafts=pinned(drafts, (*of_draft, "--rows-wait-ms", "60000", *small)),
        coordinator=(*patient, "--breaker-lates", "1000"),
        prompts=id_prompts(PROMPTS, TOKENS, vocab),
        method="dflash",
        k=K,
        environment={"TRITON_INTERPRET": "1"},
    )
    return run_grid(found, print)


def check(rows: Sequence[Row], targets: Sequence[str], drafts: Sequence[str]) -> None:
    pairs = [row for row in rows if row.draft in drafts]
    assert [(row.target, row.draft) for row in pairs] == [(t, d) for t in targets for d in drafts]
    for row in pairs:
        assert row.found == "identical" and not row.wrong, row
        assert row.target_runs.startswith(f"{row.target} on cpu"), row
        assert row.draft_runs.startswith(f"{row.draft} on cpu"), row
        assert row.drafted >= K, row


def test_no_draft_backend_changes_a_token(tmp_path: Path) -> None:
    """At the last target backend of the list, which drafts beside the latent targets too; all of
    them are in the grid below."""
    targets, drafts = DENSE[-1:], DENSE[1:-1]
    check(grid(tmp_path, write_dense_pair, targets, drafts), targets, drafts)


def test_a_latent_target_beside_a_dense_draft(tmp_path: Path) -> None:
    drafts = DENSE[-1:]
    check(grid(tmp_path, write_latent_pair, LATENT, drafts), LATENT, drafts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "targets"), [(write_dense_pair, DENSE), (write_latent_pair, LATENT)]
)
def test_the_whole_grid(
    tmp_path: Path, write: Callable[[Path], int], targets: Sequence[str]
) -> None:
    check(grid(tmp_path, write, targets, DENSE), targets, DENSE)


def test_what_cannot_be_had_is_a_row_with_the_typed_reason(tmp_path: Path) -> None:
    names = ("FLASHINFER", "TORCH_SDPA")
    rows = grid(tmp_path, write_dense_pair, names, ("FLASH_ATTN",))
    assert [(row.target, row.draft, row.wrong) for row in rows] == [
        ("FLASHINFER", "-", False),
        ("TORCH_SDPA", "none", False),
        ("TORCH_SDPA", "FLASH_ATTN", False),
    ]
    for at in (0, 2):
        assert "compute capability not supported (cpu" in rows[at].found


@pytest.mark.slow
def test_latent_drafts_as_services_and_in_the_targets_cache(tmp_path: Path) -> None:
    """Plain and fp8 KV: nothing changes a token, and something is accepted."""
    asked = ["--device", "cpu", "--draft-device", "cpu", "--latent-backend", "TORCH_MLA"]
    patient = ["--wait-ms", "60000", "--prompts", "2", "--tokens", "24"]
    rows = run_grid(latent_drafts(parsed([*asked, *patient]), tmp_path), print)
    pairs = [row for row in rows if row.draft != "none"]
    assert [row.draft for row in pairs] == ["plain KV", "fp8 KV", BESIDE, BESIDE]
    for row in pairs:
        assert row.found == "identical" and not row.wrong and row.accepted, row
        assert row.draft_runs.startswith("TORCH_MLA on cpu"), row
    assert ["fp8_ds_mla" in row.draft_runs for row in pairs] == [False, True, False, True]
