"""Which workers fit together: comparisons of what they say of themselves, before the first token.

Both values stand in every refusal. Backends, dtypes of weights and devices are never compared: they
are each service's own. So are a draft's RoPE, which its own checkpoint alone decides, and the id
map of its trimmed head, whose ids are checked one by one where they are used.
"""

from __future__ import annotations

from specwire.errors import Reason, SpecwireError
from specwire.rpc import PROTOCOL_MAJOR
from specwire.v1 import common_pb2, draft_pb2, target_pb2

_SLOTS = draft_pb2.SlotMode.Name


def check_worker(role: str, worker: common_pb2.WorkerInfo) -> None:
    if worker.protocol_major != PROTOCOL_MAJOR:
        theirs = worker.protocol_major
        text = f"protocol: the {role} speaks major {theirs}, this coordinator {PROTOCOL_MAJOR}"
        raise SpecwireError(Reason.MODEL_MISMATCH, text)
    if not worker.incarnation:
        text = f"the {role} names no incarnation (0); accepted: a nonzero number"
        raise SpecwireError(Reason.MODEL_MISMATCH, text)


def check_attention(role: str, report: common_pb2.AttentionReport) -> None:
    """A worker that runs another backend than it was asked to is not used. Nothing is compared
    between workers: backend, KV and graphs are each one's own.
    """
    asked = report.requested.upper()
    if asked not in ("", "AUTO", "INHERIT") and report.chosen.upper() != asked:
        text = f"attention: the {role} was asked for {report.requested}, it runs {report.chosen!r}"
        raise SpecwireError(
            Reason.BACKEND_UNAVAILABLE,
            text,
            {"field": "attention", "requested": report.requested, "chosen": report.chosen},
        )


def check_target(info: target_pb2.TargetServiceGetInfoResponse) -> None:
    check_worker("target", info.worker)
    check_attention("target", info.attention)
    if info.drive == target_pb2.TargetServiceGetInfoResponse.DRIVE_ENGINE:
        text = (
            "drive: the target drives its own loop (ENGINE), this coordinator drives (COORDINATOR)"
        )
        raise SpecwireError(Reason.UNSUPPORTED, text)
    sizes = {"vocabulary": info.model.vocab_size, "maximum length": info.model.max_length_tokens}
    for name, size in sizes.items():
        if not size:
            text = f"{name}: the target has {size}; accepted: 1 or more"
            raise SpecwireError(Reason.MODEL_MISMATCH, text, {"field": name, "target": str(size)})


def check_drafter(
    target: target_pb2.TargetServiceGetInfoResponse,
    drafter: draft_pb2.DrafterInfo,
    *,
    colocated: bool = False,
) -> None:
    """Raises MODEL_MISMATCH for a drafter made for another target. Zero and empty mean: any.

    Rows of a co-located drafter are never encoded: it has the layers' outputs themselves.
    """
    check_attention(f"{drafter.method} draft", drafter.attention)
    model = target.model
    pairs: list[tuple[str, object, object]] = [
        ("hidden size", drafter.target_hidden_size, model.hidden_size),
        ("layer count", drafter.target_layer_count, model.layer_count),
        ("vocabulary", drafter.target_vocab_size, model.vocab_size),
        ("tokenizer", drafter.tokenizer_hash, model.tokenizer_hash),
        ("target fingerprint", drafter.target_fingerprint, model.fingerprint),
    ]
    for name, wanted, has in pairs:
        if wanted and has and wanted != has:
            raise _mismatch(drafter, name, wanted, has)
    _check_block(drafter)
    if drafter.HasField("mask_token_id") and drafter.mask_token_id >= model.vocab_size:
        has = f"ids below {model.vocab_size}"
        raise _mismatch(drafter, "mask_token_id", drafter.mask_token_id, has)
    if drafter.needs_rows and (drafter.row_format.tap_ids or not colocated):
        _check_taps(target, drafter)
    if drafter.needs_rows and not colocated:
        _check_rows(target, drafter)


def _check_block(drafter: draft_pb2.DrafterInfo) -> None:
    """A block of B slots proposes B tokens, or B - 1 where the first slot is the anchor's."""
    k, block = drafter.max_draft_tokens, drafter.block_size
    if not k:
        raise _mismatch(drafter, "max_draft_tokens", 0, "1 or more")
    most = block - (drafter.slot_mode == draft_pb2.SLOT_MODE_FILL_IN)
    if block and k > most:
        text = f"max_draft_tokens {k}"
        accepted = f"{most}, its block of {block} slots in {_SLOTS(drafter.slot_mode)}"
        raise _mismatch(drafter, "block size", text, accepted)


def _check_taps(
    target: target_pb2.TargetServiceGetInfoResponse, drafter: draft_pb2.DrafterInfo
) -> None:
    rows = drafter.row_format
    taps = list(rows.tap_ids)
    name = common_pb2.TapConvention.Name
    convention = common_pb2.TAP_CONVENTION_OUTPUT_OF_LAYER
    if rows.convention != convention:
        raise _mismatch(drafter, "tap convention", name(rows.convention), name(convention))
    if not taps or taps != sorted(set(taps)) or taps[-1] >= target.tap_layer_count:
        accepted = f"rising layer ids below {target.tap_layer_count}"
        raise _mismatch(drafter, "tap ids", taps, accepted)


def _check_rows(
    target: target_pb2.TargetServiceGetInfoResponse, drafter: draft_pb2.DrafterInfo
) -> None:
    rows = drafter.row_format
    if rows.encoding not in target.row_encodings:
        offered = [common_pb2.RowEncoding.Name(value) for value in target.row_encodings]
        wanted = common_pb2.RowEncoding.Name(rows.encoding)
        raise _mismatch(drafter, "row encoding", wanted, offered)
    if rows.dtype != target.row_dtype:
        dtype = common_pb2.DType.Name
        raise _mismatch(drafter, "row dtype", dtype(rows.dtype), dtype(target.row_dtype))
    taps = len(rows.tap_ids)
    width = taps * target.model.hidden_size
    if rows.width != width:
        raise _mismatch(drafter, "row width", rows.width, f"{width} ({taps} taps)")


def _mismatch(
    drafter: draft_pb2.DrafterInfo, name: str, wanted: object, has: object
) -> SpecwireError:
    text = f"{drafter.method}: {name}: the draft has {wanted}, the target {has}"
    return SpecwireError(
        Reason.MODEL_MISMATCH,
        text,
        {"field": name, "draft": str(wanted), "target": str(has), "method": drafter.method},
    )
