"""From what a drafter says of its tokens to the chance that the target takes them, learned from
what the target did. Pure: no clock, no asyncio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# How sure the first guess is, in graded tokens of even odds (each tells 1/4); how fast old ones
# fade.
_PRIOR, _FADE = 4.0, 0.999
# What is said is taken between these: one wild number must not outweigh the rest.
_LEAST, _MOST = 0.01, 0.99


class Calibration:
    """chance of token i, given those before it = sigmoid(slope * logit(said) + offset_i).

    A logistic fit by one Newton step a graded token, the diagonal of the curvature kept. A position
    that was never graded does as the one before it. What is said is believed at first.
    """

    __slots__ = ("_offset_weights", "_offsets", "_slope", "_slope_weight")

    def __init__(self) -> None:
        self._slope, self._slope_weight = 1.0, _PRIOR
        self._offsets: list[float] = []
        self._offset_weights: list[float] = []

    def chances(self, said: Sequence[float]) -> list[float]:
        return [self._chance(at, _logit(value)) for at, value in enumerate(said)]

    def note(self, said: Sequence[float], accepted: int) -> None:
        """`said` of the tokens that were verified: the first one that was wrong is graded too,
        those after it are not.
        """
        for at, value in enumerate(said[: accepted + 1]):
            self._learn(at, _logit(value), at < accepted)

    def _chance(self, at: int, x: float) -> float:
        offset = self._offsets[min(at, len(self._offsets) - 1)] if self._offsets else 0.0
        return _sigmoid(self._slope * x + offset)

    def _learn(self, at: int, x: float, right: bool) -> None:
        chance = self._chance(at, x)
        if at == len(self._offsets):
            self._offsets.append(self._offsets[-1] if self._offsets else 0.0)
            self._offset_weights.append(_PRIOR)
        curvature, error = chance * (1 - chance), right - chance
        self._offset_weights[at] = _FADE * self._offset_weights[at] + curvature
        self._slope_weight = _FADE * self._slope_weight + curvature * x * x
        self._offsets[at] += error / self._offset_weights[at]
        # A drafter that says the opposite of the truth is not believed, and not turned round.
        self._slope = max(0.0, self._slope + error * x / self._slope_weight)


def _logit(value: float) -> float:
    # Written so that NaN becomes the lowest.
    value = min(value, _MOST) if value > _LEAST else _LEAST
    return math.log(value / (1 - value))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -500 else 0.0
