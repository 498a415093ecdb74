"""Hidden-state rows as bytes. The only module of the contract that uses numpy.

numpy has no bfloat16: 16-bit floats are carried as uint16 and viewed by whoever computes with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from specwire.errors import SpecwireError
from specwire.rpc import CHUNK_BYTES
from specwire.v1 import common_pb2

Rows = np.ndarray[Any, np.dtype[Any]]

# Little-endian on the wire, whatever the machine.
_WIRE: dict[int, np.dtype[Any]] = {
    common_pb2.D_TYPE_FLOAT32: np.dtype("<f4"),
    common_pb2.D_TYPE_FLOAT16: np.dtype("<u2"),
    common_pb2.D_TYPE_BFLOAT16: np.dtype("<u2"),
}


_CARRIED = np.dtype("u2"), np.dtype("f4")


def wire_dtype(dtype: int) -> np.dtype[Any]:
    """The numpy dtype that carries a `DType` of the contract."""
    found = _WIRE.get(dtype)
    if found is None:
        raise SpecwireError.field("dtype", dtype, "FLOAT32 (1), FLOAT16 (2) or BFLOAT16 (3)")
    return found


def rows_to_bytes(rows: Rows) -> bytes:
    """Rows [n, width] of uint16 (16-bit floats) or float32."""
    if rows.ndim != 2 or rows.dtype not in _CARRIED:
        given = f"{rows.dtype} with {rows.ndim} dimensions"
        raise SpecwireError.field("rows", given, "uint16 or float32 with 2 dimensions")
    if sys.byteorder == "little":
        return rows.tobytes()
    return rows.astype(rows.dtype.newbyteorder("<")).tobytes()


def rows_from_bytes(data: bytes, count: int, width: int, dtype: int) -> Rows:
    """A read-only view [count, width] of the bytes; copy it before writing."""
    kind = wire_dtype(dtype)
    expected = count * width * kind.itemsize
    if len(data) != expected:
        accepted = f"{expected} bytes ({count} rows of {width} values)"
        raise SpecwireError.field("rows", f"{len(data)} bytes", accepted)
    return np.frombuffer(data, dtype=kind).reshape(count, width)


def chunk_rows(rows: Rows, limit_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, Rows]]:
    """Cuts rows into (offset, part), each part at most `limit_bytes` (but at least one row)."""
    row_bytes = max(1, rows.shape[1] * rows.dtype.itemsize)
    step = max(1, limit_bytes // row_bytes)
    for offset in range(0, rows.shape[0], step):
        yield offset, rows[offset : offset + step]
