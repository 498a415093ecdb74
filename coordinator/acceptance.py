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
from coordinator.cuts import Cuts
from coordinator.probing import Probing

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

    def fade(self) -> None:
        """A round has passed: what earlier ones told counts less."""
        self._told *= _SESSION_FADE
        self._position_told = [_SESSION_FADE * told for told in self._position_told]


class Acceptance:
    """What all sessions of a drafter showed: `level` is where a new one begins."""

    __slots__ = ("_profile", "_told", "calibration", "cuts", "level", "probing", "rounds")

    def __init__(self) -> None:
        # What the drafter's confidences are worth, and what is saved by them.
        self.calibration, self.cuts = Calibration(), Cuts()
        self.level, self.rounds = 0.0, 0
        self.probing = Probing()
        self._profile: list[float] = []
        self._told: list[float] = []

    def chances(self, session: SessionLevel, more: float, count: int) -> list[float]:
        """Of positions 0..count-1 in a session, were its level `more` higher.

        A position that nobody tried yet, or not in this session, is taken to be like the one
        before.
        """
        profile, positions = self._profile or [_START], session._positions or [0.0]
        last, end, level, found = len(profile) - 1, len(positions) - 1, session.level, []
        for i in range(count):
            own = level + positions[i if i < end else end]
            found.append(_sigmoid(profile[i if i < last else last] + own + more))
        return found

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
        graded = [(1.0, float(at < accepted)) for at in range(min(verified, accepted + 1))]
        if accepted >= verified:
            reached = 1.0
            for chance in withheld:
                graded.append((reached, chance))
                reached *= chance
        self._learn(session, graded, proposed)
        if proposed:
            self.rounds += 1
            self.level += _FOLLOW * (session.level - self.level)

    def _learn(
        self, session: SessionLevel, graded: Sequence[tuple[float, float]], proposed: bool
    ) -> None:
        """`graded`: weight of the tokens at position 0 and on, and how far each was accepted. For
        each verdict of each session, so all in one place."""
        profile, told = self._profile, self._told
        positions, position_told = session._positions, session._position_told
        level, level_told = session.level, session._told
        for at, (weight, hit) in enumerate(graded):
            if at == len(profile):
                profile.append(profile[-1] if profile else _START)
                told.append(0.0)
            if at == len(positions):
                positions.append(positions[-1] if positions else 0.0)
                position_told.append(0.0)
            chance = _sigmoid(profile[at] + (level + positions[at]))
            # What came less what was expected, and what the token tells.
            error, curvature = weight * (hit - chance), weight * chance * (1.0 - chance)
            level_told += curvature
            position_told[at] += curvature
            level += error / (_LEVEL_PRIOR + level_told)
            positions[at] += error / (_POSITION_PRIOR + position_told[at])
            if proposed:
                told[at] = _PROFILE_FADE * told[at] + curvature
                profile[at] += error / (_PROFILE_PRIOR + told[at])
        session.level, session._told = level, level_told


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -500.0 else 0.0
