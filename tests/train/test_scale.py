"""Steps of several batches, several processes, other engines, other numbers of processes: the head is always the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.inference.target import Target
from headway.train import loop
from headway.train.config import TrainConfig
from headway.train.loop import train
from tests.train.runs import log_of, weights

Make = Callable[..., TrainConfig]
EAGLE3: dict[str, Any] = {"family": "eagle3", "head": {"steps": 2, "draft_vocab_size": 64}, "lr": 1e-3}
SHORT: dict[str, Any] = {**EAGLE3, "max_steps": 4, "eval_prompts": 1, "eval_tokens": 4, "supervise": "all"}


@pytest.fixture
def make(recipe: Make, tmp_path: Path) -> Make:
    return lambda name, **changes: recipe(**(SHORT | changes), out=str(tmp_path / name))


def losses(config: TrainConfig) -> list[float]:
    rows = [row for row in log_of(config) if "lr" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    return [row["loss"] for row in rows]


def assert_same(a: TrainConfig, b: TrainConfig) -> None:
    """The losses are compared number by number, the weights as a whole: a gradient that is all rounding moves its weight in
    Adam as far as any other."""
    assert losses(a) == pytest.approx(losses(b), abs=1e-5)
    one, other = weights(a), weights(b)
    assert {name: t.shape for name, t in one.items()} == {name: t.shape for name, t in other.items()}
    apart = torch.cat([(one[name].double() - other[name].double()).flatten() for name in other])
    size = torch.cat([t.double().flatten() for t in other.values()])
    assert float(apart.norm()) < 2e-4 * float(size.norm())


def test_a_step_of_several_batches_is_that_of_one_large_batch(
    make: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches differ in length, and with `all` the draft steps of a batch in their number of goals."""
    large, small = make("large", tokens_per_batch=100_000), make("small", tokens_per_batch=48, grad_accum=5)
    train(large, target=tiny)
    train(small, target=tiny)
    assert_same(small, large)
    monkeypatch.setattr(loop, "count_labels", lambda *given: None)  # negative control: no batch learns of the others
    alone = make("alone", tokens_per_batch=48, grad_accum=5)
    train(alone, target=tiny)
    with pytest.raises(AssertionError):
        assert_same(alone, large)
