"""Turns drafting off while it does not pay, and on again when it does: an estimate from the rounds themselves.

Drafting pays while (tokens a row gains in a drafted round) x (seconds of a plain round) > (seconds of a drafted round). All
three are measured as decoding goes, apart for each number of rows: many rows make a wide pass dear, and what a head knows of
one text says little of the next.

The tokens never depend on it in float32. In a lower precision a pass over one token and one over a tree round differently,
so an answer whose best two tokens nearly tie may, as anywhere, depend on what was run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

ENOUGH = 6
"""Drafted rounds before they are judged, and in a trial."""
PLAIN_ROUNDS = 2
"""Plain rounds that are timed before the first judgement."""
WAIT, LONGEST_WAIT = 64, 1024
"""Plain rounds before drafting is tried again; doubled each time that it does not pay."""
STOP = 0.97
"""Drafting stops where it gives less than that share of plain decoding's tokens per second."""


@dataclass
class _Rows:
    """What was measured with one number of rows."""

    drafted_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    plain_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=24))
    """Of each drafted round, tokens per row."""
    on: bool = True
    wait: int = WAIT
    plain_rounds: int = 0
    """Since drafting stopped."""


class Economy:
    """Decides, round by round, whether a batch drafts."""

    def __init__(self, ratio: float | None = None) -> None:
        """`ratio` is how much longer a drafted round of one row takes than a plain one, where `headway tune` has measured
        it; then no plain round is run to find out."""
        self._ratio = ratio
        self._rows: dict[int, _Rows] = {}
        self._last: tuple[int, bool] | None = None
        self.drafted = self.plain = 0
        """Rounds so far."""

    def drafts(self, rows: int) -> bool:
        """Return whether the next round, of that many rows, is to draft."""
        known = self._known(rows)
        if known.on:
            if len(known.tokens) < ENOUGH:
                return True
            # Rounds of one row were timed beforehand, unless they do not look worth it.
            timed = len(known.plain_seconds) >= PLAIN_ROUNDS or (rows == 1 and self._ratio is not None)
            if not timed:
                return False
            known.on = self.gain(rows) >= STOP
            known.plain_rounds = 0
            return known.on
        if known.plain_rounds < known.wait:
            return False
        known.tokens.clear()  # what was accepted of another passage
        known.on = True
        known.wait = min(2 * known.wait, LONGEST_WAIT)
        return True

    def count(self, rows: int, drafted: bool, tokens: Sequence[int], seconds: float) -> None:
        """Take a round: whether it drafted, the tokens of each row, its seconds."""
        known = self._known(rows)
        self.drafted += drafted
        self.plain += not drafted
        if drafted:
            known.tokens.append(sum(tokens) / len(tokens))
        else:
            known.plain_rounds += 1
        # The first round after a switch is not timed: it reads weights and features that others find at hand.
        now = (rows - 1).bit_length(), drafted
        if self._last == now:
            (known.drafted_seconds if drafted else known.plain_seconds).append(seconds)
        self._last = now
        if drafted and len(known.tokens) == known.tokens.maxlen and known.on and self.gain(rows) >= 1:
            known.wait = WAIT

    def gain(self, rows: int) -> float:
        """Return the estimated tokens per second with drafts over those without, for that many rows."""
        known = self._known(rows)
        if not known.tokens or not known.drafted_seconds:
            return float("inf")
        accepted = sum(known.tokens) / len(known.tokens)
        if known.plain_seconds:
            return accepted * median(known.plain_seconds) / median(known.drafted_seconds)
        return accepted / self._ratio if self._ratio is not None else float("inf")

    def _known(self, rows: int) -> _Rows:
        """Return what is known of about that many rows: 1, 2, 3-4, 5-8, ..."""
        return self._rows.setdefault((rows - 1).bit_length(), _Rows())
