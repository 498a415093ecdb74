"""Public bugs about backend selection, graphs and KV layouts, one test each, without a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention import table_native
from engine.attention.base import Span
from engine.attention.capabilities import GraphLevel
from engine.attention.checkpoint import parse_checkpoint
from engine.attention.devices import PROFILES, simulated
from engine.attention.geometry import Geometry, geometry_of
from engine.attention.layers import draft_modes
from engine.attention.lse import combine
from engine.attention.mask import attention_ref, key_range
from engine.attention.mode import LayerMode
from engine.attention.quirks import QUIRKS
from engine.attention.refusal import AttentionRefused
from engine.attention.request import GRAPH_MODES, KVGroup
from engine.attention.resolve import resolve
from engine.attention.select import AttentionOptions, make_backend, resolve_attention
from engine.attention.tables import table_for
from engine.errors import BackendUnavailable, CheckpointError
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool
from tests.engine.attention_requests import (
    CAUSAL,
    DENSE,
    MLA,
    OPEN,
    V4,
    WINDOWED,
    device,
    dflash,
    target,
)

S, F = "sliding_attention", "full_attention"


def refused(request: Any, where: str, match: str) -> AttentionRefused:
    with pytest.raises(AttentionRefused, match=match) as caught:
        resolve(request, device(where))
    return caught.value


def test_allocation_disagrees_with_the_layout() -> None:
    """AB-1: 584 bytes a token allocated, 512 viewed; 111,754 blocks of 64 tokens."""
    viewed = geometry_of(replace(V4, modes=(CAUSAL,)), "fp8_e4m3", 64, 0)
    with pytest.raises(BackendUnavailable, match=r"4176917504 bytes .*\(584 .* expected \(512 a"):
        viewed.check_allocated(111_754, 4_176_917_504)
    stored = geometry_of(replace(V4, modes=(CAUSAL,)), "fp8_ds_mla", 64, 0)
    assert (stored.token_bytes, stored.alignment_bytes, stored.page_bytes) == (584, 576, 37_440)
    stored.check_allocated(10, 374_400)


def test_inherit_is_never_implicit_and_is_validated() -> None:
    """AB-2: `inherit` of an MLA backend by a dense draft is refused with the MLA reason."""
    where = device("sm100")
    first = resolve(target(MLA), where)
    with pytest.raises(AttentionRefused, match=r"FLASHINFER_MLA, inherited from the target") as e:
        resolve(dflash(backend="inherit"), where, first)
    assert "non-MLA not supported" in str(e.value) and e.value.refusal.inherited == first.chosen
    assert resolve(dflash(backend="auto"), where, first).chosen == "FLASH_ATTN"
    with pytest.raises(AttentionRefused, match="Nothing to inherit for the dflash draft on sm100"):
        resolve(dflash(backend="inherit"), where)


def test_non_causal_with_dcp_is_a_rule_of_validation() -> None:
    """AB-3: FLASHINFER, non-causal, DCP 2 is refused naming both; causal it passes."""
    text = r"FLASHINFER: \[non-causal with decode context parallelism not supported\]"
    refused(dflash(backend="FLASHINFER", dcp=2), "sm90", text)
    assert resolve(dflash(CAUSAL, backend="FLASHINFER", dcp=2), device("sm90")).chosen
    sharded = dflash(backend="FLASHINFER", dcp=2, tp=16, kv_sharded=True)
    refused(sharded, "sm90", text)
    ok = dflash(CAUSAL, backend="FLASHINFER", dcp=2, tp=16, kv_sharded=True)
    assert resolve(ok, device("sm90")).chosen == "FLASHINFER"


def test_what_a_model_forces_stays_with_it() -> None:
    """AB-4: Gemma 4 needs TRITON_ATTN, its DFlash draft does not."""
    config = {
        "model_type": "gemma4",
        "text_config": {
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_size": 5376,
        },
    }
    shape = parse_checkpoint(config, draft=False).shape
    first = resolve(target(shape), device("sm90"))
    assert (first.policy, first.chosen) == ("model", "TRITON_ATTN")
    draft = dflash(kv_group=KVGroup.POOLED)
    assert resolve(draft, device("sm90"), first).chosen == "FLASH_ATTN"


def test_backends_per_kind_of_the_target_do_not_bind_the_draft() -> None:
    """AB-5: nor do they beat the draft's own name."""
    windowed = replace(DENSE, modes=(CAUSAL, WINDOWED))
    other = target(windowed, backend_per_kind=(("sliding_window", "TRITON_ATTN"),))
    first = resolve(other, device("sm90"))
    assert [group.chosen for group in first.groups] == ["FLASH_ATTN", "TRITON_ATTN"]
    draft = dflash(WINDOWED, WINDOWED, backend="FLASH_ATTN", kv_group=KVGroup.POOLED)
    assert resolve(draft, device("sm90"), first).chosen == "FLASH_ATTN"


def test_simulated_profiles_show_all_candidates() -> None:
    """AB-6: head size 256 non-causal on Ampere; non-causal FA2 on SM121 is denied by a quirk."""
    wide = replace(DENSE, head_size=256)
    found = resolve(dflash(shape=wide), device("sm80"))
    assert [c.name for c in found.candidates if not c.reasons] == [
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
    ]
    known = resolve(dflash(), device("sm121"))
    assert known.chosen == "FLASHINFER" and known.candidates[0].name == "FLASH_ATTN"
    assert "vllm#50707" in known.candidates[0].reasons[0]
    refused(dflash(backend="FLASH_ATTN"), "sm121", "denied: device assert in FlashAttention 2")
    assert resolve(dflash(CAUSAL, backend="FLASH_ATTN"), device("sm121")).chosen == "FLASH_ATTN"
    assert resolve(dflash(backend="FLASH_ATTN"), device("sm120")).chosen == "FLASH_ATTN"


@pytest.mark.parametrize("where", [name for name in PROFILES if name != "sm75"])
@pytest.mark.parametrize("own", ["auto", "bfloat16", "bf16", "fp8", "fp8_e5m2", "nonsense"])
@pytest.mark.parametrize("targets", ["auto", "fp8"])
def test_the_drafts_kv_dtype_is_its_own(where: str, own: str, targets: str) -> None:
    """AB-7: every combination resolves to a concrete dtype, or is refused; never a KeyError."""
    first = None
    if PROFILES[where].capability:
        try:
            first = resolve(target(V4, kv_dtype=targets), device(where))
        except AttentionRefused as error:
            assert error.refusal.candidates
    draft = dflash(kv_dtype=own, kv_group=KVGroup.PRIVATE)
    try:
        geometry = resolve(draft, device(where), first).geometry
    except AttentionRefused as error:
        assert own not in ("auto", "bfloat16", "bf16")
        assert all(c.reasons for c in error.refusal.candidates)
        return
    plain = {"auto": "bfloat16", "bf16": "bfloat16", "fp8": "fp8_e4m3"}
    assert geometry.dtype == plain.get(own, own) and own != "nonsense"
    assert geometry.token_bytes == (2048 if own.startswith("fp8") else 4096)


def test_auto_kv_is_the_models_dtype() -> None:
    """AB-7: also where the target stores fp8_ds_mla."""
    first = resolve(target(V4), device("sm90"))
    assert first.geometry.dtype == "fp8_ds_mla"
    draft = replace(dflash(), kv_group=KVGroup.POOLED)
    assert resolve(draft, device("sm90"), first).geometry.dtype == "bfloat16"
    single = replace(DENSE, dtype="float32")
    found = resolve(dflash(shape=single), device("sm90"))
    assert (found.chosen, found.geometry.dtype) == ("TRITON_ATTN", "float32")


def test_fp8_kv_without_support_is_a_typed_refusal() -> None:
    """AB-8: FlashAttention 2 has no fp8 KV; the native engine has none at all."""
    text = r"FLASH_ATTN: \[kv_cache_dtype not supported \(fp8; accepted: auto, float16, bfloat16\)"
    refused(dflash(backend="FLASH_ATTN", kv_dtype="fp8"), "sm80", text)
    with pytest.raises(AttentionRefused, match=r"dflash draft on cpu .*kv=fp8, non-causal"):
        resolve_attention(
            AttentionOptions(kv_dtype="fp8"),
            heads=4,
            kv_heads=2,
            head_dim=64,
            modes=[OPEN],
            native=True,
            role="draft",
            method="dflash",
        )


def test_a_weak_draft_never_lowers_the_targets_graphs() -> None:
    """AB-9: target ALWAYS, draft UNIFORM_SINGLE: the target stays, the draft runs eager."""
    where = device("sm100")
    first = resolve(target(DENSE, backend="TRITON_ATTN", query_tokens=5), where)
    draft = resolve(dflash(backend="FLASHINFER", query_tokens=5), where, first)
    assert first.graphs.mode == "FULL_AND_PIECEWISE" and not first.graphs.reasons
    assert draft.graphs.mode == "NONE"
    assert draft.graphs.reasons == (
        "FLASHINFER: graph level UNIFORM_SINGLE, UNIFORM needed for 5 query tokens",
    )


def test_full_graphs_hold_for_the_causality_in_use() -> None:
    """AB-10: FlashInfer on SM100 captures causal blocks, not non-causal ones."""
    where = device("sm100")
    causal = resolve(dflash(CAUSAL, backend="FLASHINFER"), where)
    assert causal.graphs.level is GraphLevel.UNIFORM and causal.graphs.decode == "FULL"
    open_ = resolve(dflash(backend="FLASHINFER"), where)
    assert open_.graphs.level is GraphLevel.UNIFORM_SINGLE and open_.graphs.decode == "NONE"
    assert any("vllm#48167" in warning for warning in open_.warnings)
    refused(dflash(backend="FLASHINFER", graph_mode="FULL"), "sm100", "UNIFORM needed for 8 query")
    mixed = resolve(dflash(CAUSAL, OPEN, backend="FLASHINFER"), where)
    assert mixed.graphs.level is GraphLevel.UNIFORM_SINGLE


def test_capture_sizes_are_whole_blocks() -> None:
    """AB-17: K = 4: every size divides by 5."""
    for request in (target(query_tokens=5), dflash(query_tokens=5)):
        sizes = resolve(request, device("sm90")).graphs.capture_tokens
        assert sizes and sizes[0] == 5 and all(size % 5 == 0 for size in sizes)


def test_more_requests_than_state_blocks() -> None:
    """AB-18: refused with both numbers when graphs were asked for, said as a reason otherwise."""
    request = target(state_blocks=32, max_requests=64)
    text = "64 requests at once, 32 state blocks"
    refused(replace(request, graph_mode="FULL_AND_PIECEWISE"), "sm90", text)
    found = resolve(request, device("sm90")).graphs
    assert found.mode == "PIECEWISE" and found.reasons == (text,)
    assert resolve(replace(request, max_requests=32), device("sm90")).graphs.decode == "FULL"


def test_flashinfer_needs_compute_capability_8() -> None:
    """AB-19: on SM75 it is refused by its capability."""
    text = r"FLASHINFER: \[.*compute capability not supported \(sm75; accepted: 8.0-12.1\)"
    refused(target(backend="FLASHINFER"), "sm75", text)


BASE: dict[str, Any] = {"num_hidden_layers": 3}
MIXED = BASE | {"layer_types": [S, S, F], "sliding_window": 6}
STYLES: dict[str, tuple[dict[str, Any], list[LayerMode]]] = {
    "no layer types": (BASE, [OPEN] * 3),
    "use_swa": (
        BASE | {"dflash_config": {"use_swa": True, "swa_window_size": 8}},
        [LayerMode(False, 8)] * 3,
    ),
    "mixed": (MIXED, [LayerMode(True, 6), LayerMode(True, 6), OPEN]),
    "all full with use_swa": (
        BASE
        | {
            "layer_types": [F, F, F],
            "sliding_window": 7,
            "dflash_config": {"use_swa": True},
        },
        [LayerMode(False, 7)] * 3,
    ),
    "mixed, is_causal false": (
        MIXED | {"is_causal": False},
        [LayerMode(False, 6), LayerMode(False, 6), OPEN],
    ),
    "speculators": (
        {"transformer_layer_config": MIXED, "sliding_window_non_causal": False},
        [LayerMode(True, 6), LayerMode(True, 6), OPEN],
    ),
    "speculators, non-causal": (
        {"transformer_layer_config": MIXED, "sliding_window_non_causal": True},
        [LayerMode(False, 6), LayerMode(False, 6), OPEN],
    ),
    "is_causal beats the nested key": (
        BASE | {"is_causal": True, "dflash_config": {"causal": False}},
        [CAUSAL] * 3,
    ),
    "mixed with use_swa keeps its full layer": (
        MIXED | {"dflash_config": {"use_swa": True, "swa_window_size": 9}},
        [LayerMode(True, 9), LayerMode(True, 9), OPEN],
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_causality_and_windows_are_per_layer(style: str) -> None:
    """AB-20: a flag of one layer kind never becomes a global one."""
    config, expected = STYLES[style]
    assert list(draft_modes(config)) == expected


@pytest.mark.parametrize("is_causal", [1, "no"])
def test_causality_is_a_truth_value(is_causal: Any) -> None:
    with pytest.raises(CheckpointError, match="config is_causal = "):
        draft_modes(BASE | {"is_causal": is_causal})


@pytest.mark.parametrize("where", ["sm90", "sm100"])
def test_one_head_rule_for_both_roles(where: str) -> None:
    """AB-23: 64 query and 64 KV heads over 4 ranks with DCP 2 are refused for target and draft."""
    wide = replace(DENSE, heads=64, kv_heads=64)
    text = r"needs tp above the KV heads \(tp=4, 64 KV heads\)"
    refused(target(wide, dcp=2, tp=4), where, text)
    refused(dflash(shape=wide, dcp=2, tp=4, kv_sharded=True), where, text)
    # The draft's default: all of its KV on every rank, so no rule to break.
    assert not dflash(shape=wide, dcp=2, tp=4).sharded
    assert resolve(dflash(shape=wide, dcp=2, tp=4), device(where)).chosen == "FLASH_ATTN"
    narrow = replace(DENSE, heads=64, kv_heads=8)
    assert resolve(target(narrow, dcp=2, tp=16), device(where)).chosen
    refused(target(narrow, dcp=4, tp=16), where, r"dcp=4 is above tp / KV heads \(16 / 8\)")
    odd = replace(DENSE, heads=24, kv_heads=8)
    refused(target(odd, dcp=2, tp=16), where, "3 query heads per KV head are no multiple of dcp=2")


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_partial_attention_combines_exactly(parts: int, base: Any) -> None:
    """AB-23: 1, 2 and 4 shards, one of them empty, in both bases, equal full attention."""
    generator = torch.Generator().manual_seed(parts)
    q = torch.randn(5, 3, 16, generator=generator).double()
    k, v = (torch.randn(37, 3, 16, generator=generator).double() for _ in range(2))
    scores = torch.einsum("rhd,khd->rhk", q, k) / 4
    full = torch.einsum("rhk,khd->rhd", scores.softmax(-1), v)
    # Token i lives on shard i mod parts; one more shard holds nothing and says NaN, as kernels do.
    outs, lses = [torch.full((5, 3, 16), torch.nan)], [torch.full((5, 3), torch.nan)]
    for part in range(parts):
        own = scores[..., part::parts]
        outs.append(torch.einsum("rhk,khd->rhd", own.softmax(-1), v[part::parts]).float())
        lses.append((own.logsumexp(-1) / (math.log(2) if base == "2" else 1)).float())
    found = combine(torch.stack(outs), torch.stack(lses), base)
    torch.testing.assert_close(found.double(), full, atol=1e-5, rtol=1e-5)
    nothing = combine(torch.full((1, 2, 1, 4), torch.nan), torch.full((1, 2, 1), math.inf), base)
    assert torch.equal(nothing, torch.zeros(2, 1, 4))


def test_adaptive_verification_needs_a_confidence_head() -> None:
    """AB-24: set without a head it is a typed refusal."""
    draft = dflash(method="dspark", adaptive_verification=True)
    refused(draft, "sm90", "adaptive verification needs a confidence head, the checkpoint has none")
    headed = replace(draft, shape=replace(draft.shape, confidence_head=True))
    assert resolve(headed, device("sm90")).chosen == "FLASH_ATTN"


@pytest.mark.parametrize("name", ["CPU_ATTN", "TORCH_SDPA"])
@pytest.mark.parametrize("context", [0, 7, 8, 9, 40, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_reach_as_far_as_the_block(name: str, context: int, causal: bool) -> None:
    """AB-11, AB-15: window 8, a block of 8 rows, each backend against the definition."""
    torch.manual_seed(context)
    mode, rows = LayerMode(causal, 8), 8
    pool, cache = PagePool(8, 16), KVCache(KVGeometry(1, 2, 16, 16, torch.float32), 8)
    cache.k[0].normal_()
    cache.v[0].normal_()
    span = Span(pool.allocate(context + rows), context, 0, rows)
    q = torch.randn(rows, 4, 16)
    low, high = key_range(mode, [span])
    for row in range(rows):
        at = context + row
        seen = [
            key
            for key in range(context + rows)
            if at - key < 8 and (key <= at if causal else key - at < 8)
        ]
        assert list(range(int(low[row]), int(high[row]))) == seen
    options = AttentionOptions(name, "float32", 16)
    found = resolve_attention(options, heads=4, kv_heads=2, head_dim=16, modes=[mode], native=True)
    backend = make_backend(found, cache)
    out = backend.run(backend.plan([span]), 0, q)
    expected = attention_ref(cache, 0, mode, [span], q)
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5)


def test_bytes_a_token_of_public_models() -> None:
    """The figures that public documents give."""

    def of(shape: Any, dtype: str, layers: int = 1) -> Geometry:
        return geometry_of(replace(shape, modes=(CAUSAL,) * layers), dtype, 64, 0)

    assert [of(MLA, d).token_bytes for d in ("bfloat16", "fp8_e4m3", "fp8_ds_mla")] == [
        1152,
        576,
        656,
    ]
    assert [of(V4, d).token_bytes for d in ("fp8_ds_mla", "fp8_e4m3", "bfloat16")] == [
        584,
        512,
        1024,
    ]
    llama = replace(DENSE, heads=32, kv_heads=8, head_size=128)
    assert of(llama, "bfloat16", 32).bytes_per_token == 131_072
    small = replace(DENSE, heads=9, kv_heads=3, head_size=64)
    assert of(small, "bfloat16", 30).bytes_per_token == 23_040


def test_tables_are_complete() -> None:
    """Every row can be reached by name, every quirk names a row and where it is public."""
    vllm, native = table_for("vllm"), table_for("native")
    assert len(vllm) == 24 and set(native) == {*vllm, "TORCH_SDPA", "TORCH_MLA"}
    ours = {row.name for row in table_native.ROWS}
    assert {name for name, row in native.items() if row.implemented} == ours
    assert not any(row.implemented for row in vllm.values())
    assert {row.name for row in native.values() if row.ran_on_gpu} == ours - {"CPU_ATTN"}
    for quirk in QUIRKS:
        assert quirk.backend in vllm and quirk.reference and quirk.text
    with pytest.raises(BackendUnavailable, match="unknown device 'sm99'; accepted: cpu, sm75"):
        simulated("sm99")
    for row in vllm.values():
        assert row.lse_base == "" or row.dcp_causal, row.name


GRAPHS = [
    (target(backend="TRITON_ATTN"), "sm90", set(GRAPH_MODES)),
    (target(backend="FLASH_ATTN"), "sm80", set(GRAPH_MODES) - {"FULL"}),
    (target(MLA, backend="CUTLASS_MLA"), "sm100", {"NONE", "PIECEWISE"}),
    (target(MLA, backend="CUTLASS_MLA", query_tokens=1), "sm100", set(GRAPH_MODES) - {"FULL"}),
    (target(replace(DENSE, dtype="float32"), engine="native"), "cpu", {"NONE"}),
    (target(engine="native"), "sm90", {"NONE", "FULL_DECODE_ONLY"}),
    (target(engine="native", backend="FLEX_ATTENTION"), "sm90", {"NONE"}),
    (dflash(engine="native"), "sm90", {"NONE", "FULL", "FULL_DECODE_ONLY"}),
    (dflash(backend="TRITON_ATTN"), "sm90", {"NONE", "FULL", "FULL_DECODE_ONLY"}),
    (dflash(backend="FLASH_ATTN"), "sm80", {"NONE", "FULL", "FULL_DECODE_ONLY"}),
    (dflash(backend="FLASHINFER"), "sm100", {"NONE"}),
    (dflash(CAUSAL, backend="FLASHINFER", dcp=2), "sm90", {"NONE"}),
    (
        dflash(CAUSAL, method="draft_model", backend="FLASH_ATTN"),
        "sm80",
        set(GRAPH_MODES) - {"FULL"},
    ),
]


@pytest.mark.parametrize(("request_", "where", "possible"), GRAPHS)
def test_graph_modes_are_had_or_refused(request_: Any, where: str, possible: set[str]) -> None:
    """AB-9, AB-10: of each service by its own backend; `auto` takes the best of what is left."""
    for mode in GRAPH_MODES:
        asked = replace(request_, graph_mode=mode)
        if mode in possible:
            assert resolve(asked, device(where)).graphs.mode == mode
        else:
            refused(asked, where, f"CUDA-graph mode {mode} not possible: ")
    auto = resolve(request_, device(where)).graphs
    best = ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"]
    assert auto.mode == next(mode for mode in best if mode in possible)
    assert bool(auto.reasons) == (auto.decode != "FULL")
