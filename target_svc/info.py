"""What `GetInfo` answers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from engine.api import Engine
from specwire.rpc import PROTOCOL_MAJOR, PROTOCOL_MINOR
from specwire.v1 import common_pb2, target_pb2
from target_svc.row_formats import projections
from target_svc.settings import TargetSettings

_Response = target_pb2.TargetServiceGetInfoResponse


def info_response(
    engine: Engine, settings: TargetSettings, incarnation: int, tokenizer_hash: str
) -> _Response:
    """Everything but the load, which changes."""
    info = engine.info
    exact = settings.exactness == "exact"
    return _Response(
        worker=common_pb2.WorkerInfo(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            incarnation=incarnation,
            version=_version(),
            device=info.device,
        ),
        model=common_pb2.ModelInfo(
            name=info.name,
            fingerprint=info.fingerprint,
            tokenizer_hash=tokenizer_hash,
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            layer_count=info.layer_count,
            max_length_tokens=info.max_length,
            eos_token_ids=info.eos_token_ids,
        ),
        attention=_attention(engine),
        tap_layer_count=info.layer_count,
        row_encodings=[common_pb2.ROW_ENCODING_TAPS],
        projections=projections(info),
        row_dtype=common_pb2.D_TYPE_BFLOAT16,
        drive=_Response.DRIVE_COORDINATOR,
        contract_levels=["L0", "L1", "L2", *(["L3"] if engine.rows_independent else [])],
        numerics_fingerprint=info.numerics,
        default_exactness=common_pb2.EXACTNESS_EXACT if exact else common_pb2.EXACTNESS_FAST,
        max_draft_tokens=settings.max_draft_tokens,
        page_size_tokens=engine.attention.page_tokens,
    )


def _attention(engine: Engine) -> common_pb2.AttentionReport:
    report = engine.attention
    return common_pb2.AttentionReport(
        requested=report.requested,
        policy=report.policy,
        chosen=report.chosen,
        candidates=[
            common_pb2.AttentionReport.Candidate(name=c.name, reasons=c.reasons)
            for c in report.candidates
        ],
        kv_dtype=report.kv_dtype,
        kv_bytes_per_token=report.kv_bytes_per_token,
        page_size_tokens=report.page_tokens,
        graph_mode=report.graph_mode,
        notes=report.notes,
    )


def _version() -> str:
    try:
        return version("specwire")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0"
