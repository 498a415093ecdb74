"""What a running coordinator says about itself, as typed objects."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.v1 import common_pb2, generate_pb2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    hidden_size: int
    layer_count: int
    max_length_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """How a worker chose its attention backend; `candidates` maps names to refusal reasons."""

    requested: str
    policy: str
    chosen: str
    candidates: dict[str, tuple[str, ...]]
    kv_dtype: str
    kv_bytes_per_token: int
    page_size_tokens: int
    graph_mode: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerState:
    role: str
    address: str
    state: str
    reason: str
    device: str
    methods: tuple[str, ...]
    attention: AttentionReport
    sessions: int
    waiting: int
    pages_free: int
    pages_total: int
    # Of a draft: "separate", or "colocated" in the process of the target at the same address.
    placement: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    protocol: tuple[int, int]
    model: ModelInfo
    workers: tuple[WorkerState, ...]
    methods: tuple[str, ...]
    default_method: str
    default_exactness: str
    default_num_speculative_tokens: int
    contract_levels: tuple[str, ...]


_EXACTNESS = {common_pb2.EXACTNESS_EXACT: "exact", common_pb2.EXACTNESS_FAST: "fast"}


def info_from(response: generate_pb2.GenerationServiceGetInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=response.version,
        protocol=(response.protocol_major, response.protocol_minor),
        model=_model(response.model),
        workers=tuple(_worker(worker) for worker in response.workers),
        methods=tuple(response.methods),
        default_method=response.default_method,
        default_exactness=_EXACTNESS.get(response.default_exactness, ""),
        default_num_speculative_tokens=response.default_num_speculative_tokens,
        contract_levels=tuple(response.contract_levels),
    )


def _model(model: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        tokenizer_hash=model.tokenizer_hash,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        layer_count=model.layer_count,
        max_length_tokens=model.max_length_tokens,
        eos_token_ids=tuple(model.eos_token_ids),
    )


def _worker(worker: generate_pb2.GenerationServiceGetInfoResponse.Worker) -> WorkerState:
    report = worker.attention
    return WorkerState(
        role=worker.role,
        address=worker.address,
        state=worker.state,
        reason=worker.reason,
        device=worker.device,
        methods=tuple(worker.methods),
        attention=AttentionReport(
            requested=report.requested,
            policy=report.policy,
            chosen=report.chosen,
            candidates={c.name: tuple(c.reasons) for c in report.candidates},
            kv_dtype=report.kv_dtype,
            kv_bytes_per_token=report.kv_bytes_per_token,
            page_size_tokens=report.page_size_tokens,
            graph_mode=report.graph_mode,
            notes=tuple(report.notes),
        ),
        sessions=worker.sessions,
        waiting=worker.waiting,
        pages_free=worker.pages_free,
        pages_total=worker.pages_total,
        placement=worker.placement,
    )
