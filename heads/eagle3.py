"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused features of three taps, drafting token by token.

Letters: B batch, T anchors, N frontier nodes, M nodes drafted so far, D hidden, F tap width, H query heads, K key heads,
d head size, V draft vocabulary.

    anchor t reads          fc(taps at t) and the token x[t+1]             step 0 predicts x[t+2]
    step s > 0 reads        its own output of step s - 1 and x[t+1+s]      predicts x[t+2+s]
    step s attends to       step 0 of anchors <= t, and steps 1..s of its own anchor; its rotary position is t + s

Training (training-time test) and drafting compute the same thing: committed tokens are step 0, drafted ones are the
steps of the newest anchor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import distil_loss
from headway.heads.common.protocol import Batch, Context, Frontier, Frozen, HeadConfig, LossReport, TargetInfo
from headway.heads.common.protocol import Head as BaseHead
from headway.heads.common.slots import Slots, seen_slots
from headway.heads.common.vocab import from_d2t, to_d2t, to_t2d


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    """Fields of an EAGLE-3 head; what is left open is the target's."""

    taps: tuple[int | str, ...] = ()  # type: ignore[assignment]
    """Three layers, low, middle and high; the default is [1, L/2 - 1, L - 4], the published choice."""
    draft_vocab_size: int = 8192
    """Words of the draft vocabulary; 0 drafts over the target's."""
    steps: int = 4
    """Steps of the training-time test; drafting may go deeper."""
    decay: float = 0.8
    """Step s weighs decay^s in the loss, unless the recipe has step_weights."""
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """Rotary parameters in transformers' spelling."""
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        if not self.taps:
            raise HeadwayError("eagle3 needs head.taps, for example [1, 14, 26]")
        if self.steps < 1:
            raise HeadwayError(f"head.steps is {self.steps}; at least 1 is needed")
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise HeadwayError(
                f"head.num_attention_heads {self.num_attention_heads} is no multiple of head.num_key_value_heads "
                f"{self.num_key_value_heads}; choose a divisor"
            )
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
        """Return the geometry, norms and rotary parameters of the target."""
        text = info.text_config
        heads = text.get("num_attention_heads") or max(1, info.hidden_size // 64)
        return {
            "taps": default_taps(info.num_layers),
            "draft_vocab_size": min(cls.draft_vocab_size, info.num_tokens),
            "num_attention_heads": heads,
            "num_key_value_heads": text.get("num_key_value_heads") or heads,
            "head_dim": text.get("head_dim") or info.hidden_size // heads,
            "intermediate_size": text.get("intermediate_size") or text.get("n_inner") or 4 * info.hidden_size,
            "rms_norm_eps": text.get("rms_norm_eps") or 1e-5,
            "rope": rope_parameters(text),
            "max_position_embeddings": text.get("max_position_embeddings") or 2048,
        }

    @classmethod
    def for_target(cls, info: TargetInfo, **fields: Any) -> Config:
        """As HeadConfig.for_target; also refuses a draft vocabulary larger than the tokenizer."""
        config = super().for_target(info, **fields)
        if config.draft_vocab_size > info.num_tokens:
            raise HeadwayError(
                f"head.draft_vocab_size is {config.draft_vocab_size}, the tokenizer has {info.num_tokens} tokens; use at most that"
            )
        return config


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return low, middle and high layers, distinct and valid for shallow targets too.

    Deep targets get [1, L/2 - 1, L - 4] (the outputs that the published [2, L/2, L - 3] name by inputs).
    """
    if num_layers >= 8:
        return (1, num_layers // 2 - 1, num_layers - 4)
    spread = sorted({0, (num_layers - 1) // 2, num_layers - 1})
    return tuple(spread)


def rope_parameters(text: dict[str, Any]) -> dict[str, Any]:
    """Return a target's rotary parameters from either spelling of its config; theta 10000 where it has none.

    A draft layer rotates whole heads: longrope factors of a target that rotates parts of them do not fit, and its plain
    angles take their place.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    part = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0
    rope = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
    if "rope_type" not in rope:
        rope["rope_type"] = rope.pop("type", "default")
    rope.setdefault("rope_theta", text.get("rope_theta") or 10000.0)
    if part != 1.0 and rope["rope_type"] == "longrope":
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope


class DraftLayer(nn.Module):
    """A Llama decoder layer whose attention reads the normed token embedding beside the normed feature."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        D, H, K, d = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.key_heads, self.head_dim = H, K, d
        self.q_proj = nn.Linear(2 * D, H * d, bias=False)
        self.k_proj = nn.Linear(2 * D, K * d, bias=False)
        self.v_proj = nn.Linear(2 * D, K * d, bias=False)
        self.o_proj = nn.Linear(H * d, D, bias=False)
        self.mlp = LlamaMLP(llama_config(config))
        self.input_layernorm = LlamaRMSNorm(D, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(D, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(D, config.rms_norm_eps)

    def project(self, hidden_BTD: Tensor, embed_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, H, T, d] and keys, and values [B, K, T, d]."""
        x = torch.cat([self.input_layernorm(embed_BTD), self.hidden_norm(hidden_BTD)], dim=-1)
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, cos.to(q.dtype), sin.to(q.dtype))
        return q, k, v

    def finish(self, hidden_BTD: Tensor, attended_BHTd: Tensor) -> Tensor:
        """Return the layer's output [B, T, D] from what attention gathered."""
        attended = self.o_proj(attended_BHTd.transpose(1, 2).flatten(2))
        hidden_BTD = hidden_BTD + attended
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))


def llama_config(config: Config) -> LlamaConfig:
    """Return the draft layer's geometry as the stock classes take it."""
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope),
    )


@dataclass
class State:
    """Keys and values of committed anchors (step 0), and the nodes drafted below the newest one."""

    slots: Slots
    newest_BD: Tensor
    """The layer's output at each row's newest anchor."""
    hidden_BND: Tensor | None = None
    """The layer's output at the nodes of the last frontier."""
    ancestor_BNM: Tensor | None = None
    """bool: which drafted nodes each node of the last frontier attends to, itself included; None at the root."""


class Head(BaseHead):
    """fc over the taps, one draft layer, norm, LM head over the draft vocabulary."""

    config: Config

    def __init__(self, config: Config, frozen: Frozen) -> None:
        super().__init__(config, frozen)
        D = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * D, D, bias=False)
        self.layer = DraftLayer(config)
        self.norm = LlamaRMSNorm(D, config.rms_norm_eps)
        self.lm_head = nn.Linear(D, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.draft_vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            self.set_draft_vocab(torch.arange(config.draft_vocab_size))
        # Kept out of the module tree: a cast of the head to bf16 must not round the rotary frequencies.
        self._rotary_of = (LlamaRotaryEmbedding(llama_config(config)),)

    @property
    def draft_vocab(self) -> Tensor | None:
        """Target ids of the draft vocabulary [V], or None."""
        return from_d2t(self.d2t) if self.config.draft_vocab_size else None  # type: ignore[arg-type]

    def set_draft_vocab(self, target_ids: Tensor) -> None:
        """Take the draft vocabulary: sorted target ids."""
        if self.config.draft_vocab_size:
            self.d2t.copy_(to_d2t(target_ids))  # type: ignore[operator]
            self.t2d.copy_(to_t2d(target_ids, self.config.vocab_size))  # type: ignore[operator]

    @torch.no_grad()
    def warm_start(self) -> None:
        """Begin as the target's last layer on the highest tap: its weights, final norm and LM head rows are copied.

        The halves that read token embeddings, which the target's layer does not have, begin small and random; the lower
        taps begin unused.
        """
        D = self.config.hidden_size
        words = self.frozen.lm_head_weight()
        self.lm_head.weight.copy_(words if self.draft_vocab is None else words[self.draft_vocab])
        self.fc.weight.normal_(std=0.002)
        self.fc.weight[:, -D:] += torch.eye(D)
        final = self.frozen.final_norm()
        if final is not None and final.shape == self.norm.weight.shape:
            self.norm.weight.copy_(final)
        source = self.frozen.layer_weights(self.frozen.info.num_layers - 1)
        names = {f"mlp.{p}_proj.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
        names |= {"o_proj.weight": "self_attn.o_proj.weight", "hidden_norm.weight": "input_layernorm.weight"}
        names |= {"post_attention_layernorm.weight": "post_attention_layernorm.weight"}
        own = dict(self.layer.named_parameters())
        for goal, name in names.items():
            if name in source and source[name].shape == own[goal].shape:
                own[goal].copy_(source[name])
        for p in ("q_proj", "k_proj", "v_proj"):
            weight, both = source.get(f"self_attn.{p}.weight"), own[f"{p}.weight"]
            if weight is not None and weight.shape == (both.shape[0], D):
                both[:, :D].normal_(std=0.01)
                both[:, D:].copy_(weight)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.frozen.embed(ids).to(self.fc.weight.dtype)

    def _rotary(self, like: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotary_of[0].to(like.device)(like, position_BT)

    def loss(self, batch: Batch) -> LossReport:
        """Return sum over steps s of decay^s times the mean objective against the target's distribution at t + 1 + s."""
        hidden_S = [self.norm(h) for h in self.unroll(batch)]
        weights = [self.lm_head.weight]
        return distil_loss(
            self.frozen, batch, hidden_S, weights,
            vocab=self.draft_vocab, decay=self.config.decay, objective=self.objective,
        )  # fmt: skip

    def unroll(self, batch: Batch) -> list[Tensor]:
        """Return the layer's output [B, T, D] at every anchor for each step of the training-time test."""
        token_BT = batch.token_BT
        B, T = token_BT.shape
        embed_BTD = self._embed(token_BT)
        hidden = self.fc(batch.tap_BTF.to(self.fc.weight.dtype))
        position = torch.arange(T, device=token_BT.device)[None]
        repeat = self.layer.heads // self.layer.key_heads
        later_TT = torch.ones(T, T, dtype=torch.bool, device=token_BT.device).triu(1)
        outputs: list[Tensor] = []
        first: tuple[Tensor, Tensor] | None = None
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..s at each anchor
        for s in range(self.config.steps):
            embed = F.pad(embed_BTD[:, 1 + s :], (0, 0, 0, min(1 + s, T)))[:, :T]
            cos, sin = self._rotary(hidden, position + s)
            q, k, v = self.layer.project(hidden, embed, cos, sin)
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            if first is None:
                first = (k, v)
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                own.append((k, v))
                attended = _attend_steps(q, first, own, later_TT)
            hidden = self.layer.finish(hidden, attended)
            outputs.append(hidden)
        return outputs

    def start(self, context: Context, state: State | None, rows: int) -> State:
        """Run step 0 over newly committed anchors; keep their keys and values and the newest output of each row."""
        tap = context.tap_BTF.to(self.fc.weight.dtype)
        B, T = context.next_BT.shape
        slots = Slots(1, rows, 256) if state is None else state.slots
        hidden = self.fc(tap)
        cos, sin = self._rotary(hidden, context.position_BT)
        q, k, v = self.layer.project(hidden, self._embed(context.next_BT), cos, sin)
        slots.place(T, tap.device)
        k, v = slots.write(0, k, v)
        causal = torch.ones(T, T, dtype=torch.bool, device=tap.device).tril().expand(B, -1, -1)
        hidden = self.layer.finish(hidden, _attend_slots(q, k, v, seen_slots(slots.relative(tap.device), causal)))
        slots.commit([list(range(n)) for n in context.count_B])
        newest = torch.tensor(context.count_B, device=tap.device) - 1
        return State(slots, hidden[torch.arange(B, device=tap.device), newest])

    def step(self, state: State, frontier: Frontier) -> tuple[Tensor, State]:
        """Return logits over the draft vocabulary for the children of each frontier node."""
        if frontier.depth == 0:
            hidden = state.newest_BD[:, None]
            return self.lm_head(self.norm(hidden)), State(state.slots, state.newest_BD, hidden, None)
        assert state.hidden_BND is not None
        B, N = frontier.token_BN.shape
        device = frontier.token_BN.device
        D = state.hidden_BND.shape[2]
        hidden = state.hidden_BND.gather(1, frontier.parent_BN[:, :, None].expand(-1, -1, D))
        itself_BNN = torch.eye(N, dtype=torch.bool, device=device).expand(B, -1, -1)
        if state.ancestor_BNM is None:
            drafted, ancestor = 0, itself_BNN
        else:
            drafted = state.ancestor_BNM.shape[2]
            above = state.ancestor_BNM.gather(1, frontier.parent_BN[:, :, None].expand(-1, -1, drafted))
            ancestor = torch.cat([above, itself_BNN], dim=2)
        slots = state.slots
        # The newest anchor is at length - 1; step s of it rotates by s more.
        position = torch.tensor(slots.length, device=device)[:, None] - 1 + frontier.depth
        cos, sin = self._rotary(hidden, position.expand(-1, N))
        q, k, v = self.layer.project(hidden, self._embed(frontier.token_BN), cos, sin)
        slots.place(N, device, offset=drafted)
        k, v = slots.write(0, k, v)
        hidden = self.layer.finish(hidden, _attend_slots(q, k, v, seen_slots(slots.relative(device), ancestor)))
        return self.lm_head(self.norm(hidden)), State(slots, state.newest_BD, hidden, ancestor)

    def select_rows(self, state: State, kept: list[int]) -> State:
        """Drop the rows that are not kept."""
        state.slots.keep_rows(kept)
        return State(state.slots, state.newest_BD[kept])

    def join_rows(self, state: State, other: State) -> State:
        """Append the rows of `other`."""
        state.slots.append_rows(other.slots, list(range(other.slots.rows)))
        return State(state.slots, torch.cat([state.newest_BD, other.newest_BD]))


def _attend_slots(q: Tensor, k: Tensor, v: Tensor, seen_BTS: Tensor) -> Tensor:
    """Return attention [B, H, T, d] over the slots each query sees, query heads grouped by key head."""
    B, H, T, d = q.shape
    K = k.shape[1]
    score = torch.matmul((q * d**-0.5).reshape(B, K, -1, d), k.transpose(-1, -2)).view(B, H, T, -1)
    score = score.float().masked_fill(~seen_BTS[:, None], -torch.inf)
    weight = score.softmax(-1).to(v.dtype)
    return torch.matmul(weight.view(B, K, -1, weight.shape[-1]), v).view(B, H, T, d)


def _attend_steps(
    q: Tensor, first: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], later_TT: Tensor
) -> Tensor:
    """Return attention of one step: over step 0 of anchors at or before each, and the later steps of its own anchor."""
    q = q * q.shape[-1] ** -0.5
    causal = torch.matmul(q, first[0].transpose(-1, -2)).float().masked_fill(later_TT, -torch.inf)
    beside = torch.stack([(q * k).sum(-1) for k, _ in own], dim=-1).float()
    weight = torch.cat([causal, beside], dim=-1).softmax(-1).to(q.dtype)
    T = later_TT.shape[0]
    out = torch.matmul(weight[..., :T], first[1])
    for i, (_, v) in enumerate(own):
        out = out + weight[..., T + i, None] * v
    return out
