"""Medusa (arXiv 2401.10774): K heads on the target's last feature, each predicting one further token.

Letters: B batch, T positions, N frontier nodes, D hidden, V the head's vocabulary.

Head k reads the feature at position t and predicts the token at t + 2 + k: the target itself predicts t + 1. The heads do
not see one another's tokens, so a draft costs one small pass and all nodes of a depth share their children's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import distil_loss
from headway.heads.common.protocol import Batch, Context, Frontier, Frozen, HeadConfig, LossReport
from headway.heads.common.protocol import Head as BaseHead


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    """Fields of a Medusa head."""

    num_heads: int = 4
    """Number of future tokens drafted; head k predicts the token k + 2 ahead of its feature."""
    num_layers: int = 1
    """Residual blocks of each head, each with its own weights."""
    lm_head: Literal["own", "shared", "draft"] = "draft"
    """`own`: a trained LM head over the target's vocabulary for each head; `shared`: the target's LM head, frozen;
    `draft`: a trained LM head over the draft vocabulary for each head."""
    draft_vocab_size: int = 8192
    """Words of the draft vocabulary, for lm_head `draft`; 0 elsewhere."""
    decay: float = 0.8
    """Head k's loss weighs decay^k, unless the recipe has step_weights."""

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 1:
            raise HeadwayError(
                f"medusa needs num_heads >= 1 and num_layers >= 1, got {self.num_heads} and {self.num_layers}"
            )
        if len(self.taps) != 1:
            raise HeadwayError(f"medusa reads one tap, got {list(self.taps)}; set head.taps to ['last'] or one layer")
        if self.lm_head not in ("own", "shared", "draft"):
            raise HeadwayError(f"head.lm_head is {self.lm_head!r}; allowed: own, shared, draft")
        if self.lm_head == "draft" and self.draft_vocab_size < 1:
            raise HeadwayError("head.lm_head 'draft' needs head.draft_vocab_size >= 1; or use 'own' or 'shared'")
        if self.lm_head != "draft":
            object.__setattr__(self, "draft_vocab_size", 0)

    @property
    def num_steps(self) -> int:
        """One step a head."""
        return self.num_heads

    @classmethod
    def defaults(cls, info: Any) -> dict[str, Any]:
        """Return a draft vocabulary no larger than the tokenizer."""
        return {"draft_vocab_size": min(cls.draft_vocab_size, info.num_tokens)}


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), zero at the start, so that an untrained head repeats the target's own prediction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class Head(BaseHead):
    """K stacks of residual blocks, each with an LM head."""

    config: Config

    def __init__(self, config: Config, frozen: Frozen) -> None:
        super().__init__(config, frozen)
        D = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(D) for _ in range(config.num_layers))) for _ in range(config.num_heads)
        )
        size = {"own": config.vocab_size, "draft": config.draft_vocab_size, "shared": 0}[config.lm_head]
        if config.lm_head == "shared":
            _require_plain_product(frozen)
        if size:
            self.lm_heads = nn.ModuleList(nn.Linear(D, size, bias=False) for _ in range(config.num_heads))
        if config.lm_head == "draft":
            self.register_buffer("vocab_ids", torch.arange(size))

    @property
    def max_depth(self) -> int:
        """One level per head."""
        return self.config.num_heads

    @property
    def draft_vocab(self) -> Tensor | None:
        """Target ids of the draft vocabulary [V], or None."""
        return self.vocab_ids if self.config.lm_head == "draft" else None  # type: ignore[return-value]

    def set_draft_vocab(self, target_ids: Tensor) -> None:
        """Take the draft vocabulary: sorted target ids."""
        if self.config.lm_head == "draft":
            self.vocab_ids.copy_(target_ids)  # type: ignore[operator]

    def warm_start(self) -> None:
        """Copy the target's LM head (its rows of the draft vocabulary) into each head."""
        if self.config.lm_head == "shared":
            return
        weight = self.frozen.lm_head_weight().detach()
        weight = weight if self.draft_vocab is None else weight[self.draft_vocab]
        for head in self.lm_heads:
            head.weight.data.copy_(weight)  # type: ignore[union-attr, operator]

    def loss(self, batch: Batch) -> LossReport:
        """Return sum over k of decay^k times the mean objective of head k against the target's distribution at t + 1 + k."""
        x = batch.tap_BTF.to(self.blocks[0][0].linear.weight.dtype)  # type: ignore[index, union-attr]
        hidden = [block(x) for block in self.blocks]
        if self.config.lm_head == "shared":
            weights = [self.frozen.lm_head_weight()]
        else:
            weights = [head.weight for head in self.lm_heads]  # type: ignore[misc]
        return distil_loss(
            self.frozen, batch, hidden, weights,
            vocab=self.draft_vocab, decay=self.config.decay, objective=self.objective,
        )  # fmt: skip

    def start(self, context: Context, state: Tensor | None, rows: int) -> Tensor:
        """Return the newest feature of each row [B, D]; nothing else is remembered."""
        newest = torch.tensor(context.count_B, device=context.tap_BTF.device) - 1
        return context.tap_BTF[torch.arange(rows, device=newest.device), newest]

    def step(self, state: Tensor, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Return head `depth`'s logits, the same for every node of the frontier."""
        block = self.blocks[frontier.depth]
        x = block(state.to(next(block.parameters()).dtype))
        if self.config.lm_head == "shared":
            logits = self.frozen.logits(x.to(self.frozen.lm_head_weight().dtype))
        else:
            logits = self.lm_heads[frontier.depth](x)
        return logits[:, None].expand(-1, frontier.token_BN.shape[1], -1), state

    def select_rows(self, state: Tensor, kept: list[int]) -> Tensor:
        """Return the features of the kept rows."""
        return state[kept]

    def join_rows(self, state: Tensor, other: Tensor) -> Tensor:
        """Return both sets of rows."""
        return torch.cat([state, other])


@torch.no_grad()
def _require_plain_product(frozen: Frozen) -> None:
    """Raise HeadwayError for a target that scales or caps what its LM head gives: training sees the product alone."""
    weight = frozen.lm_head_weight()
    x = torch.linspace(-1, 1, weight.shape[1], device=weight.device, dtype=weight.dtype)[None]
    want, got = nn.functional.linear(x, weight).float(), frozen.logits(x).float()
    if float((want - got).norm()) > 0.02 * float(want.norm()):
        raise HeadwayError(
            f"head.lm_head is shared, but {frozen.info.name} scales, caps or shifts what its LM head gives; use draft or own"
        )
