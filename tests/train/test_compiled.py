"""Training that torch.compile takes part in: the same losses, gradients and heads, and what cannot be compiled says so.

What the fast tests compile is traced and then run as it was traced; the slow ones generate code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headway.heads.common.protocol import Batch, Head, families
from headway.inference.target import Target
from headway.train.compiled import Compiled
from tests.heads.test_contract import make_batch, small
from tests.tiny import build, target

FAMILIES = families()
LENGTHS = ((24, 17), (30, 11, 9), (19,), (12, 12))


@pytest.fixture(scope="module")
def tiny() -> Target:
    return target(build(0, num_hidden_layers=4), mode="tree")


def fields(family: str) -> dict[str, Any]:
    return {"peagle": {"depths": 3, "num_layers": 2}, "eagle3": {"steps": 3, "fc_norm": True}}.get(family, {})


def loss_and_gradients(head: Head, batch: Batch) -> list[torch.Tensor]:
    """Return loss, losses and agreement by step, and gradients; what the head draws is the same at every call."""
    torch.manual_seed(3)
    head.zero_grad()
    report = head.loss(batch)
    report.loss.backward()
    grads = [p.grad for p in head.parameters()]
    assert all(g is not None for g in grads)
    return [report.loss.detach(), report.loss_S, report.agreement_S, *(g.clone() for g in grads if g is not None)]


def batches(head: Head, tiny: Target) -> Iterator[Batch]:
    """Rows and positions of several numbers, with few goals and with nothing but goals."""
    for lengths in LENGTHS:
        for first in (0, min(lengths) - 4):
            batch = make_batch(tiny, head.config.taps, lengths, first)
            # As in training: features are no tensors of inference mode.
            yield dataclasses.replace(batch, tap_BTF=batch.tap_BTF.clone(), last_BTD=batch.last_BTD.clone())


def check(family: str, tiny: Target, backend: str) -> Compiled:
    head = small(family, tiny, **fields(family)).train()
    compiled = Compiled(family, torch.device("cpu"), backend=backend)
    for batch in batches(head, tiny):
        head.compiled = None
        want = loss_and_gradients(head, batch)
        head.compiled = compiled
        got = loss_and_gradients(head, batch)
        assert not compiled.reason
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    return compiled


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_plain_ones(family: str, tiny: Target) -> None:
    compiled = check(family, tiny, "aot_eager")
    assert 1 <= compiled.num_graphs <= 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_plain_ones_in_generated_code(family: str, tiny: Target) -> None:
    check(family, tiny, "inductor")
