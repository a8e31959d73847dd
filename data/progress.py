"""Progress on stderr: items, tokens per second, time left. One line, rewritten on a terminal, repeated elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class Progress:
    """Counts items and tokens and says how it goes."""

    def __init__(
        self,
        what: str,
        total: int | None,
        *,
        seconds: float | None = None,
        show: bool = True,
        more: Callable[[], str] = lambda: "",
    ) -> None:
        """`total` items are still to be done, where that is known; `seconds` is the time allowed, if it is limited. `more` ends
        the line."""
        self._more = more
        self.what, self.total, self.seconds, self.show = what, total, seconds, show
        self.done = 0
        self.tokens = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._start + (0.0 if self._terminal else 5.0)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def out_of_time(self) -> bool:
        """Whether the time allowed is used up."""
        return self.seconds is not None and self.elapsed >= self.seconds

    def add(self, items: int = 0, tokens: int = 0) -> None:
        """Count, and show the line when it is due."""
        self.done += items
        self.tokens += tokens
        now = time.monotonic()
        if self.show and now >= self._next:
            self._next = now + (0.2 if self._terminal else 15.0)
            start, end = ("\r\x1b[K", "") if self._terminal else ("", "\n")
            print(f"{start}{self}", end=end, file=sys.stderr, flush=True)

    def close(self, last: str = "") -> None:
        """Replace the line by `last`."""
        if self.show:
            print(f"{chr(13)}\x1b[K{last}" if self._terminal else last, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        elapsed = max(self.elapsed, 1e-9)
        known = self.total is not None and self.done
        by_items = max(0, (self.total or 0) - self.done) * elapsed / self.done if known else float("inf")
        by_time = float("inf") if self.seconds is None else max(0.0, self.seconds - elapsed)
        left = min(by_items, by_time)
        eta = f", {_clock(left)} left" if left < float("inf") else ""
        if self.out_of_time:
            eta = ", time is up: what is under way is finished"
        # A total that the time will not allow says nothing.
        of = f"/{self.total}" if self.total is not None and by_items <= by_time else ""
        return f"{self.what} {self.done}{of}, {self.tokens} tokens, {self.tokens / elapsed:.0f} tokens/s{eta}{self._more()}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
