"""Hydra: every kind of it drafts what it is trained to say, and its heads do read the path."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import find_family
from tests import tiny
from tests.heads import test_contract as contract
from tests.heads.test_contract import drafted_logits, make_batch, small


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llama12("sdpa"))


@pytest.mark.parametrize(
    "fields",
    [
        {"prefix_attention": False, "num_layers": 1},
        {"prefix_attention": False, "lm_head": "shared"},
        {"lm_head": "own", "rank": 12},
    ],
    ids=["plain", "shared", "low-rank"],
)
def test_every_kind_drafts_what_it_is_trained_to_say(target, fields):
    head = small("hydra", target, **fields)
    contract.test_training_and_drafting_compute_the_same(head, target)
    contract.test_parity_check_can_fail(head, target)
    contract.test_rows_keep_their_own_state(head, target, [0, 3, 2])


@pytest.mark.parametrize("prefix", [True, False])
def test_a_head_reads_the_tokens_of_its_path_and_the_prefix_those_before(target, prefix):
    """What Medusa lacks: another first token gives another second one. And what prefix attention adds."""
    head = small("hydra", target, prefix_attention=prefix)
    batch = make_batch(target, head.config.taps, lengths=(20,))
    other = dataclasses.replace(batch, token_BT=batch.token_BT.clone())
    other.token_BT[0, 11] = (other.token_BT[0, 11] + 1) % 128
    before, after = (drafted_logits(head, b, 9, 3, split=4) for b in (batch, other))
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1], atol=1e-2)  # x[11] is drafted by step 0, read by step 1
    earlier = dataclasses.replace(batch, tap_BTF=batch.tap_BTF.clone())
    earlier.tap_BTF[0, :5] += 1.0
    moved = drafted_logits(head, earlier, 9, 1, split=4)[0]
    assert torch.allclose(before[0], moved, atol=1e-4) is not prefix


def test_an_untrained_head_repeats_the_target(target):
    """Prefix layer and blocks begin as identity, so each head says what the target says at its anchor."""
    config_class, head_class = find_family("hydra")
    head = head_class(config_class.for_target(target.info, lm_head="own"), target.frozen)
    head.warm_start()
    batch = make_batch(target, head.config.taps, lengths=(12,))
    want = target.frozen.logits(batch.last_BTD[0, 9])
    for logits in drafted_logits(head, batch, 9, 2, split=4):
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"num_heads": 0}, "num_heads"), ({"taps": [1, 2]}, "one tap"), ({"lm_head": "tied"}, "own, shared, draft")],
)
def test_what_does_not_fit_is_refused(target, fields, named):
    config_class, _ = find_family("hydra")
    with pytest.raises(HeadwayError, match=named):
        config_class.for_target(target.info, **fields)
