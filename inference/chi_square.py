"""A chi-square test of tokens drawn in a few contexts against the law of each, and a sampler that must fail it.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FEWEST = 5.0
"""Least expected count of a bin; rarer tokens share one."""


@dataclass
class Cell:
    """What was drawn in one context."""

    id: str
    after: tuple[int, ...]
    """The drawn tokens before, part of the context."""
    law_V: Tensor
    counts: Counter[int]

    @property
    def draws(self) -> int:
        """Number of tokens drawn."""
        return sum(self.counts.values())

    @property
    def rest(self) -> tuple[int, float]:
        """How many of the tokens that are expected less than FEWEST times were seen, and how many are expected."""
        expected_V = self.law_V.double() * self.draws
        rare_V = expected_V < FEWEST
        return sum(n for token, n in self.counts.items() if rare_V[token]), float(expected_V[rare_V].sum())

    @property
    def bins(self) -> list[tuple[int, float]]:
        """Pairs of the count seen and expected: one for each token expected FEWEST times, and one for the rest.

        Where the rest is expected less often than that, it is counted with the rarest token that has a bin.
        """
        expected_V = self.law_V.double() * self.draws
        own = (expected_V >= FEWEST).nonzero()[:, 0].tolist()
        bins = sorted(((self.counts[t], float(expected_V[t])) for t in own), key=lambda bin: -bin[1])
        seen, want = self.rest
        if bins and want < FEWEST:
            last = bins.pop()
            seen, want = seen + last[0], want + last[1]
        return [*bins, (seen, want)]

    @property
    def statistic(self) -> tuple[float, int]:
        """The chi-square statistic and its degrees of freedom, 0 where one bin holds everything."""
        bins = self.bins
        return sum((seen - want) ** 2 / want for seen, want in bins), len(bins) - 1

    @property
    def p(self) -> float:
        """The chance that the law itself gives counts so far from what it expects.

        A rest too rare for a bin of its own is asked about by itself: too many of it are not to be hidden in another bin.
        """
        seen, want = self.rest
        if want >= FEWEST or seen == 0:
            return _tail(*self.statistic)
        half = torch.tensor([float(seen), max(want, 1e-12)], dtype=torch.float64)
        stray = float(torch.special.gammainc(half[0], half[1]))  # P(Poisson(want) >= seen)
        return min(1.0, 2 * _tail(*self.statistic), 2 * stray)


def _tail(statistic: float, freedom: int) -> float:
    """Return P(chi-square of `freedom` degrees > statistic)."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_value(cells: Sequence[Cell]) -> float:
    """Return the p-value of all cells, of two questions: is one of them off, and are they off together? (Bonferroni)"""
    if not cells:
        return 1.0
    statistics = [cell.statistic for cell in cells]
    together = _tail(sum(statistic for statistic, _ in statistics), sum(freedom for _, freedom in statistics))
    return min(1.0, 2 * together, 2 * len(cells) * min(cell.p for cell in cells))


def wrong_cells(cells: Sequence[Cell], factor: float, seed: int) -> list[Cell]:
    """Return the cells with as many tokens drawn by a wrong sampler: from the law at `factor` times the temperature."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for cell in cells:
        wrong_V = cell.law_V.double().cpu() ** (1 / factor)  # multinomial takes what does not add up to 1
        drawn = torch.multinomial(wrong_V, cell.draws, replacement=True, generator=generator)
        out.append(replace(cell, counts=Counter(drawn.tolist())))
    return out
