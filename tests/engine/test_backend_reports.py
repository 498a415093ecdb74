"""The three public reports: what happens now, and that the old behaviour would be caught.

Each check takes a resolver. Ours passes; the old one, written down as it was reported, must not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from engine.attention.capabilities import GraphLevel
from engine.attention.devices import DeviceProfile
from engine.attention.graphs import choose_graphs
from engine.attention.mode import LayerMode
from engine.attention.refusal import AttentionRefused
from engine.attention.request import KVGroup, Request
from engine.attention.resolve import resolve
from engine.attention.table_mha import ROWS, TRITON_ATTN
from engine.attention.table_mla import FLASHINFER_MLA_SPARSE_DSV4, FLASHMLA_SPARSE_DSV4
from engine.attention.tables import table_of
from tests.engine.attention_requests import (
    CAUSAL,
    DENSE,
    MLA,
    OPEN,
    V4,
    WINDOWED,
    beside,
    device,
    dflash,
    dspark_v4,
    target,
)


@dataclass(frozen=True)
class Pair:
    """What a resolver says of two roles in one process."""

    target: str
    draft: str
    target_decode: str
    draft_decode: str
    reasons: dict[str, tuple[str, ...]]


Resolver = Callable[[Request, Request, DeviceProfile], Pair]


def ours(draft: Request, other: Request, where: DeviceProfile) -> Pair:
    first, second = beside(draft, other, where)
    reasons = {candidate.name: candidate.reasons for candidate in second.candidates}
    return Pair(first.chosen, second.chosen, first.graphs.decode, second.graphs.decode, reasons)


# Report 1: the requested backend is dropped, the draft lands on FlashInfer, and takes the target's
# graphs down (vllm#54826, vllm#46770, lilab#19).


def old_drops_the_request(draft: Request, other: Request, where: DeviceProfile) -> Pair:
    first = resolve(other, where)
    landed = "FLASHINFER"  # preferred on Blackwell; non-causal with DCP was no part of validation
    single = GraphLevel.UNIFORM_SINGLE
    lowest = choose_graphs(other, where, min(first.graphs.level, single), landed)
    return Pair(first.chosen, landed, lowest.decode, "NONE", {landed: ()})


def honours_the_request(resolver: Resolver, where: DeviceProfile) -> None:
    other = target(MLA, dcp=8)
    pair = resolver(dflash(backend="TRITON_ATTN", dcp=8), other, where)
    assert pair.draft == "TRITON_ATTN"
    assert (pair.target_decode, pair.draft_decode) == ("FULL", "FULL")


def chooses_for_the_draft_itself(resolver: Resolver, where: DeviceProfile) -> None:
    pair = resolver(dflash(dcp=8), target(MLA, dcp=8), where)
    assert pair.draft == "FLASH_ATTN"
    assert pair.reasons["FLASHINFER"] == (
        "non-causal with decode context parallelism not supported",
    )
    assert (pair.target_decode, pair.draft_decode) == ("FULL", "FULL")


def refuses_flashinfer(resolver: Resolver, where: DeviceProfile) -> None:
    with pytest.raises(AttentionRefused) as caught:
        resolver(dflash(backend="FLASHINFER", dcp=8), target(MLA, dcp=8), where)
    assert "cannot run the dflash draft on" in str(caught.value)
    assert "FLASHINFER: [non-causal with decode context par" in str(caught.value)
    names = [candidate.name for candidate in caught.value.refusal.candidates]
    assert names[:2] == ["FLASH_ATTN", "FLASHINFER"] and "FLEX_ATTENTION" in names


CHECKS_1 = [honours_the_request, chooses_for_the_draft_itself, refuses_flashinfer]


@pytest.mark.parametrize("name", ["sm100", "sm120"])
@pytest.mark.parametrize("check", CHECKS_1)
def test_report_1(check: Callable[[Resolver, DeviceProfile], None], name: str) -> None:
    """AB-3, AB-9, AB-23: a dense DFlash draft beside an MLA target, eight ranks share the KV."""
    check(ours, device(name))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(old_drops_the_request, device(name))


def test_report_1_explicit_full_graphs_are_had_or_refused() -> None:
    where = device("sm100")
    _, draft = beside(
        dflash(backend="TRITON_ATTN", graph_mode="FULL", dcp=8), target(MLA, dcp=8), where
    )
    assert draft.graphs.mode == "FULL"
    with pytest.raises(AttentionRefused, match=r"FLASHINFER: \[CUDA-graph mode FULL not possible"):
        resolve(dflash(backend="FLASHINFER", graph_mode="FULL"), where)


# Report 2: draft and target shared one mutable cache setting (vllm#52288); the fix made every
# draft inherit (vllm#52809).


@dataclass
class SharedCache:
    """The old cache config: one object for both, rewritten while layers are constructed."""

    dtype: str


BYTES = {"fp8_ds_mla": 584, "fp8": 512}


def old_auto_selects(cache: SharedCache, where: DeviceProfile) -> tuple[int, int]:
    """Bytes a token allocated, and as the draft views them."""
    asked = cache.dtype
    if FLASHMLA_SPARSE_DSV4.kv_rule(asked, where) is not None:
        cache.dtype = "fp8_ds_mla"  # the target's constructor
    viewed = BYTES[asked] if FLASHINFER_MLA_SPARSE_DSV4.kv_rule(asked, where) else 0
    return BYTES[cache.dtype], viewed


def test_report_2_the_old_behaviour() -> None:
    cache = SharedCache("fp8")
    before = copy.deepcopy(cache)
    assert old_auto_selects(cache, device("sm100")) == (584, 512)
    assert cache != before


def test_report_2_unset_inherits_what_the_target_resolved() -> None:
    """AB-1: in the target's own pages, and only there."""
    for name in ("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4"):
        pinned = target(V4, backend=name, kv_dtype="fp8")
        first, draft = beside(dspark_v4(), pinned, device("sm100"))
        assert (draft.policy, draft.inherited, draft.chosen) == ("inherit", name, name)
        assert not draft.geometry.differences(first.geometry)
        assert draft.geometry.token_bytes == (584 if name.startswith("FLASHMLA") else 512)
    # Not what it asked for, which was nothing, but what came out.
    first, draft = beside(dspark_v4(), target(V4), device("sm90"))
    assert draft.chosen == first.chosen == "FLASHMLA_SPARSE_DSV4"


def test_report_2_explicit_wins_where_the_geometry_is_equal() -> None:
    """AB-1: equal geometry with another name is allowed, 584 against 512 bytes is refused."""
    pinned = target(V4, backend="FLASHMLA_SPARSE_DSV4", kv_dtype="fp8")
    _, draft = beside(dspark_v4(backend="FLASHMLA_SPARSE_DSV4"), pinned, device("sm100"))
    assert (draft.policy, draft.chosen) == ("name", "FLASHMLA_SPARSE_DSV4")
    same = replace(FLASHMLA_SPARSE_DSV4, name="SAME_LAYOUT")
    table = table_of((FLASHMLA_SPARSE_DSV4, FLASHINFER_MLA_SPARSE_DSV4, same))
    first = resolve(pinned, device("sm100"), table=table)
    shared = dspark_v4(backend="SAME_LAYOUT", kv_group=KVGroup.SAME_CACHE)
    assert resolve(shared, device("sm100"), first, table).chosen == "SAME_LAYOUT"
    for named, other, numbers in (
        ("FLASHINFER_MLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV4", "512 against 584 bytes a token"),
        ("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", "584 against 512 bytes a token"),
    ):
        with pytest.raises(AttentionRefused, match=rf"{named}: \[KV geometry: .*{numbers}"):
            beside(
                dspark_v4(backend=named),
                target(V4, backend=other, kv_dtype="fp8"),
                device("sm100"),
            )


@pytest.mark.parametrize("draft_first", [False, True])
def test_report_2_settings_are_never_written(draft_first: bool) -> None:
    """AB-1: the target's request equals a deep copy taken before, in either order."""
    where = device("sm100")
    other, draft = target(V4, kv_dtype="fp8"), dspark_v4(kv_group=KVGroup.PRIVATE)
    before = copy.deepcopy((other, draft))
    order = [draft, other] if draft_first else [other, draft]
    found = [resolve(request, where) for request in order]
    assert (other, draft) == before
    shared = replace(draft, kv_group=KVGroup.SAME_CACHE)
    resolved = found[order.index(other)]
    kept = copy.deepcopy(resolved)
    resolve(shared, where, resolved)
    assert resolved == kept and other == before[0]


def old_fix_inherits_always(draft: Request, other: Request, where: DeviceProfile) -> str:
    first = resolve(other, where)
    return resolve(replace(draft, backend=first.chosen), where).chosen


@pytest.mark.parametrize("kind", [KVGroup.POOLED, KVGroup.PRIVATE])
def test_report_2_a_draft_with_other_attention_is_not_bound(kind: KVGroup) -> None:
    """AB-2: a dense draft with windows beside an MLA target chooses for itself."""
    where, draft = device("sm100"), dflash(WINDOWED, WINDOWED, OPEN, kv_group=kind)
    with pytest.raises(AttentionRefused, match=r"FLASHINFER_MLA: \[.*non-MLA not supported"):
        old_fix_inherits_always(draft, target(MLA), where)
    first = resolve(target(MLA), where)
    own = resolve(draft, where, first)
    assert (own.policy, own.chosen) == ("auto", "FLASH_ATTN")
    # Pages of the pool are the target's, the rest is the draft's own.
    assert own.geometry.page_tokens == (32 if kind is KVGroup.POOLED else 16)
    assert own.geometry.token_bytes == 4096 and first.geometry.token_bytes == 1152


def test_pooled_pages_bind() -> None:
    first = resolve(target(MLA, backend="CUTLASS_MLA"), device("sm100"))
    draft = dflash(kv_group=KVGroup.POOLED)
    own = resolve(draft, device("sm100"), first)
    assert own.geometry.page_tokens == 128
    with pytest.raises(AttentionRefused, match="KV geometry: 64 against 128 tokens a page"):
        resolve(replace(draft, page_tokens=64), device("sm100"), first)
    # FlashInfer has pages of 128 on sm100 only.
    with pytest.raises(AttentionRefused, match=r"block_size not supported \(128; accepted: 16/32"):
        resolve(replace(draft, backend="FLASHINFER"), device("sm90"), first)


# Report 3: causal DFlash came, but capabilities were checked in the non-causal mode only.


def old_checks_one_mode(draft: Request, where: DeviceProfile, table: object = None) -> str:
    shape = replace(draft.shape, modes=(OPEN,))
    return resolve(replace(draft, shape=shape), where, table=table).chosen  # type: ignore[arg-type]


def ours_checks_each(draft: Request, where: DeviceProfile, table: object = None) -> str:
    return resolve(draft, where, table=table).chosen  # type: ignore[arg-type]


NO_CAUSAL = replace(TRITON_ATTN, name="NO_CAUSAL", causal=False)
NO_WINDOW = replace(TRITON_ATTN, name="NO_WINDOW", window=False)
TABLE = table_of((*ROWS, NO_CAUSAL, NO_WINDOW))


def accepts_causal_only_backends(run: Callable[..., str]) -> None:
    assert run(dflash(CAUSAL, CAUSAL, backend="B12X"), device("sm120")) == "B12X"


def refuses_without_causal(run: Callable[..., str]) -> None:
    with pytest.raises(AttentionRefused, match=r"NO_CAUSAL: \[causal attention not supported\]"):
        run(dflash(CAUSAL, backend="NO_CAUSAL"), device("sm90"), TABLE)


def refuses_without_window(run: Callable[..., str]) -> None:
    with pytest.raises(AttentionRefused, match=r"NO_WINDOW: \[sliding window not supported \(2048"):
        run(dflash(WINDOWED, backend="NO_WINDOW"), device("sm90"), TABLE)


def judges_mixed_layers_one_by_one(run: Callable[..., str]) -> None:
    mixed = dflash(WINDOWED, WINDOWED, OPEN, backend="NO_WINDOW")
    with pytest.raises(AttentionRefused) as caught:
        run(mixed, device("sm90"), TABLE)
    text = "NO_WINDOW: [sliding window not supported (2048) [layers 0, 1: causal, window=2048]]"
    assert text in str(caught.value)


CHECKS_3 = [
    accepts_causal_only_backends,
    refuses_without_causal,
    refuses_without_window,
    judges_mixed_layers_one_by_one,
]


@pytest.mark.parametrize("check", CHECKS_3)
def test_report_3(check: Callable[[Callable[..., str]], None]) -> None:
    """Each mode in use is checked, causal ones and windows too."""
    check(ours_checks_each)
    with pytest.raises((AssertionError, AttentionRefused, pytest.fail.Exception)):
        check(old_checks_one_mode)


def test_auto_takes_one_backend_for_all_layers_where_one_fits() -> None:
    mixed = dflash(LayerMode(window=8), LayerMode(window=8), OPEN)
    resolution = resolve(mixed, device("sm100"))
    assert resolution.chosen == "FLASH_ATTN" and len(resolution.groups) == 2
    assert [group.layers for group in resolution.groups] == [(0, 1), (2,)]


def test_auto_may_choose_per_layer_group() -> None:
    """Where nothing fits all layers; a name must fit all."""
    window_only = replace(TRITON_ATTN, name="FLASH_ATTN", non_causal=False)
    open_only = replace(TRITON_ATTN, name="FLEX_ATTENTION", window=False)
    table = table_of((window_only, open_only))
    mixed = dflash(WINDOWED, OPEN)
    resolution = resolve(mixed, device("sm90"), table=table)
    assert [group.chosen for group in resolution.groups] == ["FLASH_ATTN", "FLEX_ATTENTION"]
    for name in table:
        with pytest.raises(AttentionRefused, match=r"FLASH_ATTN: .*FLEX_ATTENTION: "):
            resolve(replace(mixed, backend=name), device("sm90"), table=table)


def test_the_target_is_the_same_whatever_draft_is_beside_it() -> None:
    """AB-9, AB-21: nothing of a draft reaches the target's resolution."""
    where, other = device("sm100"), target(DENSE, graph_mode="FULL_AND_PIECEWISE")
    alone = resolve(other, where)
    for draft in (dflash(backend="FLASHINFER"), dflash(kv_dtype="fp8"), dspark_v4()):
        first, _ = resolve(other, where), resolve(draft, where)
        assert first == alone and first.report() == alone.report()
