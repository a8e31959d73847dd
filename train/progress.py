"""The progress line of a run, on stderr: rewritten on a terminal, repeated now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import psutil
import torch

from headway.train.run_folder import Progress


class Line:
    """Says step, loss, agreement, tokens per second and time left."""

    def __init__(self, total_steps: int, *, show: bool = True) -> None:
        self.total_steps, self.show = total_steps, show
        self._terminal = sys.stderr.isatty()
        self._next = 0.0
        self._recent: list[tuple[float, int]] = []  # seconds and tokens of the last steps

    def add(self, progress: Progress, figures: dict[str, Any]) -> None:
        """Take a finished step; show the line when it is due."""
        now = time.monotonic()
        self._recent.append((progress.seconds, progress.tokens))
        del self._recent[:-50]
        if not self.show or now < self._next:
            return
        self._next = now + (0.2 if self._terminal else 10.0)
        start, end = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{start}train: {self.text(progress, figures)}", end=end, file=sys.stderr, flush=True)

    def pace(self, progress: Progress, tokens: int, seconds: float) -> dict[str, Any]:
        """Return the figures of a step of so many tokens and seconds that is not counted yet, averaged over the last steps.

        `tokens_per_s` counts supervised tokens of all processes, `left_seconds` training steps without evaluations;
        `memory_gib` is the most that a GPU held, on a CPU what the process holds now.
        """
        s0, t0 = self._recent[0] if self._recent else (progress.seconds, progress.tokens)
        s1, t1 = progress.seconds + seconds, progress.tokens + tokens
        num_steps = max(1, len(self._recent))
        return {
            "tokens_per_s": round((t1 - t0) / max(s1 - s0, 1e-9), 2),
            "left_seconds": round((s1 - s0) / num_steps * (self.total_steps - progress.step - 1), 1),
            "memory_gib": round(held_memory() / 2**30, 3),
        }

    def text(self, progress: Progress, figures: dict[str, Any]) -> str:
        """Return the line."""
        (s0, t0), (s1, t1) = self._recent[0], self._recent[-1]
        if s1 > s0:
            rate, per_step = (t1 - t0) / (s1 - s0), (s1 - s0) / (len(self._recent) - 1)
        else:
            rate, per_step = progress.tokens / max(progress.seconds, 1e-9), progress.seconds / max(1, progress.step)
        left = round((self.total_steps - progress.step) * per_step)
        agreement = "/".join(f"{a:.2f}" for a in figures["agreement_S"])
        drift = f", target KL {figures['target_kl']:.4f}" if "target_kl" in figures else ""
        return (
            f"step {progress.step}/{self.total_steps}, loss {figures['loss']:.3f}, agreement {agreement}{drift}, "
            f"{rate:.0f} tokens/s, {left // 60}:{left % 60:02d} left"
        )

    def close(self) -> None:
        """End the line on a terminal."""
        if self.show and self._terminal:
            print(file=sys.stderr, flush=True)


def held_memory() -> int:
    """Return bytes: the most that this process held on its GPU, without one what it holds now."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss


def say(text: str) -> None:
    """Print a line on stderr."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}train: {text}", file=sys.stderr, flush=True)
