"""Steps and learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.train import schedule
from headway.train.config import TrainConfig
from headway.train.schedule import learning_rate, steps_by_count, steps_by_time


def test_the_rate_rises_then_falls_to_its_floor(recipe: Callable[..., TrainConfig]) -> None:
    config = recipe(lr=1.0, warmup=10, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)
    assert rates[55] == pytest.approx(0.55)
    assert learning_rate(recipe(lr=1.0, warmup=0.1), 10, 100) == 1.0
    assert learning_rate(recipe(lr=1.0, warmup=0), 0, 1) == 1.0


def test_wsd_stays_and_falls_at_the_end(recipe: Callable[..., TrainConfig]) -> None:
    config = recipe(lr=1.0, schedule="wsd", warmup=10, cooldown=0.2, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[:10] == sorted(rates[:10])
    assert set(rates[10:81]) == {1.0}
    assert rates[90] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    by_number = recipe(lr=1.0, schedule="wsd", warmup=10, cooldown=20, min_lr_ratio=0.1)
    assert [learning_rate(by_number, step, 100) for step in range(101)] == rates
    long = recipe(lr=1.0, schedule="wsd", warmup=10, cooldown=500, min_lr_ratio=0.0)  # more than there is: no jump
    assert [learning_rate(long, step, 20) for step in (10, 15, 20)] == pytest.approx([1.0, 0.5, 0.0])
    never = recipe(lr=1.0, schedule="wsd", warmup=0, cooldown=0)
    assert learning_rate(never, 99, 100) == 1.0


def test_the_first_limit_counts(recipe: Callable[..., TrainConfig]) -> None:
    assert steps_by_count(recipe(max_steps=100, epochs=2), 4, 30) == 15
    assert steps_by_count(recipe(max_steps=7, epochs=2), 4, 30) == 7
    assert steps_by_count(recipe(max_steps=None, max_seconds=9), 4, 30) is None


@pytest.mark.parametrize(
    ("kept", "seconds", "steps"),
    [("off", 80, 20), ("memory", 20, 5), ("memory", 80, 10 + 40)],  # ten batches: 3 s of features, 1 s of step
)
def test_steps_that_a_budget_buys(
    recipe: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, kept: str, seconds: float, steps: int
) -> None:
    clock = [0.0]

    class Slow:
        batches = [None] * 10
        num_missing = 10

        def __init__(self) -> None:
            self.kept = kept

        def compute(self, n: int) -> Any:
            clock[0] += 3.0

    def trial(batch: Any) -> None:
        clock[0] += 1.0

    monkeypatch.setattr(schedule, "clock", lambda: clock[0])
    config = recipe(max_steps=None, max_seconds=seconds)
    assert steps_by_time(config, Slow(), trial) == steps  # type: ignore[arg-type]
