"""How many draft tokens a round: the K that is expected to give the most tokens per second.

    tokens(K) = 1 + a1 + a1 a2 + .. + a1..aK        seconds(K) = verify(K) + draft(K)

with a_i the chance that draft token i is accepted when all before it were. Under the rule that a
draft token is accepted while it equals the target's own draw, any choice of K is lossless.
Pure: no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.acceptance import Acceptance, SessionLevel
from coordinator.costs import Costs

# Plain decoding must be better by this share before speculation stops for a while.
_MARGIN = 1.03
# Rounds, of the session or of the drafter before it, without which nothing is switched off.
_EVIDENCE = 16
# Plain steps before speculation is probed again, and how they grow with each probe in vain; rounds
# a probe, and the share of the time that probes may cost in the end.
_PAUSE, _GROWTH, _PROBE_ROUNDS, _PROBE_SHARE = 8, 4, 2, 0.01
# One round of so many, the fifth the first, tries another K, so that costs and chances elsewhere
# stay known: far above, the next below or above, or none at all, which is what the others are
# compared with. Far is as far as a round takes at most so much longer. Where rounds go on by
# themselves, so do as many that try a K: what they cost is compared with what the others do.
_EXPLORE, _FIRST, _LONGER, _TRIAL = 20, 5, 1.25, 2
# A step that takes so much longer than one over a single draft token is worth cutting.
_NOTICEABLE = 1.1
_FAR = 1 << 30
_STEPS = (_FAR, -1, 1, -_FAR, -1, 1)


class KPolicy:
    """Chooses K for one session. `verify`, `draft` and `past` are shared with other sessions."""

    def __init__(self, verify: Costs, draft: Costs, past: Acceptance, start: int) -> None:
        self._verify, self._draft, self._past, self._start = verify, draft, past, start
        self._level, self._rounds, self._round = SessionLevel(past.level), 0, 0
        # The round that tries a K out next, how many have, and whether the latest did.
        self._due, self._turn, self._trial = _FIRST, 0, False
        # Off: steps before this one are plain. A probe asks in a few rounds in a row.
        self._off, self._plain_until, self._probes = False, 0, 0
        # Its rounds, those that went on by themselves included.
        self._pause, self._probed = _PAUSE, 0
        # Tokens per second that is expected now; 0: not known, or this round is to try a K out.
        self._rate = 0.0
        # What the drafter said of this round's tokens, and the chances of those left out.
        self._said: tuple[float, ...] = ()
        self._withheld: tuple[float, ...] = ()

    def use(self, verify: Costs, draft: Costs, past: Acceptance) -> None:
        """The session is at these workers now; what it learned of itself stays."""
        if past is not self._past:
            self._level.level += past.level - self._past.level
        self._verify, self._draft, self._past = verify, draft, past

    def plain_steps(self, step: int) -> int:
        """Steps from this one on that will be plain."""
        return max(0, self._plain_until - step) if self._off else 0

    def stands(self, most: int) -> int:
        """How many more rounds, at most `most`, go on with the K chosen last: few behind one that
        tries a K, else up to the next that does, but one at least. They count as chosen."""
        longest = self._due - 1 - self._round if self._rate else _TRIAL - 1
        more = min(most, max(1, longest))
        self._round += more
        if self._trial:
            self._due += more * _EXPLORE
        return more

    def note(self, asked: int, accepted: int, *, proposed: bool = True) -> None:
        """How a round went. One without a proposal says nothing of the drafter's quality."""
        if self._withheld:
            asked = len(self._said) + len(self._withheld)
        self._past.note(self._level, asked, accepted, self._withheld, proposed=proposed)
        self._rounds += 1
        self._probed += self._off
        self._past.calibration.note(self._said, accepted)
        self._said = self._withheld = ()

    def forget(self) -> None:
        """The verdict over what was cut last never comes."""
        self._said = self._withheld = ()

    def cut(self, said: Sequence[float], sessions: int, context: int) -> int:
        """How many of the tokens that the drafter says so much of are worth verifying.

        The draft's time is spent. Another token pays while the tokens that it is expected to bring
        are more than its time brings elsewhere.
        """
        chances = self._past.calibration.chances(said)
        verify = self._verify.curve(sessions, context, len(said)) if self._rate else None
        kept = len(said) if verify is None else _worth(chances, verify, self._rate)
        self._said, self._withheld = tuple(said[:kept]), tuple(chances[kept:])
        return kept

    def choose(self, step: int, limit: int, sessions: int, context: int) -> int:
        """Draft tokens for the step after `step`, at most `limit`; 0: it does not pay."""
        self._rate, self._trial = 0.0, False
        if limit <= 0 or step < self._plain_until:
            return 0
        self._round += 1
        verify = self._verify.curve(sessions, context, limit)
        draft = self._draft.curve(sessions, context, limit)
        if verify is None or draft is None:
            return min(self._start, limit)
        seconds = [a + b for a, b in zip(verify, draft, strict=False)]
        pays = _MARGIN / verify[0]
        best, best_rate = self._best(seconds, limit, 0.0)
        self._rate = best_rate
        if best_rate < pays and self._rounds + self._past.rounds >= _EVIDENCE:
            # It must not pay even if the session is better than it seems so far.
            self._rate = 0.0
            best, best_rate = self._best(seconds, limit, self._level.deviation)
            if best_rate < pays:
                return self._switched_off(step, best, seconds[best] / verify[0])
        self._off, self._probes, self._pause = False, 0, _PAUSE
        if self._round < self._due:
            return best
        change = _STEPS[self._turn % len(_STEPS)]
        self._due, self._turn, self._trial = self._round + _EXPLORE, self._turn + 1, True
        return self._explored(best, limit, change, seconds)

    def _explored(self, best: int, limit: int, change: int, seconds: list[float]) -> int:
        self._rate = 0.0
        if change == _FAR:
            longest = _LONGER * seconds[best]
            return max(k for k in range(best, limit + 1) if k == best or seconds[k] <= longest)
        return max(0, min(best + change, limit))

    def _best(self, seconds: list[float], limit: int, more: float) -> tuple[int, float]:
        """The best K of 1..limit and its tokens per second, at `more` than the session's level."""
        best, best_rate = 1, 0.0
        tokens = reach = 1.0
        for k, chance in enumerate(self._past.chances(self._level, more, limit), 1):
            reach *= chance
            tokens += reach
            rate = tokens / seconds[k]
            if rate > best_rate:
                best, best_rate = k, rate
        return best, best_rate

    def _switched_off(self, step: int, best: int, cost: float) -> int:
        """Plain steps for a while, then a few rounds that look whether it pays again.

        `cost`: of a round with K = `best`, in plain steps.
        """
        if self._off and self._probes < _PROBE_ROUNDS:
            self._probes += 1
            # The second also learns what the next lower K costs.
            return max(1, best + 1 - self._probes)
        if self._off:
            longest = max(_PROBE_ROUNDS, self._probed) * (cost - 1.0) / _PROBE_SHARE
            self._pause = max(self._pause, min(_GROWTH * self._pause, round(longest)))
        self._off, self._probes, self._probed = True, 0, 0
        self._plain_until = step + self._pause
        return 0


def cut_saves(verify: Costs, tokens: int, sessions: int, context: int) -> bool:
    """Whether a step over fewer than `tokens` draft tokens takes noticeably less time."""
    curve = verify.curve(sessions, context, tokens)
    return curve is None or curve[tokens] > _NOTICEABLE * curve[min(1, tokens)]


def _worth(chances: Sequence[float], verify: Sequence[float], rate: float) -> int:
    """The number of tokens that gives the most over what `rate` gives in the same time."""
    best, best_gain = 0, 1.0 - rate * verify[0]
    tokens = reach = 1.0
    for k, chance in enumerate(chances, 1):
        reach *= chance
        tokens += reach
        gain = tokens - rate * verify[k]
        if gain >= best_gain:
            best, best_gain = k, gain
    return best
