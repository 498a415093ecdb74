"""What is known of drafting at one load, and the trials of the other way there.

Where a draft service follows the sessions that costs by itself: the target copies and sends their
rows, the draft writes them into its contexts, whether anybody drafts or not. So a session of a load
where drafting is off `leaves` its drafter, and one that opens there has none follow it.

That makes trials longer than a change of mind. Plain is tried while drafters follow first, which is
taken back at once; where that is not better, but might be without what following costs, it is tried
without. Drafting is tried once most sessions are followed again: `follows` says so from the
beginning of the trial, and those that open take their drafters along; nobody need be followed until
then. A few followers would be of no use to a trial: of what they gain and cost, the yield of all
shows their share only, which is below the margin. Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from statistics import median

# Windows last so long at least.
WINDOW_S = 0.25
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
_TRIES, STALE_S = 4, 2.0
# It is compared with the median of the latest windows, once there are some.
_RECENT, _SOME = 5, 3
# Windows until the other way is tried first, then after each change, and how they grow with each
# trial that changes nothing; the longest time between trials, but for slow ones, of which
# the share of the time in trials is kept.
_FIRST, _PAUSE, _GROWTH, _LONGEST_S, _SHARE = 4, 8, 4, 60.0, 0.02
# Of what all could yield followers leave so much at least: where plain yields less of what drafting
# does, it is not tried without them. How much it is a trial tells, to so much either way.
_FOLLOWED, _ABOUT = 0.6, 0.1
# Such a trial is taken back slowly: sessions are followed again so much later, and from one that
# was lost to the next it is as long as this at first, more with each.
BACK_S, _APART_S = 1.0, 4.0
# A trial for which sessions must be followed first is so many times as rare as it is long, at once.
_RARE = 16.0
# When nobody waits any more until most are: after both.
_GATHER_S, _GATHER_ROUNDS = 10.0, 100.0
# Sessions of a window may be fewer or more by one in so many; below so few sessions by none.
_ALIKE, FEW = 8, 4


@dataclass(slots=True)
class Load:
    """What is known at one load, its sessions' bit length: whether plain is better, what the latest
    windows of so many `sessions` yielded (tokens a second), and the trial of the other way.
    `leaves`: sessions that do not draft are not followed either."""

    plain: bool = False
    leaves: bool = False
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
    # Plain is tried without followers, now or when the trial is begun again; not before a time,
    # and so much later the next time.
    apart: bool = False
    apart_at: float = 0.0
    apart_s: float = _APART_S
    # What plain yielded before followers left, and how much of all they leave at least.
    quiet: float = 0.0
    followed: float = _FOLLOWED
    # Rounds of a trial so far in which too few were followed.
    gathered: float = 0.0

    @property
    def drafts(self) -> bool:
        """Whether sessions may draft now."""
        return self.plain == self.trial

    @property
    def follows(self) -> bool:
        """Whether drafters are to follow sessions now."""
        return self.drafts or not (self.leaves and (self.plain or self.apart))

    @property
    def tried(self) -> bool:
        """Whether the other way was tried to an end."""
        return self.pause > _FIRST

    @property
    def window_s(self) -> float:
        return _SHORT_S if self.pause == _FIRST and not self.trial else WINDOW_S

    def clear(self, rate: float, seconds: float, verdicts: int) -> bool:
        """Whether a trial's window that is not over yet is won."""
        if not self.trial or seconds < _SOONEST_S:
            return False
        noise = 1 + _CLEAR * _SPREAD / sqrt(verdicts)
        return rate > _MARGIN * noise * median(self.recent)

    def window(self, rate: float, now: float, seconds: float, idle: bool) -> None:
        """A window yielded `rate`; `idle`: though sessions might draft, hardly any did."""
        if not self.trial:
            self.recent.append(rate)
            self.waited += 1
            if self.waited >= self.pause and len(self.recent) >= _SOME:
                self.trial, self.trial_at, self.gathered = True, now, 0.0
                if idle and self._may_leave(now):
                    self.apart, self.quiet = True, median(self.recent)
        elif rate > _MARGIN * median(self.recent):
            self.wins += 1
            if self.wins >= _WINS:
                self.plain, self.pause = not self.plain, _PAUSE
                self.recent.clear()
                self._over()
        elif rate > self.followed * median(self.recent) and self._may_leave(now):
            self.apart, self.wins, self.quiet = True, 0, rate
        else:
            if self.apart:
                self.followed = min(max(_FOLLOWED, self.quiet / rate - _ABOUT), 1 - _ABOUT)
            self._lost(now, seconds)

    def _may_leave(self, now: float) -> bool:
        return self.leaves and not (self.plain or self.apart) and now >= self.apart_at

    def _lost(self, now: float, seconds: float) -> None:
        spent, window_s = now - self.trial_at, max(seconds, WINDOW_S)
        if self.apart:
            self.apart_at = now + self.apart_s
            self.apart_s = min(_GROWTH * self.apart_s, _LONGEST_S)
            spent += BACK_S
        longest = max(_LONGEST_S, spent / _SHARE) / window_s
        least = _RARE * spent / window_s if self.leaves and self.plain else _PAUSE
        self.pause = max(_PAUSE, least, min(_GROWTH * self.pause, longest))
        self._over()

    def _over(self) -> None:
        self.trial, self.apart, self.waited, self.wins = False, False, 0, 0

    def gather(self, now: float, rounds: float) -> None:
        """So many rounds more in which too few were followed to say what drafting yields."""
        self.gathered += rounds
        late = now - self.trial_at > _GATHER_S and self.gathered > _GATHER_ROUNDS
        if self.trial and late:
            self._lost(now, 0.0)

    def enter(self, sessions: int, now: float) -> None:
        """So many sessions now. What others yielded here, or long ago, is compared with nothing
        that they do."""
        if abs(sessions - self.sessions) > slack(self.sessions) or now - self.left > STALE_S:
            self.recent.clear()
            if self.trial:
                self.cut_off()
        self.sessions = sessions

    def leave(self, now: float) -> None:
        """The load changed. A trial that was on is begun again when it is like now once more: the
        first ones at once, or short turns would never see one. One for which sessions are being
        followed goes on then."""
        if self.trial and not (self.plain and self.leaves):
            self.trial, self.tries = False, self.tries + 1
            if self.pause > _FIRST or self.tries > _TRIES:
                self.waited, self.pause = 0, max(_PAUSE, self.pause)
        self.left = now

    def cut_off(self) -> None:
        """A trial that went on when the load changed does not any more. It counts as lost, or a
        load that swings would have sessions called back for nothing each time."""
        self._lost(self.left, 0.0)

    def disturbed(self) -> None:
        """What was measured is compared with nothing that comes, and drafting goes on."""
        self.recent.clear()
        if self.trial:
            self.pause = max(_PAUSE, self.pause)
            self._over()
        self.plain = False


def slack(sessions: int) -> int:
    """How many sessions fewer or more are as many."""
    return max(sessions // _ALIKE, int(sessions >= FEW))
