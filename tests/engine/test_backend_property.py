"""Whatever is asked: a choice within every declared limit, or a refusal that names everything."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.capabilities import Backend, GraphLevel, Kind
from engine.attention.devices import PROFILES, DeviceProfile
from engine.attention.mode import LayerMode
from engine.attention.quirks import QUIRKS
from engine.attention.refusal import AttentionRefused
from engine.attention.request import GRAPH_MODES, AttentionShape, KVGroup, Latent, Request
from engine.attention.resolution import Resolution
from engine.attention.resolve import resolve
from engine.attention.tables import order_for, table_for

MODES = st.builds(LayerMode, st.booleans(), st.sampled_from([None, None, 8, 128]))
KV_DTYPES = [
    "auto",
    "bfloat16",
    "float32",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_ds_mla",
    "nvfp4",
    "nvfp4_ds_mla",
    "turboquant_4bit_nc",
    "int8_per_token_head",
    "no-such",
]
LEVELS = {
    "NONE": GraphLevel.NEVER,
    "PIECEWISE": GraphLevel.NEVER,
    "FULL_DECODE_ONLY": GraphLevel.UNIFORM,
    "FULL_AND_PIECEWISE": GraphLevel.UNIFORM,
    "FULL": GraphLevel.ALWAYS,
}


def rarely(draw: st.DrawFn, usual: Any, strange: Sequence[Any]) -> Any:
    """Mostly what works, so that choices are as common as refusals."""
    return draw(st.sampled_from(strange)) if draw(st.integers(0, 7)) == 0 else usual


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    kind = draw(st.sampled_from([Kind.MHA, *Kind]))
    modes = tuple(draw(st.lists(MODES, min_size=1, max_size=3)))
    if kind is not Kind.MHA and draw(st.integers(0, 3)):
        modes = (LayerMode(),)
    dtype, sinks = rarely(draw, "bfloat16", ["float16", "float32"]), rarely(draw, False, [True])
    if kind is Kind.MHA:
        heads, kv_heads = rarely(draw, (32, 8), [(8, 8), (64, 1), (10, 4)])
        size = rarely(draw, 128, [16, 60, 64, 80, 256, 512])
        return AttentionShape("", kind, heads, kv_heads, size, modes, dtype, sinks)
    if kind is Kind.DSV4:
        return AttentionShape("", kind, 64, 1, 512, modes, dtype, sinks)
    topk = draw(st.sampled_from([1024, 2048])) if kind is Kind.SPARSE_MLA else 0
    latent = Latent(512, 64, rarely(draw, 128, [64, 100]), topk)
    heads = draw(st.sampled_from([16, 128]))
    return AttentionShape("", kind, heads, 1, 576, modes, dtype, sinks, latent)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Request, DeviceProfile]:
    where = draw(st.sampled_from(list(PROFILES.values())))
    usual = "native" if where.capability is None else "vllm"
    engine = rarely(draw, usual, ["vllm", "native"])
    shape = draw(shapes())
    if engine == "native":
        shape = replace(shape, dtype=rarely(draw, "float32", ["bfloat16"]))
    request = Request(
        shape=shape,
        role=draw(st.sampled_from(["target", "draft"])),
        method=draw(st.sampled_from(["", "dflash", "dspark", "draft_model"])),
        kv_dtype=rarely(draw, draw(st.sampled_from(["auto", "auto", "fp8"])), KV_DTYPES),
        page_tokens=rarely(draw, None, [1, 16, 48, 64, 128, 256]),
        kv_group=draw(st.sampled_from(KVGroup)),
        query_tokens=draw(st.sampled_from([1, 4, 8])),
        graph_mode=rarely(draw, "auto", ["bogus", *GRAPH_MODES]),
        dcp=rarely(draw, 1, [2, 8]),
        tp=rarely(draw, None, [4, 16]),
        kv_sharded=rarely(draw, None, [True, False]),
        engine=engine,
    )
    names = sorted(candidates_of(request, where))
    asked = ["auto", "inherit", "NO_SUCH", *table_for(engine)]
    backend = draw(st.sampled_from([None, None, *names]))
    return replace(request, backend=rarely(draw, backend, asked)), where


def quirk_denies(row: Backend, request: Request, where: DeviceProfile, mode: LayerMode) -> bool:
    """The two denials that are known, by hand."""
    assert sum(quirk.denies for quirk in QUIRKS) == 2
    if request.engine == "native":
        return False
    on_121 = where.name == "sm121" and row.name == "FLASH_ATTN" and not mode.causal
    return on_121 or (row.name == "FLASHMLA" and where.name in ("sm100", "sm103"))


def within(row: Backend, request: Request, where: DeviceProfile, mode: LayerMode) -> bool:
    """Whether a row's declared limits allow layers of a mode; written from the table's words."""
    shape, page, kv = request.shape, request.page_tokens, request.kv_dtype
    here = [rule for rule in row.kv if any(r.covers(where) for r in rule.on)]
    heads = next((s for s in row.heads if any(r.covers(where) for r in s.on)), None)
    pages = next((s for s in row.pages if any(r.covers(where) for r in s.on)), None)
    sharded = request.sharded
    group = shape.heads // shape.kv_heads
    tp = request.tp or request.dcp
    level = row.graph_level(
        where,
        causal=mode.causal,
        dcp=request.dcp,
        windowed=mode.window is not None,
        query_tokens=request.query_tokens,
    )
    return all(
        (
            any(r.covers(where) for r in row.on),
            shape.kind in row.kinds,
            shape.dtype in row.dtypes,
            any(kv in rule.accepts and not rule.only for rule in here),
            heads is None or heads.fits(shape.head_size),
            page is None or pages is None or pages.fits(page),
            shape.heads % shape.kv_heads == 0,
            not row.qk_nope or shape.latent is None or shape.latent.nope in row.qk_nope,
            not row.index_topk or not shape.latent or shape.latent.index_topk == row.index_topk,
            row.causal if mode.causal else row.non_causal,
            mode.window is None or row.window,
            mode.causal or mode.window is not None or shape.kind is not Kind.DSV4,
            mode.causal or kv not in row.non_causal_kv_refused,
            not shape.sinks or any(r.covers(where) for r in row.sinks),
            request.engine == "vllm" or (row.implemented and request.dcp == 1),
            request.dcp == 1 or sharded or mode.causal or row.dcp_group_non_causal,
            not sharded or (row.dcp_causal if mode.causal else row.dcp_non_causal),
            not sharded or mode.window is None,
            not sharded or not row.dcp_kv or kv in (*row.dcp_kv, "fp8"),
            not (sharded and mode.causal and request.role == "draft")
            or request.query_tokens == 1
            or row.dcp_draft_block,
            not sharded
            or shape.kind is not Kind.MHA
            or (
                (tp > shape.kv_heads and request.dcp <= tp // shape.kv_heads)
                and group % request.dcp == 0
            ),
            not quirk_denies(row, request, where, mode),
            graphs_within(request, where, level),
        )
    )


def graphs_within(request: Request, where: DeviceProfile, level: GraphLevel) -> bool:
    mode = request.graph_mode
    block = request.role == "draft" and request.method in ("dflash", "dspark")
    if mode in ("auto", "NONE"):
        return True
    if mode not in GRAPH_MODES or where.capability is None:
        return False
    if request.engine == "native" and mode not in ("FULL_DECODE_ONLY", "FULL" if block else ""):
        return False
    if block and mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
        return False
    needed = LEVELS[mode]
    if needed is GraphLevel.UNIFORM and request.query_tokens == 1:
        needed = GraphLevel.UNIFORM_SINGLE
    if mode == "FULL" and block:
        needed = GraphLevel.UNIFORM if request.query_tokens > 1 else GraphLevel.UNIFORM_SINGLE
    return level >= needed


def candidates_of(request: Request, where: DeviceProfile) -> set[str]:
    found: set[str] = set()
    for mode in request.shape.modes:
        found |= set(
            order_for(
                request.engine,
                where,
                request.shape.kind,
                causal=mode.causal,
                quantised=request.kv_dtype.startswith(("fp8", "nvfp4")),
                heads=request.shape.heads,
                head_size=request.shape.head_size,
            )
        )
    return found


@settings(max_examples=600, deadline=None)
@given(cases())
def test_a_choice_within_all_limits_or_a_refusal_that_names_all(
    case: tuple[Request, DeviceProfile],
) -> None:
    request, where = case
    before = copy.deepcopy(request)
    table, wanted = table_for(request.engine), (request.backend or "auto").upper()
    try:
        found = resolve(request, where)
    except AttentionRefused as error:
        refusal = error.refusal
        listed = {candidate.name: candidate.reasons for candidate in refusal.candidates}
        assert candidates_of(request, where) <= set(listed)
        assert all(f"{known}: [" in str(error) for known in listed)
        for candidate, reasons in listed.items():
            allowed = all(
                within(table[candidate], request, where, mode) for mode in request.shape.modes
            )
            assert allowed == (not reasons), (candidate, reasons)
        if wanted == "AUTO":
            assert all(listed.values())
        elif wanted in table:
            assert listed[wanted]
    else:
        check_choice(found, request, where, wanted)
    assert request == before


def check_choice(found: Resolution, request: Request, where: DeviceProfile, wanted: str) -> None:
    """Nothing that was asked for was replaced, and the limits hold layer by layer."""
    table = table_for(request.engine)
    layers = [layer for group in found.groups for layer in group.layers]
    assert sorted(layers) == list(range(len(request.shape.modes)))
    for group in found.groups:
        assert all(request.shape.modes[layer] == group.mode for layer in group.layers)
        assert within(table[group.chosen], request, where, group.mode)
        rule = next(s for s in table[group.chosen].pages if any(r.covers(where) for r in s.on))
        assert rule.fits(found.geometry.page_tokens)
    assert wanted in ("AUTO", found.chosen)
    assert found.geometry.dtype != "auto" and found.policy in ("auto", "name")
    if request.kv_dtype in ("bfloat16", "float32", "fp8_e5m2", "nvfp4", "fp8_ds_mla"):
        assert found.geometry.dtype == request.kv_dtype
    assert request.page_tokens in (None, found.geometry.page_tokens)
    assert request.graph_mode in ("auto", found.graphs.mode)
    assert candidates_of(request, where) <= {candidate.name for candidate in found.candidates}
    if found.graphs.requested == "auto" and found.graphs.decode != "FULL":
        assert found.graphs.reasons


@settings(max_examples=300, deadline=None)
@given(cases(), cases())
def test_a_shared_cache_has_one_geometry(
    one: tuple[Request, DeviceProfile], two: tuple[Request, DeviceProfile]
) -> None:
    (draft, _), (other, where) = one, two
    other = replace(other, backend=None, graph_mode="auto", role="target")
    draft = replace(draft, role="draft", engine=other.engine)
    if draft.kv_group is KVGroup.SAME_CACHE:
        draft = replace(draft, shape=replace(other.shape, modes=draft.shape.modes))
    try:
        first = resolve(other, where)
    except AttentionRefused:
        return
    kept = copy.deepcopy(first)
    try:
        found = resolve(draft, where, first)
    except AttentionRefused as error:
        assert error.refusal.candidates
    else:
        if draft.kv_group is KVGroup.SAME_CACHE:
            assert not found.geometry.differences(first.geometry)
            if draft.backend is None:
                assert found.policy == "inherit" and found.chosen in first.chosen.split("+")
        elif draft.kv_group is KVGroup.POOLED:
            assert found.geometry.page_tokens == first.geometry.page_tokens
            assert found.geometry.alignment_bytes == first.geometry.alignment_bytes
    assert first == kept
