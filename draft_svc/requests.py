"""Checks of what peers send, before anything is done with it."""

from __future__ import annotations

import math

from draft_svc.methods.base import MethodInfo, RowBlock
from engine.api import Sampling
from specwire.errors import Reason, SpecwireError
from specwire.tensors import rows_from_bytes
from specwire.v1 import common_pb2, draft_pb2

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


def sampling_of(message: common_pb2.Sampling) -> Sampling:
    """The sampling options of a session with the documented defaults filled in."""
    temperature = message.temperature if message.HasField("temperature") else 1.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0):
        raise SpecwireError.field("sampling.temperature", temperature, "a finite number >= 0")
    if not 0 < top_p <= 1:
        raise SpecwireError.field("sampling.top_p", top_p, "a number in (0, 1]")
    return Sampling(
        temperature=temperature,
        top_k=message.top_k,
        top_p=top_p,
        seed=message.seed,
        choice=message.choice,
    )


def row_block(chunk: draft_pb2.FeatureChunk, info: MethodInfo) -> RowBlock:
    """The rows of a chunk as the method reads them; `info.rows` is set."""
    assert info.rows is not None
    if chunk.count == 0:
        raise SpecwireError.field("count", 0, "at least one row", Reason.ROWS_REFUSED)
    try:
        rows = rows_from_bytes(chunk.rows, chunk.count, info.rows.width, DTYPES[info.rows.dtype])
    except SpecwireError as error:
        raise SpecwireError(
            Reason.ROWS_REFUSED, error.message, {**error.metadata, "cause": "width"}
        ) from error
    return RowBlock(chunk.start, rows)
