"""Grows a tree from a head, or whatever else drafts level by level, under any policy.

Under sampling, the token that will be emitted at a position is the one of greatest log p + g, where p is the target's
distribution and g is noise that the seed and the position fix (sampling.py). Only p is unknown while drafting, and the
head's distribution q stands in for it: children are ranked by log q + g. The emitted tokens do not depend on the tree, so
this costs no exactness; it lets a draft follow the dice, which a draft of the most probable tokens cannot.

Letters: B rows, N frontier nodes, K children of a node, M candidates, V the head's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Frontier, State
from headway.inference.host import fetch
from headway.inference.sampling import Settings, noise_of, noise_words
from headway.inference.tree import DynamicTree, Shape, StaticTree, Template, Tree, template

_layouts: dict[StaticTree, Template] = {}

CANDIDATES = 64
"""Most probable tokens among which the noise decides."""
DOUBT = 1.5
"""How far log q is off log p, about: the noisy scores are divided by it to make probabilities of them. Of 0.4 to 1.5 the
last gave the longest accepted length with an EAGLE-3 head of an hour's training (0.8 / top-p 0.9: 1.71 to 1.79)."""
UNLIKELY = -20.0
"""Log-probability of a token that the settings exclude under q; under p they may not."""
LEAST = -1e3
"""Log-probability of a token that the head excludes, or of which it gives no number."""


class Steps(Protocol):
    """What drafts level by level: a head, or a model that has its `step`."""

    @property
    def draft_vocab(self) -> Tensor | None:
        """Target ids of its vocabulary, or None when that is the target's."""

    def step(self, state: State, frontier: Frontier) -> tuple[Tensor, State]:
        """Return logits_BNV for the children of each frontier node, and the new state."""


@dataclass
class Draws:
    """Of each row, what fixes the noise of its next tokens: settings, key and the position of the token after the root."""

    settings: list[Settings]
    keys: list[int]
    positions: list[int]

    @staticmethod
    def of(settings: list[Settings], keys: list[int], positions: list[int]) -> Draws | None:
        """Return the draws of rows, or None when no row has any: greedy rows, and typical acceptance, which draws no
        drafted token."""
        return Draws(settings, keys, positions) if any(map(_draws, settings)) else None


def _draws(settings: Settings) -> bool:
    return not settings.greedy and settings.accept == "exact"


@torch.inference_mode()
def grow(head: Steps, state: State, policy: Shape, root_B: Tensor, draws: Draws | None = None) -> tuple[Tree, State]:
    """Return the candidate tree of each row under `policy`, and the head's state after drafting.

    `root_B` holds each row's newest committed token. The draft's own entries in the state are not committed: the next
    `start` continues from the committed ones. `draws` names the noise under which the target's tokens will be drawn.
    """
    if policy.depth == 0:
        return Tree.from_parents(root_B[:, None], [[-1]] * root_B.shape[0]), state
    if isinstance(policy, StaticTree):
        return _grow_static(head, state, policy, root_B, draws)
    return _grow_dynamic(head, state, policy, root_B, draws)


def _best(head: Steps, logits_BNV: Tensor, count: int, draws: Draws | None, depth: int) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest children of each node at `depth`, [B, N, K] in the head's own ids, the best first, and
    the logarithm of each one's probability to be the token that the target emits there."""
    if draws is None:
        value_BNK, index_BNK = logits_BNV.topk(count, dim=-1)
        return index_BNK, value_BNK.double() - logits_BNV.float().logsumexp(-1, keepdim=True).double()
    logp_BNM, index_BNM = _foreseen(head, logits_BNV, max(count, CANDIDATES), draws, depth)
    logp_BNK, pick_BNK = logp_BNM.topk(count, dim=-1)
    return index_BNM.gather(2, pick_BNK), logp_BNK


def _foreseen(head: Steps, logits_BNV: Tensor, most: int, draws: Draws, depth: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [B, N, M] of the `most` best candidates, given the noise, and their ids."""
    device = logits_BNV.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float64)[:, None, None]

    drawn = [_draws(s) for s in draws.settings]
    temperature = column([s.temperature if d else 1.0 for s, d in zip(draws.settings, drawn, strict=True)])
    score_BNV = logits_BNV.float() / temperature.float()
    value_BNM, index_BNM = score_BNV.topk(min(most, score_BNV.shape[-1]), dim=-1)
    logq_BNM = value_BNM.double() - score_BNV.logsumexp(-1, keepdim=True).double()
    q_BNM = logq_BNM.exp()
    # What the settings leave, of candidates that stand in descending order.
    place_M = torch.arange(q_BNM.shape[-1], device=device)
    out_BNM = place_M >= column(
        [s.top_k if s.top_k and d else 1 << 30 for s, d in zip(draws.settings, drawn, strict=True)]
    )
    top_p = column([s.top_p if d else 2.0 for s, d in zip(draws.settings, drawn, strict=True)])
    out_BNM = out_BNM | (q_BNM.cumsum(-1) - q_BNM >= top_p)
    min_p = column([s.min_p if d else 0.0 for s, d in zip(draws.settings, drawn, strict=True)])
    out_BNM = out_BNM | (q_BNM < min_p * q_BNM[..., :1])
    words = [
        noise_words(s.seed, key, at + depth)
        for s, key, at in zip(draws.settings, draws.keys, draws.positions, strict=True)
    ]
    low_B, high_B = torch.tensor(words, device=device).T
    noise_BNM = noise_of(low_B[:, None, None], high_B[:, None, None], _to_target(head, index_BNM))
    seen_BNM = ((logq_BNM + noise_BNM) / DOUBT).masked_fill(out_BNM, -torch.inf).log_softmax(-1).clamp(min=UNLIKELY)
    drawn_B11 = torch.tensor(drawn, device=device)[:, None, None]
    return torch.where(drawn_B11, seen_BNM, logq_BNM), index_BNM


def _to_target(head: Steps, ids: Tensor) -> Tensor:
    return ids if head.draft_vocab is None else head.draft_vocab[ids]


def _grow_static(
    head: Steps, state: State, policy: StaticTree, root_B: Tensor, draws: Draws | None
) -> tuple[Tree, State]:
    if policy not in _layouts:
        _layouts[policy] = template(policy)
    layout, device, B = _layouts[policy], root_B.device, root_B.shape[0]
    tokens = [root_B[:, None]]
    frontier = Frontier(root_B[:, None], torch.full((B, 1), -1, device=device), 0)
    for d in range(policy.depth):
        logits_BNV, state = head.step(state, frontier)
        most = max(layout.rank[d]) + 1
        if most > logits_BNV.shape[-1]:
            raise HeadwayError(
                f"the tree takes rank {most - 1}, the head's vocabulary has {logits_BNV.shape[-1]} words; "
                f"use ranks 0..{logits_BNV.shape[-1] - 1}"
            )
        if draws is None:
            best_BNK = logits_BNV.topk(most, dim=-1).indices
        else:
            best_BNK, _ = _best(head, logits_BNV, most, draws, d)
        token_BN = _to_target(head, best_BNK[:, layout.parent[d], layout.rank[d]])
        tokens.append(token_BN)
        if d + 1 < policy.depth:
            keep = layout.frontier[d + 1]
            parent = torch.tensor([layout.parent[d][i] for i in keep], device=device)
            frontier = Frontier(token_BN[:, keep], parent.expand(B, -1), d + 1)
    return Tree.from_parents(torch.cat(tokens, 1), [layout.parents] * B), state


def _grow_dynamic(
    head: Steps, state: State, policy: DynamicTree, root_B: Tensor, draws: Draws | None
) -> tuple[Tree, State]:
    device, B = root_B.device, root_B.shape[0]
    frontier = Frontier(root_B[:, None], torch.full((B, 1), -1, device=device), 0)
    score_BN = torch.zeros(B, 1, dtype=torch.float64, device=device)
    node_BN = torch.full((B, 1), -1, device=device)  # each frontier node's number among the candidates; the root has -1
    tokens, scores, parents = [], [], []
    count = 0
    for d in range(policy.depth):
        logits_BNV, state = head.step(state, frontier)
        index_BNK, logp_BNK = _best(head, logits_BNV, min(policy.top_k, logits_BNV.shape[-1]), draws, d)
        # A child's score must be below its parent's even where the head is certain, so that the best nodes form a tree.
        child_BC = (score_BN[:, :, None] + logp_BNK.nan_to_num(nan=LEAST).clamp(LEAST, -1e-6)).flatten(1)
        token_BC = _to_target(head, index_BNK).flatten(1)
        parent_BC = node_BN[:, :, None].expand_as(index_BNK).flatten(1)
        tokens.append(token_BC)
        scores.append(child_BC)
        parents.append(parent_BC)
        if d + 1 < policy.depth:
            score_BN, pick_BN = child_BC.topk(min(policy.top_k, child_BC.shape[1]), dim=-1)
            node_BN = pick_BN + count
            token_BN = token_BC.gather(1, pick_BN)
            frontier = Frontier(token_BN, pick_BN // index_BNK.shape[2], d + 1)
        count += child_BC.shape[1]
    token_BC, score_BC, parent_BC = torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1)
    kept_BN = score_BC.topk(min(policy.nodes - 1, count), dim=-1).indices.sort(dim=-1).values
    parents_host = _renumber(*fetch(kept_BN, parent_BC.gather(1, kept_BN)))
    token_BN = torch.cat([root_B[:, None], token_BC.gather(1, kept_BN)], 1)
    tree = Tree.from_parents(token_BN, parents_host)
    tree.score_BN = torch.cat([score_BC.new_zeros(B, 1), score_BC.gather(1, kept_BN)], 1)
    return tree, state


def _renumber(kept: list[list[int]], parent: list[list[int]]) -> list[list[int]]:
    """Return parents in the numbering of the kept nodes, root first."""
    out = []
    for nodes, above in zip(kept, parent, strict=True):
        number = {n: i + 1 for i, n in enumerate(nodes)} | {-1: 0}
        out.append([-1, *(number[p] for p in above)])
    return out
