"""Backends and KV of a draft in its target's pages: the scenarios of the public reports, run for
real on tiny random models. What is refused is refused before a page or a weight exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draft_svc.colocated import BlockDrafter
from engine import loading
from engine.api import Ask, Item, Sampling
from engine.attention.report import AttentionReport
from engine.attention.request import KVGroup
from engine.colocated import DrafterSettings, Group, Handles, Target
from engine.config import EngineConfig
from engine.errors import BackendUnavailable, SettingRefused
from engine.kernels.cpu import ops
from engine.runner import NativeEngine
from engine.weights import Weights
from tests.engine.test_dflash import BLOCK, KV_HEADS, nested, write_draft
from tests.engine.tiny import LAYERS, random_ids, write_llama

# What one token takes in one layer: K and V, 2 heads, fp32. The target's heads have 16 values, the
# draft's 24 unless it is made alike.
TARGET_BYTES, DRAFT_BYTES = 2 * 2 * 16 * 4, 2 * KV_HEADS * 24 * 4
ALIKE = {"head_dim": 16}


class Watched(BlockDrafter):
    """Keeps what it was told and what it asked for."""

    def describe(self, target: Target) -> tuple[Group, ...]:
        self.told, self.groups = target, super().describe(target)
        return self.groups

    def attach(self, handles: Handles) -> tuple[int, ...]:
        self.handles = handles
        return super().attach(handles)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_llama(directory)
    return directory


def write_alike(directory: Path, **change: Any) -> None:
    """A causal draft with the target's heads: it could live in the target's cache."""
    write_draft(directory)
    narrow = {**ALIKE, **nested(causal=True), **change}
    torch.manual_seed(2)
    state = {
        name: tensor if "attn" not in name else torch.randn(_narrow(name, tensor)) / 8
        for name, tensor in write_draft(directory, narrow).items()
    }
    save_file(state, directory / "model.safetensors")


def _narrow(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape with 16 values a head where there were 24."""
    return tuple(size // 3 * 2 if size % 24 == 0 else size for size in tensor.shape)


def start(
    target: Path, draft: Path, engine: dict[str, Any] | None = None, **settings: Any
) -> tuple[NativeEngine, Watched]:
    told = {"kernels": "torch", "dtype": "float32", "head_dtype": "model"} | settings
    own = {"kernels": "torch", "dtype": "float32", "kv_pages": 16} | (engine or {})
    drafter = Watched("dflash", DrafterSettings(checkpoint=str(draft), model=str(target), **told))
    return loading.load_engine(EngineConfig(model=str(target), **own), drafter), drafter


def report_of(drafter: Watched) -> AttentionReport:
    return drafter._model.attention


def proposes(engine: NativeEngine, drafter: Watched) -> list[int]:
    table, ids = engine.allocate(0), random_ids(20)
    token = engine.step([Item(table, ids, 0, 1, Sampling(0.0))])[0].tokens[0]
    (proposed,) = drafter.propose([Ask(table, token, BLOCK - 1, Sampling(0.0))])
    table.free()
    engine.check_integrity()
    assert not proposed.reason
    return list(proposed.ids)


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on neither pages nor weights may be asked for."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated before the refusal")

    monkeypatch.setattr(loading, "build_cache", refuse)
    monkeypatch.setattr(Weights, "__init__", refuse)


def test_same_cache_with_an_unset_backend_inherits_ab1(tmp_path: Path, target: Path) -> None:
    """AB-1: the target's *resolved* backend, whatever `auto` would choose, and its KV dtype."""
    write_alike(tmp_path)
    engine, drafter = start(
        target, tmp_path, {"attention_backend": "TORCH_SDPA", "kv_dtype": "bfloat16"}
    )
    (group,) = drafter.groups
    assert group.kind is KVGroup.SAME_CACHE
    report = report_of(drafter)
    assert (report.policy, report.chosen) == ("inherit", "TORCH_SDPA")
    assert report.requested == "" and report.kv_dtype == "bfloat16"
    assert report.kv_bytes_per_token == 3 * TARGET_BYTES // 2
    assert len(proposes(engine, drafter)) == BLOCK - 1


def test_explicit_with_equal_geometry_is_accepted(tmp_path: Path, target: Path) -> None:
    write_alike(tmp_path)
    engine, drafter = start(target, tmp_path, kv_group="same_cache", attention_backend="TORCH_SDPA")
    report = report_of(drafter)
    assert (report.policy, report.chosen, report.requested) == ("name", "TORCH_SDPA", "TORCH_SDPA")
    assert report.kv_bytes_per_token == 3 * TARGET_BYTES
    assert len(proposes(engine, drafter)) == BLOCK - 1


@pytest.mark.parametrize(
    ("draft", "settings", "named"),
    [
        ({}, {}, f"{DRAFT_BYTES} against {TARGET_BYTES} bytes a token"),
        (ALIKE, {"kv_dtype": "bfloat16"}, f"{TARGET_BYTES // 2} against {TARGET_BYTES} bytes"),
    ],
    ids=["heads", "dtype"],
)
def test_explicit_with_other_geometry_is_refused_before_allocation_ab1(
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    draft: dict[str, Any],
    settings: dict[str, Any],
    named: str,
) -> None:
    """AB-1: both byte counts are named, of the draft and of the target."""
    write_draft(tmp_path, draft)
    never(monkeypatch)
    with pytest.raises(BackendUnavailable, match=named):
        start(target, tmp_path, kv_group="same_cache", attention_backend="TORCH_SDPA", **settings)


def test_pooled_chooses_for_itself_ab2(tmp_path: Path, target: Path) -> None:
    """AB-2: another head size, another KV dtype and another backend beside the target."""
    write_draft(tmp_path)
    engine, drafter = start(
        target, tmp_path, {"attention_backend": "TORCH_SDPA"}, kv_dtype="bfloat16"
    )
    assert drafter.groups[0].kind is KVGroup.POOLED
    report = report_of(drafter)
    assert (report.policy, report.kv_dtype) == ("auto", "bfloat16")
    assert report.kv_bytes_per_token == 3 * DRAFT_BYTES // 2
    assert engine.attention.kv_dtype == "float32"
    assert len(proposes(engine, drafter)) == BLOCK - 1


def test_pooled_may_run_another_backend_than_its_target(tmp_path: Path, target: Path) -> None:
    write_draft(tmp_path)
    own = {"attention_backend": "TORCH_SDPA", "kernels": "auto"}
    engine, drafter = start(target, tmp_path, own, kernels="auto")
    chosen = "CPU_ATTN" if ops.available() else "TORCH_SDPA"
    assert (engine.attention.chosen, report_of(drafter).chosen) == ("TORCH_SDPA", chosen)
    inherited = start(target, tmp_path, own, kernels="auto", attention_backend="inherit")[1]
    assert report_of(inherited).chosen == "TORCH_SDPA"
    assert len(proposes(engine, drafter)) == BLOCK - 1


@pytest.mark.parametrize("backend", ["FLASHINFER", "TRITON_ATTN", "NONSENSE"])
def test_a_backend_that_cannot_be_had_is_refused_ab3(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """AB-3: asked for and not resolved is an error, never another one in its place."""
    write_draft(tmp_path)
    never(monkeypatch)
    with pytest.raises(BackendUnavailable, match=backend):
        start(target, tmp_path, attention_backend=backend)


def test_private_pages_are_a_services_own(tmp_path: Path, target: Path) -> None:
    write_draft(tmp_path)
    with pytest.raises(SettingRefused, match="same_cache, pooled"):
        start(target, tmp_path, kv_group="private")


def test_memory_that_disagrees_with_the_layout_is_refused_ab1(tmp_path: Path, target: Path) -> None:
    """AB-1: 584 bytes allocated, 512 viewed: a layout is checked against the bytes, twice."""

    class Lying(Watched):
        def describe(self, target: Target) -> tuple[Group, ...]:
            (group,) = super().describe(target)
            return (replace(group, geometry=replace(group.geometry, head_dim=28)),)

    write_draft(tmp_path)
    settings = DrafterSettings(
        checkpoint=str(tmp_path), model=str(target), kernels="torch", dtype="float32"
    )
    config = EngineConfig(model=str(target), kernels="torch", dtype="float32", kv_pages=16)
    viewed, allocated = DRAFT_BYTES, DRAFT_BYTES // 24 * 28
    named = rf"\({allocated} a token and layer\).*\({viewed} a token and layer\)"
    with pytest.raises(BackendUnavailable, match=named):
        loading.load_engine(config, Lying("dflash", settings))


def test_groups_share_the_memory_allowed(tmp_path: Path, target: Path) -> None:
    write_draft(tmp_path)
    engine, _ = start(target, tmp_path, {"kv_pages": None, "kv_memory_mb": 1})
    page_bytes = 16 * (LAYERS * TARGET_BYTES + 3 * DRAFT_BYTES)
    assert engine.stats().total == 2**20 // page_bytes
    alone = loading.load_engine(
        EngineConfig(model=str(target), kernels="torch", dtype="float32", kv_memory_mb=1)
    )
    assert alone.stats().total == 2**20 // (16 * LAYERS * TARGET_BYTES)
    # The draft is in no fingerprint of the target's (AB-21): the text does not depend on it.
    assert alone.info.numerics == engine.info.numerics
    assert alone.info.fingerprint == engine.info.fingerprint


def test_weights_and_rows_are_shared_by_reference(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_draft(tmp_path)
    engine, drafter = start(target, tmp_path)
    model = drafter._model
    assert model._embedding is engine._model.embedding and model._head is engine._model.head
    assert model.pool is engine._pool
    seen: list[int] = []
    forward = engine._model.forward

    def watched(rows: Any, cache: Any, backend: Any, draws: Any, taps: Any, tap_rows: Any) -> Any:
        seen.append(tap_rows.data_ptr())
        return forward(rows, cache, backend, draws, taps, tap_rows)

    monkeypatch.setattr(engine._model, "forward", watched)
    monkeypatch.setattr(drafter, "write", lambda rows: seen.append(rows.rows.data_ptr()))
    table = engine.allocate(0)
    engine.step([Item(table, random_ids(9), 0, 1, Sampling(0.0))])
    table.free()
    assert len(seen) == 2 and seen[0] == seen[1]


def test_nobody_writes_to_what_the_other_was_told(tmp_path: Path, target: Path) -> None:
    """AB-1, AB-4, AB-5: each role's values are frozen, and its own."""
    write_draft(tmp_path)
    engine, drafter = start(target, tmp_path, kv_dtype="bfloat16")
    before = dataclasses.asdict(drafter.told.attention)
    group = drafter.groups[0]
    frozen: Sequence[tuple[object, str]] = (
        (drafter.told, "attention"),
        (drafter.told.attention, "geometry"),
        (drafter.told.attention.geometry, "dtype"),
        (drafter.told.attention.request, "kv_dtype"),
        (drafter.told.config, "hidden_size"),
        (group, "kind"),
        (group.geometry, "dtype"),
        (group.attention.geometry, "token_bytes"),
        (drafter.handles, "caches"),
        (drafter._settings, "kv_dtype"),
        (engine._config, "kv_dtype"),
        (engine.attention, "kv_dtype"),
    )
    for value, name in frozen:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, "changed")
    with pytest.raises(TypeError):
        drafter.handles.memory.caches["target"] = None  # type: ignore[index]
    assert dataclasses.asdict(drafter.told.attention) == before
    assert drafter.told.attention.request.kv_dtype == "auto"  # the target's, not the draft's


def test_other_taps_of_a_step_do_not_change_the_draft(tmp_path: Path, target: Path) -> None:
    """A batch mate that exports other layers, or scores its prompt, in the same forward."""
    write_draft(tmp_path)
    engine, drafter = start(target, tmp_path)
    ids, other = random_ids(20), random_ids(13, seed=4)

    def proposals(mate: dict[str, Any] | None) -> tuple[int, ...]:
        table, beside = engine.allocate(0), engine.allocate(0)
        # `fast` items share a forward.
        items = [Item(table, ids, 0, 1, Sampling(0.0), exact=False)]
        if mate is not None:
            items.append(Item(beside, other, 0, 1, Sampling(0.0), exact=False, **mate))
        token = engine.step(items)[0].tokens[0]
        (proposed,) = drafter.propose([Ask(table, token, BLOCK - 1, Sampling(0.0))])
        for used in (table, beside):
            used.free()
        return proposed.ids

    alone = proposals(None)
    scores = {"context": other, "prompt_len": 13, "prompt_logprobs": 1}
    for mate in (
        {},
        {"taps": (1, 2)},
        {"drafted": False},
        {"drafted": False, "taps": (2,)},
        scores,
    ):
        assert proposals(mate) == alone, mate


def test_no_memory_for_the_drafters_rows_costs_the_target_nothing(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are picked where a batch mate is not drafted for."""
    write_draft(tmp_path)
    engine, _ = start(target, tmp_path)
    tables = [engine.allocate(0) for _ in range(2)]
    items = [
        Item(table, random_ids(10), 0, 1, Sampling(0.0), exact=False, drafted=drafted)
        for table, drafted in zip(tables, (False, True), strict=True)
    ]
    expected = [result.tokens for result in engine.step(items)]

    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("engine.colocated._rows_of", short)
    assert [result.tokens for result in engine.step(items)] == expected
    assert [table.covered for table in tables] == [{}, {}]


def test_what_is_not_drafted_for_is_not_written(tmp_path: Path, target: Path) -> None:
    write_draft(tmp_path)
    engine, drafter = start(target, tmp_path)
    cache = drafter.handles.caches["dflash"]
    tables = [engine.allocate(0) for _ in range(2)]
    items = [
        Item(table, random_ids(10), 0, 1, Sampling(0.0), exact=False, drafted=drafted)
        for table, drafted in zip(tables, (False, True), strict=True)
    ]
    engine.step(items)
    assert [table.covered for table in tables] == [{}, {"dflash": 0}]
    assert not cache.k[0][tables[0].pages[0]].any() and cache.k[0][tables[1].pages[0]].any()
    (no, yes) = drafter.propose([Ask(table, 5, 2, Sampling(0.0)) for table in tables])
    assert (no.reason, no.ids) == ("rows_missing", ()) and len(yes.ids) == 2
