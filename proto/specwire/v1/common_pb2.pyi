from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Exactness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_UNSPECIFIED: _ClassVar[Exactness]
    EXACTNESS_EXACT: _ClassVar[Exactness]
    EXACTNESS_FAST: _ClassVar[Exactness]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_FLOAT32: _ClassVar[DType]
    D_TYPE_FLOAT16: _ClassVar[DType]
    D_TYPE_BFLOAT16: _ClassVar[DType]

class TapConvention(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TAP_CONVENTION_UNSPECIFIED: _ClassVar[TapConvention]
    TAP_CONVENTION_OUTPUT_OF_LAYER: _ClassVar[TapConvention]

class RowEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_ENCODING_UNSPECIFIED: _ClassVar[RowEncoding]
    ROW_ENCODING_TAPS: _ClassVar[RowEncoding]
    ROW_ENCODING_PROJECTED: _ClassVar[RowEncoding]
EXACTNESS_UNSPECIFIED: Exactness
EXACTNESS_EXACT: Exactness
EXACTNESS_FAST: Exactness
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
D_TYPE_UNSPECIFIED: DType
D_TYPE_FLOAT32: DType
D_TYPE_FLOAT16: DType
D_TYPE_BFLOAT16: DType
TAP_CONVENTION_UNSPECIFIED: TapConvention
TAP_CONVENTION_OUTPUT_OF_LAYER: TapConvention
ROW_ENCODING_UNSPECIFIED: RowEncoding
ROW_ENCODING_TAPS: RowEncoding
ROW_ENCODING_PROJECTED: RowEncoding

class SessionKey(_message.Message):
    __slots__ = ("coordinator", "session_id", "generation")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    session_id: int
    generation: int
    def __init__(self, coordinator: _Optional[int] = ..., session_id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "choice", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_sequences", "min_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    text: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., text: _Optional[str] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    text: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("rows", "sessions", "context_tokens", "compute_ns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    sessions: int
    context_tokens: int
    compute_ns: int
    def __init__(self, rows: _Optional[int] = ..., sessions: _Optional[int] = ..., context_tokens: _Optional[int] = ..., compute_ns: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("reason", "message", "metadata", "retry_after_ms")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    retry_after_ms: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ns", "compute_ns", "once_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    ONCE_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    compute_ns: int
    once_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., once_ns: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "tokenizer_hash", "vocab_size", "hidden_size", "layer_count", "max_length_tokens", "eos_token_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    hidden_size: int
    layer_count: int
    max_length_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., layer_count: _Optional[int] = ..., max_length_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AttentionReport(_message.Message):
    __slots__ = ("requested", "policy", "chosen", "candidates", "kv_dtype", "kv_bytes_per_token", "page_size_tokens", "graph_mode", "notes")
    class Candidate(_message.Message):
        __slots__ = ("name", "reasons")
        NAME_FIELD_NUMBER: _ClassVar[int]
        REASONS_FIELD_NUMBER: _ClassVar[int]
        name: str
        reasons: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, name: _Optional[str] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_MODE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    requested: str
    policy: str
    chosen: str
    candidates: _containers.RepeatedCompositeFieldContainer[AttentionReport.Candidate]
    kv_dtype: str
    kv_bytes_per_token: int
    page_size_tokens: int
    graph_mode: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requested: _Optional[str] = ..., policy: _Optional[str] = ..., chosen: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[AttentionReport.Candidate, _Mapping]]] = ..., kv_dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., page_size_tokens: _Optional[int] = ..., graph_mode: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "incarnation", "version", "device")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    incarnation: int
    version: str
    device: str
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., incarnation: _Optional[int] = ..., version: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class RowFormat(_message.Message):
    __slots__ = ("encoding", "convention", "tap_ids", "dtype", "width", "projection")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    CONVENTION_FIELD_NUMBER: _ClassVar[int]
    TAP_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    encoding: RowEncoding
    convention: TapConvention
    tap_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: DType
    width: int
    projection: str
    def __init__(self, encoding: _Optional[_Union[RowEncoding, str]] = ..., convention: _Optional[_Union[TapConvention, str]] = ..., tap_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DType, str]] = ..., width: _Optional[int] = ..., projection: _Optional[str] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("key", "step_id", "base_len", "ids", "confidences", "timings", "reason", "source")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    key: SessionKey
    step_id: int
    base_len: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    timings: Timings
    reason: str
    source: str
    def __init__(self, key: _Optional[_Union[SessionKey, _Mapping]] = ..., step_id: _Optional[int] = ..., base_len: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., reason: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...
