"""How many draft tokens a round: the K that is expected to give the most tokens per second.

    tokens(K) = 1 + a1 + a1 a2 + .. + a1..aK        seconds(K) = verify(K) + draft(K)

with a_i the chance that draft token i is accepted when all before it were, and the seconds of each
way in which rounds may follow each other (`ways.py`): K and the way are one choice. Under the rule
that a draft token is accepted while it equals the target's own draw, any choice is lossless.
Pure: no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.acceptance import Acceptance, SessionLevel
from coordinator.round_costs import RoundCosts
from coordinator.ways import Way, plain_seconds, ways

# Plain decoding must be better by this share before speculation stops for a while.
_MARGIN = 1.03
# Where drafting has paid, in a session whose level is known so well (logits), it stops only where
# it seems worse than plain even if the level were so many standard deviations higher: a level that
# dips is soon known better while rounds draft, and hardly once they do not. So many rounds in a row
# without an accepted token are no dip.
_KNOWN, _DOUBT, _NO_DIP = 0.4, 2.0, 12
# Rounds, of the session or of the drafter before it, without which nothing is switched off.
_EVIDENCE = 16
# Plain steps before speculation is probed again, and how they grow with each probe in vain; runs
# a probe, and the share of the time that probes may cost in the end.
_PAUSE, _GROWTH, _PROBE_RUNS, _PROBE_SHARE = 8, 4, 2, 0.01
# One round of so many, the fifth the first, tries another K, so that costs and chances elsewhere
# stay known: none at all, which is what the others are compared with, far above, the next below or
# above; or it goes the other way. Far is as far as a round takes at most so much longer. What comes
# next is shared by the drafter's sessions: one alone may be over before it has tried everything.
_EXPLORE, _FIRST, _LONGER = 20, 5, 1.25
_FAR, _OTHER_WAY = 1 << 30, 0
_STEPS = (_FAR, -_FAR, -1, 1, _OTHER_WAY, -1, 1)


class KPolicy:
    """Chooses K for one session. `verify`, `draft` and `past` are shared with other sessions."""

    def __init__(
        self, verify: RoundCosts, draft: RoundCosts, past: Acceptance, start: int, free_run: int = 0
    ) -> None:
        """`start`: K while nothing is known; `free_run`: plain steps that come unasked in a row."""
        self._verify, self._draft, self._past = verify, draft, past
        self._start, self._free_run = start, free_run
        self._level, self._rounds, self._round = SessionLevel(past.level), 0, 0
        self._due = _FIRST  # the round that tries something out next
        # Off: steps before this one are plain. A probe asks in a few runs in a row.
        self._off, self._plain_until, self._probes = False, 0, 0
        self._stopped = False  # once at least
        # Whether drafting has paid here, and rounds in a row of which nothing was accepted.
        self._paid, self._missed = False, 0
        # Its rounds, those that went on by themselves included.
        self._pause, self._probed = _PAUSE, 0
        # Tokens per second that is expected now, 0: not known; and whether nothing is to be cut.
        self._rate, self._whole = 0.0, False
        # Rounds that go on by themselves behind the one chosen last, or plain steps if it is plain.
        self._ahead = 0
        # What the drafter said of this round's tokens, and the chances of those left out.
        self._said: tuple[float, ...] = ()
        self._withheld: tuple[float, ...] = ()

    def use(self, verify: RoundCosts, draft: RoundCosts, past: Acceptance) -> None:
        """The session is at these workers now; what it learned of itself stays."""
        if past is not self._past:
            self._level.level += past.level - self._past.level
        if verify is not self._verify or draft is not self._draft:
            # What did not pay there may pay here.
            self._off, self._probes, self._probed, self._plain_until = False, 0, 0, 0
            self._paid = False
        self._verify, self._draft, self._past = verify, draft, past

    @property
    def off(self) -> bool:
        """Whether drafting does not pay now."""
        return self._off

    def plain_steps(self, step: int) -> int:
        """Steps from this one on that will be plain, where none was to be drafted."""
        return max(0, self._plain_until - step) if self._off else self._ahead

    def stands(self, most: int) -> int:
        """How many rounds, at most `most`, go on by themselves with the K chosen last; 0: each is
        asked for. They count as chosen."""
        more = min(most, self._ahead)
        self._round += more
        return more

    def note(self, asked: int, accepted: int, *, proposed: bool = True) -> None:
        """How a round went. One without a proposal says nothing of the drafter's quality."""
        if self._withheld:
            asked = len(self._said) + len(self._withheld)
        self._past.note(self._level, asked, accepted, self._withheld, proposed=proposed)
        self._rounds += 1
        self._missed = 0 if accepted else self._missed + 1
        self._paid = self._paid and self._missed < _NO_DIP
        self._probed += self._off
        self._past.calibration.note(self._said, accepted)
        self._said = self._withheld = ()

    def passed(self) -> None:
        """A step is over, with draft tokens or without."""
        self._past.probing.waited += self._off

    def forget(self) -> None:
        """The verdict over what was cut last never comes, and steps are counted anew."""
        self._said = self._withheld = ()
        self._plain_until = 0

    def cut(self, said: Sequence[float], sessions: int, context: int) -> int:
        """How many of the tokens that the drafter says so much of are worth verifying; all of them
        in a run, which verifies them by itself, and where it is tried what they cost.

        The draft's time is spent. Another token pays while the tokens that it is expected to bring
        are more than its time brings elsewhere.
        """
        chances, kept = self._past.calibration.chances(said), len(said)
        verify = self._verify.curves(sessions, context, kept) if self._rate else None
        if verify is not None:
            worth = self._past.cuts.worth(chances, verify.driven, self._rate)
            kept = kept if self._ahead or self._whole else worth
        self._said, self._withheld = tuple(said[:kept]), tuple(chances[kept:])
        return kept

    def choose(self, step: int, limit: int, sessions: int, context: int, ahead: int = 0) -> int:
        """Draft tokens for the step after `step`, at most `limit`; 0: it does not pay. `ahead`:
        rounds that can go on by themselves behind it."""
        self._rate, self._ahead, self._whole = 0.0, 0, False
        if limit <= 0 or step < self._plain_until:
            return 0
        self._round += 1
        verify = self._verify.curves(sessions, context, limit)
        draft = self._draft.curves(sessions, context, limit)
        if verify is None or draft is None:
            self._ahead = min(1, ahead)
            return min(self._start, limit)
        possible = ways(verify, draft, ahead, self._past.cuts.saves)
        plain = plain_seconds(verify, self._free_run)
        way, best, self._rate = self._best(possible, limit, 0.0)
        pays = self._rate >= _MARGIN / plain
        if not pays and self._rounds + self._past.rounds >= _EVIDENCE:
            # It must not pay even if the session is better than it seems so far.
            way, best, likely = self._best(possible, limit, self._doubt(way))
            if likely < (1.0 if self._paid else _MARGIN) / plain:
                return self._switched_off(step, best, way, plain)
        if pays or self._off:
            self._past.probing.pays()
        self._off, self._probes = False, 0
        known = self._level.deviation < _KNOWN and self._missed < _NO_DIP
        self._paid = self._paid or (pays and known)
        if self._round >= self._due:
            return self._explored(way, best, limit, possible)
        # What the session is only hoped to be is seen to soon.
        self._ahead = way.ahead if pays or self._paid else way.shortest(best)
        return best

    def _doubt(self, way: Way) -> float:
        """How much higher than it seems, in logits, the level may be, as far as is worth trying."""
        deviation = self._level.deviation
        if self._paid:
            return _DOUBT * deviation
        # It is better known where the drafter says how sure it is.
        says = self._past.cuts.saves and not way.ahead
        own = self._rounds >= _EVIDENCE
        return deviation * (0.5 if says else 1.0) * (1.0 if own else self._past.probing.hope)

    def _explored(self, way: Way, best: int, limit: int, possible: Sequence[Way]) -> int:
        """Something else than the best, for a short run."""
        change, k = _STEPS[self._past.probing.trials % len(_STEPS)], best
        self._past.probing.trials += 1
        if change == _FAR:
            longest = _LONGER * way.seconds[best]
            k = max(k for k in range(best, limit + 1) if k == best or way.seconds[k] <= longest)
        elif change == _OTHER_WAY:
            way = next((other for other in possible if other is not way), way)
        else:
            k = max(0, min(best + change, limit))
            self._whole = True  # what it costs is learned
        self._ahead = way.shortest(k)
        self._due = self._round + _EXPLORE * (1 + self._ahead)
        return k

    def _best(self, possible: Sequence[Way], limit: int, more: float) -> tuple[Way, int, float]:
        """The best way and K of 1..limit, and its tokens per second, at `more` than the session's
        level."""
        chances = self._past.chances(self._level, more, limit)
        way, best, best_rate = possible[0], 1, 0.0
        for each in possible:
            tokens = reach = 1.0
            for k, chance in enumerate(chances, 1):
                reach *= chance
                tokens += reach
                rate = tokens / each.seconds[k]
                if rate > best_rate:
                    way, best, best_rate = each, k, rate
        return way, best, best_rate

    def _switched_off(self, step: int, best: int, way: Way, plain: float) -> int:
        """Plain steps for a while, then a few runs that look whether it pays again."""
        shared = self._past.probing
        if self._off and self._probes < _PROBE_RUNS:
            self._probes += 1
            shared.begin()
            # The second also learns what the next lower K costs.
            k = max(1, best + 1 - self._probes)
            self._ahead = way.shortest(k)
            return k
        if not self._off:
            # Where it is long until a run goes on by itself, a probe is as much more.
            self._pause = round(_PAUSE * way.first(best) / way.later(best))
            left = shared.left(self._pause)
            self._pause = max(self._pause, shared.pause)
            if not self._stopped:
                shared.stopped()
            self._stopped = True
        else:
            later = max(0, self._probed - _PROBE_RUNS)
            spent = _PROBE_RUNS * way.first(best) + later * way.later(best)
            lost = spent / plain - _PROBE_RUNS - later
            longest = round(lost / _PROBE_SHARE)
            self._pause = left = max(self._pause, min(_GROWTH * self._pause, longest))
            shared.in_vain(self._pause)
        self._off, self._probes, self._probed = True, 0, 0
        self._paid = False
        self._plain_until = step + left
        return 0
