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
    def bins(self) -> list[tuple[int, float]]:
        """Pairs of the count seen and expected: one for each token expected FEWEST times, and one for all the others.

        Where the others are expected less often than that, they are counted with the rarest token that has a bin.
        """
        expected_V = self.law_V.double() * self.draws
        own = (expected_V >= FEWEST).nonzero()[:, 0].tolist()
        bins = sorted(((self.counts[t], float(expected_V[t])) for t in own), key=lambda bin: -bin[1])
        seen, want = self.draws - sum(s for s, _ in bins), self.draws - sum(w for _, w in bins)
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
        """The chance that the law itself gives counts so far from what it expects."""
        return _tail(*self.statistic)


def _tail(statistic: float, freedom: int) -> float:
    """Return P(chi-square of `freedom` degrees > statistic)."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_value(cells: Sequence[Cell]) -> float:
    """Return the p-value of all cells, of two questions: is one of them off, and are they off together? (Bonferroni)"""
    tested = [cell for cell in cells if cell.statistic[1]]
    if not tested:
        return 1.0
    together = _tail(sum(cell.statistic[0] for cell in tested), sum(cell.statistic[1] for cell in tested))
    return min(1.0, 2 * together, 2 * len(tested) * min(cell.p for cell in tested))


def wrong_cells(cells: Sequence[Cell], factor: float, seed: int) -> list[Cell]:
    """Return the cells with as many tokens drawn by a wrong sampler: from the law at `factor` times the temperature."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for cell in cells:
        wrong_V = cell.law_V.double().cpu() ** (1 / factor)  # multinomial takes what does not add up to 1
        drawn = torch.multinomial(wrong_V, cell.draws, replacement=True, generator=generator)
        out.append(replace(cell, counts=Counter(drawn.tolist())))
    return out
