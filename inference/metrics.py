"""What is said of acceptance, each figure under its own name.

A step drafts a path of `depth` tokens and the target accepts the first `a` of them; the bonus token that the target adds
in every step is not in `a`.
"""

from __future__ import annotations

from collections.abc import Sequence


def mean_accepted_length(accepted: Sequence[int]) -> float:
    """Return tokens committed per step: accepted draft tokens and the bonus token. 1.0 when nothing is accepted."""
    return 1.0 + sum(accepted) / len(accepted) if accepted else 1.0


def draft_acceptance_rate(accepted: Sequence[int], depth: int) -> float:
    """Return the share of drafted tokens that were accepted; the bonus token does not count."""
    drafted = len(accepted) * depth
    return sum(accepted) / drafted if drafted else 0.0


def acceptance_by_depth(accepted: Sequence[int], depth: int) -> list[float]:
    """Return, per draft position, the share of all steps in which it was accepted (unconditional; never rises)."""
    return [sum(a > d for a in accepted) / len(accepted) if accepted else 0.0 for d in range(depth)]


def conditional_acceptance_by_depth(accepted: Sequence[int], depth: int) -> list[float]:
    """Return, per draft position, the share accepted among the steps that had accepted every position before it."""
    reached = [sum(a >= d for a in accepted) for d in range(depth + 1)]
    return [reached[d + 1] / reached[d] if reached[d] else 0.0 for d in range(depth)]
