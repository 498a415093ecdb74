"""A refusal: one typed error that names every candidate with all its reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.attention.mode import LayerMode
from engine.attention.report import Candidate
from engine.attention.request import Request
from engine.errors import BackendUnavailable


@dataclass(frozen=True, slots=True)
class Refusal:
    """`requested` is what the settings say; `inherited` the target's backend it stood for."""

    role: str
    device: str
    requested: str
    inherited: str
    described: str
    problem: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        listed = ", ".join(
            f"{c.name}: [{', '.join(c.reasons) or 'valid'}]" for c in self.candidates
        )
        return f"{self.problem} ({self.described}): {{{listed}}}"


class AttentionRefused(BackendUnavailable):
    """Nothing fits, or what was asked for does not. Raised before weights are read."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def described(request: Request) -> str:
    """The request in a line, as refusals and logs show it."""
    shape = request.shape
    modes = " and ".join(dict.fromkeys(map(str, shape.modes)))
    parts = [f"{shape.kind.value}, head_size={shape.head_size}", f"kv={request.kv_dtype}", modes]
    if shape.kind.value == "mha":
        parts[0] = f"head_size={shape.head_size}"
    if request.page_tokens is not None:
        parts.append(f"page={request.page_tokens}")
    if request.dcp > 1:
        parts.append(f"dcp={request.dcp}")
    if request.graph_mode != "auto":
        parts.append(f"graphs={request.graph_mode}")
    return ", ".join(parts)


def refuse(
    request: Request,
    device: str,
    problem: str,
    candidates: Sequence[Candidate],
    inherited: str = "",
) -> AttentionRefused:
    requested = request.backend or ""
    return AttentionRefused(
        Refusal(
            request.label, device, requested, inherited, described(request), problem,
            tuple(candidates),
        )
    )  # fmt: skip


def layers_of(mode: LayerMode, modes: Sequence[LayerMode]) -> tuple[int, ...]:
    return tuple(index for index, other in enumerate(modes) if other == mode)


def merged(
    judged: Mapping[LayerMode, Sequence[Candidate]], modes: Sequence[LayerMode]
) -> tuple[Candidate, ...]:
    """Candidates of all layers; a reason that holds for some layers only says for which."""
    found: dict[str, dict[str, list[LayerMode]]] = {}
    for mode, candidates in judged.items():
        for candidate in candidates:
            by_reason = found.setdefault(candidate.name, {})
            for reason in candidate.reasons:
                by_reason.setdefault(reason, []).append(mode)

    def tagged(reason: str, held: list[LayerMode]) -> str:
        if len(held) == len(judged):
            return reason
        layers = sorted(layer for mode in held for layer in layers_of(mode, modes))
        word = "layers" if len(layers) > 1 else "layer"
        where = f"{word} {', '.join(map(str, layers))}: {' or '.join(map(str, held))}"
        return f"{reason} [{where}]"

    return tuple(
        Candidate(name, tuple(tagged(reason, held) for reason, held in reasons.items()))
        for name, reasons in found.items()
    )
