"""Each objective by its definition, at the ends of its range, and over a draft vocabulary; what a recipe may call them."""

from __future__ import annotations

import math

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.objective import (
    OBJECTIVES,
    Objective,
    Scratch,
    make_teacher,
    parse_objective,
    value,
    value_and_grad,
)

N, V, INSIDE = 6, 40, 25


def logits(seed: int, width: int = V) -> torch.Tensor:
    return torch.randn(N, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2


def teacher_of(objective: Objective, p_NV: torch.Tensor, width: int = V):
    label_N = p_NV.argmax(-1)
    return make_teacher(objective, p_NV[:, :width].log(), torch.where(label_N < width, label_N, -1))


def both(objective: Objective, z_NV: torch.Tensor, p_NV: torch.Tensor) -> torch.Tensor:
    """Return the values, once the two ways to them agree."""
    width = z_NV.shape[-1]
    plain_N = value(objective, z_NV, teacher_of(objective, p_NV, width))
    written_N, _ = value_and_grad(objective, z_NV.clone(), teacher_of(objective, p_NV, width), Scratch())
    torch.testing.assert_close(written_N, plain_N, rtol=1e-10, atol=1e-10)
    return written_N


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_draft_vocabulary_counts_the_mass_it_lacks(name: str) -> None:
    """By definition over the whole vocabulary, where q is 0 outside the draft vocabulary."""
    z_NV, p_NV = logits(1, INSIDE), logits(2).softmax(-1)
    q_NV = torch.cat([z_NV.softmax(-1), torch.zeros(N, V - INSIDE)], 1)
    in_p, in_q = p_NV[:, :INSIDE], q_NV[:, :INSIDE]
    m_N1 = in_p.sum(-1, keepdim=True)
    kl_N = m_N1[:, 0] * (in_p / m_N1 * (in_p / m_N1 / in_q).log()).sum(-1)
    tv_N = (p_NV - q_NV).abs().sum(-1) / 2
    mean_NV = (p_NV + q_NV) / 2
    share_N = (-3 * (1 - tv_N)).exp()
    best = in_p.topk(7, -1).indices
    few_p = torch.zeros_like(in_p).scatter(-1, best, in_p.gather(-1, best))
    few_m = few_p.sum(-1, keepdim=True)
    label_N = p_NV.argmax(-1)
    assert (label_N >= INSIDE).any()
    want = {
        "kl": kl_N,
        "ce": torch.stack([-q.log()[y] if y < INSIDE else q.new_zeros(()) for q, y in zip(q_NV, label_N, strict=True)]),
        "reverse_kl": (in_q * (in_q / in_p).log()).sum(-1),
        "jsd": (torch.xlogy(p_NV, p_NV / mean_NV) + torch.xlogy(q_NV, q_NV / mean_NV)).sum(-1) / 2,
        "tv": tv_N,
        "lk": share_N * kl_N + (1 - share_N) * tv_N,
        "topk": few_m[:, 0] * torch.xlogy(few_p / few_m, few_p / few_m / in_q).sum(-1),
    }[name]
    torch.testing.assert_close(both(parse_objective({"topk": "topk:k=7"}.get(name, name)), z_NV, p_NV), want)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_is_lost_where_the_head_is_the_target(name: str) -> None:
    z_NV = logits(3)
    loss_N = both(Objective(name, top_k=V), z_NV, z_NV.softmax(-1))
    want_N = -z_NV.log_softmax(-1).max(-1).values if name == "ce" else torch.zeros(N, dtype=torch.float64)
    torch.testing.assert_close(loss_N, want_N, rtol=0, atol=1e-9)


def test_what_has_an_upper_end_reaches_it() -> None:
    """Two distributions without a common word."""
    z_NV, p_NV = torch.full((1, V), -200.0), torch.zeros(1, V)
    z_NV[0, 0], p_NV[0, 1] = 0.0, 1.0
    assert float(both(Objective("tv"), z_NV, p_NV)) == 1
    assert float(both(Objective("jsd"), z_NV, p_NV)) == pytest.approx(math.log(2))
    assert torch.isfinite(both(Objective("reverse_kl"), z_NV, p_NV)).all()  # infinite, were it not for LEAST_LOG


def test_the_ends_of_lk_and_topk() -> None:
    z_NV, p_NV = logits(4), logits(5).softmax(-1)
    kl_N, tv_N = both(Objective("kl"), z_NV, p_NV), both(Objective("tv"), z_NV, p_NV)
    torch.testing.assert_close(both(Objective("lk", eta=0), z_NV, p_NV), kl_N)
    torch.testing.assert_close(both(Objective("lk", eta=1e9), z_NV, p_NV), tv_N)
    torch.testing.assert_close(both(Objective("topk", top_k=V), z_NV, p_NV), kl_N)
    one_N = both(Objective("topk", top_k=1), z_NV, p_NV)
    torch.testing.assert_close(one_N, p_NV.max(-1).values * both(Objective("ce"), z_NV, p_NV))


def test_a_tie_has_the_derivative_of_autograd() -> None:
    z_NV = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    p_NV = torch.tensor([[0.25, 0.5, 0.15, 0.1]], dtype=torch.float64)
    value(Objective("tv"), z_NV, teacher_of(Objective("tv"), p_NV)).backward()
    _, grad_NV = value_and_grad(Objective("tv"), z_NV.detach().clone(), teacher_of(Objective("tv"), p_NV), Scratch())
    torch.testing.assert_close(grad_NV, z_NV.grad)


def test_what_a_recipe_may_say() -> None:
    assert parse_objective("kl") == Objective()
    assert parse_objective("topk:k=5").top_k == 5
    assert parse_objective("lk:eta=0.5", (1.0, 0.5)) == Objective("lk", eta=0.5, step_weights=(1.0, 0.5))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("revers_kl", "unknown loss 'revers_kl'; did you mean reverse_kl?"),
        ("", "unknown loss ''; allowed: kl, ce, reverse_kl, jsd, tv, lk, topk"),
        ("kl:3", "cannot read loss 'kl:3'; kl takes no number"),
        ("topk:k=0", "topk takes a whole number of 1 or more: topk:k=64"),
        ("topk:64", "cannot read loss 'topk:64'"),
        ("topk:k=1.5", "cannot read loss 'topk:k=1.5'"),
        ("lk:eta=nan", "lk takes a finite number of 0 or more: lk:eta=3"),
        ("lk:", "cannot read loss 'lk:'"),
    ],
)
def test_what_is_refused(text: str, named: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        parse_objective(text)
    assert named in str(caught.value)


@pytest.mark.parametrize("weights", [(0.0, 0.0), (1.0, -0.5), (float("nan"),), (float("inf"), 1.0)])
def test_weights_that_mean_nothing_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(HeadwayError, match="step_weights is .*finite numbers of 0 or more"):
        parse_objective("kl", weights)
