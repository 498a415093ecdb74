"""Checks of what peers send, before anything is done with it."""

from __future__ import annotations

from draft_svc.methods.base import MethodInfo, RowBlock, RowNeeds
from engine.api import Sampling
from specwire.errors import Reason, SpecwireError
from specwire.sampling import complete
from specwire.tensors import rows_from_bytes
from specwire.v1 import common_pb2, draft_pb2

_ANY_ID = 1 << 32

DTYPES = {
    "float32": common_pb2.D_TYPE_FLOAT32,
    "float16": common_pb2.D_TYPE_FLOAT16,
    "bfloat16": common_pb2.D_TYPE_BFLOAT16,
}


def checked_ids(ids: list[int], field: str, info: MethodInfo) -> list[int]:
    """Token ids that the method's vocabulary holds; a method without one takes any."""
    vocab = info.known_vocab_size
    if vocab and ids and max(ids) >= vocab:
        accepted = f"token ids from 0 to {vocab - 1}"
        raise SpecwireError.field(field, max(ids), accepted, Reason.VOCAB_RANGE)
    return ids


def sampling_of(message: common_pb2.Sampling, info: MethodInfo) -> Sampling:
    """The sampling options of a session, checked as the target checks them.

    They are hints here: what a drafter cannot follow costs acceptance only.
    """
    given = complete(message, info.known_vocab_size or _ANY_ID)
    return Sampling(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        choice=given.choice,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=tuple(sorted(given.logit_bias.items())),
        bad_sequences=tuple(tuple(sequence.ids) for sequence in given.bad_sequences),
    )


def takes_projected(request: draft_pb2.OpenDraft, info: MethodInfo) -> bool:
    """Whether the session's rows have the draft's `fc` and norm applied. Raises SpecwireError for
    an encoding that the method does not read."""
    encodings, asked = [common_pb2.ROW_ENCODING_TAPS], request.row_encoding
    if info.rows is not None and info.rows.projected_width:
        encodings.append(common_pb2.ROW_ENCODING_PROJECTED)
    if asked and asked not in encodings:
        accepted = " or ".join(f"{common_pb2.RowEncoding.Name(e)} ({e})" for e in encodings)
        raise SpecwireError.field("row_encoding", asked, accepted, Reason.ROWS_REFUSED)
    return asked == common_pb2.ROW_ENCODING_PROJECTED


def row_block(chunk: draft_pb2.FeatureChunk, needs: RowNeeds, projected: bool) -> RowBlock:
    """The rows of a chunk as the method reads them."""
    if chunk.count == 0:
        raise SpecwireError.field("count", 0, "at least one row", Reason.ROWS_REFUSED)
    try:
        width = needs.projected_width if projected else needs.width
        rows = rows_from_bytes(chunk.rows, chunk.count, width, DTYPES[needs.dtype])
    except SpecwireError as error:
        raise SpecwireError(
            Reason.ROWS_REFUSED, error.message, {**error.metadata, "cause": "width"}
        ) from error
    return RowBlock(chunk.start, rows, projected)
