"""Turns drafting off while it does not pay, and on again when it does: an estimate from the rounds themselves.

Drafting pays while a drafted round gains a row more tokens than the plain rounds that it lasts. Both are measured as decoding
goes, apart for each number of rows: many rows make a wide pass dear, and what a head knows of one text says little of the
next. A machine that others use is half as fast for a while and fast again, so a drafted round is held against the plain one
beside it, never against one of long ago.

The tokens never depend on it in float32. In a lower precision a pass over one token and one over a tree round differently,
so an answer whose best two tokens nearly tie may, as anywhere, depend on what was run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from headway.inference.tree import at_least

ENOUGH = 6
"""Drafted rounds of one row in a trial, and rounds that a price from `headway tune` counts for; with more rows there are fewer,
each tells more."""
FEWEST = 3
WAIT, LONGEST_WAIT = 64, 1024
"""Plain rounds before drafting is tried again; doubled each time that it does not pay."""
TRIALS = 0.015
"""Most that trials may cost, as a share of the time: a dear one waits longer."""
READING = 3.0
"""Plain rounds that a drafter's reading of what it missed, prompts too, is taken to last until it was seen."""
START, STOP = 1.08, 1.03
"""Drafting begins where it gives so much of plain decoding's tokens per second, and ends below STOP: a gain that is not clear
may be none, and rows that were asked together are done when the last one is, which gains less than the mean."""
UNCLEAR = 0.9, 1.1
"""A trial whose gain is between these shares of START goes on, up to three times as long."""
PROBE = 24
"""Drafted rounds after which a plain one is timed beside them."""


@dataclass(frozen=True)
class Price:
    """What drafting costs and gives, as `headway tune` measured it."""

    ratio: float
    """Plain rounds that a drafted round lasts."""
    accepted: float
    """Tokens that a row gains in it."""


@dataclass
class _Rows:
    """What was measured with one number of rows."""

    price: Price | None
    enough: int
    ratios: deque[float] = field(init=False)
    """Plain rounds that a drafted one lasts, of neighbours."""
    tokens: deque[float] = field(init=False)
    """Of each drafted round, tokens per row."""
    on: bool = True
    trial: bool = True
    """Whether drafting has not shown yet that it pays."""
    wait: int = WAIT
    undrafted: int = 0
    """Plain rounds since drafting stopped."""
    unprobed: int = 0
    """Drafted rounds since a plain one."""
    spent: float = 0.0
    """Plain rounds that drafted ones and reading have cost since drafting began."""
    plain_seconds: float | None = None
    """Of the last plain round."""

    def __post_init__(self) -> None:
        self.ratios, self.tokens = deque(maxlen=3 * self.enough), deque(maxlen=8 * self.enough)

    @property
    def ratio(self) -> float | None:
        """Plain rounds that a drafted one lasts; None while that is not known."""
        known = sorted(self.ratios)
        if self.price is not None:
            known = sorted(known + [self.price.ratio] * (FEWEST - len(known)))
        if not known:
            return None
        cut = len(known) // 4  # a round that something else held up
        return sum(known[cut : len(known) - cut]) / (len(known) - 2 * cut)

    @property
    def accepted(self) -> float | None:
        """Tokens that a row gains in a drafted round; None while that is not known."""
        known, count = sum(self.tokens), float(len(self.tokens))
        if self.price is not None:
            known, count = known + self.enough * self.price.accepted, count + self.enough
        return known / count if count else None

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; infinite while it is not known."""
        if self.ratio is None or self.accepted is None:
            return float("inf")
        return self.accepted / self.ratio

    @property
    def judged(self) -> bool:
        """Whether a trial has shown enough."""
        rounds = min(len(self.ratios), len(self.tokens))
        clear = not UNCLEAR[0] < self.gain / START < UNCLEAR[1]
        return rounds >= (self.enough if clear else 3 * self.enough)

    def stop(self, lost: float) -> None:
        """Draft no more for a while: as long as makes a trial that loses so many plain rounds cheap."""
        self.on, self.undrafted = False, 0
        self.wait = min(max(self.wait, ceil(lost / TRIALS)), LONGEST_WAIT)

    def begin(self) -> None:
        """Try drafting."""
        self.on = self.trial = True
        self.wait = min(2 * self.wait, LONGEST_WAIT)
        # Of another passage, and another spell of the machine.
        self.tokens.clear()
        self.ratios.clear()
        self.unprobed, self.spent = 0, 0.0
        self.price = None


class Economy:
    """Decides, round by round, whether a batch drafts."""

    def __init__(self, prices: Mapping[int, Price] | None = None) -> None:
        """`prices` are those of numbers of rows where `headway tune` has measured them: drafting begins where it paid there.
        Of other numbers the next larger is taken, or the largest. Without prices it begins with a trial."""
        self._prices = dict(prices or {})
        self._rows: dict[int, _Rows] = {}
        self._last: tuple[int, bool, float] | None = None
        self._before: tuple[int, bool] | None = None
        self.drafted = self.plain = 0
        """Rounds so far."""

    def drafts(self, rows: int) -> bool:
        """Return whether the next round, of that many rows, is to draft."""
        known = self._known(rows)
        if not known.on:
            if known.undrafted < known.wait:
                return False
            known.begin()
            return True
        if known.trial and known.price is None and not known.judged:
            return known.unprobed == 0  # by turns, so that the two are neighbours
        if known.gain < (START if known.trial else STOP):
            known.stop(max(0.0, known.spent - sum(known.tokens)))
            return False
        known.trial = False
        return known.unprobed < PROBE

    def count(self, rows: int, asked: bool, drafted: bool, tokens: Sequence[int], seconds: float) -> None:
        """Take a round: whether it was to draft, whether anything was drafted (a lookup may find nothing), the tokens of each
        row, its seconds."""
        known = self._known(rows)
        self.drafted += drafted
        self.plain += not drafted
        self._pair(known, rows, drafted, seconds)
        if drafted:
            known.tokens.append(sum(tokens) / len(tokens))
            known.unprobed += 1
            self.read(rows, seconds)
        else:
            known.unprobed, known.plain_seconds = 0, seconds
        known.undrafted += not asked
        if drafted and len(known.tokens) == known.tokens.maxlen and known.on and not known.trial:
            known.wait = WAIT

    def read(self, rows: int, seconds: float) -> None:
        """Take what a drafter's reading of what it missed has cost, outside a round."""
        known = self._known(rows)
        known.spent += seconds / known.plain_seconds if known.plain_seconds else READING

    def gain(self, rows: int) -> float:
        """Return the estimated tokens per second with drafts over those without, for that many rows."""
        return self._known(rows).gain

    def _pair(self, known: _Rows, rows: int, drafted: bool, seconds: float) -> None:
        """Hold the round against the one before it, where one of the two was drafted."""
        last, before, about = self._last, self._before, _about(rows)
        self._before, self._last = (None if last is None else last[:2]), (about, drafted, seconds)
        if last is None or last[:2] != (about, not drafted):
            return
        # A drafted round after several plain ones has the drafter read what it missed: it is dearer than others.
        if not drafted:
            known.ratios.append(last[2] / seconds)
        elif before == (about, True):
            known.ratios.append(seconds / last[2])

    def _known(self, rows: int) -> _Rows:
        """Return what is known of about that many rows."""
        if _about(rows) not in self._rows:
            price = at_least(self._prices, rows) if self._prices else None
            known = self._rows[_about(rows)] = _Rows(price, max(FEWEST, ceil(ENOUGH / rows)))
            if known.gain < START and price is not None:
                known.stop(known.enough * max(0.0, price.ratio - price.accepted) + READING)
        return self._rows[_about(rows)]


def _about(rows: int) -> int:
    """Return the same number for 1 row, for 2, for 3-4, for 5-8, ..."""
    return (rows - 1).bit_length()
