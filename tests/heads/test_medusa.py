"""Medusa's LM heads: each kind learns, and drafts what it learned."""

from __future__ import annotations

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Context, Frontier, find_family
from tests import tiny
from tests.heads import test_contract as contract
from tests.heads.test_contract import make_batch, small


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llama12("sdpa"))


@pytest.mark.parametrize(
    ("lm_head", "rank"), [("own", 0), ("shared", 0), ("own", 12), ("draft", 12)], ids=lambda value: str(value)
)
def test_every_lm_head_of_medusa_drafts_what_it_is_trained_to_say(target, lm_head, rank):
    head = small("medusa", target, lm_head=lm_head, rank=rank)
    contract.test_training_and_drafting_compute_the_same(head, target)
    contract.test_parity_check_can_fail(head, target)
    if head.lm_heads:
        contract.test_gradients_reach_every_parameter_and_none_of_the_target(head, target)


@pytest.mark.parametrize("lm_head", ["own", "shared", "draft"])
def test_every_lm_head_of_medusa_learns_and_drafts_what_it_learned(target, lm_head):
    head = small("medusa", target, lm_head=lm_head)
    batch = make_batch(target, head.config.taps, lengths=(24,), supervised_from=3)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    first = float(head.loss(batch).loss)
    for _ in range(60):
        optimizer.zero_grad()
        head.loss(batch).loss.backward()
        optimizer.step()
    with torch.no_grad():
        report = head.loss(batch)
        assert float(report.loss) < 0.9 * first
        # What it is trained to say at position t is what it drafts there.
        features = Context(batch.tap_BTF, batch.token_BT.roll(-1, 1), torch.arange(24)[None], [24])
        state = head.start(features, None, 1)
        token = torch.zeros(1, 1, dtype=torch.long)
        logits, _ = head.step(state, Frontier(token, torch.zeros_like(token), 0))
        x = head.blocks[0](batch.tap_BTF[:, -1])
        if lm_head == "shared":
            want = torch.nn.functional.linear(x, target.frozen.lm_head_weight())
        else:
            want = torch.nn.functional.linear(x, head.lm_heads[0].weight)
        torch.testing.assert_close(logits[0, 0], want[0], atol=1e-4, rtol=1e-4)


def test_a_shared_lm_head_of_a_target_that_caps_its_logits_is_refused():
    capped = tiny.target(tiny.build(3, model_type="gemma2", head_dim=16, final_logit_softcapping=30.0), mode="tree")
    with pytest.raises(HeadwayError, match="lm_head is shared"):
        small("medusa", capped, lm_head="shared")
    small("medusa", capped, lm_head="own")


def test_a_shared_lm_head_of_a_target_that_scales_its_logits_drafts_what_it_trained():
    scaled = tiny.target(tiny.build(3, model_type="granite", logits_scaling=4.0), mode="tree")
    head = small("medusa", scaled, lm_head="shared")
    assert head.lm_heads.factor == pytest.approx(0.25, rel=1e-4)
    contract.test_training_and_drafting_compute_the_same(head, scaled)


def test_a_low_rank_lm_head_begins_as_the_best_of_its_rank(target):
    """No other matrix of that rank is nearer to the target's: what is left are its smallest singular values."""
    config_class, head_class = find_family("medusa")
    head = head_class(config_class.for_target(target.info, lm_head="own", rank=24), target.frozen)
    head.warm_start()
    words = target.frozen.lm_head_weight()
    left = words - head.lm_heads[0][1].weight @ head.lm_heads[0][0].weight
    want = torch.linalg.svdvals(words)[24:].square().sum().sqrt()
    assert float(left.norm()) == pytest.approx(float(want), rel=1e-3)
    assert head.lm_heads[0][0].weight.shape == (24, 64)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lm_head": "shared", "rank": 8}, "head.rank is 8"),
        ({"lm_head": "own", "rank": 64}, "below the hidden size 64"),
        ({"lm_head": "draft", "draft_vocab_size": 0}, "draft_vocab_size"),
        ({"lm_head": "tied"}, "own, shared, draft"),
    ],
)
def test_lm_heads_that_do_not_fit_are_refused(target, fields, named):
    config_class, _ = find_family("medusa")
    with pytest.raises(HeadwayError, match=named):
        config_class.for_target(target.info, **fields)
