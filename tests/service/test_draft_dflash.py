"""The DFlash drafter as shipped: proposals over gRPC against a direct computation."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from draft_svc.host import DraftHost
from draft_svc.loading import DEFAULT_DRAFT
from draft_svc.methods.base import (
    REASON_CAPACITY,
    REASON_PAGES,
    REASON_ROWS_MISSING,
    Request,
    RowBlock,
)
from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.dflash_context import DFlashContext
from engine.api import Item, Sampling
from engine.config import EngineConfig
from engine.loading import load_engine
from engine.models.dflash import Block
from engine.models.draft_loading import LoadedDraft, load_dflash
from engine.models.draft_options import DFlashOptions
from engine.noise import gumbel
from specwire.rpc import channel_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.service.draft_peer import (
    LIMITS,
    TARGET,
    Link,
    advance_item,
    open_item,
    session_key,
)

pytestmark = pytest.mark.model

KEY = session_key()
LIMITS_BIG = dataclasses.replace(LIMITS, rows_buffer_bytes=1 << 24)
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
Rows = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def loaded() -> LoadedDraft:
    return load_dflash(DEFAULT_DRAFT, "default", DFlashOptions(page_count=64))


@pytest.fixture
def method(loaded: LoadedDraft) -> Iterator[DFlashMethod]:
    yield make_method(loaded)
    loaded.model.pool.check_integrity()
    assert loaded.model.pool.stats().tables == 0, "a context was not closed"


def make_method(loaded: LoadedDraft, max_length: int | None = None) -> DFlashMethod:
    return DFlashMethod(
        loaded, max_draft_tokens=7, max_length=max_length, tokenizer_hash="tokenizer"
    )


def random_rows(count: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 2880, generator=generator).bfloat16()
    return rows.view(torch.uint16).numpy()


def direct_logits(
    loaded: LoadedDraft, rows: Rows, anchor: int, start: int, origin: int = 0
) -> torch.Tensor:
    """Logits [7, vocabulary] from all context rows [origin, start) at once, one session alone."""
    model = loaded.model
    table = model.pool.allocate(0)
    values = torch.from_numpy(rows.copy()).view(torch.bfloat16)
    model.write_context(table, origin, values, origin)
    logits = model.propose_logits([Block(table, anchor, start, origin)])[0].clone()
    table.free()
    return logits


def advanced(
    method: DFlashMethod, ids: Sequence[int], rows: Rows, **options: float
) -> DFlashContext:
    """A context with `ids` committed, the last one the anchor, and the rows before it written."""
    context = method.open(ids[:-1], Sampling(temperature=0.0, **options))  # type: ignore[arg-type]
    method.update(context, len(ids) - 1, ids[-1:], [RowBlock(0, rows)])
    return context


@pytest.fixture
async def stub(loaded: LoadedDraft, tmp_path: Path) -> AsyncIterator[Any]:
    host = DraftHost(
        lambda: {"dflash": make_method(loaded)},
        address=f"unix:{tmp_path}/draft.sock",
        limits=LIMITS_BIG,
        default_method="dflash",
    )
    async with (
        host,
        grpc.aio.insecure_channel(host.address, options=channel_options(link=True)) as channel,
    ):
        yield draft_pb2_grpc.DraftServiceStub(channel)


async def push(stub: Any, step: int, start: int, rows: Rows) -> None:
    call = stub.PushFeatures()
    chunk = draft_pb2.FeatureChunk(
        key=KEY, step_id=step, start=start, count=len(rows), rows=rows.tobytes()
    )
    await call.write(draft_pb2.PushFeaturesRequest(target_incarnation=TARGET, chunks=[chunk]))
    response = await call.read()
    assert not response.acks[0].HasField("error"), response.acks[0].error


async def test_proposals_from_a_real_target_match_a_direct_computation(
    stub: Any, loaded: LoadedDraft
) -> None:
    engine = load_engine(EngineConfig(kv_memory_mb=32))
    info = (await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())).drafters[0]
    assert info.target_fingerprint == engine.info.fingerprint
    taps, greedy = tuple(info.row_format.tap_ids), Sampling(temperature=0.0)
    table = engine.allocate(64)
    link = Link(stub)
    zero = common_pb2.Sampling(temperature=0.0)
    fingerprint = info.target_fingerprint
    await link.ask(open_item(KEY, PROMPT, "dflash", sampling=zero, target_fingerprint=fingerprint))
    ids, accepted = list(PROMPT), 0
    all_rows: list[Rows] = []
    item = Item(table, ids, 0, 1, greedy, taps)
    for step in range(6):
        (result,) = engine.step([item])
        assert result.rows is not None
        rows = result.rows.contiguous().view(torch.uint16).numpy()
        accepted += result.accepted
        half = len(rows) // 2  # two chunks where there is more than one row
        for part in (slice(0, half), slice(half, None)):
            if len(rows[part]):
                await push(stub, step, sum(map(len, all_rows)), rows[part])
                all_rows.append(rows[part])
        reply = await link.ask(advance_item(KEY, step, len(ids), result.tokens, 7))
        ids += result.tokens
        start = len(ids) - 1
        expected = direct_logits(loaded, np.concatenate(all_rows), ids[-1], start)
        assert list(reply.proposal.ids) == expected.argmax(-1).tolist()
        own = expected.softmax(-1).max(-1).values.tolist()
        assert list(reply.proposal.confidences) == pytest.approx(own, abs=1e-4)
        item = Item(table, [ids[-1], *reply.proposal.ids], start, 8, greedy, taps)
    assert accepted > 0, "the shipped draft never hit; taps, positions or mask id are off"


def test_a_block_beyond_the_limit_is_not_proposed(loaded: LoadedDraft) -> None:
    """DF-33, DF-39, DF-41: no slot past the draft's own positions, and the reason is named."""
    method = make_method(loaded, max_length=24)
    ids = list(range(17))
    context = advanced(method, ids, random_rows(16))
    assert len(method.propose([Request(context, 3)])[0].ids) == 3
    method.update(context, 17, [5], [RowBlock(16, random_rows(1))])
    assert method.propose([Request(context, 3)])[0].reason == REASON_CAPACITY
    method.update(context, 18, list(range(40)), [RowBlock(17, random_rows(40))])
    assert method.propose([Request(context, 3)])[0].reason == REASON_CAPACITY
    method.close(context)
    assert method.info.max_length_tokens == 24


def test_short_pages_cost_proposals_only(method: DFlashMethod, loaded: LoadedDraft) -> None:
    """WC-7: a session without pages proposes nothing, and goes on when there are some."""
    ids, rows = list(range(33)), random_rows(32)
    hoard = loaded.model.pool.allocate(63 * 16)
    context = advanced(method, ids, rows)
    assert method.propose([Request(context, 4)])[0].reason == REASON_PAGES
    method.update(context, 33, [7], [RowBlock(32, random_rows(1, seed=1))])
    hoard.free()
    (draft,) = method.propose([Request(context, 4)])
    everything = np.concatenate([rows, random_rows(1, seed=1)])
    expected = direct_logits(loaded, everything, 7, 33)[:4].argmax(-1).tolist()
    assert list(draft.ids) == expected
    method.close(context)


def test_sessions_in_one_forward_do_not_touch_each_other(
    method: DFlashMethod, loaded: LoadedDraft
) -> None:
    sizes = (3, 20, 45)
    contexts = [advanced(method, list(range(n + 1)), random_rows(n, seed=n)) for n in sizes]
    requests = [Request(c, k) for c, k in zip(contexts, (7, 1, 4), strict=True)]
    for draft, request, n in zip(method.propose(requests), requests, sizes, strict=True):
        expected = direct_logits(loaded, random_rows(n, seed=n), n, n)
        assert list(draft.ids) == expected.argmax(-1).tolist()[: request.k]
        assert len(draft.confidences) == request.k
    for context in contexts:
        method.close(context)


def test_context_may_begin_late(method: DFlashMethod, loaded: LoadedDraft) -> None:
    context = method.open(list(range(40)), Sampling(temperature=0.0))
    rows = random_rows(10)
    method.update(context, 40, [3], [RowBlock(30, rows[:4]), RowBlock(34, rows[4:])])
    (draft,) = method.propose([Request(context, 7)])
    expected = direct_logits(loaded, rows, 3, 40, origin=30)
    assert list(draft.ids) == expected.argmax(-1).tolist()
    method.close(context)


def test_projected_rows_that_are_rolled_back(method: DFlashMethod, loaded: LoadedDraft) -> None:
    """Written when somebody asks: what waits, and what is left of it, are projected rows still."""
    rows = random_rows(30)
    values = torch.from_numpy(rows.copy()).view(torch.bfloat16)
    made = loaded.model._project(values).bfloat16().view(torch.uint16).numpy()
    context = method.open(list(range(20)), Sampling(temperature=0.0))
    method.update(context, 20, [3], [RowBlock(0, made[:20], projected=True)])
    method.update(context, 17, [8], [RowBlock(16, made[16:17], projected=True)])
    method.update(context, 18, [9], [RowBlock(16, made[16:18], projected=True).clip(17, 18)])
    (draft,) = method.propose([Request(context, 7)])
    expected = direct_logits(loaded, np.concatenate([rows[:16], rows[16:18]]), 9, 18)
    # Near what tap rows give: their values are rounded once more.
    tokens = torch.tensor(draft.ids)
    assert (expected.gather(1, tokens[:, None])[:, 0] > expected.amax(-1) - 0.5).all()
    method.close(context)


def test_truncation_and_rounds_without_a_proposal(
    method: DFlashMethod, loaded: LoadedDraft
) -> None:
    rows = random_rows(24)
    context = advanced(method, list(range(17)), rows[:16])
    method.update(context, 17, [1, 2, 3], [RowBlock(16, rows[16:19])])
    method.update(context, 17, [8], [RowBlock(16, rows[20:21])])  # back to 17, another way on
    (draft,) = method.propose([Request(context, 7)])
    expected = direct_logits(loaded, np.concatenate([rows[:16], rows[20:21]]), 8, 17)
    assert list(draft.ids) == expected.argmax(-1).tolist()
    method.update(context, 18, [9], [])
    assert method.propose([Request(context, 7)])[0].reason == REASON_ROWS_MISSING
    method.close(context)


def test_few_rows_are_written_with_a_proposal_on_a_gpu(loaded: LoadedDraft) -> None:
    """Each write takes the device from a target that shares it."""
    method, cold = make_method(loaded), make_method(loaded)
    method._worth_writing, greedy = 64, Sampling(temperature=0.0)
    ids, rows = [7 * i % 1000 for i in range(80)], random_rows(79)
    contexts = [method.open(ids[:30], greedy) for _ in range(2)]
    for context in contexts:
        method.update(context, 30, (), [RowBlock(0, rows[:29])])
        assert not method.work() and context.end == 0
    method.update(contexts[0], 30, ids[30:40], [RowBlock(29, rows[29:39])])
    while method.work():
        pass
    assert [context.end for context in contexts] == [39, 29]
    method.update(contexts[1], 30, ids[30:40], [RowBlock(29, rows[29:39])])
    assert not method.work() and contexts[1].end == 29
    expected = cold.open(ids[:40], greedy)
    cold.update(expected, 40, (), [RowBlock(0, rows[:39])])
    (wanted,) = cold.propose([Request(expected, 3)])
    found = method.propose([Request(context, 3) for context in contexts])
    assert [draft.ids for draft in found] == [wanted.ids] * 2 and len(wanted.ids) == 3
    for context in contexts:
        method.close(context)
    cold.close(expected)
    loaded.model.pool.check_integrity()


def test_sampling_uses_the_noise_of_the_position_drawn(
    method: DFlashMethod, loaded: LoadedDraft
) -> None:
    rows, seed = random_rows(12), 2**63 + 5
    context = method.open(list(range(12)), Sampling(temperature=0.7, seed=seed, choice=3))
    method.update(context, 12, [4], [RowBlock(0, rows)])
    (draft,) = method.propose([Request(context, 5)])
    logits = direct_logits(loaded, rows, 4, 12)
    for slot, token in enumerate(draft.ids, start=1):
        noise = gumbel(seed, 3, 12 + slot, logits.shape[1])
        assert token == int((logits[slot - 1] / 0.7 + noise).argmax())
        own = float((logits[slot - 1] / 0.7).softmax(-1)[token])
        assert draft.confidences[slot - 1] == pytest.approx(own, rel=1e-3)
    method.close(context)


def test_the_handshake_says_what_the_checkpoint_says(method: DFlashMethod) -> None:
    info = method.info
    assert info.rows is not None and info.rows.tap_ids == (1, 8, 14, 20, 27)
    assert (info.rows.width, info.block_size, info.mask_token_id) == (2880, 8, 16)
    assert info.layer_attention == ("non-causal", "non-causal")
    assert (info.slot_mode, info.rope_style, info.rope_theta) == ("fill_in", "neox", 100000.0)
    assert info.attention is not None and info.attention.chosen


def test_confidences_cost_time_and_may_be_left_out(loaded: LoadedDraft) -> None:
    drafts = []
    for wanted in (True, False):
        method = DFlashMethod(
            loaded, max_draft_tokens=7, max_length=None, tokenizer_hash="", confidences=wanted
        )
        context = advanced(method, list(range(9)), random_rows(8))
        drafts += method.propose([Request(context, 5)])
        method.close(context)
    assert drafts[0].ids == drafts[1].ids
    assert len(drafts[0].confidences) == 5 and drafts[1].confidences == ()
