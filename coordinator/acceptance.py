"""The chance that draft token i is accepted when all before it were:

    chance_i = sigmoid(profile_i + level)

The profile is the drafter's and changes slowly; the level is each session's own and is found within
a few rounds, so text that nobody can guess spoils neither later sessions nor deeper positions. A
logistic fit, one Newton step a token, the diagonal of the curvature kept. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from coordinator.confidence import Calibration

# Chance assumed of a drafter that was never seen: it gets a try.
_UNSEEN = 0.7
_START = math.log(_UNSEEN / (1.0 - _UNSEEN))
# How sure the first guess of a position is, in accepted or refused tokens of even odds (each tells
# 1/4), and how fast what was learned fades.
_PROFILE_PRIOR, _PROFILE_FADE = 2.0, 0.998
# How sure a session's level is at first, one over the variance between sessions; the same of its
# single positions; and how fast what it showed fades, in rounds.
_LEVEL_PRIOR, _POSITION_PRIOR, _SESSION_FADE = 0.5, 2.0, 0.97
# Share of the way to a session's level that the level of new sessions goes in each of its rounds.
_FOLLOW = 0.03


class SessionLevel:
    """How much better or worse than its profile a drafter does in one session, in logits: at all
    positions alike, and at single ones beside that."""

    __slots__ = ("_position_told", "_positions", "_told", "level")

    def __init__(self, level: float = 0.0) -> None:
        self.level, self._told = level, 0.0
        self._positions: list[float] = []
        self._position_told: list[float] = []

    @property
    def deviation(self) -> float:
        """One standard deviation of what is not known of the level yet."""
        return 1.0 / math.sqrt(_LEVEL_PRIOR + self._told)

    def at(self, position: int) -> float:
        """One that this session did not try yet does as the one before it."""
        positions = self._positions
        if not positions:
            return self.level
        return self.level + positions[min(position, len(positions) - 1)]

    def fade(self) -> None:
        """A round has passed: what earlier ones told counts less."""
        self._told *= _SESSION_FADE
        self._position_told = [_SESSION_FADE * told for told in self._position_told]

    def learn(self, position: int, error: float, curvature: float) -> None:
        """`error`: what came less what was expected; `curvature`: what the token tells."""
        positions, told = self._positions, self._position_told
        while position >= len(positions):
            positions.append(positions[-1] if positions else 0.0)
            told.append(0.0)
        self._told += curvature
        told[position] += curvature
        self.level += error / (_LEVEL_PRIOR + self._told)
        positions[position] += error / (_POSITION_PRIOR + told[position])


class Acceptance:
    """What all sessions of a drafter showed: `level` is where a new one begins."""

    __slots__ = ("_profile", "_told", "calibration", "level", "rounds")

    def __init__(self) -> None:
        # What the drafter's confidences are worth.
        self.calibration = Calibration()
        self.level, self.rounds = 0.0, 0
        self._profile: list[float] = []
        self._told: list[float] = []

    def chances(self, session: SessionLevel, more: float, count: int) -> list[float]:
        """Of positions 0..count-1 in a session, were its level `more` higher.

        A position that nobody tried yet is taken to be like the one before.
        """
        profile = self._profile or [_START]
        last = len(profile) - 1
        return [_sigmoid(profile[min(i, last)] + session.at(i) + more) for i in range(count)]

    def note(
        self,
        session: SessionLevel,
        asked: int,
        accepted: int,
        withheld: Sequence[float] = (),
        *,
        proposed: bool = True,
    ) -> None:
        """A round that asked for `asked` tokens; those that never came count as not accepted.

        `withheld` are the chances of tokens that came and were not verified: they count as
        accepted in part, or rounds cut where the drafter was unsure would flatter it. A round
        without a proposal says nothing of the drafter, only of what the session gets.
        """
        session.fade()
        verified = asked - len(withheld)
        for at in range(min(verified, accepted + 1)):
            self._learn(session, at, 1.0, at < accepted, proposed)
        if accepted >= verified:
            reached = 1.0
            for at, chance in enumerate(withheld, verified):
                self._learn(session, at, reached, chance, proposed)
                reached *= chance
        if proposed:
            self.rounds += 1
            self.level += _FOLLOW * (session.level - self.level)

    def _learn(
        self, session: SessionLevel, at: int, weight: float, hit: float, proposed: bool
    ) -> None:
        profile, told = self._profile, self._told
        while at >= len(profile):
            profile.append(profile[-1] if profile else _START)
            told.append(0.0)
        chance = _sigmoid(profile[at] + session.at(at))
        error, curvature = weight * (hit - chance), weight * chance * (1.0 - chance)
        session.learn(at, error, curvature)
        if proposed:
            told[at] = _PROFILE_FADE * told[at] + curvature
            profile[at] += error / (_PROFILE_PRIOR + told[at])


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -500.0 else 0.0
