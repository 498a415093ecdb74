"""Who decides: the order of preference, the target's choice, the model, or the operator's name."""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.mode import LayerMode
from engine.attention.request import KVGroup, Request
from engine.attention.resolution import Resolution

_ORIGIN = {"inherit": ", inherited from the target,", "model": ", needed by the model,"}


@dataclass(frozen=True, slots=True)
class Policy:
    """`policy`: auto, inherit, name or model. `name` "" leaves the choice to the order of
    preference; `inherited` repeats a name that came from the target."""

    policy: str
    name: str = ""
    inherited: str = ""

    def problem(self, role: str, device: str) -> str:
        """The first words of a refusal."""
        if self.policy == "auto":
            return f"No valid attention backend for the {role} on {device}"
        origin = _ORIGIN.get(self.policy, "")
        return f"Attention backend {self.name}{origin} cannot run the {role} on {device}"


def policy_for(request: Request, mode: LayerMode, target: Resolution | None) -> Policy | None:
    """The policy for layers of a mode; None where `inherit` has nothing to take from."""
    kind = "full_attention" if mode.window is None else "sliding_window"
    wanted = dict(request.backend_per_kind).get(kind, request.backend)
    if wanted is None and request.kv_group is KVGroup.SAME_CACHE and target is not None:
        wanted = "inherit"
    word = (wanted or "auto").lower()
    if word == "inherit":
        return None if target is None else _inherited(mode, target)
    if word != "auto":
        return Policy("name", word.upper())
    if request.shape.override:
        return Policy("model", request.shape.override)
    return Policy("auto")


def _inherited(mode: LayerMode, target: Resolution) -> Policy:
    """The target's *resolved* backend, of layers with a window for layers with one."""
    windowed = mode.window is not None
    like = [group for group in target.groups if (group.mode.window is not None) == windowed]
    name = (like or list(target.groups))[0].chosen
    return Policy("inherit", name, name)
