"""How one layer attends; shared by models, backends and the resolver. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerMode:
    """How one layer attends inside a block. `window` counts the token itself; None is full
    attention.

    causal: row at position p sees keys [max(0, p-window+1), p].
    non-causal: it sees every key of its session's span end, [max(0, p-window+1), min(end,
    p+window)) with a window.
    """

    causal: bool = True
    window: int | None = None

    def __str__(self) -> str:
        """As it stands in reports: `causal`, or `non-causal, window=2048`."""
        word = "causal" if self.causal else "non-causal"
        return word if self.window is None else f"{word}, window={self.window}"
