"""The figures of acceptance, on six steps that drafted four tokens each."""

from __future__ import annotations

import pytest

from headway.inference.metrics import (
    acceptance_by_depth,
    conditional_acceptance_by_depth,
    draft_acceptance_rate,
    mean_accepted_length,
)

ACCEPTED = [3, 0, 1, 4, 2, 0]


def test_figures() -> None:
    assert mean_accepted_length(ACCEPTED) == pytest.approx(16 / 6)
    assert draft_acceptance_rate(ACCEPTED, 4) == pytest.approx(10 / 24)
    assert acceptance_by_depth(ACCEPTED, 4) == pytest.approx([4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert conditional_acceptance_by_depth(ACCEPTED, 4) == pytest.approx([4 / 6, 3 / 4, 2 / 3, 1 / 2])


def test_they_agree_with_one_another() -> None:
    by_depth = acceptance_by_depth(ACCEPTED, 4)
    assert mean_accepted_length(ACCEPTED) == pytest.approx(1 + sum(by_depth))
    assert draft_acceptance_rate(ACCEPTED, 4) == pytest.approx(sum(by_depth) / 4)
    product = 1.0
    for conditional, plain in zip(conditional_acceptance_by_depth(ACCEPTED, 4), by_depth, strict=True):
        product *= conditional
        assert product == pytest.approx(plain)


def test_nothing_is_not_a_number_out_of_range() -> None:
    assert (mean_accepted_length([]), draft_acceptance_rate([], 4), draft_acceptance_rate([0], 0)) == (1.0, 0.0, 0.0)
    assert acceptance_by_depth([], 2) == conditional_acceptance_by_depth([], 2) == [0.0, 0.0]
    assert conditional_acceptance_by_depth([0, 0], 2) == [0.0, 0.0]
