"""Which mode a target can run in, found by running it: tree, chain, replay (replay.py), or plain.

A model that ignores the mask or the positions it is given answers wrongly and does not fail, so it is asked a question
whose answer is known: a small tree must give each node the logits of its own path, and two tokens at once must give what
they give one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headway.inference.target import Target

TOLERANCE = 1e-3
"""Relative difference of logits that is always taken for rounding; wrong masks were seen at 0.1 and above in fp32."""
LOW_TOLERANCE = 0.06
"""The same for bfloat16 and float16."""
SIBLINGS = 12
"""In the tree that is asked for: so far ahead of a position may its slot be. Of 20 random models with ALiBi of slots 19 differ by
0.02 to 0.9; with two siblings it was 1e-5 to 0.1."""
NOISE_FACTOR = 4.0
"""How many times the model's own rounding noise (its cached step against its full forward) is still taken for rounding."""


def rounding(target: Target) -> float:
    """Return the relative difference of logits that is taken for rounding."""
    return TOLERANCE if target.dtype == torch.float32 else max(LOW_TOLERANCE, NOISE_FACTOR * _own_noise(target))


def probe(target: Target) -> tuple[str, str]:
    """Return (mode, reason): the best of tree, chain, replay, plain that reproduces the target's own forward."""
    allowed = TOLERANCE
    if target.dtype != torch.float32:
        try:
            allowed = rounding(target)
        except Exception as e:  # noqa: BLE001 - no cache that a second forward can take
            return "plain", f"the model's own cached step failed: {type(e).__name__}: {_first_line(e)}"
    reasons = []
    for mode, ask in (("tree", _tree_error), ("chain", _chain_error), ("replay", _replay_error)):
        if mode == "replay" and getattr(target.text_config, "index_topk", None):
            # Seen on texts longer than index_topk, which a probe cannot afford: other tokens than one by one.
            reasons.append("its indexer chooses keys for several tokens at once otherwise than for one")
            continue
        if mode == "tree" and _has_alibi(target.text_config):
            # A low precision can hide what it does in a short text.
            reasons.append("its ALiBi counts places in the cache, not positions")
            continue
        try:
            worst = ask(target)
        except Exception as e:  # noqa: BLE001 - any failure of a foreign model means a lesser mode, named in the reason
            reasons.append(f"{mode} verification failed: {type(e).__name__}: {_first_line(e)}")
            continue
        if worst <= allowed:
            why = f", and {reasons[-1]}" if mode == "replay" else ""
            return (
                mode,
                f"{mode} verification agrees with the model's own forward (relative difference {worst:.1e}){why}",
            )
        reasons.append(f"{mode} verification differs from the model's own forward by {worst:.2f}")
    return "plain", "; ".join(reasons[1:])


def heeds_window(target: Target) -> bool:
    """Return False if the window in the config is one that the model never reads: its answer is the same with a short one.

    True wherever that cannot be told, as where a layer has a window of its own.
    """
    config, ids = target.text_config, _ids(target, 9)
    if getattr(target.decoder, "config", None) is not config:
        return True
    if any(isinstance(getattr(module, "sliding_window", None), int) for module in target.model.modules()):
        return True
    window = config.sliding_window
    try:
        config.sliding_window = 3
        short = _truth(target, ids)
        config.sliding_window = len(ids)
        return not torch.equal(short, _truth(target, ids))
    except Exception:  # noqa: BLE001 - a foreign model that cannot be asked
        return True
    finally:
        config.sliding_window = window


def _has_alibi(config: Any) -> bool:
    """Return whether a config, or its `attn_config`, says that the attention has a bias by distance."""
    inner = getattr(config, "attn_config", None)
    inner = inner if isinstance(inner, dict) else vars(inner) if inner is not None else {}
    return bool(getattr(config, "alibi", False) or inner.get("alibi"))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _ids(target: Target, count: int) -> list[int]:
    step = max(1, target.info.num_tokens // (count + 3))
    return [(i + 2) * step % target.info.num_tokens for i in range(count)]


@torch.inference_mode()
def _truth(target: Target, path: list[int]) -> Tensor:
    """Return the model's own logits for the last token of a sequence, by a plain forward."""
    return target.model(input_ids=torch.tensor([path], device=target.device), use_cache=False).logits[0, -1].float()


@torch.inference_mode()
def _own_noise(target: Target) -> float:
    """Return how far the model's cached step and its full forward differ: what its dtype cannot resolve."""
    ids = _ids(target, 9)
    want = torch.stack([_truth(target, ids[: n + 1]) for n in range(5, 9)])
    _, cache = target.own_pass(ids[:5])
    if cache is None:
        raise ValueError("the model hands out no cache")
    got = []
    for n in range(5, 9):
        logits_1NV, cache = target.own_pass([ids[n]], n, cache)
        got.append(logits_1NV[0, -1].float())
    return float(relative_error(torch.stack(got), want).max())


def relative_error(got: Tensor, want: Tensor) -> Tensor:
    """Return |got - want| / |want - mean(want)| along the last axis."""
    return (got - want).norm(dim=-1) / (want - want.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)


def _error(
    target: Target, prefix: list[int], nodes: list[int], parents: list[int], asked: Sequence[int] | None = None
) -> float:
    """Return the largest relative difference between a tree's logits and the plain logits of each path, or of those that end
    at the nodes `asked`."""
    from headway.inference.tree import Tree

    device = target.device
    tree = Tree.from_parents(torch.tensor([nodes], device=device), [parents])
    cache = target.new_cache(1)
    size = len(prefix)
    causal = torch.ones(1, size, size, dtype=torch.bool, device=device).tril()
    target.forward(torch.tensor([prefix], device=device), torch.arange(size, device=device)[None], causal, cache)
    cache.slots.commit([list(range(size))])
    got = target.forward(tree.token_BN, tree.depth_BN + size, tree.ancestor_BNN, cache).logits_BNV[0].float()
    worst = 0.0
    for n in range(len(nodes)) if asked is None else asked:
        path, at = [], n
        while at >= 0:
            path.append(nodes[at])
            at = parents[at]
        want = _truth(target, prefix + path[::-1])
        worst = max(worst, float(relative_error(got[n], want)))
    return worst if worst == worst else float("inf")


def _tree_error(target: Target) -> float:
    # The last path begins behind siblings, so that its slots are far ahead of its positions: a bias by slots shows.
    ids = _ids(target, 8 + SIBLINGS)
    parents = [-1, *[0] * SIBLINGS, 1, SIBLINGS + 1]
    return _error(target, ids[:5], ids[5:], parents, [0, 1, 2, SIBLINGS + 1, SIBLINGS + 2])


def _chain_error(target: Target) -> float:
    ids = _ids(target, 8)
    return _error(target, ids[:5], ids[5:8], [-1, 0, 1])


def _replay_error(target: Target) -> float:
    """Return the largest relative difference from plain logits of chains on the model's own cache, some of them rejected."""
    ids = _ids(target, 14)
    cache = target.replay_cache(1)
    worst, at = 0.0, 0
    # (new tokens, of them right and committed); the others are wrong on purpose.
    for count, right in ((5, 5), (3, 1), (4, 2), (3, 3), (1, 1), (2, 1), (1, 1)):
        chain = ids[at : at + right] + ids[: count - right]
        token_1N = torch.tensor([chain], device=target.device)
        position_1N = at + torch.arange(count, device=target.device)[None]
        causal = torch.ones(1, count, count, dtype=torch.bool, device=target.device).tril()
        got = target.forward(token_1N, position_1N, causal, cache).logits_BNV[0].float()
        for n in range(count):
            want = _truth(target, ids[:at] + chain[: n + 1])
            worst = max(worst, float(relative_error(got[n], want)))
        cache.slots.commit([list(range(right))])
        at += right
    return worst if worst == worst else float("inf")
