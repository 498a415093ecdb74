"""Rows of a step as a draft's own `fc` and norm make them, for a draft service that is sent those:
as many times fewer bytes as it reads layers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.api import Projection
from engine.errors import CheckpointError
from engine.models.draft_dialects import Target, read_draft
from engine.models.layers import Kernels
from engine.models.row_projection import RowProjection
from engine.tap_export import columns_of
from engine.weights import Weights, fingerprint, read_json


class Projecting:
    """A draft's projection beside the target, with the target's kernels."""

    def __init__(
        self,
        checkpoint: Path,
        target: Target,
        kernels: Kernels,
        weight_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Of a draft made for `target`. Raises CheckpointError, which names the draft."""
        try:
            config = read_draft(read_json(checkpoint / "config.json"), target)
            weights = Weights(checkpoint, weight_dtype, device)
            self._project = RowProjection(config, weights, kernels)
        except CheckpointError as error:
            raise CheckpointError(f"draft {checkpoint.name}: {error}") from error
        self._hidden = target.model.hidden_size
        self.info = Projection(fingerprint(checkpoint), config.tap_ids, config.hidden_size)

    def __call__(self, taps: tuple[int, ...], tap_rows: Tensor) -> Tensor:
        """bf16 [n, width] of rows [n, len(taps) * hidden], which hold those that it reads."""
        rows = columns_of(tap_rows, taps, self.info.taps, self._hidden)
        return self._project(rows.bfloat16()).bfloat16()
