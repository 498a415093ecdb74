"""The handshake: what `GetInfo` says about each drafter of this service."""

from __future__ import annotations

from collections.abc import Iterable

from draft_svc.methods.base import Cost, MethodInfo
from draft_svc.requests import DTYPES
from engine.attention.report import AttentionReport
from specwire.v1 import common_pb2, draft_pb2

_SLOT_MODES = {
    "": draft_pb2.SLOT_MODE_UNSPECIFIED,
    "fill_in": draft_pb2.SLOT_MODE_FILL_IN,
    "next_token": draft_pb2.SLOT_MODE_NEXT_TOKEN,
}


def drafter_infos(infos: Iterable[MethodInfo], default: str) -> list[draft_pb2.DrafterInfo]:
    return [_drafter(info, info.method == default) for info in infos]


def _drafter(info: MethodInfo, is_default: bool) -> draft_pb2.DrafterInfo:
    return draft_pb2.DrafterInfo(
        method=info.method,
        name=info.name,
        needs_rows=info.rows is not None,
        row_format=_row_format(info),
        max_draft_tokens=info.max_draft_tokens,
        max_length_tokens=info.max_length_tokens,
        fingerprint=info.fingerprint,
        target_hidden_size=info.target_hidden_size,
        target_layer_count=info.target_layer_count,
        target_vocab_size=info.target_vocab_size,
        target_fingerprint=info.target_fingerprint,
        tokenizer_hash=info.tokenizer_hash,
        slot_mode=_SLOT_MODES[info.slot_mode],
        block_size=info.block_size,
        mask_token_id=info.mask_token_id,
        d2t_hash=info.d2t_hash,
        rope_style=info.rope_style,
        rope_theta=info.rope_theta,
        rope_scaling=info.rope_scaling,
        attention=_attention(info.attention),
        layer_attention=info.layer_attention,
        is_default=is_default,
        costs=[_cost(cost) for cost in info.costs],
        projected_width=info.rows.projected_width if info.rows is not None else 0,
    )


def _cost(cost: Cost) -> common_pb2.StepCost:
    return common_pb2.StepCost(
        rows=cost.tokens,
        sessions=cost.sessions,
        context_tokens=cost.context_tokens,
        compute_ns=cost.compute_ns,
    )


def _row_format(info: MethodInfo) -> common_pb2.RowFormat | None:
    if info.rows is None:
        return None
    return common_pb2.RowFormat(
        encoding=common_pb2.ROW_ENCODING_TAPS,
        convention=common_pb2.TAP_CONVENTION_OUTPUT_OF_LAYER,
        tap_ids=info.rows.tap_ids,
        dtype=DTYPES[info.rows.dtype],
        width=info.rows.width,
    )


def _attention(report: AttentionReport | None) -> common_pb2.AttentionReport | None:
    if report is None:
        return None
    candidates = [
        common_pb2.AttentionReport.Candidate(name=c.name, reasons=c.reasons)
        for c in report.candidates
    ]
    return common_pb2.AttentionReport(
        requested=report.requested,
        policy=report.policy,
        chosen=report.chosen,
        candidates=candidates,
        kv_dtype=report.kv_dtype,
        kv_bytes_per_token=report.kv_bytes_per_token,
        page_size_tokens=report.page_tokens,
        graph_mode=report.graph_mode,
        notes=report.notes,
    )
