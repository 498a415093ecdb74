"""Rows that leave the engine through a draft's `fc` and norm, and context that is made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.loading import load_engine
from engine.models.dflash import Block, DFlashModel
from engine.models.draft_context import ContextRows
from tests.engine import interpreted
from tests.engine.draft_reference import entering
from tests.engine.projection_checks import check_rows
from tests.engine.test_dialects import CASES
from tests.engine.tiny import KERNELS, write_llama


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_of_a_step_on_the_cpu(kernels: str) -> None:
    check_rows(kernels)


@pytest.mark.timeout(300)
def test_rows_of_a_step_with_tritons_kernels() -> None:
    found = interpreted.run("tests.engine.projection_checks", "check_rows")
    assert found == {"check_rows": ""}, found["check_rows"]


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_rows_of_a_step_with_cuda_graphs() -> None:
    command = [sys.executable, "-m", "tests.engine.projection_checks"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]


def test_a_draft_of_another_model_has_no_projection_for_this_one(tmp_path: Path) -> None:
    write_llama(tmp_path / "target")
    write_llama(tmp_path / "wide", hidden_size=96)
    CASES["zlab"].write(tmp_path / "draft of this", tmp_path / "target")
    config = EngineConfig(model=str(tmp_path / "wide"), dtype="float32", kv_pages=16)
    with pytest.raises(CheckpointError, match="draft of this: config hidden_size = 64"):
        load_engine(config, projected=tmp_path / "draft of this")
    with pytest.raises(CheckpointError, match="draft wide: config architectures"):
        load_engine(config, projected=tmp_path / "wide")


def logits(model: DFlashModel, *writes: ContextRows) -> torch.Tensor:
    """Of a block behind each of the contexts, written together."""
    model.write_contexts(writes)
    found = model.propose_logits([Block(w.table, 7, len(w.rows)) for w in writes]).clone()
    for write in writes:
        write.table.truncate(0)
    return found


@pytest.mark.parametrize("name", ["zlab", "deepspec"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_context_of_projected_rows_is_that_of_the_rows(
    tmp_path: Path, name: str, kernels: str
) -> None:
    """Beside sessions whose rows are the layers' own: each is read as what it is."""
    write_llama(tmp_path / "target")
    CASES[name].write(tmp_path / "draft", tmp_path / "target")
    model = CASES[name].load(tmp_path / "draft", tmp_path / "target", kernels).model
    tables = [model.pool.allocate(0) for _ in range(3)]
    states = [entering(count, count) for count in (12, 9, 5)]
    rows = [torch.cat([own[i] for i in CASES[name].entered], 1).bfloat16() for own in states]
    raw = [ContextRows(table, 0, own) for table, own in zip(tables, rows, strict=True)]
    made = [ContextRows(w.table, 0, model._project(w.rows).bfloat16(), projected=True) for w in raw]
    assert made[0].rows.shape[1] == model.config.hidden_size != rows[0].shape[1]
    expected = logits(model, *raw)
    found = logits(model, raw[0], made[1], made[2])
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found, expected, rtol=5e-2, atol=5e-2)
    assert not torch.allclose(found[1], expected[2], rtol=5e-2, atol=5e-2)
