from specwire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "chat", "tokens", "sampling", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "exactness", "speculation", "return_token_ids", "return_margins", "n", "logprobs", "prompt_logprobs", "bad_words", "priority", "structured_output", "include_stop")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RETURN_MARGINS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: str
    chat: ChatInput
    tokens: TokenInput
    sampling: _common_pb2.Sampling
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    exactness: _common_pb2.Exactness
    speculation: Speculation
    return_token_ids: bool
    return_margins: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    structured_output: StructuredOutput
    include_stop: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., tokens: _Optional[_Union[TokenInput, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., exactness: _Optional[_Union[_common_pb2.Exactness, str]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., return_token_ids: bool = ..., return_margins: bool = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., include_stop: bool = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choice")
    class Choices(_message.Message):
        __slots__ = ("values",)
        VALUES_FIELD_NUMBER: _ClassVar[int]
        values: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: StructuredOutput.Choices
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[StructuredOutput.Choices, _Mapping]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class TokenInput(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("method", "num_speculative_tokens")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    method: str
    num_speculative_tokens: int
    def __init__(self, method: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("delta", "finished", "choice")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    delta: Delta
    finished: Finished
    choice: int
    def __init__(self, delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., choice: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids", "accepted_count", "margins", "accepted_chars", "logprobs", "later_accepted")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_CHARS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LATER_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepted_count: int
    margins: _containers.RepeatedScalarFieldContainer[float]
    accepted_chars: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    later_accepted: _containers.RepeatedCompositeFieldContainer[AcceptedSpan]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted_count: _Optional[int] = ..., margins: _Optional[_Iterable[float]] = ..., accepted_chars: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., later_accepted: _Optional[_Iterable[_Union[AcceptedSpan, _Mapping]]] = ...) -> None: ...

class AcceptedSpan(_message.Message):
    __slots__ = ("start", "count", "start_char", "chars")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    START_CHAR_FIELD_NUMBER: _ClassVar[int]
    CHARS_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    start_char: int
    chars: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., start_char: _Optional[int] = ..., chars: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id", "usage", "acceptance", "sampling", "request_id", "exactness", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words", "priority", "prompt_logprobs")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    acceptance: AcceptanceRecord
    sampling: _common_pb2.Sampling
    request_id: str
    exactness: _common_pb2.Exactness
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., acceptance: _Optional[_Union[AcceptanceRecord, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., request_id: _Optional[str] = ..., exactness: _Optional[_Union[_common_pb2.Exactness, str]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., bad_words: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class AcceptanceRecord(_message.Message):
    __slots__ = ("method", "rounds", "draft_tokens", "accepted_tokens", "tau", "drafted_by_position", "accepted_by_position", "fallbacks", "phase_ms", "per_step_drafted", "per_step_accepted", "ttft_ms", "total_ms", "accepted_by_source", "target_moves", "placement", "per_step_outside_us")
    class FallbacksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PhaseMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class AcceptedBySourceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    PHASE_MS_FIELD_NUMBER: _ClassVar[int]
    PER_STEP_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PER_STEP_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_MOVES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    PER_STEP_OUTSIDE_US_FIELD_NUMBER: _ClassVar[int]
    method: str
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    tau: float
    drafted_by_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    fallbacks: _containers.ScalarMap[str, int]
    phase_ms: _containers.ScalarMap[str, float]
    per_step_drafted: _containers.RepeatedScalarFieldContainer[int]
    per_step_accepted: _containers.RepeatedScalarFieldContainer[int]
    ttft_ms: float
    total_ms: float
    accepted_by_source: _containers.ScalarMap[str, int]
    target_moves: int
    placement: str
    per_step_outside_us: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, method: _Optional[str] = ..., rounds: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., tau: _Optional[float] = ..., drafted_by_position: _Optional[_Iterable[int]] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., fallbacks: _Optional[_Mapping[str, int]] = ..., phase_ms: _Optional[_Mapping[str, float]] = ..., per_step_drafted: _Optional[_Iterable[int]] = ..., per_step_accepted: _Optional[_Iterable[int]] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., accepted_by_source: _Optional[_Mapping[str, int]] = ..., target_moves: _Optional[int] = ..., placement: _Optional[str] = ..., per_step_outside_us: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerationServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerationServiceGetInfoResponse(_message.Message):
    __slots__ = ("version", "protocol_major", "protocol_minor", "model", "workers", "methods", "default_method", "default_exactness", "contract_levels", "default_num_speculative_tokens")
    class Worker(_message.Message):
        __slots__ = ("role", "address", "state", "reason", "attention", "methods", "device", "sessions", "waiting", "pages_free", "pages_total", "placement")
        ROLE_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        ATTENTION_FIELD_NUMBER: _ClassVar[int]
        METHODS_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        SESSIONS_FIELD_NUMBER: _ClassVar[int]
        WAITING_FIELD_NUMBER: _ClassVar[int]
        PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
        PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
        PLACEMENT_FIELD_NUMBER: _ClassVar[int]
        role: str
        address: str
        state: str
        reason: str
        attention: _common_pb2.AttentionReport
        methods: _containers.RepeatedScalarFieldContainer[str]
        device: str
        sessions: int
        waiting: int
        pages_free: int
        pages_total: int
        placement: str
        def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., attention: _Optional[_Union[_common_pb2.AttentionReport, _Mapping]] = ..., methods: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., sessions: _Optional[int] = ..., waiting: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_total: _Optional[int] = ..., placement: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_LEVELS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol_major: int
    protocol_minor: int
    model: _common_pb2.ModelInfo
    workers: _containers.RepeatedCompositeFieldContainer[GenerationServiceGetInfoResponse.Worker]
    methods: _containers.RepeatedScalarFieldContainer[str]
    default_method: str
    default_exactness: _common_pb2.Exactness
    contract_levels: _containers.RepeatedScalarFieldContainer[str]
    default_num_speculative_tokens: int
    def __init__(self, version: _Optional[str] = ..., protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[GenerationServiceGetInfoResponse.Worker, _Mapping]]] = ..., methods: _Optional[_Iterable[str]] = ..., default_method: _Optional[str] = ..., default_exactness: _Optional[_Union[_common_pb2.Exactness, str]] = ..., contract_levels: _Optional[_Iterable[str]] = ..., default_num_speculative_tokens: _Optional[int] = ...) -> None: ...
