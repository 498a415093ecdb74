"""Steps of the native engine: acceptance, truncation, rows, exactness, limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.api import Item, Sampling
from engine.config import EngineConfig
from engine.errors import BackendUnavailable, CheckpointError, OutOfPages, SettingRefused
from engine.loading import load_engine
from engine.runner import NativeEngine
from tests.engine.tiny import HIDDEN, KERNELS, VOCAB, load_tiny, random_ids, run, write_llama

GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runner")
    write_llama(path)
    return path


@pytest.fixture(scope="module", params=KERNELS)
def engine(request: pytest.FixtureRequest, directory: Path) -> NativeEngine:
    return load_tiny(directory, request.param)


def generate(
    engine: NativeEngine, prompt: Sequence[int], count: int, k: int, sampling: Sampling, skill: int
) -> list[int]:
    """Round loop with drafts of which the first `skill` are right (taken from a plain run)."""
    oracle = generate(engine, prompt, count + k + 1, 0, sampling, 0) if k and skill else []
    table = engine.allocate(len(prompt) + count + k + 1)
    ids = list(prompt)
    ids += engine.step([Item(table, ids, 0, 1, sampling)])[0].tokens
    while len(ids) < len(prompt) + count:
        start = len(ids) - 1
        limit = min(k, engine.block_limit(start, True) - 1)
        drafts = [(oracle + [0] * 99)[start + 1 + i - len(prompt)] for i in range(limit)]
        drafts = [d if i < skill else (d + 1) % VOCAB for i, d in enumerate(drafts)]
        item = Item(table, [ids[-1], *drafts], start, limit + 1, sampling)
        result = engine.step([item])[0]
        assert len(result.tokens) == result.accepted + 1
        ids += result.tokens
        assert table.length == len(ids) - 1
    table.free()
    return ids[len(prompt) : len(prompt) + count]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("k", "skill"), [(1, 0), (3, 2), (7, 7), (7, 3)])
def test_drafts_never_change_the_tokens(
    engine: NativeEngine, sampling: Sampling, k: int, skill: int
) -> None:
    """WC-41: a step of K + 1 rows gives what steps of one token give."""
    prompt = random_ids(250, seed=3)  # the blocks meet the bucket edge at 256
    plain = generate(engine, prompt, 24, 0, sampling, 0)
    assert generate(engine, prompt, 24, k, sampling, skill) == plain


def test_batch_mates_do_not_change_an_exact_item(engine: NativeEngine) -> None:
    prompt = random_ids(30)
    alone = engine.allocate(64)
    first = engine.step([Item(alone, prompt, 0, 1, SEEDED, taps=(1, 3))])[0]
    tables = [engine.allocate(64) for _ in range(3)]
    mates = [Item(t, random_ids(n, seed=n), 0, 1, GREEDY) for t, n in zip(tables[:2], (5, 40))]  # noqa: B905
    crowd = [mates[0], Item(tables[2], prompt, 0, 1, SEEDED, taps=(1, 3)), mates[1]]
    second = engine.step(crowd)[1]
    assert first.tokens == second.tokens and first.rows is not None and second.rows is not None
    assert torch.equal(first.rows, second.rows)
    for table in (alone, *tables):
        table.free()
    engine.check_integrity()


def test_rows_cover_valid_positions_only(engine: NativeEngine) -> None:
    prompt = random_ids(12)
    table = engine.allocate(64)
    result = engine.step([Item(table, prompt, 0, 1, GREEDY, taps=(0, 2))])[0]
    assert result.rows is not None and result.rows.dtype == torch.bfloat16
    assert result.rows.shape == (12, 2 * HIDDEN)
    wrong = (result.tokens[0] + 1) % VOCAB
    block = Item(table, [result.tokens[0], wrong, wrong, wrong], 12, 4, GREEDY, taps=(2,))
    verdict = engine.step([block])[0]
    assert verdict.rows is not None
    assert verdict.rows.shape == (verdict.accepted + 1, HIDDEN)
    table.free()


@pytest.mark.parametrize("width", range(1, 9))
def test_rows_are_captured_at_every_width(engine: NativeEngine, width: int) -> None:
    """DF-14: a verify block of any width gives the rows that steps of one token give."""
    ids = generate(engine, random_ids(12), 9, 0, GREEDY, 0)
    found = []
    for cut in (width, 1):
        table = engine.allocate(64)
        engine.step([Item(table, random_ids(12), 0, 1, GREEDY)])
        rows = []
        for start in range(0, width, cut):
            block = ids[start : start + cut]
            result = engine.step([Item(table, block, 12 + start, cut, GREEDY, taps=(0, 3))])[0]
            assert result.accepted == cut - 1 and result.rows is not None
            rows.append(result.rows)
        found.append(torch.cat(rows))
        table.free()
    assert found[0].shape == (width, 2 * HIDDEN)
    assert torch.equal(*found)


def test_items_with_different_taps_share_a_step(engine: NativeEngine) -> None:
    ids = random_ids(9)
    tables = [engine.allocate(16) for _ in range(2)]
    both = [
        Item(table, ids, 0, 1, GREEDY, taps=taps, exact=False)
        for table, taps in zip(tables, ((0, 3), (2, 3)), strict=True)
    ]
    first, second = engine.step(both)
    assert first.rows is not None and second.rows is not None
    torch.testing.assert_close(first.rows[:, HIDDEN:], second.rows[:, HIDDEN:])
    assert not torch.allclose(first.rows[:, :HIDDEN], second.rows[:, :HIDDEN])
    for table in tables:
        table.free()


def test_margins_and_prompt_chunks(engine: NativeEngine) -> None:
    ids = random_ids(20)
    table = engine.allocate(32)
    chunk = engine.step([Item(table, ids[:16], 0, 0, GREEDY, taps=(1,))])[0]
    assert chunk.tokens == () and chunk.rows is not None and len(chunk.rows) == 16
    (logits,), _ = run(engine, [(table, ids[16:], 16)])
    last = engine.step([Item(table, ids[16:], 16, 1, GREEDY, margins=True)])[0]
    top = logits[-1].topk(2)
    assert last.tokens == (int(top.indices[0]),)
    assert last.margins == pytest.approx([float(top.values[0] - top.values[1])], abs=1e-4)
    table.free()


def test_a_lower_start_truncates(engine: NativeEngine) -> None:
    ids = random_ids(20)
    table = engine.allocate(32)
    full = engine.step([Item(table, ids, 0, 1, GREEDY)])[0]
    again = engine.step([Item(table, ids[10:], 10, 1, GREEDY)])[0]
    assert again.tokens == full.tokens and table.length == 20
    table.free()


def test_limits_without_row_independence(directory: Path) -> None:
    engine = load_tiny(directory, "torch", prefill_chunk=64, kv_bucket=32, max_length=100)
    assert not engine.rows_independent
    assert [engine.block_limit(s, True) for s in (0, 26, 31, 32)] == [8, 6, 1, 8]
    assert engine.block_limit(95, False) == 5
    assert [engine.chunk_limit(s, True) for s in (0, 10, 63)] == [64, 54, 1]
    assert engine.chunk_limit(10, False) == 64


def test_native_rows_are_independent(directory: Path) -> None:
    engine = load_tiny(directory, KERNELS[0], max_length=100)
    assert engine.rows_independent == (KERNELS[0] == "native")
    assert engine.stats().free == engine.stats().total == 64


def test_start_up_refusals(directory: Path) -> None:
    with pytest.raises(BackendUnavailable, match="device 'cuda'"):
        load_tiny(directory, device="cuda")
    with pytest.raises(BackendUnavailable, match=r"kv=int8.*accepted: auto, float32"):
        load_tiny(directory, kv_dtype="int8")
    for field, value in (("dtype", "float8"), ("kernels", "fast")):
        with pytest.raises(SettingRefused, match=f"^{field} = '{value}' .* accepted: auto, "):
            load_tiny(directory, **{field: value})
    with pytest.raises(BackendUnavailable, match="TORCH_SDPA"):
        load_tiny(directory, attention_backend="FLASHINFER")
    with pytest.raises(SettingRefused, match=r"^kv_memory_mb = 1 .* accepted: 4 or more: one page"):
        load_tiny(directory, kv_pages=None, kv_memory_mb=1, page_tokens=4096)
    for setting in ({"kv_pages": 10**12}, {"kv_pages": None, "kv_memory_mb": 10**12}):
        with pytest.raises(SettingRefused, match=r"= 1000000000000 .* accepted: what this machine"):
            load_tiny(directory, **setting)
    with pytest.raises(SettingRefused, match=r"^max_length = 513 .* accepted: 2 to 512, the model"):
        load_tiny(directory, max_length=513)
    assert load_tiny(directory, max_length=512).info.max_length == 512
    with pytest.raises(SettingRefused, match=r"^max_length = 65 .* accepted: 2 to 64, what the KV"):
        load_tiny(directory, max_length=65, kv_pages=4)


def test_no_session_is_promised_more_than_the_pages_hold(directory: Path) -> None:
    """A request without a length of its own gets the longest; it must fit."""
    engine = load_tiny(directory, kv_pages=4)
    assert engine.info.max_length == 64
    engine.allocate(engine.info.max_length).free()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_engine(EngineConfig(model="no-such-model"))


def test_pages_run_out_before_anything_runs(directory: Path) -> None:
    engine = load_tiny(directory, kv_pages=2)
    with pytest.raises(OutOfPages, match="3 KV pages needed, 2 of 2 free"):
        engine.allocate(33)
    engine.check_integrity()


def test_pages_that_hold_less_than_a_session_may_have_are_warned_of(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_tiny(directory, kv_pages=2, page_tokens=16)
    assert engine.info.max_length == 32
    assert "the pages hold 32 tokens" in caplog.text
    caplog.clear()
    load_tiny(directory, kv_pages=2, page_tokens=16, max_length=20)
    assert "hold" not in caplog.text
