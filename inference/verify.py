"""The acceptance rules: which path of a verified tree is kept, and the token that follows it.

Letters: N nodes, V vocabulary.

Each rule walks one row. It returns `path`, the accepted nodes with the root first, and `emitted`, the tokens committed:
one per accepted node below the root, then the bonus token that the target chose after the last of them. So
len(emitted) == len(path), and emitted[-1] is the next root, unless the answer ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from headway.inference.sampling import Settings, choose, choose_rows, process, process_rows, typical_threshold


def children_of(parents: list[int]) -> list[list[int]]:
    """Return each node's children, in node order."""
    out: list[list[int]] = [[] for _ in parents]
    for n, p in enumerate(parents):
        if p >= 0:
            out[p].append(n)
    return out


def walk_greedy(token_N: list[int], parents: list[int], argmax_N: list[int]) -> tuple[list[int], list[int]]:
    """Follow the target's argmax from the root; exact for greedy decoding."""
    by_parent = {(p, token_N[n]): n for n, p in reversed(list(enumerate(parents)))}
    path, emitted = [0], [argmax_N[0]]
    while (path[-1], emitted[-1]) in by_parent:
        path.append(by_parent[path[-1], emitted[-1]])
        emitted.append(argmax_N[path[-1]])
    return path, emitted


def walk_exact(
    token_N: list[int],
    parents: list[int],
    logits_NV: Tensor,
    settings: Settings,
    key: int,
    history: list[int],
    take: Callable[[int], bool] = lambda token: True,
) -> tuple[list[int], list[int]]:
    """Draw the target's token at each node; go to the child that carries it, or stop. Lossless for any tree.

    The token drawn at a node is a function of the target's scores there and of noise fixed by seed, key and position: the
    emitted tokens are those that plain decoding draws, whatever the tree holds. So a tree may be grown with an eye on the
    noise (draft.py). `history` ends with the root's token; the token drawn at a node of depth d has position len(history) + d.

    `take` is given each token as it is drawn and returns whether the answer goes on: what a processor allows after the last
    one is not asked.
    """
    by_parent = {(p, token_N[n]): n for n, p in reversed(list(enumerate(parents)))}
    path: list[int] = [0]
    emitted: list[int] = []
    history = [*history]
    while True:
        score = process(logits_NV[path[-1]], settings, history)
        emitted.append(choose(score, settings, key, len(history)))
        history.append(emitted[-1])
        child = by_parent.get((path[-1], emitted[-1]))
        if not take(emitted[-1]) or child is None:
            return path, emitted
        path.append(child)


def walk_exact_rows(
    token_BN: list[list[int]],
    parents: list[list[int]],
    logits_BNV: Tensor,
    settings: Settings,
    keys: list[int],
    lengths: list[int],
) -> list[tuple[list[int], list[int]]]:
    """Walk rows that share settings without a repetition penalty, all rows at once, as `walk_exact` walks each.

    `lengths[b]` is the length of row b's history.
    """
    by_parent = [
        {(p, token_N[n]): n for n, p in reversed(list(enumerate(above)))}
        for token_N, above in zip(token_BN, parents, strict=True)
    ]
    walks: list[tuple[list[int], list[int]]] = [([0], []) for _ in token_BN]
    walking, depth = list(range(len(token_BN))), 0
    while walking:
        score = process_rows(logits_BNV[walking, [walks[b][0][-1] for b in walking]], settings)
        drawn = choose_rows(score, settings, [keys[b] for b in walking], [lengths[b] + depth for b in walking])
        still = []
        for b, token in zip(walking, drawn, strict=True):
            path, emitted = walks[b]
            emitted.append(token)
            child = by_parent[b].get((path[-1], token))
            if child is not None:
                path.append(child)
                still.append(b)
        walking, depth = still, depth + 1
    return walks


def walk_typical(
    token_N: list[int],
    parents: list[int],
    logits_NV: Tensor,
    settings: Settings,
    key: int,
    history: list[int],
    eos: Collection[int] = (),
) -> tuple[list[int], list[int]]:
    """Accept a child whose probability exceeds min(epsilon, delta exp(-H)) at its parent; keep the longest accepted path,
    the more probable of equals; then draw the next token there. Lossy: the output is not distributed as the target's.

    Only drafted tokens are judged; the bonus token is always sampled. Nothing follows a token of `eos`: a path that it ends has
    no bonus token, and emits one less than it has nodes.
    """
    children = children_of(parents)
    best: tuple[int, float, list[int], list[int]] = (0, 0.0, [0], [])
    stack = [best]
    while stack:
        depth, logp, path, tokens = stack.pop()
        if (depth, logp) > best[:2]:
            best = (depth, logp, path, tokens)
        node = path[-1]
        if not children[node] or (tokens and tokens[-1] in eos):
            continue
        probability = process(logits_NV[node], settings, history + tokens).softmax(-1)
        threshold = typical_threshold(probability, settings.epsilon, settings.delta)
        for child in children[node]:
            p = float(probability[token_N[child]])
            if p > threshold:
                step = float(probability[token_N[child]].log())
                stack.append((depth + 1, logp + step, [*path, child], [*tokens, token_N[child]]))
    _, _, path, tokens = best
    if tokens and tokens[-1] in eos:
        return path, tokens
    score = process(logits_NV[path[-1]], settings, history + tokens)
    return path, [*tokens, choose(score, settings, key, len(history) + len(tokens))]
