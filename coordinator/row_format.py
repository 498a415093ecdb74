"""What a target sends a draft service as rows."""

from __future__ import annotations

from specwire.v1 import common_pb2, draft_pb2, target_pb2


def row_format(
    target: target_pb2.TargetServiceGetInfoResponse | None, drafter: draft_pb2.DrafterInfo
) -> common_pb2.RowFormat:
    """What the drafter's own `fc` and norm make of the layers' outputs, where the target has those
    of just this draft and they are narrower. Else the outputs."""
    for offered in target.projections if target is not None else ():
        known = offered.encoding == common_pb2.ROW_ENCODING_PROJECTED
        its_own = (offered.projection, offered.width) == (
            drafter.fingerprint,
            drafter.projected_width,
        )
        if known and its_own and offered.width < drafter.row_format.width:
            return offered
    return drafter.row_format
