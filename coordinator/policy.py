"""How many draft tokens a round: the K that is expected to give the most tokens per second.

    tokens(K) = 1 + a1 + a1 a2 + .. + a1..aK        seconds(K) = verify(K) + draft(K)

with a_i the chance that draft token i is accepted when all before it were. Under the rule that a
draft token is accepted while it equals the target's own draw, any choice of K is lossless.
Pure: no clock, no asyncio.
"""

from __future__ import annotations

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

    __slots__ = ("_decay", "hits", "rounds", "trials")

    def __init__(self, decay: float = _DRAFTER_DECAY) -> None:
        self._decay = decay
        self.hits: list[float] = []
        self.trials: list[float] = []
        self.rounds = 0

    def note(self, asked: int, accepted: int) -> None:
        """A round that asked for `asked` tokens; those that never came count as not accepted."""
        # Every session does this every round: locals, and nothing for what does not change.
        hits, trials, decay = self.hits, self.trials, self._decay
        tried = min(asked, accepted + 1)
        self.rounds += 1
        while len(trials) < tried:
            hits.append(0.0)
            trials.append(0.0)
        for i in range(tried):
            trials[i] = trials[i] * decay + 1.0
            hits[i] = hits[i] * decay + 1.0
        if accepted < tried:
            hits[accepted] -= 1.0


class KPolicy:
    """Chooses K for one session. `verify`, `draft` and `past` are shared with other sessions."""

    def __init__(self, verify: Costs, draft: Costs, past: Acceptance, start: int) -> None:
        self._verify, self._draft, self._past, self._start = verify, draft, past, start
        self._own = Acceptance(_SESSION_DECAY)
        self._round = 0
        # Off: steps before this one are plain. A probe asks in a few rounds in a row.
        self._off, self._plain_until, self._probes = False, 0, 0
        self._pause = _PAUSE

    def use(self, verify: Costs, draft: Costs, past: Acceptance) -> None:
        """The session is at these workers now; what it learned of itself stays."""
        self._verify, self._draft, self._past = verify, draft, past

    def plain_steps(self, step: int) -> int:
        """Steps from this one on that will be plain."""
        return max(0, self._plain_until - step) if self._off else 0

    def note(self, asked: int, accepted: int, *, proposed: bool = True) -> None:
        """How a round went. One without a proposal says nothing of the drafter's quality."""
        self._own.note(asked, accepted)
        if proposed:
            self._past.note(asked, accepted)

    def choose(self, step: int, limit: int, sessions: int, context: int) -> int:
        """Draft tokens for the step after `step`, at most `limit`; 0: it does not pay."""
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
        if self._round % _EXPLORE == 0:
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
