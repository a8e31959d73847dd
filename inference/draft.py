"""Grows a tree from a head: any head, any policy.

Letters: B rows, N frontier nodes, K children of a node, V the head's vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Context, Frontier, Head, State
from headway.inference.packed import pack
from headway.inference.tree import DynamicTree, Policy, StaticTree, Template, Tree, template

_layouts: dict[StaticTree, Template] = {}


@torch.inference_mode()
def grow(head: Head, state: State, policy: Policy, root_B: Tensor) -> tuple[Tree, State]:
    """Return the candidate tree of each row under `policy`, and the head's state after drafting.

    `root_B` holds each row's newest committed token. The draft's own entries in the state are not committed: the next
    `start` continues from the committed ones.
    """
    if policy.depth == 0:
        return Tree.from_parents(root_B[:, None], [[-1]] * root_B.shape[0]), state
    with pack(head):
        if isinstance(policy, StaticTree):
            return _grow_static(head, state, policy, root_B)
        return _grow_dynamic(head, state, policy, root_B)


def absorb(head: Head, context: Context, state: State | None, rows: int) -> State:
    """Return the head's state after newly committed tokens, by its `start`."""
    with pack(head):
        return head.start(context, state, rows)


def _to_target(head: Head, ids: Tensor) -> Tensor:
    return ids if head.draft_vocab is None else head.draft_vocab[ids]


def _grow_static(head: Head, state: State, policy: StaticTree, root_B: Tensor) -> tuple[Tree, State]:
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
        best_BNK = logits_BNV.topk(most, dim=-1).indices
        token_BN = _to_target(head, best_BNK[:, layout.parent[d], layout.rank[d]])
        tokens.append(token_BN)
        if d + 1 < policy.depth:
            keep = layout.frontier[d + 1]
            parent = torch.tensor([layout.parent[d][i] for i in keep], device=device)
            frontier = Frontier(token_BN[:, keep], parent.expand(B, -1), d + 1)
    return Tree.from_parents(torch.cat(tokens, 1), [layout.parents] * B), state


def _grow_dynamic(head: Head, state: State, policy: DynamicTree, root_B: Tensor) -> tuple[Tree, State]:
    device, B = root_B.device, root_B.shape[0]
    frontier = Frontier(root_B[:, None], torch.full((B, 1), -1, device=device), 0)
    score_BN = torch.zeros(B, 1, dtype=torch.float64, device=device)
    node_BN = torch.full((B, 1), -1, device=device)  # each frontier node's number among the candidates; the root has -1
    tokens, scores, parents = [], [], []
    count = 0
    for d in range(policy.depth):
        logits_BNV, state = head.step(state, frontier)
        value_BNK, index_BNK = logits_BNV.topk(min(policy.top_k, logits_BNV.shape[-1]), dim=-1)
        logp_BNK = value_BNK.double() - logits_BNV.float().logsumexp(-1, keepdim=True).double()
        # A child's score must be below its parent's even where the head is certain, so that the best nodes form a tree.
        child_BC = (score_BN[:, :, None] + logp_BNK.clamp(max=-1e-6)).flatten(1)
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
    parents_host = _renumber(kept_BN.tolist(), parent_BC.gather(1, kept_BN).tolist())
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
