from specwire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceGetInfoResponse(_message.Message):
    __slots__ = ("worker", "model", "attention", "tap_layer_count", "row_encodings", "row_dtype", "drive", "contract_levels", "numerics_fingerprint", "default_exactness", "max_draft_tokens", "page_size_tokens", "load", "costs", "projections")
    class Drive(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DRIVE_UNSPECIFIED: _ClassVar[TargetServiceGetInfoResponse.Drive]
        DRIVE_COORDINATOR: _ClassVar[TargetServiceGetInfoResponse.Drive]
        DRIVE_ENGINE: _ClassVar[TargetServiceGetInfoResponse.Drive]
    DRIVE_UNSPECIFIED: TargetServiceGetInfoResponse.Drive
    DRIVE_COORDINATOR: TargetServiceGetInfoResponse.Drive
    DRIVE_ENGINE: TargetServiceGetInfoResponse.Drive
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    TAP_LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    ROW_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DRIVE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_LEVELS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    PROJECTIONS_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerInfo
    model: _common_pb2.ModelInfo
    attention: _common_pb2.AttentionReport
    tap_layer_count: int
    row_encodings: _containers.RepeatedScalarFieldContainer[_common_pb2.RowEncoding]
    row_dtype: _common_pb2.DType
    drive: TargetServiceGetInfoResponse.Drive
    contract_levels: _containers.RepeatedScalarFieldContainer[str]
    numerics_fingerprint: str
    default_exactness: _common_pb2.Exactness
    max_draft_tokens: int
    page_size_tokens: int
    load: TargetLoad
    costs: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepCost]
    projections: _containers.RepeatedCompositeFieldContainer[_common_pb2.RowFormat]
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., attention: _Optional[_Union[_common_pb2.AttentionReport, _Mapping]] = ..., tap_layer_count: _Optional[int] = ..., row_encodings: _Optional[_Iterable[_Union[_common_pb2.RowEncoding, str]]] = ..., row_dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., drive: _Optional[_Union[TargetServiceGetInfoResponse.Drive, str]] = ..., contract_levels: _Optional[_Iterable[str]] = ..., numerics_fingerprint: _Optional[str] = ..., default_exactness: _Optional[_Union[_common_pb2.Exactness, str]] = ..., max_draft_tokens: _Optional[int] = ..., page_size_tokens: _Optional[int] = ..., load: _Optional[_Union[TargetLoad, _Mapping]] = ..., costs: _Optional[_Iterable[_Union[_common_pb2.StepCost, _Mapping]]] = ..., projections: _Optional[_Iterable[_Union[_common_pb2.RowFormat, _Mapping]]] = ...) -> None: ...

class TargetLoad(_message.Message):
    __slots__ = ("sessions", "waiting", "pages_free", "pages_total", "pages_cached", "preempted")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    waiting: int
    pages_free: int
    pages_total: int
    pages_cached: int
    preempted: int
    def __init__(self, sessions: _Optional[int] = ..., waiting: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_cached: _Optional[int] = ..., preempted: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("known_hash",)
    KNOWN_HASH_FIELD_NUMBER: _ClassVar[int]
    known_hash: str
    def __init__(self, known_hash: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("hash", "chunk")
    HASH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    hash: str
    chunk: bytes
    def __init__(self, hash: _Optional[str] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class TargetServiceLinkRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TargetItem]
    def __init__(self, items: _Optional[_Iterable[_Union[TargetItem, _Mapping]]] = ...) -> None: ...

class TargetItem(_message.Message):
    __slots__ = ("open", "verify", "export_rows", "close", "heartbeat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    EXPORT_ROWS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    open: OpenTarget
    verify: Verify
    export_rows: ExportRows
    close: CloseSession
    heartbeat: Heartbeat
    def __init__(self, open: _Optional[_Union[OpenTarget, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., export_rows: _Optional[_Union[ExportRows, _Mapping]] = ..., close: _Optional[_Union[CloseSession, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class OpenTarget(_message.Message):
    __slots__ = ("key", "ids", "prompt_len", "sampling", "stop_token_ids", "ignore_eos", "max_new_tokens", "exactness", "push_to", "rows_from", "lease_ms", "deadline_ms", "traceparent", "report_margins", "free_run", "row_window", "fork_of", "priority", "logprobs", "prompt_logprobs", "no_prefix_cache", "colocated")
    KEY_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    PUSH_TO_FIELD_NUMBER: _ClassVar[int]
    ROWS_FROM_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    REPORT_MARGINS_FIELD_NUMBER: _ClassVar[int]
    FREE_RUN_FIELD_NUMBER: _ClassVar[int]
    ROW_WINDOW_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NO_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    ids: bytes
    prompt_len: int
    sampling: _common_pb2.Sampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    max_new_tokens: int
    exactness: _common_pb2.Exactness
    push_to: PushTo
    rows_from: int
    lease_ms: int
    deadline_ms: int
    traceparent: str
    report_margins: bool
    free_run: int
    row_window: int
    fork_of: _common_pb2.SessionKey
    priority: int
    logprobs: int
    prompt_logprobs: int
    no_prefix_cache: bool
    colocated: ColocatedDraft
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., ids: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., max_new_tokens: _Optional[int] = ..., exactness: _Optional[_Union[_common_pb2.Exactness, str]] = ..., push_to: _Optional[_Union[PushTo, _Mapping]] = ..., rows_from: _Optional[int] = ..., lease_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., report_margins: bool = ..., free_run: _Optional[int] = ..., row_window: _Optional[int] = ..., fork_of: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., priority: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., no_prefix_cache: bool = ..., colocated: _Optional[_Union[ColocatedDraft, _Mapping]] = ...) -> None: ...

class ColocatedDraft(_message.Message):
    __slots__ = ("method", "max_draft_tokens", "then_propose")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THEN_PROPOSE_FIELD_NUMBER: _ClassVar[int]
    method: str
    max_draft_tokens: int
    then_propose: int
    def __init__(self, method: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., then_propose: _Optional[int] = ...) -> None: ...

class PushTo(_message.Message):
    __slots__ = ("address", "draft_incarnation", "format")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    address: str
    draft_incarnation: int
    format: _common_pb2.RowFormat
    def __init__(self, address: _Optional[str] = ..., draft_incarnation: _Optional[int] = ..., format: _Optional[_Union[_common_pb2.RowFormat, _Mapping]] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("key", "step_id", "base_len", "draft_ids", "free_run", "then_propose", "deadline_ms", "drafts_ahead", "draft_wait_us")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    FREE_RUN_FIELD_NUMBER: _ClassVar[int]
    THEN_PROPOSE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    step_id: int
    base_len: int
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    free_run: int
    then_propose: int
    deadline_ms: int
    drafts_ahead: bool
    draft_wait_us: int
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., step_id: _Optional[int] = ..., base_len: _Optional[int] = ..., draft_ids: _Optional[_Iterable[int]] = ..., free_run: _Optional[int] = ..., then_propose: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., drafts_ahead: bool = ..., draft_wait_us: _Optional[int] = ...) -> None: ...

class ExportRows(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., **kwargs) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("coordinator", "sessions", "lease_ms")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    sessions: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionKey]
    lease_ms: int
    def __init__(self, coordinator: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[_common_pb2.SessionKey, _Mapping]]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class TargetServiceLinkResponse(_message.Message):
    __slots__ = ("incarnation", "replies", "load")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    replies: _containers.RepeatedCompositeFieldContainer[TargetReply]
    load: TargetLoad
    def __init__(self, incarnation: _Optional[int] = ..., replies: _Optional[_Iterable[_Union[TargetReply, _Mapping]]] = ..., load: _Optional[_Union[TargetLoad, _Mapping]] = ...) -> None: ...

class TargetReply(_message.Message):
    __slots__ = ("verdict", "refused", "closed", "heartbeat_ack")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    refused: TargetRefused
    closed: TargetClosed
    heartbeat_ack: HeartbeatAck
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., refused: _Optional[_Union[TargetRefused, _Mapping]] = ..., closed: _Optional[_Union[TargetClosed, _Mapping]] = ..., heartbeat_ack: _Optional[_Union[HeartbeatAck, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("key", "step_id", "base_len", "accepted", "tokens", "new_len", "finish", "timings", "margins", "rows_start", "rows_count", "width", "logprobs", "prompt_logprobs", "cached_tokens", "proposal")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_LEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    ROWS_START_FIELD_NUMBER: _ClassVar[int]
    ROWS_COUNT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    step_id: int
    base_len: int
    accepted: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    new_len: int
    finish: _common_pb2.FinishReason
    timings: _common_pb2.Timings
    margins: _containers.RepeatedScalarFieldContainer[float]
    rows_start: int
    rows_count: int
    width: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    cached_tokens: int
    proposal: _common_pb2.Proposal
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., step_id: _Optional[int] = ..., base_len: _Optional[int] = ..., accepted: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., new_len: _Optional[int] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., margins: _Optional[_Iterable[float]] = ..., rows_start: _Optional[int] = ..., rows_count: _Optional[int] = ..., width: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ...) -> None: ...

class TargetRefused(_message.Message):
    __slots__ = ("key", "step_id", "error", "have_len")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    step_id: int
    error: _common_pb2.ItemError
    have_len: int
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., step_id: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ItemError, _Mapping]] = ..., have_len: _Optional[int] = ...) -> None: ...

class TargetClosed(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionKey]
    def __init__(self, unknown: _Optional[_Iterable[_Union[_common_pb2.SessionKey, _Mapping]]] = ...) -> None: ...
