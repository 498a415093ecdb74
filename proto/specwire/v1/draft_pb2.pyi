from specwire.v1 import common_pb2 as _common_pb2
from specwire.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SlotMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_MODE_UNSPECIFIED: _ClassVar[SlotMode]
    SLOT_MODE_FILL_IN: _ClassVar[SlotMode]
    SLOT_MODE_NEXT_TOKEN: _ClassVar[SlotMode]
SLOT_MODE_UNSPECIFIED: SlotMode
SLOT_MODE_FILL_IN: SlotMode
SLOT_MODE_NEXT_TOKEN: SlotMode

class DraftServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetInfoResponse(_message.Message):
    __slots__ = ("worker", "drafters", "load", "push_address")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PUSH_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerInfo
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterInfo]
    load: DraftLoad
    push_address: str
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[DrafterInfo, _Mapping]]] = ..., load: _Optional[_Union[DraftLoad, _Mapping]] = ..., push_address: _Optional[str] = ...) -> None: ...

class DraftLoad(_message.Message):
    __slots__ = ("sessions", "pages_free", "pages_total")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    pages_free: int
    pages_total: int
    def __init__(self, sessions: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_total: _Optional[int] = ...) -> None: ...

class DrafterInfo(_message.Message):
    __slots__ = ("method", "name", "needs_rows", "row_format", "max_draft_tokens", "max_length_tokens", "fingerprint", "target_hidden_size", "target_layer_count", "target_vocab_size", "target_fingerprint", "tokenizer_hash", "slot_mode", "block_size", "mask_token_id", "rope_style", "rope_theta", "rope_scaling", "attention", "d2t_hash", "layer_attention", "is_default", "costs", "projected_width")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NEEDS_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TARGET_HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    TARGET_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    SLOT_MODE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ROPE_STYLE_FIELD_NUMBER: _ClassVar[int]
    ROPE_THETA_FIELD_NUMBER: _ClassVar[int]
    ROPE_SCALING_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    D2T_HASH_FIELD_NUMBER: _ClassVar[int]
    LAYER_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    PROJECTED_WIDTH_FIELD_NUMBER: _ClassVar[int]
    method: str
    name: str
    needs_rows: bool
    row_format: _common_pb2.RowFormat
    max_draft_tokens: int
    max_length_tokens: int
    fingerprint: str
    target_hidden_size: int
    target_layer_count: int
    target_vocab_size: int
    target_fingerprint: str
    tokenizer_hash: str
    slot_mode: SlotMode
    block_size: int
    mask_token_id: int
    rope_style: str
    rope_theta: float
    rope_scaling: str
    attention: _common_pb2.AttentionReport
    d2t_hash: str
    layer_attention: _containers.RepeatedScalarFieldContainer[str]
    is_default: bool
    costs: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepCost]
    projected_width: int
    def __init__(self, method: _Optional[str] = ..., name: _Optional[str] = ..., needs_rows: bool = ..., row_format: _Optional[_Union[_common_pb2.RowFormat, _Mapping]] = ..., max_draft_tokens: _Optional[int] = ..., max_length_tokens: _Optional[int] = ..., fingerprint: _Optional[str] = ..., target_hidden_size: _Optional[int] = ..., target_layer_count: _Optional[int] = ..., target_vocab_size: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., slot_mode: _Optional[_Union[SlotMode, str]] = ..., block_size: _Optional[int] = ..., mask_token_id: _Optional[int] = ..., rope_style: _Optional[str] = ..., rope_theta: _Optional[float] = ..., rope_scaling: _Optional[str] = ..., attention: _Optional[_Union[_common_pb2.AttentionReport, _Mapping]] = ..., d2t_hash: _Optional[str] = ..., layer_attention: _Optional[_Iterable[str]] = ..., is_default: bool = ..., costs: _Optional[_Iterable[_Union[_common_pb2.StepCost, _Mapping]]] = ..., projected_width: _Optional[int] = ...) -> None: ...

class DraftServiceLinkRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftItem]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftItem, _Mapping]]] = ...) -> None: ...

class DraftItem(_message.Message):
    __slots__ = ("open", "advance", "close", "heartbeat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    open: OpenDraft
    advance: Advance
    close: _target_pb2.CloseSession
    heartbeat: _target_pb2.Heartbeat
    def __init__(self, open: _Optional[_Union[OpenDraft, _Mapping]] = ..., advance: _Optional[_Union[Advance, _Mapping]] = ..., close: _Optional[_Union[_target_pb2.CloseSession, _Mapping]] = ..., heartbeat: _Optional[_Union[_target_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class OpenDraft(_message.Message):
    __slots__ = ("key", "method", "ids", "sampling", "max_draft_tokens", "lease_ms", "target_incarnation", "target_fingerprint", "deadline_ms", "traceparent", "row_encoding")
    KEY_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ROW_ENCODING_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    method: str
    ids: bytes
    sampling: _common_pb2.Sampling
    max_draft_tokens: int
    lease_ms: int
    target_incarnation: int
    target_fingerprint: str
    deadline_ms: int
    traceparent: str
    row_encoding: _common_pb2.RowEncoding
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., method: _Optional[str] = ..., ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_draft_tokens: _Optional[int] = ..., lease_ms: _Optional[int] = ..., target_incarnation: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., row_encoding: _Optional[_Union[_common_pb2.RowEncoding, str]] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("key", "step_id", "base_len", "tokens", "k", "deadline_ms", "rows_start", "rows_count")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    ROWS_START_FIELD_NUMBER: _ClassVar[int]
    ROWS_COUNT_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    step_id: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    k: int
    deadline_ms: int
    rows_start: int
    rows_count: int
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., step_id: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., k: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., rows_start: _Optional[int] = ..., rows_count: _Optional[int] = ...) -> None: ...

class DraftServiceLinkResponse(_message.Message):
    __slots__ = ("incarnation", "replies", "load")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    replies: _containers.RepeatedCompositeFieldContainer[DraftReply]
    load: DraftLoad
    def __init__(self, incarnation: _Optional[int] = ..., replies: _Optional[_Iterable[_Union[DraftReply, _Mapping]]] = ..., load: _Optional[_Union[DraftLoad, _Mapping]] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("opened", "proposal", "refused", "closed", "heartbeat_ack")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    opened: DraftOpened
    proposal: _common_pb2.Proposal
    refused: DraftRefused
    closed: DraftClosed
    heartbeat_ack: _target_pb2.HeartbeatAck
    def __init__(self, opened: _Optional[_Union[DraftOpened, _Mapping]] = ..., proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., refused: _Optional[_Union[DraftRefused, _Mapping]] = ..., closed: _Optional[_Union[DraftClosed, _Mapping]] = ..., heartbeat_ack: _Optional[_Union[_target_pb2.HeartbeatAck, _Mapping]] = ...) -> None: ...

class DraftOpened(_message.Message):
    __slots__ = ("key", "have_rows")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HAVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    have_rows: int
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., have_rows: _Optional[int] = ...) -> None: ...

class DraftRefused(_message.Message):
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

class DraftClosed(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ...) -> None: ...

class PushFeaturesRequest(_message.Message):
    __slots__ = ("target_incarnation", "chunks", "asks")
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    target_incarnation: int
    chunks: _containers.RepeatedCompositeFieldContainer[FeatureChunk]
    asks: _containers.RepeatedCompositeFieldContainer[Advance]
    def __init__(self, target_incarnation: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[FeatureChunk, _Mapping]]] = ..., asks: _Optional[_Iterable[_Union[Advance, _Mapping]]] = ...) -> None: ...

class FeatureChunk(_message.Message):
    __slots__ = ("key", "step_id", "start", "count", "rows")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    step_id: int
    start: int
    count: int
    rows: bytes
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., step_id: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class PushFeaturesResponse(_message.Message):
    __slots__ = ("acks", "replies")
    ACKS_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedCompositeFieldContainer[FeatureAck]
    replies: _containers.RepeatedCompositeFieldContainer[DraftReply]
    def __init__(self, acks: _Optional[_Iterable[_Union[FeatureAck, _Mapping]]] = ..., replies: _Optional[_Iterable[_Union[DraftReply, _Mapping]]] = ...) -> None: ...

class FeatureAck(_message.Message):
    __slots__ = ("key", "step_id", "credit_bytes", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SessionKey
    step_id: int
    credit_bytes: int
    error: _common_pb2.ItemError
    def __init__(self, key: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., step_id: _Optional[int] = ..., credit_bytes: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ItemError, _Mapping]] = ...) -> None: ...
