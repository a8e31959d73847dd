"""How waiting prompts are cut into prefill passes."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from torch import Tensor

from headway.inference.generate import PREFILL_TOKENS, Request, _like_length, generate
from headway.inference.sampling import Settings
from headway.inference.tree import Tree
from tests.inference.helpers import POLICIES, encode, random_head
from tests.tiny import llama4, target


def _cost(groups: list[list[int]], pass_tokens: int) -> float:
    if any(len(group) > 1 and len(group) * max(group) > PREFILL_TOKENS for group in groups):
        return float("inf")
    return sum(len(group) * max(group) + pass_tokens for group in groups)


def _cheapest(sizes: list[int], pass_tokens: int) -> float:
    """Return the least cost over every way to cut the sorted sizes."""
    ordered = sorted(sizes)
    costs = []
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            edges = [0, *cuts, len(ordered)]
            costs.append(_cost([ordered[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)], pass_tokens))
    return min(costs)


@pytest.mark.parametrize("pass_tokens", [0, 24, 256])
@pytest.mark.parametrize("longest", [60, 900, 5000])
def test_cheapest_cut(pass_tokens: int, longest: int) -> None:
    draw = random.Random(pass_tokens + longest)
    for _ in range(10):
        sizes = [draw.randint(1, longest) for _ in range(draw.randint(1, 9))]
        requests = [Request([0] * size, id=n) for n, size in enumerate(sizes)]
        groups = _like_length(requests, pass_tokens)
        assert sorted(r.id for group in groups for r in group) == list(range(len(sizes)))
        lengths = [[len(r.prompt_ids) for r in group] for group in groups]
        assert _cost(lengths, pass_tokens) == _cheapest(sizes, pass_tokens)
        assert max(lengths[0]) == max(sizes), "the longest come first"


def test_no_requests() -> None:
    assert _like_length([], 24) == []


@pytest.mark.parametrize("family", ["medusa", "eagle3"])
def test_what_prompts_share_is_read_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a drafter too: what it reads of the shared part, and so all that it proposes, is as if each came alone."""
    t = target(llama4())
    head = random_head(family, t)
    texts = ["You are helpful. What is a cat", "You are helpful. Why", "You are helpful. What is a dog, and why"]
    requests = [Request(encode(text), Settings(max_new_tokens=12, eos_ids=()), id=text) for text in texts]
    widths: list[int] = []
    forward = t.forward

    def counted(token_BN: Tensor, *args: object, **kwargs: object) -> object:
        widths.append(token_BN.shape[1])
        return forward(token_BN, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(t, "forward", counted)

    def answers(some: list[Request]) -> tuple[list[object], list[Tensor]]:
        trees: list[Tensor] = []

        def observe(tree: Tree, paths: list[list[int]]) -> None:
            trees.append(tree.token_BN.clone())

        found = generate(t, some, head=head, policy=POLICIES["binary"], observe=observe)
        return [(r.id, r.token_ids, r.accepted_per_round) for r in found], trees

    together, trees = answers(requests)
    prefills = [width for width in widths if width not in {tree.shape[1] for tree in trees}]
    alone = [answers([request]) for request in requests]
    assert together == [one for results, _ in alone for one in results]
    wanted = [tree for _, trees_of_one in alone for tree in trees_of_one]
    assert [tree.tolist() for tree in trees] == [tree.tolist() for tree in wanted]
    shared = [0, len("You are helpful. Wh"), len("You are helpful. What is a ")]
    assert prefills == [len(r.prompt_ids) - known for r, known in zip(requests, shared, strict=True)]
