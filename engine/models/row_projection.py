"""What a block draft makes of its target's rows before its own layers: RMSNorm(fc(taps)), DFlash's
context vectors (arXiv 2602.06036, section 3). Either side of the wire may compute it."""

from __future__ import annotations

from torch import Tensor

from engine.models.dflash_config import DFlashConfig
from engine.models.layers import Kernels
from engine.weights import Weights


class RowProjection:
    def __init__(self, config: DFlashConfig, draft: Weights, kernels: Kernels) -> None:
        """Raises CheckpointError where the draft's file has no fitting `fc` and norm."""
        width = config.hidden_size
        self._kernels, self._eps = kernels, config.rms_eps
        self._fc = kernels.pack(draft.take("fc.weight", width, config.row_width))
        self._norm = draft.take("hidden_norm.weight", width).float()

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, hidden] of the draft, of `rows` [n, taps * hidden] of the target, any float dtype."""
        if self._kernels.mode != "triton":
            rows = rows.float()
        return self._kernels.rms_norm(self._fc(rows), self._norm, self._eps)
