"""From the words of `specwire backends` to requests: flags, and vLLM's keys beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine.attention.checkpoint import Checkpoint, read_checkpoint
from engine.attention.devices import DeviceProfile, simulated
from engine.attention.graphs import BLOCK_DRAFTERS
from engine.attention.made_for import check_made_for
from engine.attention.outcome import Outcome, judge, kv_group
from engine.attention.request import KVGroup, Request
from engine.attention.tables import EngineName
from engine.errors import BackendUnavailable

DEFAULT_DRAFT_TOKENS = 7


class UsageError(BackendUnavailable):
    """A call that contradicts itself or names something unknown."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One call. Empty and None: not given. `target_*` are the target's own settings."""

    device: str
    role: str = "target"
    model: str = ""
    targets: tuple[str, ...] = ()
    attention_backend: str | None = None
    kv_dtype: str = "auto"
    cuda_graph_mode: str = "auto"
    page_tokens: int | None = None
    dcp: int = 1
    tp: int | None = None
    draft_tokens: int | None = None
    method: str = ""
    colocated: bool = False
    group: str = ""
    engine: str = "auto"
    target_attention_backend: str | None = None
    target_kv_dtype: str = "auto"
    target_dcp: int | None = None
    adaptive_verification: bool = False


@dataclass(frozen=True, slots=True)
class Pairing:
    """What was asked for, and the target it was judged beside."""

    outcome: Outcome
    target: Outcome | None = None

    @property
    def resolved(self) -> bool:
        return self.outcome.resolved and (self.target is None or self.target.resolved)


def check_matrix(asked: Asked) -> None:
    """Raises UsageError for flags that a matrix would ignore."""
    if asked != Asked(asked.device, dcp=asked.dcp, kv_dtype=asked.kv_dtype):
        raise UsageError("--matrix goes with --device, --dcp, --kv-dtype and --json only")


def answer(asked: Asked) -> list[Pairing]:
    """One pairing for each target named, or one without. Raises EngineError for what cannot be
    read, UsageError for a call that makes no sense."""
    _check(asked)
    device = simulated(asked.device)
    role: Literal["target", "draft"] = "draft" if asked.role == "draft" else "target"
    checkpoint = read_checkpoint(Path(asked.model).expanduser(), draft=role == "draft")
    request = _request(asked, checkpoint, role, device)
    if role == "target" or not asked.targets:
        if asked.colocated and role == "draft":
            raise UsageError("--colocated needs --target, the model it shares a process with")
        return [Pairing(judge(request, device))]
    k = asked.draft_tokens or _block(checkpoint)
    pairs = []
    for name in asked.targets:
        other = read_checkpoint(Path(name).expanduser(), draft=False)
        if checkpoint.method in BLOCK_DRAFTERS:
            check_made_for(checkpoint.config, other.config)
        beside = _target(asked, other, k, device)
        pairs.append(pair(request, beside, device, asked.colocated, asked.group))
    return pairs


def pair(
    draft: Request, target: Request, device: DeviceProfile, colocated: bool, group: str = ""
) -> Pairing:
    """Judges the target for itself, then the draft beside what the target resolved."""
    beside = judge(target, device)
    kind = KVGroup(group) if group else kv_group(draft, target, colocated)
    return Pairing(judge(replace(draft, kv_group=kind), device, beside.resolution), beside)


def _target(asked: Asked, checkpoint: Checkpoint, k: int, device: DeviceProfile) -> Request:
    """The target's own request: nothing of the draft's goes into it but the block it verifies."""
    own = replace(
        asked,
        attention_backend=asked.target_attention_backend,
        kv_dtype=asked.target_kv_dtype,
        cuda_graph_mode="auto",
        page_tokens=None,
        dcp=asked.target_dcp or asked.dcp,
        draft_tokens=k,
    )
    return _request(own, checkpoint, "target", device)


def _request(
    asked: Asked,
    checkpoint: Checkpoint,
    role: Literal["target", "draft"],
    device: DeviceProfile,
) -> Request:
    method = asked.method if role == "draft" and asked.method else checkpoint.method
    if method in BLOCK_DRAFTERS and checkpoint.method not in BLOCK_DRAFTERS:
        raise UsageError(f"method is {method!r}, the checkpoint is an ordinary model")
    checkpoint = replace(checkpoint, method=method)
    if role == "target":
        tokens = DEFAULT_DRAFT_TOKENS if asked.draft_tokens is None else asked.draft_tokens
        rows = tokens + 1
    else:
        rows = checkpoint.query_tokens(asked.draft_tokens or _block(checkpoint))
    engine: EngineName = "native" if asked.engine == "native" else "vllm"
    if asked.engine == "auto" and device.capability is None:
        engine = "native"
    shape = checkpoint.shape
    if engine == "native":
        # Of activations: our kernels pass on what the weights are, those of the CPU fp32.
        shape = replace(shape, dtype="float32" if device.capability is None else "bfloat16")
    return Request(
        shape=shape,
        role=role,
        method=method if role == "draft" else "",
        backend=asked.attention_backend,
        kv_dtype=asked.kv_dtype,
        page_tokens=asked.page_tokens,
        query_tokens=rows,
        graph_mode=asked.cuda_graph_mode,
        dcp=asked.dcp,
        tp=asked.tp,
        adaptive_verification=asked.adaptive_verification and role == "draft",
        engine=engine,
    )


def _block(checkpoint: Checkpoint) -> int:
    size = checkpoint.shape.block_size
    if size < 1:
        return DEFAULT_DRAFT_TOKENS
    return size if checkpoint.next_token else max(size - 1, 1)


def _check(asked: Asked) -> None:
    allowed: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("role", asked.role, ("target", "draft")),
        ("engine", asked.engine, ("auto", "native", "vllm")),
        ("kv-group", asked.group, ("", *(group.value for group in KVGroup))),
    )
    for name, value, accepted in allowed:
        if value not in accepted:
            words = ", ".join(word for word in accepted if word)
            raise UsageError(f"--{name} is {value!r}; accepted: {words}")
    if not asked.model:
        raise UsageError(
            "--model is missing; accepted: a checkpoint's directory, with a config.json; or no "
            "model, with --matrix (kinds of models) or --list (limits of every backend)"
        )
    if asked.role == "target" and (asked.targets or asked.colocated or asked.group):
        raise UsageError("--target, --colocated and --kv-group go with --role draft")
    about_target = (asked.target_attention_backend, asked.target_kv_dtype, asked.target_dcp)
    if about_target != (None, "auto", None) and not asked.targets:
        raise UsageError("the target's own settings need --role draft and --target")
    if asked.group not in ("", "private") and not asked.targets:
        raise UsageError("--kv-group needs --target, the model whose pages are meant")
    for name, number in (("dcp", asked.dcp), ("tp", asked.tp), ("target-dcp", asked.target_dcp)):
        if number is not None and number < 1:
            raise UsageError(f"--{name} is {number}; accepted: 1 or more")
