"""The tree is chosen among priced candidates, from a recording that smaller trees are parts of."""

from __future__ import annotations

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.inference import tune as tuning
from headway.inference.tree import Tree
from headway.inference.tune import Recording, load_policy, save_policy, tune
from tests.inference.helpers import PROMPTS, encode, random_head
from tests.tiny import llama4, target


def test_a_recording_prices_smaller_trees() -> None:
    # root 0; nodes 1 and 2 below it, 3 below 1; the ranking by score is 0, 2, 1, 3
    tree = Tree.from_parents(torch.tensor([[5, 6, 7, 8]]), [[-1, 0, 0, 1]])
    tree.score_BN = torch.tensor([[0.0, -2.0, -1.0, -3.0]])
    recording = Recording()
    recording.observe(tree, [[0, 1, 3]])
    recording.observe(tree, [[0, 2]])
    recording.observe(tree, [[0]])
    assert recording.accepted(nodes=4, depth=2) == pytest.approx((2 + 1 + 0) / 3)
    assert recording.accepted(nodes=4, depth=1) == pytest.approx((1 + 1 + 0) / 3)
    assert recording.accepted(nodes=3, depth=2) == pytest.approx((1 + 1 + 0) / 3)
    assert recording.accepted(nodes=2, depth=2) == pytest.approx((0 + 1 + 0) / 3)
    assert recording.accepted_chain(2) == pytest.approx((2 + 0 + 0) / 3)


def test_the_best_candidate_is_taken_and_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = target(llama4())
    head = random_head("eagle3", loaded)
    monkeypatch.setattr(tuning, "WIDTHS", (1, 2, 4, 8))
    answers = []
    report = tune(
        loaded, head, [encode(p) for p in PROMPTS], depth=2, top_k=3, max_new_tokens=8, context=8, repeats=1,
        seconds=0, on_progress=lambda items, tokens: answers.append(items),
    )  # fmt: skip
    assert sum(answers) == 1  # no time: one prompt is answered all the same
    assert report["policy"] == report["candidates"][0]["policy"]
    assert report["expected_ratio_vs_plain"] >= 1.0  # no draft at all is among the candidates
    save_policy(tmp_path, loaded, report)
    policy = load_policy(tmp_path, loaded.dtype, str(loaded.device))
    assert policy is not None
    assert policy.describe() == report["policy"]
    with pytest.raises(HeadwayError, match="calibration"):
        tune(loaded, head, [])
