"""Turns drafting off while it does not pay, and on again when it does: an estimate from the rounds themselves.

Drafting pays while (tokens a row gains in a drafted round) x (seconds of a plain round) > (seconds of a drafted round). All
three are measured as decoding goes, apart for each number of rows: many rows make a wide pass dear, and what a head knows of
one text says little of the next.

The tokens never depend on it in float32. In a lower precision a pass over one token and one over a tree round differently,
so an answer whose best two tokens nearly tie may, as anywhere, depend on what was run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median

from headway.inference.tree import at_least

ENOUGH = 6
"""Drafted rounds of one row before they are judged, and in a trial; with more rows there are fewer, each tells more."""
FEWEST = 3
PLAIN_ROUNDS = 2
"""Plain rounds that are timed before the first judgement."""
WAIT, LONGEST_WAIT = 64, 1024
"""Plain rounds before drafting is tried again; doubled each time that it does not pay."""
TRIALS = 0.015
"""Most that trials may cost, as a share of the time: a dear one waits longer."""
STOP = 0.97
"""Drafting stops where it gives less than that share of plain decoding's tokens per second."""


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
    drafted_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    plain_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=24))
    """Of each drafted round, tokens per row."""
    on: bool = True
    wait: int = WAIT
    plain_rounds: int = 0
    """Since drafting stopped."""

    @property
    def ratio(self) -> float | None:
        """Plain rounds that a drafted one lasts; None while that is not known."""
        if self.plain_seconds and self.drafted_seconds:
            return median(self.drafted_seconds) / median(self.plain_seconds)
        return self.price.ratio if self.price is not None else None

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; infinite while it is not known."""
        if not self.tokens or self.ratio is None:
            return float("inf")
        return sum(self.tokens) / len(self.tokens) / self.ratio

    def stop(self, ratio: float, accepted: float) -> None:
        """Draft no more for a while: as long as makes a trial that fails cheap."""
        lost = self.enough * (ratio - accepted)
        self.on, self.plain_rounds = False, 0
        self.wait = min(max(self.wait, ceil(lost / TRIALS)), LONGEST_WAIT)


class Economy:
    """Decides, round by round, whether a batch drafts."""

    def __init__(self, prices: Mapping[int, Price] | None = None) -> None:
        """`prices` are those of numbers of rows where `headway tune` has measured them: then no plain round is run to find
        out, and drafting begins where it paid there. Of other numbers the next larger is taken, or the largest."""
        self._prices = dict(prices or {})
        self._rows: dict[int, _Rows] = {}
        self._last: tuple[int, bool] | None = None
        self.drafted = self.plain = 0
        """Rounds so far."""

    def drafts(self, rows: int) -> bool:
        """Return whether the next round, of that many rows, is to draft."""
        known = self._known(rows)
        if known.on:
            if len(known.tokens) < known.enough:
                return True
            # Rounds were timed beforehand where there is a price, unless they do not look worth it.
            if len(known.plain_seconds) < PLAIN_ROUNDS and known.price is None:
                return False
            if known.gain < STOP:
                known.stop(known.ratio or 1.0, sum(known.tokens) / len(known.tokens))
            return known.on
        if known.plain_rounds < known.wait:
            return False
        known.tokens.clear()  # what was accepted of another passage
        known.on = True
        known.wait = min(2 * known.wait, LONGEST_WAIT)
        return True

    def count(self, rows: int, asked: bool, drafted: bool, tokens: Sequence[int], seconds: float) -> None:
        """Take a round: whether it was to draft, whether anything was drafted (a lookup may find nothing), the tokens of each
        row, its seconds."""
        known = self._known(rows)
        self.drafted += drafted
        self.plain += not drafted
        if drafted:
            known.tokens.append(sum(tokens) / len(tokens))
        known.plain_rounds += not asked
        # The first round after a switch is not timed: it reads weights and features that others find at hand.
        now = _about(rows), asked
        if self._last == now:
            (known.drafted_seconds if drafted else known.plain_seconds).append(seconds)
        self._last = now
        if drafted and len(known.tokens) == known.tokens.maxlen and known.on and known.gain >= 1:
            known.wait = WAIT

    def gain(self, rows: int) -> float:
        """Return the estimated tokens per second with drafts over those without, for that many rows."""
        return self._known(rows).gain

    def _known(self, rows: int) -> _Rows:
        """Return what is known of about that many rows."""
        if _about(rows) not in self._rows:
            price = at_least(self._prices, rows) if self._prices else None
            known = self._rows[_about(rows)] = _Rows(price, max(FEWEST, ceil(ENOUGH / rows)))
            if price is not None and price.accepted < price.ratio:
                known.stop(price.ratio, price.accepted)
        return self._rows[_about(rows)]


def _about(rows: int) -> int:
    """Return the same number for 1 row, for 2, for 3-4, for 5-8, ..."""
    return (rows - 1).bit_length()
