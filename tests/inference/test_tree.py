"""Trees: their text forms, the best static shape, the dynamic shape against a plain twin, depth limits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Frontier, Frozen, Head, HeadConfig, TargetInfo
from headway.inference.draft import grow
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.tree import (
    OFF,
    ByRows,
    DynamicTree,
    StaticTree,
    Tree,
    chain,
    check_policy,
    parse_policy,
    static_from_hits,
)
from tests.inference.helpers import BINARY3, answer, encode, hf_greedy, random_head
from tests.tiny import llama4, target

TOY = TargetInfo(name="toy", model_type="toy", hidden_size=1, vocab_size=7, num_tokens=7, num_layers=1)


class Table(Head):
    """A head whose logits are a fixed function of the path; remembers the path of every frontier node."""

    def __init__(self, seed: int, peaked: bool = False, vocab: Tensor | None = None) -> None:
        super().__init__(HeadConfig(hidden_size=1, vocab_size=7), Frozen(TOY, *(lambda *a: torch.zeros(1),) * 3))
        self.seed, self.peaked, self.vocab = seed, peaked, vocab

    @property
    def draft_vocab(self) -> Tensor | None:
        return self.vocab

    def logits(self, row: int, path: tuple[int, ...]) -> Tensor:
        word = hash((self.seed, row, path)) % 2**31
        logits = torch.randn(7, generator=torch.Generator().manual_seed(word))
        return logits * 60 if self.peaked else logits

    def step(self, state: Any, frontier: Frontier) -> tuple[Tensor, Any]:
        paths = []
        for b, row in enumerate(frontier.token_BN.tolist()):
            above = frontier.parent_BN[b].tolist()
            paths.append([(*state[b][p], t) if p >= 0 else () for t, p in zip(row, above, strict=True)])
        return torch.stack([torch.stack([self.logits(b, p) for p in row]) for b, row in enumerate(paths)]), paths


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """Return the token path of every node below the root."""
    tokens, parents = tree.token_BN[row].tolist(), tree.parents[row]
    out: list[tuple[int, ...]] = [()]
    for n in range(1, len(tokens)):
        out.append((*out[parents[n]], tokens[n]))
    return out[1:]


def naive_dynamic(head: Table, row: int, policy: DynamicTree) -> set[tuple[int, ...]]:
    """Return the paths EAGLE-2 keeps, by its text: expand the best nodes of each level, then keep the best of all."""
    vocab = list(range(7)) if head.vocab is None else head.vocab.tolist()
    frontier, scores = [()], {(): 0.0}
    for _ in range(policy.depth):
        level = []
        for path in frontier:
            logp = head.logits(row, path).double().log_softmax(-1)
            for index in logp.topk(policy.top_k).indices.tolist():
                child = (*path, vocab[index])
                scores[child] = scores[path] + min(float(logp[index]), -1e-6)
                level.append(child)
        frontier = sorted(level, key=lambda p: -scores[p])[: policy.top_k]
    del scores[()]
    return set(sorted(scores, key=lambda p: -scores[p])[: policy.nodes - 1])


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize(
    "policy", [DynamicTree(3, 4, 12), DynamicTree(4, 2, 6), DynamicTree(2, 3, 100), DynamicTree(5, 1, 4)]
)
def test_dynamic_tree_is_the_naive_one(policy: DynamicTree, peaked: bool) -> None:
    for seed in range(5):
        head = Table(seed, peaked)
        tree, _ = grow(head, None, policy, torch.tensor([5, 6]))
        for row in (0, 1):
            paths = paths_of(tree, row)
            assert len(set(paths)) == len(paths) <= policy.nodes - 1
            assert all(path[:-1] in {(), *paths} for path in paths), "an ancestor is missing"
            assert set(paths) == naive_dynamic(head, row, policy)
            assert all(p < n for n, p in enumerate(tree.parents[row]))


def test_the_naive_tree_depends_on_the_scores() -> None:
    policy = DynamicTree(3, 4, 12)
    tree, _ = grow(Table(0), None, policy, torch.tensor([5]))
    assert set(paths_of(tree, 0)) != naive_dynamic(Table(1), 0, policy)


@pytest.mark.parametrize("policy", [BINARY3, StaticTree(((1,), (3,), (1, 2), (3, 0), (3, 5), (3, 0, 4)))])
def test_static_tree_takes_the_named_ranks(policy: StaticTree) -> None:
    """Of a tree with gaps too, where a child stands without its likelier sibling."""
    for vocab in (None, torch.tensor([0, 2, 3, 5, 8, 9, 11])):
        head = Table(3, vocab=vocab)
        tree, _ = grow(head, None, policy, torch.tensor([5, 6]))
        names = list(range(7)) if vocab is None else vocab.tolist()
        for row in (0, 1):
            want = []
            for ranks in policy.paths:
                path: tuple[int, ...] = ()
                for rank in ranks:
                    path = (*path, names[int(head.logits(row, path).argsort(descending=True)[rank])])
                want.append(path)
            assert paths_of(tree, row) == want


def test_ancestors() -> None:
    tree = Tree.from_parents(torch.zeros(2, 5, dtype=torch.long), [[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 3]])
    assert tree.depth_BN.tolist() == [[0, 1, 1, 2, 3], [0, 1, 2, 3, 4]]
    for row, parents in enumerate(tree.parents):
        for n in range(5):
            above, at = set(), n
            while at >= 0:
                above.add(at)
                at = parents[at]
            assert tree.ancestor_BNN[row, n].nonzero()[:, 0].tolist() == sorted(above)


def expected_gain(paths: Any, share: list[list[float]]) -> float:
    total = 0.0
    for path in paths:
        gain = 1.0
        for depth, rank in enumerate(path):
            gain *= share[depth][rank]
        total += gain
    return total


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [2, 3, 5, 6])
def test_static_from_hits_is_optimal(seed: int, nodes: int) -> None:
    share = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    share /= share.sum(1, keepdim=True) + 0.2  # in no order of rank on purpose
    every = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    closed = _closed(every, nodes - 1)
    best = max(expected_gain(c, share.tolist()) for c in closed)
    got = static_from_hits(share, nodes)
    assert got.nodes == nodes
    assert expected_gain(got.paths, share.tolist()) == pytest.approx(best)


def _closed(every: list[tuple[int, ...]], size: int) -> set[frozenset[tuple[int, ...]]]:
    """Return every set of `size` paths that holds the prefixes of its members."""
    sets = {frozenset[tuple[int, ...]]()}
    for _ in range(size):
        sets = {s | {p} for s in sets for p in every if p not in s and (len(p) == 1 or p[:-1] in s)}
    return sets


def test_static_from_hits_stops_at_what_never_hits() -> None:
    assert static_from_hits(torch.tensor([[0.5, 0.0], [0.0, 0.0]]), 20).paths == ((0,),)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("off", StaticTree(())),
        ("chain:3", chain(3)),
        (" chain:0 ", StaticTree(())),
        ("dynamic:depth=5,top_k=8,nodes=32", DynamicTree(5, 8, 32)),
        ("dynamic", DynamicTree()),
        ("static:0/1/0.0", StaticTree(((0,), (1,), (0, 0)))),
    ],
)
def test_parse_policy(text: str, policy: Any) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(policy.describe()) == policy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tree",
        "chain",
        "chain:x",
        "chain:-1",
        "chain:2.5",
        "off:3",
        "dynamic:depth=0",
        "1=tree",
        "1=chain:2 chain:1",
        "2=chain:2 1=chain:1",
        "0=chain:1",
        "1=chain:1 1=off",
        "dynamic:depth",
        "dynamic:width=3",
        "dynamic:nodes=1",
        "static:",
        "static:0.0",
        "static:0/a",
        "static:-1",
    ],
)
def test_parse_policy_refuses(text: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        parse_policy(text)
    assert "\n" not in str(caught.value)


def test_a_tree_for_each_number_of_rows() -> None:
    by_rows = parse_policy("1=dynamic:depth=2,top_k=2,nodes=5 2=chain:1 4=off")
    assert isinstance(by_rows, ByRows)
    assert [by_rows.of(rows) for rows in (1, 2, 3, 4, 9)] == [DynamicTree(2, 2, 5), chain(1), OFF, OFF, OFF]
    assert (by_rows.depth, by_rows.nodes, by_rows.is_chain) == (2, 5, False)
    t = target(llama4())
    head = random_head("medusa", t, num_heads=3)
    seen: dict[int, set[int]] = {}
    sizes = lambda tree, paths: seen.setdefault(len(paths), set()).add(tree.token_BN.shape[1])  # noqa: E731
    requests = [Request(encode(text), Settings(max_new_tokens=n, eos_ids=()), id=text) for text, n in LENGTHS.items()]
    found = generate(t, requests, head=head, policy=by_rows, batch_size=4, observe=sizes)
    for result in found:
        assert result.token_ids == hf_greedy(t.model, encode(result.id), LENGTHS[result.id])
    assert seen == {4: {1}, 3: {1}, 2: {2}, 1: {5}}
    # Where acceptance is lossy the answer depends on the tree, which is then that of one row.
    seen.clear()
    lossy = [replace(r, settings=replace(r.settings, temperature=0.9, accept="typical")) for r in requests]
    list(generate(t, lossy, head=head, policy=by_rows, batch_size=4, observe=sizes))
    assert set().union(*seen.values()) == {5}
    with pytest.raises(HeadwayError, match="depth 4"):
        check_policy(parse_policy("1=chain:4 2=chain:1"), 3)


LENGTHS = {"a": 6, "bc": 12, "def": 20, "g": 40}


@pytest.mark.parametrize("policy", [StaticTree(((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0))), DynamicTree(depth=4)])
def test_a_tree_deeper_than_the_heads_is_refused(policy: Any) -> None:
    t = target(llama4())
    head = random_head("medusa", t, num_heads=3)
    with pytest.raises(HeadwayError, match=r"depth 4.* 3 "):
        answer(t, encode("a"), head, policy, max_new_tokens=4)
    check_policy(chain(3), 3)
    check_policy(chain(30), None)
    assert len(answer(t, encode("a"), head, chain(3), max_new_tokens=4).token_ids) == 4


def test_a_rank_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(HeadwayError, match="rank 7.* 7 words"):
        grow(Table(0), None, StaticTree(((0,), (7,))), torch.tensor([5]))
    grow(Table(0), None, StaticTree(((0,), (6,))), torch.tensor([5]))
