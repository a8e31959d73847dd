"""A Llama decoder layer that drafts: its geometry, its attention, and the loop of a head that reads its own output.

Letters: B batch, T anchors, N frontier nodes, M nodes drafted so far, D hidden, H query heads, K key heads, d head size,
S slots.

    anchor t reads          a feature of position t and the token x[t+1]   step 0 predicts x[t+2]
    step s > 0 reads        its own output of step s - 1 and x[t+1+s]      predicts x[t+2+s]
    step s attends to       step 0 of anchors <= t, and steps 1..s of its own anchor; its rotary position is t + s

Training (`unroll`) and drafting (`absorb`, then `expand`) compute the same thing: committed tokens are step 0, drafted
ones are the steps of the newest anchor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from headway.heads.common.blocks import after
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Context, Frontier, Frozen, HeadConfig, TargetInfo
from headway.heads.common.slots import Slots
from headway.heads.common.static import Run, Writes, cached_pass

SPARSE = 0.9
"""Training leaves anchors without a goal out where those with one are at most this share of a batch's positions."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    """Fields of a family that has draft layers; what is left open is the target's."""

    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """Rotary parameters in transformers' spelling."""
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise HeadwayError(
                f"head.num_attention_heads {self.num_attention_heads} is no multiple of head.num_key_value_heads "
                f"{self.num_key_value_heads}; choose a divisor"
            )
        if self.hidden_size:  # else what is left open is not yet known
            self._check_sizes()
            self._check_rope()

    def _check_sizes(self) -> None:
        names = (
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        )
        for name in names:
            if getattr(self, name) < 1:
                raise HeadwayError(f"head.{name} is {getattr(self, name)}; give 1 or more, or leave it out")
        if self.head_dim % 2:
            raise HeadwayError(f"head.head_dim is {self.head_dim}; give an even number: positions turn pairs")
        if not 0 < self.rms_norm_eps < math.inf:
            raise HeadwayError(f"head.rms_norm_eps is {self.rms_norm_eps}; give a finite number above 0")

    def _check_rope(self) -> None:
        remedy = "give rotary parameters as transformers spells them, {'rope_type': 'default', 'rope_theta': 10000.0} for one"
        try:
            # Written so that a NaN does not pass.
            fits = 0 < self.rope.get("rope_theta", 10000.0) < math.inf
            pairs = LlamaRotaryEmbedding(llama_config(self)).inv_freq.numel() if fits else 0
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise HeadwayError(f"head.rope is {self.rope}: {' '.join(map(str, error.args))}; {remedy}") from None
        if 2 * pairs != self.head_dim:
            raise HeadwayError(
                f"head.rope is {self.rope}, which does not turn whole heads of {self.head_dim}; {remedy}"
            )

    @classmethod
    def defaults(cls, info: TargetInfo) -> dict[str, Any]:
        """Return the geometry, norms and rotary parameters of the target."""
        text = info.text_config
        heads = text.get("num_attention_heads") or max(1, info.hidden_size // 64)
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": text.get("num_key_value_heads") or heads,
            "head_dim": text.get("head_dim") or info.hidden_size // heads,
            "intermediate_size": text.get("intermediate_size") or text.get("n_inner") or 4 * info.hidden_size,
            "rms_norm_eps": text.get("rms_norm_eps") or 1e-5,
            "rope": rope_parameters(text),
            "max_position_embeddings": text.get("max_position_embeddings") or 2048,
        }


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


def llama_config(config: LayerConfig) -> LlamaConfig:
    """Return a draft layer's geometry as the stock classes take it."""
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


class Rotary:
    """cos and sin [B, T, d] of positions. No module: a cast of the head to bf16 must not round the frequencies."""

    def __init__(self, config: LayerConfig) -> None:
        self.stock = LlamaRotaryEmbedding(llama_config(config))

    def __call__(self, like: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin on the device and in the dtype of `like`."""
        stock = self.stock if torch.compiler.is_compiling() else self.stock.to(like.device)
        cos, sin = stock(like, position_BT)
        return cos, sin


def rotate(x: Tensor, cos_BTd: Tensor, sin_BTd: Tensor) -> Tensor:
    """Return queries or keys [B, H, T, d] rotated to their positions."""
    cos, sin = cos_BTd.to(x.dtype)[:, None], sin_BTd.to(x.dtype)[:, None]
    return x * cos + rotate_half(x) * sin  # type: ignore[no-any-return]


class DraftLayer(nn.Module):
    """A Llama decoder layer whose attention reads one input per norm, each normed, concatenated; with no norms, one input
    as it is."""

    def __init__(self, config: LayerConfig, norms: Sequence[str] = ()) -> None:
        super().__init__()
        D, H, K, d = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width = max(1, len(norms)) * D
        self.heads, self.key_heads, self.head_dim = H, K, d
        self.q_proj = nn.Linear(width, H * d, bias=False)
        self.k_proj = nn.Linear(width, K * d, bias=False)
        self.v_proj = nn.Linear(width, K * d, bias=False)
        self.o_proj = nn.Linear(H * d, D, bias=False)
        self.mlp = LlamaMLP(llama_config(config))
        self.norms = tuple(norms)
        for name in norms:
            self.add_module(name, LlamaRMSNorm(D, config.rms_norm_eps))
        self.post_attention_layernorm = LlamaRMSNorm(D, config.rms_norm_eps)

    def project(self, inputs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, H, T, d] and keys, and values [B, K, T, d], of inputs [B, T, D]."""
        x = self.read(inputs)
        return self.queries(x, cos, sin), *self.keys_and_values(x, cos, sin)

    def read(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return what attention reads [B, T, width]: the inputs, each normed, side by side."""
        if self.norms:
            # Of fewer inputs, the last ones.
            inputs = [self.get_submodule(name)(x) for name, x in zip(self.norms[-len(inputs) :], inputs, strict=True)]
        return torch.cat(list(inputs), dim=-1)

    @property
    def is_plain(self) -> bool:
        """Whether queries, keys and values are products with weights alone, no LoRA beside them."""
        return all(type(p) is nn.Linear for p in (self.q_proj, self.k_proj, self.v_proj))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotated queries [B, H, T, d] of what attention reads."""
        return rotate(self.per_head(self.q_proj(x)), cos, sin)

    def keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [B, K, T, d] of what attention reads."""
        return rotate(self.per_head(self.k_proj(x)), cos, sin), self.per_head(self.v_proj(x))

    def per_head(self, x: Tensor) -> Tensor:
        """Return heads side by side [B, T, n d] as [B, n, T, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def finish(self, hidden_BTD: Tensor, attended_BHTd: Tensor) -> Tensor:
        """Return the layer's output [B, T, D]: the residual `hidden_BTD`, what attention gathered, and the MLP."""
        attended = self.o_proj(attended_BHTd.transpose(1, 2).flatten(2))
        hidden_BTD = hidden_BTD + attended
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))

    def causal(self, hidden_BTD: Tensor, inputs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output [B, T, D] where each position attends to itself and those before it."""
        q, k, v = self.project(inputs, cos, sin)
        k, v = self.per_query_head(k, v)
        return self.finish(hidden_BTD, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def cached(
        self, slots: Writes, index: int, hidden_BTD: Tensor, inputs: Sequence[Tensor], cos: Tensor, sin: Tensor,
        seen_BTS: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the layer's output [B, T, D] for tokens that `slots` has placed; their keys and values are stored as those
        of layer `index`, and each attends to the slots it sees."""
        q, k, v = self.project(inputs, cos, sin)
        k, v = slots.write(index, k, v)
        return self.finish(hidden_BTD, attend_slots(q, k, v, seen_BTS))

    def per_query_head(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values repeated for each query head [B, H, T, d]."""
        repeat = self.heads // self.key_heads
        return k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)

    @torch.no_grad()
    def copy_from(self, source: dict[str, Tensor], feature_norm: str | None = None) -> None:
        """Take what fits of a target layer's weights: the projections at the last of the inputs, the norms and the MLP.

        Inputs before the last, which the target's layer does not have, begin small and random. `feature_norm` names the
        norm that takes the target's input norm.
        """
        own = dict(self.named_parameters())
        names = {f"mlp.{p}_proj.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
        names |= {"o_proj.weight": "self_attn.o_proj.weight"}
        names |= {f"{feature_norm}.weight": "input_layernorm.weight"} if feature_norm else {}
        names |= {"post_attention_layernorm.weight": "post_attention_layernorm.weight"}
        for goal, name in names.items():
            if name in source and source[name].shape == own[goal].shape:
                own[goal].copy_(source[name])
        D = own["post_attention_layernorm.weight"].shape[0]
        for p in ("q_proj", "k_proj", "v_proj"):
            weight, all_inputs = source.get(f"self_attn.{p}.weight"), own[f"{p}.weight"]
            if weight is not None and weight.shape == (all_inputs.shape[0], D):
                all_inputs[:, :-D].normal_(std=0.01)
                all_inputs[:, -D:].copy_(weight)

    @torch.no_grad()
    def begin_as_identity(self, source: dict[str, Tensor], feature_norm: str) -> None:
        """As `copy_from`, but with projections out of attention and MLP at zero, so that an untrained layer changes
        nothing."""
        self.copy_from(source, feature_norm)
        self.silence()

    @torch.no_grad()
    def silence(self) -> None:
        """Set the projections out of attention and MLP to zero: the layer then changes nothing, and can learn to."""
        self.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()


class Fused(Protocol):
    """A head that reads several taps through fc and speaks through a norm and an LM head of its own."""

    frozen: Frozen
    fc: nn.Linear
    norm: LlamaRMSNorm
    lm_head: nn.Linear

    @property
    def draft_vocab(self) -> Tensor | None:
        """Target ids of the draft vocabulary, or None."""


@torch.no_grad()
def begin_as_target(head: Fused) -> None:
    """Begin at the highest tap, with the target's final norm and its LM head (the rows of the draft vocabulary); the lower
    taps begin unused."""
    words, final = head.frozen.lm_head_weight(), head.frozen.final_norm()
    head.lm_head.weight.copy_(words if head.draft_vocab is None else words[head.draft_vocab])
    D = head.fc.out_features
    head.fc.weight.normal_(std=0.002)
    head.fc.weight[:, -D:] += torch.eye(D)
    if final is not None and final.shape == head.norm.weight.shape:
        head.norm.weight.copy_(final)


class Recurrent(Protocol):
    """A head whose single layer reads its own output: what `unroll`, `absorb` and `expand` need of it."""

    layer: DraftLayer
    static: Run | None
    embeds_apart: bool
    """Whether the first of the layer's inputs is the token's embedding as it is."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return the token embeddings in the head's dtype."""

    def rotary(self, like: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions."""

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the layer's residual and its inputs, from a feature (or an output fed back) and the token after it."""

    def feed(self, output_BTD: Tensor) -> Tensor:
        """Return what the next step reads in place of a feature."""

    def score(self, output_BND: Tensor) -> Tensor:
        """Return logits [B, N, V] of the tokens after nodes from the layer's output at them."""


@dataclass
class Drafted:
    """State of a recurrent head: keys and values of committed anchors (step 0), and the nodes below the newest one."""

    slots: Slots
    newest_BD: Tensor
    """The layer's output at each row's newest anchor."""
    output_BND: Tensor | None = None
    """The layer's output at the nodes of the last frontier."""
    ancestor_BNM: Tensor | None = None
    """bool: which drafted nodes each node of the last frontier attends to, itself included; None at the root."""


def unroll(
    head: Recurrent, feature_BTD: Tensor, embed_BTD: Tensor, steps: int, some: Anchors | None = None
) -> list[Tensor]:
    """Return the layer's output [B, T, D] at every anchor for each step: the training-time test.

    `embed_BTD` are the embeddings of the tokens. With `some`, those of `Anchors.of_goals`, the output is that of these anchors,
    and zero at the others or of no meaning: later steps attend to none but their own anchor, so of the others keys and values
    will do.
    """
    T, device = embed_BTD.shape[1], embed_BTD.device
    everywhere = torch.arange(T, device=device)[None]
    position = everywhere if some is None else some.position_BA
    later = everywhere[:, None, None] > position[:, None, :, None]
    projections = Projections if head.embeds_apart and head.layer.is_plain else PlainProjections
    project = projections(head.layer, embed_BTD, some)

    residual, inputs = head.fuse(feature_BTD, after(embed_BTD, 1))
    q, k, v = project.first(inputs, head.rotary(feature_BTD, position), head.rotary(feature_BTD, everywhere))
    first = head.layer.per_query_head(k, v)
    if some is None:
        attended = F.scaled_dot_product_attention(q, *first, is_causal=True)
    else:
        residual = some.pick(residual)
        attended = F.scaled_dot_product_attention(q, *first, attn_mask=~later)
    outputs = [head.layer.finish(residual, attended)]

    own: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..s at each anchor
    for s in range(1, steps):
        hidden, embed = head.feed(outputs[-1]), after(embed_BTD, 1 + s)
        residual, inputs = head.fuse(hidden, embed if some is None else some.pick(embed))
        q, k, v = project.later(s, inputs, *head.rotary(hidden, position + s))
        own.append(head.layer.per_query_head(k, v))
        outputs.append(head.layer.finish(residual, attend_steps(q, first, own, later)))
    return outputs if some is None else [some.place(output) for output in outputs]


class PlainProjections:
    """Queries, keys and values of an unrolling, each step on its own: the plain twin of Projections."""

    def __init__(self, layer: DraftLayer, embed_BTD: Tensor, some: Anchors | None) -> None:
        self.layer, self.some = layer, some

    def first(
        self, inputs: Sequence[Tensor], turn: tuple[Tensor, Tensor], turn_all: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return step 0's queries of some anchors, and keys and values of all; `turn` are cos and sin of each."""
        x = self.layer.read(inputs)
        q = self.layer.queries(x if self.some is None else self.some.pick(x), *turn)
        return q, *self.layer.keys_and_values(x, *turn_all)

    def later(self, step: int, inputs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a later step's queries, keys and values of some anchors."""
        return self.layer.project(inputs, cos, sin)


class Projections(PlainProjections):
    """Queries, keys and values of an unrolling where the first input is the token's embedding: what it adds to them is the
    same at each step but for the position, so it is computed once."""

    def __init__(self, layer: DraftLayer, embed_BTD: Tensor, some: Anchors | None) -> None:
        super().__init__(layer, embed_BTD, some)
        D = embed_BTD.shape[-1]
        weight = torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)])
        of_token, self.weight = weight.split([D, weight.shape[1] - D], dim=1)
        self.num_queries = layer.q_proj.out_features
        self.of_q, self.of_kv = self.weight.split([self.num_queries, len(weight) - self.num_queries])
        self.token_BTX = F.linear(layer.get_submodule(layer.norms[0])(embed_BTD), of_token)

    def first(
        self, inputs: Sequence[Tensor], turn: tuple[Tensor, Tensor], turn_all: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return step 0's queries of some anchors, and keys and values of all; `turn` are cos and sin of each."""
        x = self.layer.read(inputs[1:])
        token_q, token_kv = after(self.token_BTX, 1).split([self.num_queries, len(self.of_kv)], dim=-1)
        k, v = (F.linear(x, self.of_kv) + token_kv).chunk(2, dim=-1)
        if self.some is not None:
            x, token_q = self.some.pick(x), self.some.pick(token_q)
        q = F.linear(x, self.of_q) + token_q
        per_head = self.layer.per_head
        return rotate(per_head(q), *turn), rotate(per_head(k), *turn_all), per_head(v)

    def later(self, step: int, inputs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a later step's queries, keys and values of some anchors."""
        token = after(self.token_BTX, 1 + step)
        both = F.linear(self.layer.read(inputs[1:]), self.weight) + (
            token if self.some is None else self.some.pick(token)
        )
        rest = len(self.of_kv) // 2
        q, k, v = (self.layer.per_head(x) for x in both.split([self.num_queries, rest, rest], dim=-1))
        return rotate(q, cos, sin), rotate(k, cos, sin), v


@dataclass
class Anchors:
    """Some of the anchors of each row, A of them: a row's own choice, filled up with others where another row has more."""

    position_BA: Tensor
    num_positions: int

    @classmethod
    def of_goals(cls, supervised_BT: Tensor, steps: int) -> Anchors | None:
        """Return the anchors from which a supervised token is predicted in one of the steps, or None when they are nearly
        all, and leaving out the rest would cost more than it saves."""
        if supervised_BT.is_meta:
            return None
        T = supervised_BT.shape[1]
        goal_BT = torch.zeros_like(supervised_BT)
        for s in range(min(steps, T - 2)):
            goal_BT[:, : T - 2 - s] |= supervised_BT[:, 2 + s :]
        most = int(goal_BT.sum(1).max())
        if most > SPARSE * T:
            return None
        return cls(goal_BT.int().argsort(dim=1, descending=True, stable=True)[:, : max(most, 1)], T)

    def __post_init__(self) -> None:
        B = len(self.position_BA)
        row_B1 = torch.arange(B, device=self.position_BA.device)[:, None]
        self._flat = (row_B1 * self.num_positions + self.position_BA).flatten()

    def pick(self, x_BTX: Tensor) -> Tensor:
        """Return the entries of these anchors [B, A, X]."""
        B, A = self.position_BA.shape
        return x_BTX.flatten(0, 1).index_select(0, self._flat).view(B, A, -1)

    def place(self, x_BAX: Tensor) -> Tensor:
        """Return the entries where their anchors are [B, T, X], zeros elsewhere."""
        B, _, X = x_BAX.shape
        zeros = x_BAX.new_zeros(B * self.num_positions, X)
        return zeros.index_copy(0, self._flat, x_BAX.flatten(0, 1)).view(B, -1, X)


def absorb(head: Recurrent, feature_BTD: Tensor, context: Context, state: Drafted | None, rows: int) -> Drafted:
    """Run step 0 over newly committed anchors; keep their keys and values and the newest output of each row."""
    B, T = context.next_BT.shape
    slots = Slots(1, rows, static=head.static is not None) if state is None else state.slots
    causal = causal_mask(B, T, feature_BTD.device)
    (output,) = cached_pass(head, _outputs, slots, causal, feature_BTD, context.next_BT, context.position_BT)
    slots.commit([list(range(n)) for n in context.count_B])
    return Drafted(slots, newest(output, context.count_B))


def expand(head: Recurrent, state: Drafted, frontier: Frontier) -> tuple[Tensor, Drafted]:
    """Return logits of the children of the frontier's nodes, and the state whose `output_BND` is the layer's output there."""
    if frontier.depth == 0:
        root_B1D = state.newest_BD[:, None]
        return head.score(root_B1D), Drafted(state.slots, state.newest_BD, root_B1D)
    assert state.output_BND is not None
    N, device, D = frontier.token_BN.shape[1], frontier.token_BN.device, state.newest_BD.shape[1]
    hidden = head.feed(state.output_BND.gather(1, frontier.parent_BN[:, :, None].expand(-1, -1, D)))
    ancestor = _with_themselves(state.ancestor_BNM, frontier.parent_BN)
    slots = state.slots
    # The newest anchor is at length - 1; step s of it rotates by s more.
    position = torch.tensor(slots.length, device=device)[:, None] - 1 + frontier.depth
    output, logits = cached_pass(
        head, _scored_outputs, slots, ancestor, hidden, frontier.token_BN, position.expand(-1, N)
    )
    return logits, Drafted(slots, state.newest_BD, output, ancestor)


def _outputs(
    head: Recurrent, slots: Writes, seen_BNS: Tensor, hidden_BND: Tensor, token_BN: Tensor, position_BN: Tensor
) -> tuple[Tensor]:
    """Return the layer's output at new nodes."""
    residual, inputs = head.fuse(hidden_BND, head.embed(token_BN))
    return (head.layer.cached(slots, 0, residual, inputs, *head.rotary(hidden_BND, position_BN), seen_BNS),)


def _scored_outputs(head: Recurrent, *nodes: Any) -> tuple[Tensor, Tensor]:
    """Return the layer's output at new nodes, and its logits."""
    (output,) = _outputs(head, *nodes)
    return output, head.score(output)


def select_drafted(state: Drafted, kept: list[int]) -> Drafted:
    """Return the state of the rows that are kept."""
    state.slots.keep_rows(kept)
    return Drafted(state.slots, state.newest_BD[kept])


def join_drafted(state: Drafted, other: Drafted) -> Drafted:
    """Return the state with the rows of `other` after its own."""
    state.slots.append_rows(other.slots, list(range(other.slots.rows)))
    return Drafted(state.slots, torch.cat([state.newest_BD, other.newest_BD]))


def _with_themselves(above_BNM: Tensor | None, parent_BN: Tensor) -> Tensor:
    """Return which drafted nodes each of N new nodes attends to, [B, N, M + N]: its parent's, and itself."""
    B, N = parent_BN.shape
    itself_BNN = torch.eye(N, dtype=torch.bool, device=parent_BN.device).expand(B, -1, -1)
    if above_BNM is None:
        return itself_BNN
    inherited = above_BNM.gather(1, parent_BN[:, :, None].expand(-1, -1, above_BNM.shape[2]))
    return torch.cat([inherited, itself_BNN], dim=2)


def causal_mask(rows: int, num_tokens: int, device: torch.device | str) -> Tensor:
    """Return bool [rows, num_tokens, num_tokens]: each token sees itself and those before it."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)


def newest(value_BTX: Tensor, count_B: list[int]) -> Tensor:
    """Return each row's entry count - 1, the newest of those that are no padding, [B, X]."""
    index = torch.tensor(count_B, device=value_BTX.device) - 1
    return value_BTX[torch.arange(len(count_B), device=index.device), index]


def attend_slots(q: Tensor, k: Tensor, v: Tensor, seen_BTS: Tensor) -> Tensor:
    """Return attention [B, H, T, d] over the slots each query sees, query heads grouped by key head."""
    B, H, T, d = q.shape
    K = k.shape[1]
    score = torch.matmul((q * d**-0.5).reshape(B, K, -1, d), k.transpose(-1, -2)).view(B, H, T, -1)
    score = score.float().masked_fill(~seen_BTS[:, None], -torch.inf)
    weight = score.softmax(-1).to(v.dtype)
    return torch.matmul(weight.view(B, K, -1, weight.shape[-1]), v).view(B, H, T, d)


def attend_steps(
    q: Tensor, first: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], later: Tensor
) -> Tensor:
    """Return attention [B, H, N, d] of one step: over step 0 of every anchor but the `later` ones [..., N, T], and over the
    later steps of each query's own anchor, [B, H, N, d] each."""
    q = q * q.shape[-1] ** -0.5
    causal = torch.matmul(q, first[0].transpose(-1, -2)).float().masked_fill(later, -torch.inf)
    beside = torch.stack([(q * k).sum(-1) for k, _ in own], dim=-1).float()
    weight = torch.cat([causal, beside], dim=-1).softmax(-1).to(q.dtype)
    # Split, not sliced: the gradient of a slice is as large as the whole.
    weight, weight_own = weight.split([first[0].shape[2], len(own)], dim=-1)
    out = torch.matmul(weight, first[1])
    for i, (_, v) in enumerate(own):
        out = out + weight_own[..., i, None] * v
    return out
