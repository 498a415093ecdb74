"""What the resolver found: one value per service, computed once and never written to again."""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.capabilities import GraphLevel
from engine.attention.geometry import Geometry
from engine.attention.graphs import Graphs
from engine.attention.mode import LayerMode
from engine.attention.report import AttentionReport, Candidate
from engine.attention.request import Request


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one mode, the backend that runs them and the others with their reasons."""

    layers: tuple[int, ...]
    mode: LayerMode
    chosen: str
    level: GraphLevel
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Everything that follows from a request on a device. `policy`: auto, inherit, name, or model
    where the model itself cannot do without one backend."""

    request: Request
    device: str
    policy: str
    inherited: str
    groups: tuple[LayerGroup, ...]
    candidates: tuple[Candidate, ...]
    geometry: Geometry
    graphs: Graphs
    warnings: tuple[str, ...]

    @property
    def chosen(self) -> str:
        """The backend's name; several, where `auto` took one per layer mode, joined by `+`."""
        return "+".join(dict.fromkeys(group.chosen for group in self.groups))

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know of the choice."""
        graphs = tuple(f"CUDA graphs: {reason}" for reason in self.graphs.reasons)
        return graphs + tuple(f"known trouble: {warning}" for warning in self.warnings)

    def report(self) -> AttentionReport:
        """What travels to `GetInfo`."""
        return AttentionReport(
            requested=self.request.backend or "",
            policy=self.policy,
            chosen=self.chosen,
            candidates=self.candidates,
            kv_dtype=self.geometry.dtype,
            kv_bytes_per_token=self.geometry.bytes_per_token,
            page_tokens=self.geometry.page_tokens,
            graph_mode=self.graphs.mode,
            notes=self.notes,
        )

    def lines(self) -> list[str]:
        """For logs: the choice, and why not another."""
        role, graphs = self.request.label, self.graphs
        lines = [
            f"{role}: attention {self.chosen} ({self.policy}) on {self.device}, "
            f"KV {self.geometry.dtype}, {self.geometry.bytes_per_token} bytes a token, "
            f"{self.geometry.page_tokens} tokens a page, CUDA graphs {graphs.mode}"
        ]
        for candidate in self.candidates:
            if candidate.reasons:
                reasons = "; ".join(candidate.reasons)
                lines.append(f"{role}: {candidate.name} not in use: {reasons}")
        return lines + [f"{role}: {note}" for note in self.notes]
