"""A drafter in its target's process: one address, one exchange a round, the same text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from engine.api import Item, Sampling
from engine.models.dflash import Block, DFlashOptions
from engine.models.draft_loading import load_dflash
from specwire.v1 import draft_pb2, target_pb2
from tests.engine.test_dflash import BLOCK, TAPS, write_draft
from tests.engine.tiny import load_tiny, random_ids, write_llama
from tests.service.colocated_harness import Colocated, colocated_target, generate


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a random DFlash draft for it."""
    directory = tmp_path_factory.mktemp("pair")
    write_llama(directory / "target")
    write_draft(directory / "draft")
    return directory / "target", directory / "draft"


@pytest.fixture
async def colocated(models: tuple[Path, Path]) -> AsyncIterator[Colocated]:
    async with colocated_target(*models) as running:
        yield running


async def test_both_services_are_one_process(colocated: Colocated) -> None:
    target = await colocated.target.GetInfo(target_pb2.TargetServiceGetInfoRequest())
    draft = await colocated.draft.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
    assert draft.worker.incarnation == target.worker.incarnation != 0
    (info,) = draft.drafters
    assert (info.method, info.max_draft_tokens) == ("dflash", BLOCK - 1)
    assert list(info.row_format.tap_ids) == list(TAPS) and info.is_default
    assert info.costs and target.costs
    assert draft.load.pages_total == target.load.pages_total == 64


async def test_proposals_are_those_of_the_draft_over_the_same_rows(
    models: tuple[Path, Path], colocated: Colocated
) -> None:
    """Against a draft with pages of its own that gets the target's rows in one piece."""
    prompt, k = random_ids(21), BLOCK - 1
    found = await generate(colocated.peer(), prompt, 24, k)
    engine = load_tiny(models[0])
    options = DFlashOptions(page_count=64, weight_dtype=torch.float32, kernels="torch")
    model = load_dflash(models[1], str(models[0]), options).model
    text, length = prompt + found.tokens, len(prompt) + 1
    for proposal in found.proposals:
        table = engine.allocate(length - 1)
        result = engine.step([Item(table, text[: length - 1], 0, 0, Sampling(0.0), TAPS)])[0]
        table.free()
        context = model.pool.allocate(0)
        assert result.rows is not None
        model.write_context(context, 0, result.rows)
        logits = model.propose_logits([Block(context, text[length - 1], length - 1)])[0]
        context.free()
        assert list(proposal) == logits.argmax(-1).tolist()[: len(proposal)]
        expected = text[length : length + len(proposal)]
        right = [a == b for a, b in zip(proposal, expected, strict=False)]
        length += (right.index(False) if False in right else len(right)) + 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_the_text_is_that_of_plain_decoding(colocated: Colocated, temperature: float) -> None:
    prompt = random_ids(33, seed=3)
    options = {"temperature": temperature, "no_prefix_cache": True}
    plain = await generate(colocated.peer(), prompt, 40, 0, **options)
    for k in (1, 2, BLOCK - 1):
        found = await generate(colocated.peer(), prompt, 40, k, **options)
        assert found.tokens == plain.tokens
    assert len(plain.tokens) == 40
    assert colocated.stats().free == colocated.stats().total
