"""The distillation loss over a large vocabulary, in chunks, and the plain version it must equal.

Letters: B batch, T positions, D hidden, S draft steps, M supervised label positions, V the head's vocabulary.

    position:                 j - 1 - s   ...   j        j + 1
    the target:                                 p(j)  ->  x[j+1] was emitted
    step s of an anchor at:   t = j - 1 - s  predicts x[t + 2 + s] = x[j + 1], taught by p(j)

So everything about one label is gathered at its teacher position j: one teacher row serves all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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


def label_positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (row, position), each [M]: teacher positions j whose next token was emitted by the target."""
    taught_BT = torch.zeros_like(batch.supervised_BT)
    taught_BT[:, :-1] = batch.supervised_BT[:, 1:]
    row, position = taught_BT.nonzero(as_tuple=True)
    return row, position


@torch.no_grad()
def summarise(frozen: Frozen, last_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's log-normaliser [M] (fp32) and argmax [M] from features after the final norm, in chunks."""
    normaliser, argmax = [], []
    for part in last_MD.split(max(1, CHUNK_ELEMENTS // frozen.info.vocab_size)):
        logits = frozen.logits(part).float()
        normaliser.append(logits.logsumexp(-1))
        argmax.append(logits.argmax(-1))
    if not normaliser:
        return last_MD.new_zeros(0, dtype=torch.float32), torch.zeros(0, dtype=torch.long, device=last_MD.device)
    return torch.cat(normaliser), torch.cat(argmax)


def teacher_probability(frozen: Frozen, last_MD: Tensor, normaliser_M: Tensor, vocab: Tensor | None) -> Tensor:
    """Return the target's probabilities [M, V] of the head's vocabulary, fp32; with a draft vocabulary they sum to less than 1."""
    return (frozen.logits(last_MD, vocab).float() - normaliser_M[:, None]).exp_()


class _ChunkedDistil(torch.autograd.Function):
    """Sum over labels and steps of weight * cross-entropy, with gradients made in the same pass over the chunks.

    d(-sum_v p_v log q_v)/dz = q * sum(p) - p, so nothing of size [M, V] outlives its chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        frozen: Frozen,
        vocab: Tensor | None,
        last_MD: Tensor,
        normaliser_M: Tensor,
        weight_MS: Tensor,
        hidden_MSD: Tensor,
        *lm_heads: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        M, S, _ = hidden_MSD.shape
        shared = len(lm_heads) == 1
        grad_hidden = torch.zeros_like(hidden_MSD) if hidden_MSD.requires_grad else None
        grad_heads = [torch.zeros_like(w, dtype=torch.float32) if w.requires_grad else None for w in lm_heads]
        loss_MS = hidden_MSD.new_zeros(M, S, dtype=torch.float32)
        best_MS = torch.zeros(M, S, dtype=torch.long, device=hidden_MSD.device)
        # The matrix products run in the autocast dtype, as a Linear would.
        device_type = hidden_MSD.device.type
        low = device_type != "meta" and torch.is_autocast_enabled(device_type)  # meta: followed for an estimate
        dtype = torch.get_autocast_dtype(device_type) if low else hidden_MSD.dtype
        weights = [w.detach().to(dtype) for w in lm_heads]
        size = max(1, CHUNK_ELEMENTS // lm_heads[0].shape[0])
        for at in range(0, M, size):
            part = slice(at, at + size)
            p_NV = teacher_probability(frozen, last_MD[part], normaliser_M[part], vocab)
            mass_N1 = p_NV.sum(-1, keepdim=True)
            for s in range(S):
                k = 0 if shared else s
                h_ND = hidden_MSD[part, s].to(dtype)
                z_NV = (h_ND @ weights[k].T).float()
                best_MS[part, s] = z_NV.argmax(-1)
                log_N1 = z_NV.logsumexp(-1, keepdim=True)
                loss_MS[part, s] = (log_N1 * mass_N1)[:, 0] - torch.linalg.vecdot(p_NV, z_NV)
                grad_NV = z_NV.sub_(log_N1).exp_().mul_(mass_N1).sub_(p_NV).mul_(weight_MS[part, s, None]).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part, s] = (grad_NV @ weights[k]).to(grad_hidden.dtype)
                grad = grad_heads[k]
                if grad is not None:
                    grad += grad_NV.T @ h_ND
        ctx.grads = (grad_hidden, grad_heads)
        ctx.head_dtypes = [w.dtype for w in lm_heads]
        ctx.mark_non_differentiable(loss_MS, best_MS)
        return (loss_MS * weight_MS).sum(), loss_MS, best_MS

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad = grads[0]
        grad_hidden, grad_heads = ctx.grads
        ctx.grads = None
        hidden = None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype)
        heads = [None if g is None else (g * grad).to(d) for g, d in zip(grad_heads, ctx.head_dtypes, strict=True)]
        return (None, None, None, None, None, hidden, *heads)


def _plain_distil(
    frozen: Frozen,
    vocab: Tensor | None,
    last_MD: Tensor,
    normaliser_M: Tensor,
    weight_MS: Tensor,
    hidden_MSD: Tensor,
    *lm_heads: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of _ChunkedDistil: everything at once, gradients by autograd."""
    S = hidden_MSD.shape[1]
    heads = [lm_heads[0 if len(lm_heads) == 1 else s] for s in range(S)]
    logits = torch.stack([(hidden_MSD[:, s] @ heads[s].to(hidden_MSD.dtype).T).float() for s in range(S)], 1)
    p_MV = teacher_probability(frozen, last_MD, normaliser_M, vocab)
    loss_MS = -(p_MV[:, None] * logits.log_softmax(-1)).sum(-1)
    return (loss_MS * weight_MS).sum(), loss_MS.detach(), logits.argmax(-1)


def distil_loss(
    frozen: Frozen,
    batch: Batch,
    hidden_S: Sequence[Tensor],
    lm_heads: Sequence[Tensor],
    *,
    vocab: Tensor | None = None,
    decay: float = 0.8,
    plain: bool = False,
) -> LossReport:
    """Return the loss of S draft steps: sum over s of decay^s times the mean cross-entropy to the target's distribution.

    `hidden_S[s]` [B, T, D] is what the LM head of step s reads, at each anchor; `lm_heads` is one weight [V, D] for all
    steps or one a step. Each mean is over supervised labels that have an anchor; with none the loss is zero. Agreement
    counts a target argmax outside the draft vocabulary as a miss.
    """
    row_M, position_M = label_positions(batch)
    last_MD = batch.last_BTD[row_M, position_M]
    if batch.normaliser_BT is None or batch.argmax_BT is None:
        normaliser_M, argmax_M = summarise(frozen, last_MD)
    else:
        normaliser_M, argmax_M = batch.normaliser_BT[row_M, position_M], batch.argmax_BT[row_M, position_M]
    hidden_MSD = torch.stack([to_teacher(h, s)[row_M, position_M] for s, h in enumerate(hidden_S)], 1)
    step_S = torch.arange(len(hidden_S), device=row_M.device)
    valid_MS = position_M[:, None] >= 1 + step_S
    count_S = valid_MS.sum(0)
    weight_MS = valid_MS * (decay**step_S / count_S.clamp_min(1))
    run = _plain_distil if plain else _ChunkedDistil.apply
    loss, loss_MS, best_MS = run(frozen, vocab, last_MD, normaliser_M, weight_MS, hidden_MSD, *lm_heads)
    best_MS = best_MS if vocab is None else vocab[best_MS]
    hit_MS = (best_MS == argmax_M[:, None]) & valid_MS
    share = 1.0 / count_S.clamp_min(1)
    return LossReport(
        loss=loss,
        loss_S=(loss_MS * valid_MS).sum(0) * share,
        agreement_S=hit_MS.sum(0) * share,
        count_S=count_S,
    )
