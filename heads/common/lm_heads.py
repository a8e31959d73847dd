"""LM heads of a family that has one for each draft step, as Medusa and Hydra do, and the target's own as a product.

Letters: D hidden, V the head's vocabulary, r rank.

    own, draft          W_k [V, D], trained                 V the target's vocabulary or the draft vocabulary
    own, draft, rank r  B_k A_k, [V, r] [r, D], trained     V r + r D weights in place of V D
    shared              the target's W, frozen
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Frozen, module_dtype

Kind = Literal["own", "shared", "draft"]


def check_lm_heads(family: str, kind: str, rank: int, draft_vocab_size: int, hidden_size: int) -> None:
    """Raise HeadwayError unless the fields of a family's Config that describe its LM heads fit together."""
    if kind not in ("own", "shared", "draft"):
        raise HeadwayError(f"head.lm_head is {kind!r}; allowed: own, shared, draft")
    if kind == "draft" and draft_vocab_size < 1:
        raise HeadwayError("head.lm_head 'draft' needs head.draft_vocab_size >= 1; or use 'own' or 'shared'")
    if kind == "shared" and rank:
        raise HeadwayError(
            f"head.rank is {rank}, but the LM head of {family} is shared, which is the target's; use draft or own"
        )
    if rank < 0 or (hidden_size and rank >= hidden_size):
        raise HeadwayError(
            f"head.rank is {rank}; give 0 for a full LM head, or a rank below the hidden size {hidden_size}"
        )


class LMHeads(nn.ModuleList):
    """One LM head for each of `count` steps; none where the target's is shared."""

    def __init__(self, frozen: Frozen, kind: Kind, count: int, rank: int, size: int) -> None:
        D = frozen.info.hidden_size
        heads: list[nn.Module] = []
        if kind != "shared":
            for _ in range(count):
                full = nn.Linear(rank or D, size, bias=False)
                heads.append(nn.Sequential(nn.Linear(D, rank, bias=False), full) if rank else full)
        super().__init__(heads)
        self.frozen = frozen  # no Module
        self.rank = rank
        self.factor = lm_head_factor(frozen, "head.lm_head is shared", "use draft or own") if kind == "shared" else 1.0

    @torch.no_grad()
    def multiply_out(self) -> None:
        """Put the product in place of the factors of LM heads of low rank, computed in float32."""
        for k, factors in enumerate(self):
            if isinstance(factors, nn.Sequential):
                narrow_rD, wide_Vr = factors.state_dict().values()
                full = nn.Linear(narrow_rD.shape[1], wide_Vr.shape[0], bias=False, device="meta")
                full.weight = nn.Parameter((wide_Vr.float() @ narrow_rD.float()).to(wide_Vr.dtype))
                self[k] = full

    def logits(self, step: int, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of a step from what its LM head reads [..., D]."""
        if not len(self):
            return self.frozen.logits(hidden.to(self.frozen.lm_head_weight().dtype))
        logits: Tensor = self[step](hidden)
        return logits

    def factors(self, hidden_S: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return features and weights whose products are the logits of each step, as `losses.distil_loss` takes them."""
        if not len(self):
            return [hidden * self.factor for hidden in hidden_S], [self.frozen.lm_head_weight()]
        if not self.rank:
            return list(hidden_S), [head.weight for head in self]  # type: ignore[misc]
        narrow = [head[0](hidden) for head, hidden in zip(self, hidden_S, strict=True)]  # type: ignore[index]
        return narrow, [head[1].weight for head in self]  # type: ignore[index]

    @torch.no_grad()
    def warm_start(self, vocab: Tensor | None) -> None:
        """Copy the target's LM head (its rows of the draft vocabulary) into each head, or its best approximation of that
        rank."""
        if not len(self):
            return
        weight = self.frozen.lm_head_weight().detach()
        weight = weight if vocab is None else weight[vocab]
        if not self.rank:
            for head in self:
                head.weight.copy_(weight)  # type: ignore[operator, union-attr]
            return
        # W A'A, where the rows of A are the leading right singular vectors of W (Eckart, Young).
        words = weight.to(module_dtype(self)).float()
        basis = torch.linalg.eigh(words.T @ words).eigenvectors[:, -self.rank :]
        for head in self:
            head[0].weight.copy_(basis.T)  # type: ignore[index]
            head[1].weight.copy_(words @ basis)  # type: ignore[index]


@torch.no_grad()
def lm_head_factor(frozen: Frozen, because: str, remedy: str) -> float:
    """Return f where the target's logits are f times the product of feature and LM head, as training takes them to be.

    Raises HeadwayError, saying why this matters and what else to do, for a target that caps or shifts them.
    """
    weight = frozen.lm_head_weight()
    if weight.is_meta:  # laid out for an estimate
        return 1.0
    x = torch.linspace(-1, 1, weight.shape[1], device=weight.device, dtype=weight.dtype)[None]
    product = nn.functional.linear(x, weight).float()
    none, small, large = (frozen.logits(x * size).float() for size in (0, 1, 100))
    factor = float((product * small).sum() / product.square().sum())
    want = factor * product
    off = max(float(d.norm()) for d in (none, small - want, large / 100 - want))
    if not off <= 0.02 * float(want.norm()):
        raise HeadwayError(
            f"{because}, but {frozen.info.name} caps or shifts what its LM head gives, which training does not see; {remedy}"
        )
    return factor
