"""How waiting prompts are cut into prefill passes."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from headway.inference.generate import PREFILL_TOKENS, Request, _like_length


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
