"""Medusa (arXiv 2401.10774): K heads on the target's last feature, each predicting one further token.

Letters: B batch, T positions, N frontier nodes, D hidden, V the head's vocabulary.

Head k reads the feature at position t and predicts the token at t + 2 + k: the target itself predicts t + 1. The heads do
not see one another's tokens, so a draft costs one small pass and all nodes of a depth share their children's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.heads.common.blocks import ResidualBlock
from headway.heads.common.errors import HeadwayError
from headway.heads.common.lm_heads import Kind, LMHeads, check_lm_heads
from headway.heads.common.losses import distil_loss
from headway.heads.common.protocol import Batch, Context, Frontier, Frozen, HeadConfig, LossReport, module_dtype
from headway.heads.common.static import free_pass
from headway.heads.common.vocab import IdsHead


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    """Fields of a Medusa head."""

    num_heads: int = 4
    """Number of future tokens drafted; head k predicts the token k + 2 ahead of its feature."""
    num_layers: int = 1
    """Residual blocks of each head, each with its own weights."""
    lm_head: Kind = "draft"
    """`own`: a trained LM head over the target's vocabulary for each head; `shared`: the target's LM head, frozen;
    `draft`: a trained LM head over the draft vocabulary for each head."""
    rank: int = 0
    """Rank of each trained LM head; 0 is a full one."""
    draft_vocab_size: int = 8192
    """Words of the draft vocabulary, for lm_head `draft`; 0 elsewhere."""
    decay: float = 0.8
    """Head k's loss weighs decay^k, as published, unless the recipe has step_weights."""

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 1:
            raise HeadwayError(
                f"medusa needs num_heads >= 1 and num_layers >= 1, got {self.num_heads} and {self.num_layers}"
            )
        if len(self.taps) != 1:
            raise HeadwayError(f"medusa reads one tap, got {list(self.taps)}; set head.taps to ['last'] or one layer")
        check_lm_heads("medusa", self.lm_head, self.rank, self.draft_vocab_size, self.hidden_size)
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


class Head(IdsHead):
    """K stacks of residual blocks, each with an LM head."""

    config: Config

    def __init__(self, config: Config, frozen: Frozen) -> None:
        super().__init__(config, frozen)
        D = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(D) for _ in range(config.num_layers))) for _ in range(config.num_heads)
        )
        size = config.draft_vocab_size or config.vocab_size
        self.lm_heads = LMHeads(frozen, config.lm_head, config.num_heads, config.rank, size)
        self.add_vocab(config.draft_vocab_size)

    @property
    def max_depth(self) -> int:
        """One level per head."""
        return self.config.num_heads

    def warm_start(self) -> None:
        """Copy the target's LM head (its rows of the draft vocabulary) into each head."""
        self.lm_heads.warm_start(self.draft_vocab)

    def loss(self, batch: Batch) -> LossReport:
        """Return sum over k of decay^k times the mean objective of head k against the target's distribution at t + 1 + k."""
        x = batch.tap_BTF.to(module_dtype(self))
        hidden, weights = self.lm_heads.factors(self.training_pass(Head.outputs, x))
        return distil_loss(
            self.frozen, batch, hidden, weights,
            vocab=self.draft_vocab, decay=self.config.decay, objective=self.objective,
        )  # fmt: skip

    def outputs(self, feature_BTD: Tensor) -> list[Tensor]:
        """Return what the LM head of each step reads [B, T, D]."""
        return [block(feature_BTD) for block in self.blocks]

    def start(self, context: Context, state: Tensor | None, rows: int) -> Tensor:
        """Return the newest feature of each row [B, D]; nothing else is remembered."""
        newest = torch.tensor(context.count_B, device=context.tap_BTF.device) - 1
        return context.tap_BTF[torch.arange(rows, device=newest.device), newest]

    def step(self, state: Tensor, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Return head `depth`'s logits, the same for every node of the frontier."""
        logits = free_pass(self, Head._score, frontier.depth, state[:, None])
        return logits.expand(-1, frontier.token_BN.shape[1], -1), state

    def _score(self, step: int, feature_BND: Tensor) -> tuple[Tensor]:
        return (self.lm_heads.logits(step, self.blocks[step](feature_BND.to(module_dtype(self)))),)

    def select_rows(self, state: Tensor, kept: list[int]) -> Tensor:
        """Return the features of the kept rows."""
        return state[kept]

    def join_rows(self, state: Tensor, other: Tensor) -> Tensor:
        """Return both sets of rows."""
        return torch.cat([state, other])
