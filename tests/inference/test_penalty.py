"""A repetition penalty under a tree: each node is judged with its own path as history, so the answer is transformers'."""

from __future__ import annotations

import pytest
import torch

from headway.inference.generate import plain
from headway.inference.sampling import Settings
from headway.inference.verify import walk_exact
from tests.inference.helpers import POLICIES, answer, encode, hf_greedy, random_head
from tests.tiny import llama12, target


@pytest.mark.parametrize("text", ["aaaaab", "Hello wo"])
def test_greedy_with_a_penalty_equals_transformers(text: str) -> None:
    t = target(llama12())
    want = hf_greedy(t.model, encode(text), 32, repetition_penalty=1.3)
    assert want != hf_greedy(t.model, encode(text), 32), "the penalty changes nothing here"
    settings = Settings(max_new_tokens=32, repetition_penalty=1.3, eos_ids=())
    assert plain(t, encode(text), settings) == want
    for family in ("medusa", "eagle3"):
        head = random_head(family, t)
        for policy in POLICIES.values():
            got = answer(t, encode(text), head, policy, max_new_tokens=32, repetition_penalty=1.3)
            assert got.token_ids == want, (family, policy)


def test_a_node_is_penalised_for_its_own_path_only() -> None:
    """Token 1 wins at the root and again below it, unless the path's own 1 is penalised; a sibling's token is not."""
    logits_NV = torch.tensor([[0.0, 3.0, 0.0, 2.9], [0.0, 3.0, 2.5, 2.0], [0.0, 9.0, 0.0, 0.0], [0.0, 1.0, 0.0, 5.0]])
    tokens, parents = [0, 1, 2, 2], [-1, 0, 0, 1]
    settings = Settings(repetition_penalty=1.3)
    assert walk_exact(tokens, parents, logits_NV, settings, 0, [0]) == ([0, 1, 3], [1, 2, 3])
    assert walk_exact(tokens, parents, logits_NV, Settings(), 0, [0]) == ([0, 1], [1, 1])
