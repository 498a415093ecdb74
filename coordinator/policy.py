"""How many draft tokens a round: the K that is expected to give the most tokens per second.

    tokens(K) = 1 + a1 + a1 a2 + .. + a1..aK        seconds(K) = verify(K) + draft(K)

with a_i the chance that draft token i is accepted when all before it were. Under the rule that a
draft token is accepted while it equals the target's own draw, any choice of K is lossless.
Pure: no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.confidence import Calibration
from coordinator.costs import Costs

# Rounds until a round counts a third: of one session, and of all that a drafter had.
_SESSION_DECAY, _DRAFTER_DECAY = 0.96, 0.995
# How many rounds of the session the drafter's own past is worth.
_PRIOR_ROUNDS = 4.0
# Chance assumed of a drafter that was never seen: it gets a try.
_UNSEEN = 0.7
# Plain decoding must be better by this share before speculation stops for a while.
_MARGIN = 1.03
# Rounds, of the session or of the drafter before it, without which nothing is switched off.
_EVIDENCE = 16
# Plain steps before speculation is probed again, doubled after each probe in vain; rounds a probe.
_PAUSE, _LONGEST_PAUSE, _PROBE_ROUNDS = 16, 256, 2
# One round of so many tries another K, so that its cost stays known: the next below or above, or
# none at all, which is what the others are compared with.
_EXPLORE = 20
_STEPS = (-1, 1, None, -1, 1, -1, 1)


class Acceptance:
    """Accepted and tried, by position; old rounds fade."""

    __slots__ = ("_decay", "calibration", "hits", "rounds", "trials")

    def __init__(self, decay: float = _DRAFTER_DECAY) -> None:
        self._decay = decay
        # What the drafter's confidences are worth.
        self.calibration = Calibration()
        self.hits: list[float] = []
        self.trials: list[float] = []
        self.rounds = 0

    def note(self, asked: int, accepted: int, withheld: Sequence[float] = ()) -> None:
        """A round that asked for `asked` tokens; those that never came count as not accepted.

        `withheld` are the chances of tokens that came and were not verified: they count as
        accepted in part, or rounds cut where the drafter was unsure would flatter it.
        """
        # Every session does this every round: locals, and nothing for what does not change.
        hits, trials, decay = self.hits, self.trials, self._decay
        verified = asked - len(withheld)
        tried = min(verified, accepted + 1)
        self.rounds += 1
        while len(trials) < tried:
            hits.append(0.0)
            trials.append(0.0)
        for i in range(tried):
            trials[i] = trials[i] * decay + 1.0
            hits[i] = hits[i] * decay + 1.0
        if accepted < tried:
            hits[accepted] -= 1.0
            return
        reached = 1.0
        for i, chance in enumerate(withheld, verified):
            self._count(i, reached, chance)
            reached *= chance

    def _count(self, i: int, weight: float, hit: float) -> None:
        if i == len(self.trials):
            self.hits.append(0.0)
            self.trials.append(0.0)
        # What counts less fades the past less.
        fade = 1.0 - weight * (1.0 - self._decay)
        self.trials[i] = self.trials[i] * fade + weight
        self.hits[i] = self.hits[i] * fade + weight * hit


class KPolicy:
    """Chooses K for one session. `verify`, `draft` and `past` are shared with other sessions."""

    def __init__(self, verify: Costs, draft: Costs, past: Acceptance, start: int) -> None:
        self._verify, self._draft, self._past, self._start = verify, draft, past, start
        self._own = Acceptance(_SESSION_DECAY)
        self._round = 0
        # Off: steps before this one are plain. A probe asks in a few rounds in a row.
        self._off, self._plain_until, self._probes = False, 0, 0
        self._pause = _PAUSE
        # Tokens per second that is expected now; 0: not known, or this round is to try a K out.
        self._rate = 0.0
        # What the drafter said of this round's tokens, and the chances of those left out.
        self._said: tuple[float, ...] = ()
        self._withheld: tuple[float, ...] = ()

    def use(self, verify: Costs, draft: Costs, past: Acceptance) -> None:
        """The session is at these workers now; what it learned of itself stays."""
        self._verify, self._draft, self._past = verify, draft, past

    def plain_steps(self, step: int) -> int:
        """Steps from this one on that will be plain."""
        return max(0, self._plain_until - step) if self._off else 0

    def note(self, asked: int, accepted: int, *, proposed: bool = True) -> None:
        """How a round went. One without a proposal says nothing of the drafter's quality."""
        if self._withheld:
            asked = len(self._said) + len(self._withheld)
        self._own.note(asked, accepted, self._withheld)
        if proposed:
            self._past.note(asked, accepted, self._withheld)
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
        self._rate = 0.0
        if limit <= 0 or step < self._plain_until:
            return 0
        self._round += 1
        verify = self._verify.curve(sessions, context, limit)
        draft = self._draft.curve(sessions, context, limit)
        if verify is None or draft is None:
            return min(self._start, limit)
        best, best_rate = self._best(verify, draft, limit)
        known = self._own.rounds + self._past.rounds >= _EVIDENCE
        if known and best_rate * _MARGIN < 1.0 / verify[0]:
            return self._switched_off(step, best)
        self._off, self._probes, self._pause = False, 0, _PAUSE
        self._rate = best_rate
        if self._round % _EXPLORE == 0:
            self._rate = 0.0
            change = _STEPS[self._round // _EXPLORE % len(_STEPS)]
            best = 0 if change is None else best + change
        return max(0, min(best, limit))

    def _best(self, verify: list[float], draft: list[float], limit: int) -> tuple[int, float]:
        """The best K of 1..limit and its tokens per second."""
        best, best_rate = 1, 0.0
        tokens = reach = 1.0
        chance = _UNSEEN
        hits, trials, seen = self._own.hits, self._own.trials, len(self._own.trials)
        past_hits, past_trials = self._past.hits, self._past.trials
        known = len(past_trials)
        for k in range(1, limit + 1):
            i = k - 1
            # A position that nobody tried yet is taken to be like the one before.
            if i < known:
                chance = (past_hits[i] + chance) / (past_trials[i] + 1.0)
            if i < seen:
                own = (hits[i] + chance * _PRIOR_ROUNDS) / (trials[i] + _PRIOR_ROUNDS)
                reach *= own
            else:
                reach *= chance
            tokens += reach
            rate = tokens / (verify[k] + draft[k])
            if rate > best_rate:
                best, best_rate = k, rate
        return best, best_rate

    def _switched_off(self, step: int, best: int) -> int:
        """Plain steps for a while, then a few rounds that look whether it pays again."""
        if self._off and self._probes < _PROBE_ROUNDS:
            self._probes += 1
            return best
        if self._off:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._off, self._probes = True, 0
        self._plain_until = step + self._pause
        return 0


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
