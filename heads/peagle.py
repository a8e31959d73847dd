"""P-EAGLE (arXiv 2602.01469): EAGLE-3's head drafting all its tokens in one pass.

Letters: B batch, T anchors, N nodes below depth 0, K depths, D hidden, F tap width, V draft vocabulary.

    depth 0 of anchor t    reads fc(taps at t) and the token x[t+1]           predicts x[t+2]
    depth d > 0            reads fc(mask_hidden) and the mask token           predicts x[t+2+d]
    depth d attends to     depth 0 of anchors <= t, and depths 1..d of its own anchor; its rotary position is t + d

What a depth reads does not depend on the tokens drafted before it: so all depths run side by side, in training as in
drafting, and all nodes of a depth share their children's logits. Training every depth at every anchor would cost K rows for
each token; deeper depths are down-sampled instead: depth d trains on about ratio^d of the anchors, those of depth d + 1
among those of depth d, so that each has the earlier depths that it attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headway.heads.common.blocks import after
from headway.heads.common.draft_layer import (
    DraftLayer,
    LayerConfig,
    Rotary,
    attend_steps,
    begin_as_target,
    causal_mask,
    default_taps,
    newest,
)
from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import distil_loss, to_teacher
from headway.heads.common.protocol import Batch, Context, Frontier, Frozen, LossReport, TargetInfo
from headway.heads.common.slots import Slots
from headway.heads.common.static import Writes, cached_pass
from headway.heads.common.vocab import MapsHead


@dataclass(frozen=True, kw_only=True)
class Config(LayerConfig):
    """Fields of a P-EAGLE head; what is left open is the target's."""

    taps: tuple[int | str, ...] = ()  # type: ignore[assignment]
    """Three layers, low, middle and high; the default is [1, L/2 - 1, L - 4], the published choice."""
    draft_vocab_size: int = 8192
    """Words of the draft vocabulary; 0 drafts over the target's."""
    depths: int = 6
    """Tokens drafted in a pass."""
    num_layers: int = 4
    """Draft layers; the first reads the token beside the feature."""
    mask_token_id: int = 0
    """The token whose embedding stands for one not yet known; not given, an id without a token, or the padding token."""
    ratio: float = 0.7
    """Depth d trains on max(ratio^d, least_ratio) of the anchors; 1 trains every depth on all."""
    least_ratio: float = 0.2
    max_anchors: int = 512
    """At most this many anchors of a row train beyond depth 0."""
    decay: float = 1.0
    """Depth d weighs decay^d in the loss, unless the recipe has step_weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.taps:
            raise HeadwayError("peagle needs head.taps, for example [1, 14, 26]")
        for name in ("depths", "num_layers", "max_anchors"):
            if getattr(self, name) < 1:
                raise HeadwayError(f"head.{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("ratio", "least_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise HeadwayError(f"head.{name} is {getattr(self, name)}; give a share above 0, at most 1")
        if self.draft_vocab_size < 0:
            raise HeadwayError(
                f"head.draft_vocab_size is {self.draft_vocab_size}; use 0 for the whole vocabulary or more"
            )

    @property
    def num_steps(self) -> int:
        """One step a depth."""
        return self.depths

    @classmethod
    def defaults(cls, info: TargetInfo) -> dict[str, Any]:
        """Return the target's geometry, three taps, a mask token, and a draft vocabulary no larger than the tokenizer."""
        unused = info.num_tokens if info.vocab_size > info.num_tokens else info.text_config.get("pad_token_id") or 0
        return {
            **super().defaults(info),
            "taps": default_taps(info.num_layers),
            "draft_vocab_size": min(cls.draft_vocab_size, info.num_tokens),
            "mask_token_id": unused,
        }

    @classmethod
    def for_target(cls, info: TargetInfo, **fields: Any) -> Config:
        """As HeadConfig.for_target; also refuses a mask token that the target does not have."""
        config = super().for_target(info, **fields)
        if not 0 <= config.mask_token_id < info.vocab_size:
            raise HeadwayError(
                f"head.mask_token_id is {config.mask_token_id}, {info.name} has ids 0..{info.vocab_size - 1}; use one of those"
            )
        return config


@dataclass
class Sample:
    """Which anchors train at which depth. Entry i of row b is anchor order_BT[b, i]; depth d >= 1 runs on the first
    size_K[d] entries of every row, of which the first count_KB[d][b] count."""

    order_BT: Tensor
    size_K: list[int]
    count_KB: Tensor


@dataclass
class State:
    """Keys and values of committed anchors in each layer, and what the newest anchor drafts."""

    slots: Slots
    output_BKD: Tensor
    """The last layer's output at each depth of each row's newest anchor."""


class Head(MapsHead):
    """fc over the taps, draft layers, norm, LM head over the draft vocabulary; and what stands for features to come."""

    config: Config

    def __init__(self, config: Config, frozen: Frozen) -> None:
        super().__init__(config, frozen)
        D, width = config.hidden_size, len(config.taps) * config.hidden_size
        self.fc = nn.Linear(width, D, bias=False)
        self.mask_hidden = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.layers = nn.ModuleList(
            DraftLayer(config, norms=("input_layernorm", "hidden_norm") if i == 0 else ("input_layernorm",))
            for i in range(config.num_layers)
        )
        self.norm = LlamaRMSNorm(D, config.rms_norm_eps)
        self.lm_head = nn.Linear(D, config.draft_vocab_size or config.vocab_size, bias=False)
        self.add_vocab(config.draft_vocab_size)
        self.rotary = Rotary(config)

    @property
    def max_depth(self) -> int:
        """Depths trained."""
        return self.config.depths

    @torch.no_grad()
    def warm_start(self) -> None:
        """Begin as the target's last layer on the highest tap; further layers begin as identity."""
        begin_as_target(self)
        source = self.frozen.layer_weights(self.frozen.info.num_layers - 1)
        for i, layer in enumerate(self.layers):
            if i == 0:
                layer.copy_from(source, feature_norm="hidden_norm")  # type: ignore[operator]
            else:
                layer.begin_as_identity(source, feature_norm="input_layernorm")  # type: ignore[operator]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.frozen.embed(ids).to(self.fc.weight.dtype)

    def _embed_mask(self) -> Tensor:
        """Return the embedding [1, 1, D] that stands for a token not yet known."""
        return self._embed(torch.full((1, 1), self.config.mask_token_id, device=self.fc.weight.device))

    def _inputs(self, tap_BTF: Tensor, embed_BTD: Tensor, mask_11D: Tensor, masks: int) -> tuple[Tensor, Tensor]:
        """Return features and embeddings [B, T + masks, D]: of the anchors, then of so many positions to come."""
        tap_BTF = tap_BTF.to(self.fc.weight.dtype)
        B, D = embed_BTD.shape[0], embed_BTD.shape[2]
        feature = torch.cat([self.fc(tap_BTF), self.fc(self.mask_hidden).expand(B, masks, D)], dim=1)
        return feature, torch.cat([embed_BTD, mask_11D.expand(B, masks, D)], dim=1)

    def loss(self, batch: Batch) -> LossReport:
        """Return sum over depths d of decay^d times the mean objective against the target's distribution at t + 1 + d.

        In training each mean is over the depth's sample of anchors, in evaluation over all.
        """
        sample = self.sample(batch.supervised_BT) if self.training else self._every_anchor(batch)
        vocab, weights = self.draft_vocab, [self.lm_head.weight]
        alone = replace(self.objective, step_weights=())  # each call has one step, which is weighed below
        reports = []
        embed_BTD = after(self._embed(batch.token_BT), 1)
        deeper = [sample.order_BT[:, :n] for n in sample.size_K[1:]]
        outputs = self.training_pass(Head.unroll, batch.tap_BTF, embed_BTD, self._embed_mask(), deeper)
        for d, hidden in enumerate(outputs):
            goals = _goals(sample, d, batch.supervised_BT)
            if d:
                hidden = _to_anchors(hidden, sample, batch.token_BT.shape[1])
                hidden = to_teacher(hidden, d - 1)  # distil_loss shifts by one more: its only step is this depth
            whole = batch.whole_count_S
            one = replace(batch, supervised_BT=goals, whole_count_S=None if whole is None else whole[d : d + 1])
            reports.append(distil_loss(self.frozen, one, [hidden], weights, vocab=vocab, objective=alone))
        step_weight_S = self.objective.weights(len(reports), self.config.decay).tolist()
        weighted = (weight * r.loss for weight, r in zip(step_weight_S, reports, strict=True))
        loss = sum(weighted, start=reports[0].loss.new_zeros(()))
        return LossReport(
            loss=loss,
            loss_S=torch.cat([r.loss_S for r in reports]),
            agreement_S=torch.cat([r.agreement_S for r in reports]),
            count_S=torch.cat([r.count_S for r in reports]),
        )

    def count_labels(self, supervised_BT: Tensor) -> Tensor:
        """As Head.count_labels, over the sample that `loss` would draw."""
        if not self.training:
            return super().count_labels(supervised_BT)
        sample = self.sample(supervised_BT)
        return torch.stack([_goals(sample, d, supervised_BT)[:, 2:].sum() for d in range(self.config.depths)])

    def sample(self, supervised_BT: Tensor) -> Sample:
        """Draw the anchors of each depth, among those whose depth 1 has a goal, by torch's generator."""
        config = self.config
        goal_BT = after(supervised_BT[:, :, None].float(), 3)[:, :, 0]
        order_BT = (goal_BT + torch.rand_like(goal_BT)).argsort(dim=1, descending=True)
        num_goals_B = goal_BT.sum(1)
        shares = [max(config.ratio**d, config.least_ratio) for d in range(config.depths)]
        count_KB = torch.stack([(num_goals_B * share).ceil().clamp(max=config.max_anchors) for share in shares]).long()
        # At least one entry, so that every weight takes part in every batch; it counts where the row has a goal.
        return Sample(order_BT, [max(1, n) for n in count_KB.amax(1).tolist()], count_KB)

    def _every_anchor(self, batch: Batch) -> Sample:
        """Return the sample that leaves nothing out."""
        B, T = batch.token_BT.shape
        order_BT = torch.arange(T, device=batch.token_BT.device).expand(B, -1)
        return Sample(
            order_BT, [T] * self.config.depths, torch.full((self.config.depths, B), T, device=order_BT.device)
        )

    def unroll(self, tap_BTF: Tensor, embed_BTD: Tensor, mask_11D: Tensor, deeper: Sequence[Tensor]) -> list[Tensor]:
        """Return what the LM head reads at depth 0 of every anchor [B, T, D], then at the anchors `deeper` [B, N] of each depth.

        `embed_BTD` is the embedding of the token after each anchor, `mask_11D` of one not yet known.
        """
        B, T = embed_BTD.shape[:2]
        sizes = [T, *(anchor_BN.shape[1] for anchor_BN in deeper)]
        hidden, embed = self._inputs(tap_BTF, embed_BTD, mask_11D, sum(sizes[1:]))
        anchor_K = [torch.arange(T, device=hidden.device).expand(B, -1), *deeper]
        position = torch.cat([anchor + d for d, anchor in enumerate(anchor_K)], dim=1)
        rotary = self.rotary(hidden, position)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DraftLayer)
            q, k, v = layer.project((embed, hidden) if i == 0 else (hidden,), *rotary)
            q_K, k_K, v_K = (x.split(sizes, dim=2) for x in (q, *layer.per_query_head(k, v)))
            whole = (q_K[0], k_K[0], v_K[0])
            if torch.compiler.is_compiling():  # of views of more positions inductor takes the layout for a constant
                whole = tuple(x.contiguous() for x in whole)  # type: ignore[assignment]
            attended = [F.scaled_dot_product_attention(*whole, is_causal=True)]
            for d in range(1, len(anchor_K)):
                n = sizes[d]
                own = [(k_K[e][:, :, :n], v_K[e][:, :, :n]) for e in range(1, d + 1)]
                later_BNT = torch.arange(T, device=q.device) > anchor_K[d][:, :, None]
                attended.append(attend_steps(q_K[d], (k_K[0], v_K[0]), own, later_BNT[:, None]))
            hidden = layer.finish(hidden, torch.cat(attended, dim=2))
        return [self.norm(output) for output in hidden.split(sizes, dim=1)]

    def start(self, context: Context, state: State | None, rows: int) -> State:
        """Run newly committed anchors and every depth of the newest one, in one pass; keep the anchors' keys and values."""
        B, T = context.next_BT.shape
        masks = self.config.depths - 1
        static = self.static is not None
        slots = Slots(self.config.num_layers, rows, static=static) if state is None else state.slots
        hidden, embed = self._inputs(context.tap_BTF, self._embed(context.next_BT), self._embed_mask(), masks)
        device = hidden.device
        to_come = newest(context.position_BT[:, :, None], context.count_B) + torch.arange(1, masks + 1, device=device)
        position = torch.cat([context.position_BT, to_come], dim=1)
        seen = _seen_by_masks(context.count_B, T, masks, device)
        (hidden,) = cached_pass(self, Head._outputs, slots, seen, hidden, embed, position)
        slots.commit([list(range(n)) for n in context.count_B])
        return State(slots, torch.cat([newest(hidden, context.count_B)[:, None], hidden[:, T:]], dim=1))

    def _outputs(
        self, slots: Writes, seen_BNS: Tensor, hidden: Tensor, embed: Tensor, position_BN: Tensor
    ) -> tuple[Tensor]:
        rotary = self.rotary(hidden, position_BN)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DraftLayer)
            hidden = layer.cached(slots, i, hidden, (embed, hidden) if i == 0 else (hidden,), *rotary, seen_BNS)
        return (hidden,)

    def step(self, state: State, frontier: Frontier) -> tuple[Tensor, State]:
        """Return the logits of the frontier's depth, the same for every node."""
        logits = self.lm_head(self.norm(state.output_BKD[:, frontier.depth]))
        return logits[:, None].expand(-1, frontier.token_BN.shape[1], -1), state

    def select_rows(self, state: State, kept: list[int]) -> State:
        """Drop the rows that are not kept."""
        state.slots.keep_rows(kept)
        return State(state.slots, state.output_BKD[kept])

    def join_rows(self, state: State, other: State) -> State:
        """Append the rows of `other`."""
        state.slots.append_rows(other.slots, list(range(other.slots.rows)))
        return State(state.slots, torch.cat([state.output_BKD, other.output_BKD]))


def _to_anchors(hidden_BND: Tensor, sample: Sample, T: int) -> Tensor:
    """Return a depth's features [B, T, D] at their anchors, zeros elsewhere."""
    B, N, D = hidden_BND.shape
    anchor_BN = sample.order_BT[:, :N]
    full = hidden_BND.new_zeros(B, T, D)
    return full.scatter(1, anchor_BN[:, :, None].expand_as(hidden_BND), hidden_BND)


def _goals(sample: Sample, depth: int, supervised_BT: Tensor) -> Tensor:
    """Return the goals [B, T] that have an anchor in the sample of a depth; at depth 0 all have."""
    if depth == 0:
        return supervised_BT
    anchor_BN = sample.order_BT[:, : sample.size_K[depth]]
    counts_BN = torch.arange(anchor_BN.shape[1], device=anchor_BN.device) < sample.count_KB[depth][:, None]
    taught_BT = torch.zeros_like(supervised_BT).scatter(1, anchor_BN, counts_BN)
    # Depth d of the anchor at t predicts the token at t + 2 + d.
    return supervised_BT & to_teacher(taught_BT, 1 + depth)


def _seen_by_masks(count_B: Sequence[int], T: int, masks: int, device: torch.device) -> Tensor:
    """Return bool [B, T + masks, T + masks]: anchors see those up to themselves; a mask sees its row's anchors, which are
    the first count_B[b], and the masks up to itself."""
    seen = causal_mask(len(count_B), T + masks, device).clone()
    count = torch.tensor(count_B, device=device)[:, None, None]
    seen[:, T:, :T] &= torch.arange(T, device=device) < count
    return seen
