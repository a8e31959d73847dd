"""Medusa's LM heads: each kind learns, and drafts what it learned."""

from __future__ import annotations

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Context, Frontier
from tests import tiny
from tests.heads.test_contract import make_batch, small


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llama12("sdpa"))


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
        weight = {
            "own": lambda: head.lm_heads[0].weight,
            "draft": lambda: head.lm_heads[0].weight,
            "shared": target.frozen.lm_head_weight,
        }[lm_head]()
        want = torch.nn.functional.linear(head.blocks[0](batch.tap_BTF[:, -1]), weight)
        torch.testing.assert_close(logits[0, 0], want[0], atol=1e-4, rtol=1e-4)


def test_a_shared_lm_head_of_a_target_that_caps_its_logits_is_refused():
    capped = tiny.target(tiny.build(3, model_type="gemma2", head_dim=16, final_logit_softcapping=1.0), mode="tree")
    with pytest.raises(HeadwayError, match="lm_head is shared"):
        small("medusa", capped, lm_head="shared")
    small("medusa", capped, lm_head="own")
