"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused features of three taps, drafting token by token.

Letters: B batch, T anchors, D hidden, F tap width, V draft vocabulary. The alignment and the loop over steps are those of
common/draft_layer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headway.heads.common.draft_layer import (
    Anchors,
    Drafted,
    DraftLayer,
    LayerConfig,
    Rotary,
    absorb,
    begin_as_target,
    default_taps,
    expand,
    join_drafted,
    select_drafted,
    unroll,
)
from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import distil_loss
from headway.heads.common.protocol import Batch, Context, Frontier, Frozen, LossReport, TargetInfo, module_dtype
from headway.heads.common.vocab import MapsHead


@dataclass(frozen=True, kw_only=True)
class Config(LayerConfig):
    """Fields of an EAGLE-3 head; what is left open is the target's."""

    taps: tuple[int | str, ...] = ()  # type: ignore[assignment]
    """Three layers, low, middle and high; the default is [1, L/2 - 1, L - 4], the published choice."""
    draft_vocab_size: int = 8192
    """Words of the draft vocabulary; 0 drafts over the target's."""
    steps: int = 4
    """Steps of the training-time test; drafting may go deeper."""
    decay: float = 0.8
    """Step s weighs decay^s in the loss, as published, unless the recipe has step_weights."""
    fc_norm: bool = False
    """Norm each tap's feature before fc, so that none is louder than the others (EAGLE-3.1, arXiv 2605.09992)."""
    norm_output: bool = False
    """Feed the layer's output back through the final norm, so that it does not grow from step to step (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """Begin the residual at the normed feature instead of the raw one, as heads trained by speculators do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.taps:
            raise HeadwayError("eagle3 needs head.taps, for example [1, 14, 26]")
        if self.steps < 1:
            raise HeadwayError(f"head.steps is {self.steps}; at least 1 is needed")
        if self.draft_vocab_size < 0:
            raise HeadwayError(
                f"head.draft_vocab_size is {self.draft_vocab_size}; use 0 for the whole vocabulary or more"
            )

    @property
    def num_steps(self) -> int:
        """Steps of the training-time test."""
        return self.steps

    @classmethod
    def defaults(cls, info: TargetInfo) -> dict[str, Any]:
        """Return the target's geometry, three taps, and a draft vocabulary no larger than the tokenizer."""
        return {
            **super().defaults(info),
            "taps": default_taps(info.num_layers),
            "draft_vocab_size": min(cls.draft_vocab_size, info.num_tokens),
        }


class Head(MapsHead):
    """fc over the taps, one draft layer, norm, LM head over the draft vocabulary."""

    config: Config
    embeds_apart = True

    def __init__(self, config: Config, frozen: Frozen) -> None:
        super().__init__(config, frozen)
        D = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * D, D, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(D, config.rms_norm_eps) for _ in config.taps)
        self.layer = DraftLayer(config, norms=("input_layernorm", "hidden_norm"))
        self.norm = LlamaRMSNorm(D, config.rms_norm_eps)
        self.lm_head = nn.Linear(D, config.draft_vocab_size or config.vocab_size, bias=False)
        self.add_vocab(config.draft_vocab_size)
        self.rotary = Rotary(config)

    @torch.no_grad()
    def warm_start(self) -> None:
        """Begin as the target's last layer on the highest tap; the halves that read token embeddings, which the target's
        layer does not have, begin small and random."""
        begin_as_target(self)
        self.layer.copy_from(self.frozen.layer_weights(self.frozen.info.num_layers - 1), feature_norm="hidden_norm")

    def embed(self, ids: Tensor) -> Tensor:
        """Return the target's token embeddings in the head's dtype."""
        return self.frozen.embed(ids).to(module_dtype(self))

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the layer's residual, and its inputs: the token's embedding and the feature, each to be normed."""
        residual = (
            self.layer.get_submodule("hidden_norm")(hidden_BTD) if self.config.norm_before_residual else hidden_BTD
        )
        return residual, (embed_BTD, hidden_BTD)

    def feed(self, output_BTD: Tensor) -> Tensor:
        """Return what the next step reads in place of the fused features: the layer's own output."""
        return self.norm(output_BTD) if self.config.norm_output else output_BTD

    def loss(self, batch: Batch) -> LossReport:
        """Return sum over steps s of decay^s times the mean objective against the target's distribution at t + 1 + s."""
        some = Anchors.of_goals(batch.supervised_BT, self.config.steps)
        hidden_S = self.training_pass(Head.unroll, batch.tap_BTF, self.embed(batch.token_BT), some)
        weights = [self.lm_head.weight]
        return distil_loss(
            self.frozen, batch, hidden_S, weights,
            vocab=self.draft_vocab, decay=self.config.decay, objective=self.objective,
        )  # fmt: skip

    def unroll(self, tap_BTF: Tensor, embed_BTD: Tensor, some: Anchors | None) -> list[Tensor]:
        """Return what the LM head reads [B, T, D] at some anchors, or all, for each step of the training-time test."""
        outputs = unroll(self, self.fuse_taps(tap_BTF), embed_BTD, self.config.steps, some)
        return [self.norm(output) for output in outputs]

    def fuse_taps(self, tap_BTF: Tensor) -> Tensor:
        """Return one feature [B, T, D] from those of the taps."""
        tap_BTF = tap_BTF.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            parts = tap_BTF.split(self.config.hidden_size, dim=-1)
            tap_BTF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(tap_BTF)

    def start(self, context: Context, state: Drafted | None, rows: int) -> Drafted:
        """Run step 0 over newly committed anchors; keep their keys and values and the newest output of each row."""
        return absorb(self, self.fuse_taps(context.tap_BTF), context, state, rows)

    def step(self, state: Drafted, frontier: Frontier) -> tuple[Tensor, Drafted]:
        """Return logits over the draft vocabulary for the children of each frontier node."""
        return expand(self, state, frontier)

    def score(self, output_BND: Tensor) -> Tensor:
        """Return logits from the layer's output."""
        logits: Tensor = self.lm_head(self.norm(output_BND))
        return logits

    def select_rows(self, state: Drafted, kept: list[int]) -> Drafted:
        """Drop the rows that are not kept."""
        return select_drafted(state, kept)

    def join_rows(self, state: Drafted, other: Drafted) -> Drafted:
        """Append the rows of `other`."""
        return join_drafted(state, other)
