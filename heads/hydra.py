"""Hydra (arXiv 2402.05109): K heads, each reading the tokens drafted before it on its path.

Letters: B batch, T positions, N frontier nodes, D hidden, X width of what a head reads, V the head's vocabulary.

    head s of an anchor at t reads   the prefix at t and the embeddings of x[t+1] .. x[t+1+s]
    it predicts                      x[t+2+s]
    the prefix at t is               the feature of t; with prefix attention, a decoder layer over the features up to t

The defaults are those of Hydra++: prefix attention, deeper heads, and the target's distribution as teacher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headway.heads.common.blocks import ResidualBlock, after
from headway.heads.common.draft_layer import DraftLayer, LayerConfig, Rotary, causal_mask, newest
from headway.heads.common.errors import HeadwayError
from headway.heads.common.lm_heads import Kind, LMHeads, check_lm_heads
from headway.heads.common.losses import distil_loss
from headway.heads.common.protocol import Batch, Context, Frontier, Frozen, LossReport, TargetInfo, module_dtype
from headway.heads.common.slots import Slots
from headway.heads.common.static import Writes, cached_pass, free_pass
from headway.heads.common.vocab import IdsHead


@dataclass(frozen=True, kw_only=True)
class Config(LayerConfig):
    """Fields of a Hydra head; what is left open of the prefix layer is the target's."""

    num_heads: int = 4
    """Number of future tokens drafted; head s predicts the token s + 2 ahead of its feature."""
    num_layers: int = 4
    """Residual blocks of each head; the first reads the prefix and the path, the others what it gives."""
    prefix_attention: bool = True
    """Put a decoder layer between the features and the heads, once a round."""
    lm_head: Kind = "draft"
    """`own`: a trained LM head over the target's vocabulary for each head; `shared`: the target's LM head, frozen;
    `draft`: a trained LM head over the draft vocabulary for each head."""
    rank: int = 0
    """Rank of each trained LM head; 0 is a full one."""
    draft_vocab_size: int = 8192
    """Words of the draft vocabulary, for lm_head `draft`; 0 elsewhere."""
    decay: float = 0.8
    """Head s's loss weighs decay^s, unless the recipe has step_weights; the reference code weighs all alike, as 1 does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads < 1 or self.num_layers < 1:
            raise HeadwayError(
                f"hydra needs num_heads >= 1 and num_layers >= 1, got {self.num_heads} and {self.num_layers}"
            )
        if len(self.taps) != 1:
            raise HeadwayError(f"hydra reads one tap, got {list(self.taps)}; set head.taps to ['last'] or one layer")
        check_lm_heads("hydra", self.lm_head, self.rank, self.draft_vocab_size, self.hidden_size)
        if self.lm_head != "draft":
            object.__setattr__(self, "draft_vocab_size", 0)

    @property
    def num_steps(self) -> int:
        """One step a head."""
        return self.num_heads

    @classmethod
    def defaults(cls, info: TargetInfo) -> dict[str, Any]:
        """Return the target's geometry, and a draft vocabulary no larger than the tokenizer."""
        return {**super().defaults(info), "draft_vocab_size": min(cls.draft_vocab_size, info.num_tokens)}


@dataclass
class State:
    """The prefix at each row's newest anchor, and what the heads read at the nodes of the last frontier."""

    slots: Slots | None
    """Keys and values of the prefix layer; None without one."""
    newest_BD: Tensor
    path_BNX: Tensor | None = None
    """The prefix and the embeddings of the path down to each node, side by side."""


class Head(IdsHead):
    """A prefix layer, and K stacks of residual blocks on prefix and path, each with an LM head."""

    config: Config

    def __init__(self, config: Config, frozen: Frozen) -> None:
        super().__init__(config, frozen)
        D = config.hidden_size
        self.prefix = DraftLayer(config, norms=("input_layernorm",)) if config.prefix_attention else None
        self.blocks = nn.ModuleList(
            nn.Sequential(ResidualBlock(D, 2 + s), *(ResidualBlock(D) for _ in range(config.num_layers - 1)))
            for s in range(config.num_heads)
        )
        size = config.draft_vocab_size or config.vocab_size
        self.lm_heads = LMHeads(frozen, config.lm_head, config.num_heads, config.rank, size)
        self.add_vocab(config.draft_vocab_size)
        self.rotary = Rotary(config)

    @property
    def max_depth(self) -> int:
        """One level per head."""
        return self.config.num_heads

    @torch.no_grad()
    def warm_start(self) -> None:
        """Copy the target's LM head into each head, and its last layer into the prefix layer, which begins as identity."""
        self.lm_heads.warm_start(self.draft_vocab)
        if self.prefix is not None:
            source = self.frozen.layer_weights(self.frozen.info.num_layers - 1)
            self.prefix.begin_as_identity(source, feature_norm="input_layernorm")

    def loss(self, batch: Batch) -> LossReport:
        """Return sum over s of decay^s times the mean objective of head s against the target's distribution at t + 1 + s."""
        tap = batch.tap_BTF.to(module_dtype(self))
        outputs = self.training_pass(Head.outputs, tap, self._embed(batch.token_BT))
        hidden, weights = self.lm_heads.factors(outputs)
        return distil_loss(
            self.frozen, batch, hidden, weights,
            vocab=self.draft_vocab, decay=self.config.decay, objective=self.objective,
        )  # fmt: skip

    def outputs(self, tap_BTD: Tensor, embed_BTD: Tensor) -> list[Tensor]:
        """Return what the LM head of each step reads [B, T, D]."""
        path = tap_BTD
        if self.prefix is not None:
            position = torch.arange(path.shape[1], device=path.device)[None]
            path = self.prefix.causal(path, (path,), *self.rotary(path, position))
        outputs = []
        for s, block in enumerate(self.blocks):
            path = torch.cat([path, after(embed_BTD, 1 + s)], dim=-1)
            outputs.append(block(path))
        return outputs

    def start(self, context: Context, state: State | None, rows: int) -> State:
        """Run the prefix layer over newly committed features and keep each row's newest output."""
        tap = context.tap_BTF.to(module_dtype(self))
        if self.prefix is None:
            return State(None, newest(tap, context.count_B))
        B, T = context.next_BT.shape
        slots = Slots(1, rows, static=self.static is not None) if state is None or state.slots is None else state.slots
        (output,) = cached_pass(self, Head._prefixes, slots, causal_mask(B, T, tap.device), tap, context.position_BT)
        slots.commit([list(range(n)) for n in context.count_B])
        return State(slots, newest(output, context.count_B))

    def _prefixes(self, slots: Writes, seen_BTS: Tensor, tap_BTD: Tensor, position_BT: Tensor) -> tuple[Tensor]:
        assert self.prefix is not None
        rotary = self.rotary(tap_BTD, position_BT)
        return (self.prefix.cached(slots, 0, tap_BTD, (tap_BTD,), *rotary, seen_BTS),)

    def step(self, state: State, frontier: Frontier) -> tuple[Tensor, State]:
        """Return the logits of head `depth` for the children of each frontier node."""
        if frontier.depth == 0:
            above = state.newest_BD[:, None]
        else:
            assert state.path_BNX is not None
            index = frontier.parent_BN[:, :, None].expand(-1, -1, state.path_BNX.shape[2])
            above = state.path_BNX.gather(1, index)
        path = torch.cat([above, self._embed(frontier.token_BN)], dim=-1)
        return free_pass(self, Head._score, frontier.depth, path), replace(state, path_BNX=path)

    def _score(self, step: int, path_BNX: Tensor) -> tuple[Tensor]:
        return (self.lm_heads.logits(step, self.blocks[step](path_BNX)),)

    def select_rows(self, state: State, kept: list[int]) -> State:
        """Drop the rows that are not kept."""
        if state.slots is not None:
            state.slots.keep_rows(kept)
        return State(state.slots, state.newest_BD[kept])

    def join_rows(self, state: State, other: State) -> State:
        """Append the rows of `other`."""
        if state.slots is not None and other.slots is not None:
            state.slots.append_rows(other.slots, list(range(other.slots.rows)))
        return State(state.slots, torch.cat([state.newest_BD, other.newest_BD]))

    def _embed(self, ids: Tensor) -> Tensor:
        return self.frozen.embed(ids).to(module_dtype(self))
