"""The distillation loss over a large vocabulary, in chunks, and the plain version it must equal (objective.py: of what).

Letters: B batch, T positions, D hidden, S draft steps, M supervised label positions, V the head's vocabulary.

    position:                 j - 1 - s   ...   j        j + 1
    the target:                                 p(j)  ->  x[j+1] was emitted
    step s of an anchor at:   t = j - 1 - s  predicts x[t + 2 + s] = x[j + 1], taught by p(j)

So everything about one label is gathered at its teacher position j: one teacher row serves all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headway.heads.common.objective import Objective, Scratch, Teacher, make_teacher, value, value_and_grad
from headway.heads.common.protocol import Batch, Frozen, LossReport

CHUNK_ELEMENTS = 1 << 22
"""Largest logits matrix (rows x vocabulary) alive at once."""


def to_teacher(value_BTX: Tensor, step: int) -> Tensor:
    """Return at position j what an anchor at j - 1 - step holds; zeros where there is no such anchor. The one shift."""
    shift = 1 + step
    if value_BTX.shape[1] <= shift:
        return torch.zeros_like(value_BTX)
    pad = torch.zeros_like(value_BTX[:, :shift])
    return torch.cat([pad, value_BTX[:, :-shift]], dim=1)


def _at_teacher(value_BTX: Tensor, row_M: Tensor, position_M: Tensor, step: int) -> Tensor:
    """Return `to_teacher` at some positions [M, X], but what is at the first one where there is no such anchor. Whole rows
    are copied, and their gradients added: indexing by pairs does both element by element."""
    T = value_BTX.shape[1]
    anchor_M = (position_M - 1 - step).clamp_min(0)
    return value_BTX.flatten(0, 1).index_select(0, row_M * T + anchor_M)


def label_positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (row, position), each [M]: teacher positions j whose next token was emitted by the target."""
    taught_BT = torch.zeros_like(batch.supervised_BT)
    taught_BT[:, :-1] = batch.supervised_BT[:, 1:]
    row, position = taught_BT.nonzero(as_tuple=True)
    return row, position


def count_labels(supervised_BT: Tensor) -> Tensor:
    """Return how many labels have an anchor at each step, int64 [S], for as many steps as any has."""
    # Step s predicts the token at g from the anchor at g - 2 - s: it lacks the first 2 + s tokens.
    return supervised_BT[:, 2:].sum(0).flip(0).cumsum(0).flip(0)


def mean_over(batch: Batch, count_S: Tensor) -> Tensor:
    """Return over how many labels the mean of each step goes: those counted here, or those of the whole that this is part of.
    At least 1."""
    whole_S = batch.whole_count_S
    if whole_S is None:
        return count_S.clamp_min(1)
    return F.pad(whole_S, (0, max(0, len(count_S) - len(whole_S))))[: len(count_S)].clamp_min(1)


@torch.no_grad()
def summarise(frozen: Frozen, last_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's log-normaliser [M] (fp32) and argmax [M] from features after the final norm, in chunks."""
    M = last_MD.shape[0]
    normaliser_M = last_MD.new_zeros(M, dtype=_full(last_MD.dtype))
    argmax_M = torch.zeros(M, dtype=torch.long, device=last_MD.device)
    size = max(1, CHUNK_ELEMENTS // frozen.info.vocab_size)
    for at in range(0, M, size):
        part = slice(at, at + size)
        # Written in place: small results kept between large ones would pin the holes that those leave in a CPU's heap.
        logits = frozen.logits(last_MD[part]).to(normaliser_M.dtype)
        torch.logsumexp(logits, -1, out=normaliser_M[part])
        torch.argmax(logits, -1, out=argmax_M[part])
    return normaliser_M, argmax_M


@dataclass(frozen=True)
class Labels:
    """What is taught at M labels, from which the teacher of any chunk of them is made again."""

    frozen: Frozen
    objective: Objective
    vocab: Tensor | None
    """Target ids of the head's vocabulary [V], or None for the target's own."""
    last_MD: Tensor
    normaliser_M: Tensor
    label_M: Tensor
    """The target's argmax as an index of the head's vocabulary, -1 outside it."""

    def teacher(self, part: slice, dtype: torch.dtype, scratch: Scratch | None = None) -> Teacher:
        """Return the target's distribution at a chunk of the labels."""
        log_NV = self.frozen.logits(self.last_MD[part], self.vocab).to(dtype)
        log_NV.sub_(self.normaliser_M[part, None])
        return make_teacher(self.objective, log_NV, self.label_M[part], scratch)


@dataclass
class _Pass:
    """One pass over chunks of the labels: losses and argmaxes, and the gradients of sum(weight * loss) that are wanted.

    Nothing of size [M, V] outlives its chunk.
    """

    loss_MS: Tensor
    best_MS: Tensor
    grad_hidden: Tensor | None
    grad_heads: list[Tensor | None]
    scratch: Scratch

    def add(
        self, at: tuple[slice, int], teacher: Teacher, labels: Labels, weight_MS: Tensor, h_ND: Tensor, w: Tensor
    ) -> None:
        """Do one step of one chunk, `at` = (labels, step), with the LM head's weight w as the product takes it."""
        z_NV = self.scratch.empty("z", h_ND.shape[0], w.shape[0], self.loss_MS)
        if w.dtype == z_NV.dtype:
            torch.mm(h_ND, w.T, out=z_NV)
        else:
            z_NV.copy_(h_ND @ w.T)
        self.best_MS[at] = z_NV.argmax(-1)
        self.loss_MS[at], grad_NV = value_and_grad(labels.objective, z_NV, teacher, self.scratch)
        grad_head = self.grad_heads[0 if len(self.grad_heads) == 1 else at[1]]
        if self.grad_hidden is None and grad_head is None:
            return
        grad_NV = grad_NV.mul_(weight_MS[at][:, None]).to(w.dtype)
        if self.grad_hidden is not None:
            self.grad_hidden[at] = (grad_NV @ w).to(self.grad_hidden.dtype)
        if grad_head is not None and grad_head.dtype == w.dtype:
            grad_head.addmm_(grad_NV.T, h_ND)  # in place: [V, D] once more would be the largest tensor of all
        elif grad_head is not None:
            grad_head += grad_NV.T @ h_ND


def _pass(
    labels: Labels, weight_MS: Tensor, hidden_MSD: Tensor, lm_heads: Sequence[Tensor], wanted: Sequence[bool]
) -> _Pass:
    """Return a whole pass; `wanted` says whether the gradient of the hidden states and of each LM head is."""
    M, S, _ = hidden_MSD.shape
    full, dtype = _full(hidden_MSD.dtype), _product_dtype(hidden_MSD)
    done = _Pass(
        loss_MS=hidden_MSD.new_zeros(M, S, dtype=full),
        best_MS=torch.zeros(M, S, dtype=torch.long, device=hidden_MSD.device),
        grad_hidden=torch.zeros_like(hidden_MSD) if wanted[0] else None,
        grad_heads=[torch.zeros_like(w, dtype=full) if g else None for w, g in zip(lm_heads, wanted[1:], strict=True)],
        scratch=Scratch(),
    )
    weights = [w.detach().to(dtype) for w in lm_heads]
    size = max(1, CHUNK_ELEMENTS // lm_heads[0].shape[0])
    for at in range(0, M, size):
        part = slice(at, at + size)
        teacher = labels.teacher(part, full, done.scratch)
        for s in range(S):
            w = weights[0 if len(weights) == 1 else s]
            done.add((part, s), teacher, labels, weight_MS, hidden_MSD[part, s].to(dtype), w)
        del teacher  # before the next is made
    done.scratch = Scratch()  # the pass is kept until backward
    return done


def _full(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that losses and probabilities are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the LM head's product: the autocast one, as a Linear's would be; never fp16, which overflows."""
    device_type = hidden.device.type
    low = device_type != "meta" and torch.is_autocast_enabled(device_type)  # meta: followed for an estimate
    dtype = torch.get_autocast_dtype(device_type) if low else hidden.dtype
    return torch.float32 if dtype == torch.float16 else dtype


class _ChunkedDistil(torch.autograd.Function):
    """Sum over labels and steps of weight * objective. The gradients are made in the same pass over the chunks, so that no
    logits are made twice; only a second backward through the same graph makes them again."""

    @staticmethod
    def forward(
        ctx: Any, labels: Labels, weight_MS: Tensor, training: bool, hidden_MSD: Tensor, *lm_heads: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.wanted = [training and t.requires_grad for t in (hidden_MSD, *lm_heads)]
        done = _pass(labels, weight_MS, hidden_MSD, lm_heads, ctx.wanted)
        ctx.save_for_backward(weight_MS, hidden_MSD, *lm_heads)
        ctx.labels, ctx.done = labels, done
        device_type = "cpu" if hidden_MSD.device.type == "meta" else hidden_MSD.device.type
        ctx.autocast = torch.autocast(
            device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        )
        ctx.mark_non_differentiable(done.loss_MS, done.best_MS)
        return (done.loss_MS * weight_MS).sum(), done.loss_MS, done.best_MS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        weight_MS, hidden_MSD, *lm_heads = ctx.saved_tensors
        done, ctx.done = ctx.done, None  # handed over and scaled in place: a copy is as large as the LM head
        if done is None:
            with ctx.autocast:
                done = _pass(ctx.labels, weight_MS, hidden_MSD, lm_heads, ctx.wanted)
        grads = [done.grad_hidden, *done.grad_heads]
        scaled = [
            None if g is None else g.mul_(grad).to(t.dtype) for g, t in zip(grads, (hidden_MSD, *lm_heads), strict=True)
        ]
        return (None, None, None, *scaled)


def _chunked_distil(
    labels: Labels, weight_MS: Tensor, hidden_MSD: Tensor, *lm_heads: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum, the losses [M, S] and the head's argmaxes [M, S]."""
    return _ChunkedDistil.apply(labels, weight_MS, torch.is_grad_enabled(), hidden_MSD, *lm_heads)


def _plain_distil(
    labels: Labels, weight_MS: Tensor, hidden_MSD: Tensor, *lm_heads: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of _chunked_distil: everything at once, gradients by autograd."""
    M, S, _ = hidden_MSD.shape
    full = _full(hidden_MSD.dtype)
    dtype = _product_dtype(hidden_MSD)
    teacher = labels.teacher(slice(0, M), full)
    loss, best = [], []
    for s in range(S):
        weight = lm_heads[0 if len(lm_heads) == 1 else s]
        z_MV = (hidden_MSD[:, s].to(dtype) @ weight.to(dtype).T).to(full)
        best.append(z_MV.argmax(-1))
        loss.append(value(labels.objective, z_MV, teacher))
    loss_MS = torch.stack(loss, 1)
    return (loss_MS * weight_MS).sum(), loss_MS.detach(), torch.stack(best, 1)


def distil_loss(
    frozen: Frozen,
    batch: Batch,
    hidden_S: Sequence[Tensor],
    lm_heads: Sequence[Tensor],
    *,
    objective: Objective,
    vocab: Tensor | None = None,
    decay: float = 0.8,
    plain: bool = False,
) -> LossReport:
    """Return the loss of S draft steps: sum over s of a weight, decay^s or the objective's own, times the mean objective.

    `hidden_S[s]` [B, T, D] is what the LM head of step s reads, at each anchor; `lm_heads` is one weight [V, D] for all
    steps or one a step. Each mean is over supervised labels that have an anchor, in the loss those of the whole that the batch
    is part of; with none the loss is zero. Agreement counts a target argmax outside the draft vocabulary as a miss. Raises
    HeadwayError when the objective has weights for another number of steps.
    """
    row_M, position_M = label_positions(batch)
    last_MD = batch.last_BTD[row_M, position_M]
    if batch.normaliser_BT is None or batch.argmax_BT is None:
        normaliser_M, argmax_M = summarise(frozen, last_MD)
    else:
        normaliser_M, argmax_M = batch.normaliser_BT[row_M, position_M], batch.argmax_BT[row_M, position_M]
    hidden_MSD = torch.stack([_at_teacher(h, row_M, position_M, s) for s, h in enumerate(hidden_S)], 1)
    valid_MS, count_S = _anchored(position_M, len(hidden_S))
    step_weight_S = objective.weights(len(hidden_S), decay).to(count_S.device)
    weight_MS = (valid_MS * (step_weight_S / mean_over(batch, count_S))).to(_full(hidden_MSD.dtype))
    label_M = _label_indices(argmax_M, vocab, frozen.info.vocab_size)
    labels = Labels(frozen, objective, vocab, last_MD, normaliser_M, label_M)
    run = _plain_distil if plain else _chunked_distil
    loss, loss_MS, best_MS = run(labels, weight_MS, hidden_MSD, *lm_heads)
    hit_MS = (best_MS == label_M[:, None]) & valid_MS
    share = 1.0 / count_S.clamp_min(1)
    return LossReport(
        loss=loss,
        loss_S=(loss_MS * valid_MS).sum(0) * share,
        agreement_S=hit_MS.sum(0) * share,
        count_S=count_S,
    )


def feature_loss(batch: Batch, feature_S: Sequence[Tensor], step_weight_S: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the sum over steps of step_weight_S[s] times the mean smooth-L1 distance (beta 1) of predicted features to the
    target's, and the means [S], detached (EAGLE, arXiv 2401.15077).

    `feature_S[s]` [B, T, D] is what step s, at each anchor t, predicts the target's last feature at t + 1 + s to be. Means
    are over D and over supervised labels that have an anchor; with none the loss is zero. Computed in fp32.
    """
    row_M, position_M = label_positions(batch)
    full = _full(feature_S[0].dtype)
    goal_MD = batch.last_BTD[row_M, position_M].to(full)
    valid_MS, count_S = _anchored(position_M, len(feature_S))
    over_S = mean_over(batch, count_S)
    means = []
    for s, feature_BTD in enumerate(feature_S):
        feature_MD = _at_teacher(feature_BTD, row_M, position_M, s).to(full)
        distance_M = F.smooth_l1_loss(feature_MD, goal_MD, reduction="none").mean(-1)
        means.append((distance_M * valid_MS[:, s]).sum() / over_S[s])
    mean_S = torch.stack(means)
    return (mean_S * mean_S.new_tensor(list(step_weight_S))).sum(), mean_S.detach()


def _anchored(position_M: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Return which labels have an anchor at each step [M, S], and how many have [S]."""
    valid_MS = position_M[:, None] >= 1 + torch.arange(num_steps, device=position_M.device)
    return valid_MS, valid_MS.sum(0)


def _label_indices(argmax_M: Tensor, vocab: Tensor | None, vocab_size: int) -> Tensor:
    """Return target ids as indices of the head's vocabulary, -1 where it lacks them."""
    if vocab is None:
        return argmax_M
    index = torch.full((vocab_size,), -1, device=argmax_M.device)
    index[vocab] = torch.arange(len(vocab), device=argmax_M.device)
    return index[argmax_M]
