"""Whether drafting pays for all sessions of a target together: it is tried, both ways.

Each session that drafts slows down the others, through the device, the draft and the event loops;
a plain step in their company is as slow as theirs, so each finds that drafting pays, even where all
of them would be faster plain. So what all yield together is measured in windows of time: drafting
as their policies like, and now and then all plain; where plain is better, the other way round.
Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from statistics import median

# One session alone is in nobody's way: its policy compares the right times.
_FEWEST = 2
# A window lasts so long at least, and so many rounds a session; before the first one after a change
# what was under way ends, which is as many rounds, and at least so long.
_WINDOW_S, _SETTLE_S, _ROUNDS = 0.25, 0.03, 2
# Until the other way was tried once at a load windows are short: sessions may be over in a second.
_SHORT_S = 0.06
# The other way must yield so much more, in so many windows in a row: one alone may be a hiccup.
_MARGIN, _WINS = 1.03, 2
# A window of a trial that is won need not last longer once that is clear: of `n` verdicts, each of
# which brings tokens with about such a deviation, it is won by more than so many deviations. One
# that seems lost may be a hiccup.
_SOONEST_S, _SPREAD, _CLEAR = 0.03, 0.7, 2.5
# Trials whose sessions went before anything was known, until the next one is waited for; and after
# how long what was measured before the sessions went is compared with nothing.
_TRIES, _STALE_S = 4, 2.0
# It is compared with the median of the latest windows, once there are some.
_RECENT, _SOME = 5, 3
# Windows until the other way is tried first, then after each change, and how they grow with each
# trial that changes nothing; the longest time between trials, but for slow ones, of which
# the share of the time in trials is kept.
_FIRST, _PAUSE, _GROWTH, _LONGEST_S, _SHARE = 4, 8, 4, 60.0, 0.02
# Sessions of a window may be fewer or more by one in so many; below so few sessions by none.
_ALIKE, _FEW = 8, 4
# How far their mean may be from the number that they are taken for.
_OFF = 0.75


@dataclass(slots=True)
class _Load:
    """What is known at one load, its sessions' bit length: whether plain is better, what the latest
    windows of so many `sessions` yielded (tokens a second), and the trial of the other way."""

    plain: bool = False
    sessions: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    # Windows since the last trial, and from how many on there is another.
    waited: int = 0
    pause: float = _FIRST
    trial: bool = False
    trial_at: float = 0.0
    wins: int = 0
    tries: int = 0
    left: float = 0.0

    @property
    def window_s(self) -> float:
        return _SHORT_S if self.pause == _FIRST and not self.trial else _WINDOW_S

    def clear(self, rate: float, seconds: float, verdicts: int) -> bool:
        """Whether a trial's window that is not over yet is won."""
        if not self.trial or seconds < _SOONEST_S:
            return False
        noise = 1 + _CLEAR * _SPREAD / sqrt(verdicts)
        return rate > _MARGIN * noise * median(self.recent)

    def window(self, rate: float, now: float, seconds: float) -> bool:
        """A window yielded `rate`. True: from now on it goes the other way."""
        if not self.trial:
            self.recent.append(rate)
            self.waited += 1
            if self.waited < self.pause or len(self.recent) < _SOME:
                return False
            self.trial, self.trial_at = True, now
            return True
        if rate > _MARGIN * median(self.recent):
            self.wins += 1
            if self.wins < _WINS:
                return False
            self.plain, self.trial, self.waited, self.pause = not self.plain, False, 0, _PAUSE
            self.recent.clear()
            self.wins = 0
            return False
        longest = max(_LONGEST_S, (now - self.trial_at) / _SHARE) / max(seconds, _WINDOW_S)
        self.pause = max(_PAUSE, min(_GROWTH * self.pause, longest))
        self.trial, self.waited, self.wins = False, 0, 0
        return True

    def enter(self, sessions: int, now: float) -> None:
        """So many sessions now. What others yielded here, or long ago, is compared with nothing
        that they do."""
        if abs(sessions - self.sessions) > _slack(self.sessions) or now - self.left > _STALE_S:
            self.recent.clear()
            self.wins = 0
        self.sessions = sessions

    def leave(self, now: float) -> None:
        """The load changed. A trial that was on is begun again when it is like now once more: the
        first ones at once, or short turns would never see one."""
        if self.trial:
            self.trial, self.tries = False, self.tries + 1
            if self.pause > _FIRST or self.tries > _TRIES:
                self.waited, self.pause = 0, max(_PAUSE, self.pause)
        self.left = now

    def disturbed(self) -> None:
        """What was measured is compared with nothing that comes."""
        self.recent.clear()
        if self.trial:
            self.trial, self.waited, self.pause = False, 0, max(_PAUSE, self.pause)


def _slack(sessions: int) -> int:
    """How many sessions fewer or more are as many."""
    return max(sessions // _ALIKE, int(sessions >= _FEW))


class Yields:
    """Judges one drafter at one target by the tokens of all the target's sessions.

    Sessions with a K of their own, plain ones too, are counted and never asked.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._load: _Load | None = None
        # Sessions that this window is about, its beginning, and what came since.
        self._level, self._start, self._settled = 0, 0.0, False
        self._tokens, self._rounds, self._governed, self._sessions = 0, 0, 0, 0

    def allows(self, sessions: int) -> bool:
        """Whether a session may draft now, one of so many at the target."""
        return sessions < _FEWEST or self._drafts

    @property
    def trying(self) -> bool:
        """Whether what holds now is a trial."""
        return self._load is not None and self._load.trial

    @property
    def _drafts(self) -> bool:
        return self._load is None or self._load.plain == self._load.trial

    def note(self, now: float, tokens: int, sessions: int, drafts: bool | None) -> None:
        """A verdict at `now` (seconds) brought `tokens` to one of `sessions` sessions.

        `drafts`: what `allows` said when its step was decided on; None: it was not asked.
        """
        if sessions < _FEWEST:
            self._leave(now)
            return
        if self._load is None or abs(sessions - self._level) > _slack(self._level):
            self._enter(sessions, now)
            self._begin(now)
        elif drafts is not None and drafts != self._drafts:
            self._begin(now)  # it is still on what was decided before the change
        self._tokens += tokens
        self._rounds += 1
        self._governed += drafts is not None
        self._sessions += sessions
        # Verdicts come in batches: whole rounds are counted, or a window's edge would cut one.
        if self._rounds % self._level == 0 and self._rounds >= _ROUNDS * self._level:
            self._whole(now)

    def _whole(self, now: float) -> None:
        """Whole rounds have passed: ends the window if it is long enough."""
        seconds, load = now - self._start, self._load
        assert load is not None
        over = seconds >= (load.window_s if self._settled else _SETTLE_S)
        if self._settled and not over:
            over = load.clear(self._tokens / max(seconds, 1e-9), seconds, self._rounds)
        if not over:
            return
        mean, changes = self._sessions / self._rounds, False
        if abs(mean - self._level) > _OFF:
            self._enter(round(mean), now)
            changes = True
        elif self._settled:
            changes = self._judge(now, seconds)
        self._begin(now, settled=not changes)

    def _judge(self, now: float, seconds: float) -> bool:
        """Whether the sessions go another way after this window."""
        load = self._load
        assert load is not None
        if 2 * self._governed >= self._rounds:
            return load.window(self._tokens / seconds, now, seconds)
        # Most sessions are not asked: what the others do would drown in the noise.
        before = self._drafts
        load.disturbed()
        load.plain = False
        return not before

    def _enter(self, sessions: int, now: float) -> None:
        """A load begins as the nearest that is known."""
        bucket = sessions.bit_length()
        self._leave(now)
        found = self._loads.get(bucket)
        if found is None:
            near = min(self._loads, key=lambda at: abs(at - bucket), default=None)
            plain = near is not None and self._loads[near].plain
            found = self._loads[bucket] = _Load(plain)
        found.enter(sessions, now)
        self._load, self._level = found, sessions

    def _leave(self, now: float) -> None:
        if self._load is not None:
            self._load.leave(now)
        self._load, self._level = None, 0

    def _begin(self, now: float, *, settled: bool = False) -> None:
        self._start, self._settled = now, settled
        self._tokens, self._rounds, self._governed, self._sessions = 0, 0, 0, 0
