"""EAGLE (arXiv 2401.15077): one decoder layer that predicts the target's next feature, token by token.

Letters: B batch, T anchors, M supervised labels, D hidden, V the head's vocabulary. The alignment and the loop over steps
are those of common/draft_layer.py.

    anchor t reads    fc of the embedding of x[t+1] and the feature f[t]      step 0 predicts f[t+1]
    step s > 0        the same, of x[t+1+s] and its own prediction of f[t+s]  predicts f[t+1+s]
    the token         x[t+2+s] comes from the predicted f[t+1+s] by the target's own LM head

The feature is the last one, after the final norm: what the LM head reads. Training is on true features with noise (one
step), as published; with `steps` the head also learns from its own predictions, as HASS does (arXiv 2408.15766). EAGLE-2
(arXiv 2406.16858) is the same head with a dynamic tree, which is the tree policy's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headway.heads.common.draft_layer import (
    Anchors,
    Drafted,
    DraftLayer,
    LayerConfig,
    Rotary,
    absorb,
    expand,
    join_drafted,
    select_drafted,
    unroll,
)
from headway.heads.common.errors import HeadwayError
from headway.heads.common.lm_heads import lm_head_factor
from headway.heads.common.losses import distil_loss, feature_loss
from headway.heads.common.protocol import Batch, Context, Frontier, Frozen, LossReport, module_dtype
from headway.heads.common.vocab import IdsHead


@dataclass(frozen=True, kw_only=True)
class Config(LayerConfig):
    """Fields of an EAGLE head; what is left open is the target's."""

    draft_vocab_size: int = 0
    """Words of the draft vocabulary, which are those rows of the target's LM head; 0 drafts over all of them."""
    feature_weight: float = 1.0
    """Weight of the smooth-L1 distance to the target's feature."""
    token_weight: float = 0.1
    """Weight of the objective against the target's distribution; 1.0 and 0.1 are the published weights."""
    noise: float = 0.1
    """Uniform noise between plus and minus this is added to the features in training."""
    bias: bool = False
    """Give fc a bias, as the original has; vLLM reads heads without."""
    steps: int = 1
    """Steps trained on; the first reads the target's features, later ones the head's own."""
    decay: float = 0.8
    """Step s weighs decay^s in both parts of the loss, unless the recipe has step_weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps != ("last",):
            raise HeadwayError(
                f"eagle predicts the feature that the LM head reads, got taps {list(self.taps)}; leave ['last']"
            )
        if self.steps < 1:
            raise HeadwayError(f"head.steps is {self.steps}; at least 1 is needed")
        for name in ("feature_weight", "token_weight", "noise", "draft_vocab_size"):
            if not 0 <= getattr(self, name) < math.inf:
                raise HeadwayError(f"head.{name} is {getattr(self, name)}; give a finite number of 0 or more")
        if not self.feature_weight + self.token_weight:
            raise HeadwayError("head.feature_weight and head.token_weight are both 0; nothing would be learned")

    @property
    def num_steps(self) -> int:
        """Steps of training, on its own predictions after the first."""
        return self.steps


class Head(IdsHead):
    """fc over token embedding and feature, and one draft layer without norms before it; the target's LM head."""

    config: Config
    embeds_apart = False

    def __init__(self, config: Config, frozen: Frozen) -> None:
        super().__init__(config, frozen)
        D = config.hidden_size
        self.fc = nn.Linear(2 * D, D, bias=config.bias)
        self.layer = DraftLayer(config)
        self.add_vocab(config.draft_vocab_size)
        self.rotary = Rotary(config)
        self.factor = lm_head_factor(frozen, "eagle reads the target's LM head", "train eagle3, which has its own")
        # The LM head's rows of a draft vocabulary, and that vocabulary: gathered once, no part of the head.
        self._rows: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def warm_start(self) -> None:
        """Begin by repeating the feature, with the token's embedding little heard and a layer that writes nothing yet.

        The target's last layer is no start: it reads and writes at the scale of what the final norm reads, and the feature
        comes after that norm.
        """
        D = self.config.hidden_size
        self.fc.weight.normal_(std=0.002)
        self.fc.weight[:, D:] += torch.eye(D)
        if self.config.bias:
            self.fc.bias.zero_()
        self.layer.silence()

    def embed(self, ids: Tensor) -> Tensor:
        """Return the target's token embeddings in the head's dtype."""
        return self.frozen.embed(ids).to(module_dtype(self))

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the layer's residual, which is also its one input: fc over the token's embedding and the feature."""
        fused = self.fc(torch.cat([embed_BTD, hidden_BTD], dim=-1))
        return fused, (fused,)

    def feed(self, output_BTD: Tensor) -> Tensor:
        """Return what the next step reads in place of a feature: the predicted one."""
        return output_BTD

    def lm_head(self) -> Tensor:
        """Return the target's LM head [V, D], or its rows of the draft vocabulary."""
        vocab = self.draft_vocab
        if vocab is None:
            return self.frozen.lm_head_weight()
        if torch.compiler.is_compiling():  # after the root was scored, which gathered them
            assert self._rows is not None
            return self._rows[0]
        if self._rows is None or self._rows[1].device != vocab.device or not torch.equal(self._rows[1], vocab):
            with torch.inference_mode(False):  # rows gathered while drafting serve training too
                self._rows = (self.frozen.lm_head_weight().detach()[vocab], vocab.clone())
        return self._rows[0]

    def loss(self, batch: Batch) -> LossReport:
        """Return sum over steps s of decay^s times (feature_weight x mean smooth-L1 to the feature at t + 1 + s
        + token_weight x mean objective against the target's distribution there); `loss_S` are the objectives."""
        config = self.config
        feature = batch.tap_BTF.to(module_dtype(self))
        if self.training and config.noise:
            feature = feature + (2 * torch.rand_like(feature) - 1) * config.noise
        some = Anchors.of_goals(batch.supervised_BT, config.steps)
        predicted_S = self.training_pass(unroll, feature, self.embed(batch.token_BT), config.steps, some)
        report = distil_loss(
            self.frozen,
            batch,
            [p * self.factor for p in predicted_S],
            [self.lm_head()],
            vocab=self.draft_vocab,
            decay=config.decay,
            objective=self.objective,
        )
        step_weight_S = self.objective.weights(len(predicted_S), config.decay).tolist()
        distance, _ = feature_loss(batch, predicted_S, step_weight_S)
        return replace(report, loss=config.token_weight * report.loss + config.feature_weight * distance)

    def start(self, context: Context, state: Drafted | None, rows: int) -> Drafted:
        """Run step 0 over newly committed anchors; keep their keys and values and the newest prediction of each row."""
        return absorb(self, context.tap_BTF.to(module_dtype(self)), context, state, rows)

    def step(self, state: Drafted, frontier: Frontier) -> tuple[Tensor, Drafted]:
        """Return logits for the children of each frontier node: the target's LM head on the predicted feature."""
        return expand(self, state, frontier)

    def score(self, output_BND: Tensor) -> Tensor:
        """Return logits from the predicted feature."""
        if self.draft_vocab is None:
            return self.frozen.logits(output_BND.to(self.frozen.lm_head_weight().dtype))
        words = self.lm_head()
        return F.linear(output_BND.to(words.dtype), words) * self.factor

    def select_rows(self, state: Drafted, kept: list[int]) -> Drafted:
        """Drop the rows that are not kept."""
        return select_drafted(state, kept)

    def join_rows(self, state: Drafted, other: Drafted) -> Drafted:
        """Append the rows of `other`."""
        return join_drafted(state, other)
