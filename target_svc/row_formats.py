"""What rows may be: told in the handshake, checked where a session is opened."""

from __future__ import annotations

from engine.api import ModelInfo, Projection
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2

_TAPS, _PROJECTED = common_pb2.ROW_ENCODING_TAPS, common_pb2.ROW_ENCODING_PROJECTED
_CONVENTION = common_pb2.TAP_CONVENTION_OUTPUT_OF_LAYER


def projections(info: ModelInfo) -> list[common_pb2.RowFormat]:
    """Of the draft whose `fc` and norm the engine has, if any."""
    own = info.projection
    if own is None:
        return []
    return [
        common_pb2.RowFormat(
            encoding=_PROJECTED,
            convention=_CONVENTION,
            tap_ids=own.taps,
            dtype=common_pb2.D_TYPE_BFLOAT16,
            width=own.width,
            projection=own.fingerprint,
        )
    ]


def checked_taps(
    given: common_pb2.RowFormat, hidden_size: int, layer_count: int, projection: Projection | None
) -> tuple[int, ...]:
    """The tap layers, when the draft and this target mean the same by a row. Raises
    ROWS_REFUSED."""
    encodings = ["TAPS (1)", *(["PROJECTED (2)"] if projection is not None else [])]
    known = given.encoding == _TAPS or (given.encoding == _PROJECTED and projection is not None)
    _check("encoding", given.encoding, known, " or ".join(encodings))
    _check("convention", given.convention, given.convention == _CONVENTION, "OUTPUT_OF_LAYER (1)")
    bfloat16 = given.dtype == common_pb2.D_TYPE_BFLOAT16
    _check("dtype", given.dtype, bfloat16, "BFLOAT16 (3)")
    taps = tuple(given.tap_ids)
    if given.encoding == _PROJECTED and projection is not None:
        of = f"of the draft {projection.fingerprint}"
        named = given.projection == projection.fingerprint
        _check("projection", given.projection, named, projection.fingerprint)
        _check("tap_ids", list(taps), taps == projection.taps, f"{list(projection.taps)}, {of}")
        width = projection.width
    else:
        rising = bool(taps) and list(taps) == sorted(set(taps)) and taps[-1] < layer_count
        _check("tap_ids", list(taps), rising, f"rising layer ids below {layer_count}")
        width, of = len(taps) * hidden_size, f"{len(taps)} taps of {hidden_size}"
    _check("width", given.width, given.width == width, f"{width} ({of})")
    return taps


def _check(name: str, value: object, fits: bool, accepted: str) -> None:
    if not fits:
        raise SpecwireError.field(f"push_to.format.{name}", value, accepted, Reason.ROWS_REFUSED)
