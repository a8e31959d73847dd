"""EAGLE: what it predicts is the target's next feature, and drafting reads its own predictions as training does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headway.heads.common import draft_layer
from headway.heads.common.draft_layer import Anchors, Projections, unroll
from headway.heads.common.errors import HeadwayError
from headway.heads.common.objective import Objective
from headway.heads.common.protocol import find_family
from headway.inference.generate import Request, generate, plain
from headway.inference.sampling import Settings
from headway.inference.tree import DynamicTree
from tests import tiny
from tests.heads import test_contract as contract
from tests.heads.test_contract import drafted_logits, loss_of_logits, make_batch, small


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llama12("sdpa"))


@pytest.mark.parametrize(
    "fields", [{"steps": 3}, {"draft_vocab_size": 0, "steps": 2, "bias": True}], ids=["draft", "all"]
)
def test_later_steps_draft_what_they_are_trained_to_say(target, fields):
    head = small("eagle", target, **fields)
    contract.test_training_and_drafting_compute_the_same(head, target)
    contract.test_gradients_reach_every_parameter_and_none_of_the_target(head, target)


def loss_and_gradients(head, batch):
    head.zero_grad()
    loss = head.loss(batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in head.parameters())]


def with_few_goals(batch):
    """Return a batch whose goals are two spans of the first row and the last token of the second."""
    supervised_BT = torch.zeros_like(batch.supervised_BT)
    supervised_BT[0, 8:11] = supervised_BT[0, 15:18] = supervised_BT[1, 16] = True
    return dataclasses.replace(batch, supervised_BT=supervised_BT)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_anchors_without_a_goal_are_left_out_and_nothing_changes(target, family, monkeypatch):
    head = small(family, target, steps=3)
    batch = with_few_goals(make_batch(target, head.config.taps))
    widths = []
    head.layer.mlp.register_forward_pre_hook(lambda module, given: widths.append(given[0].shape[1]))
    some = loss_and_gradients(head, batch)
    assert widths == [10] * 3  # of 24: three steps reach two anchors further back than the first of each span
    with monkeypatch.context() as patch:
        patch.setattr(draft_layer, "SPARSE", 0)
        torch.testing.assert_close(loss_and_gradients(head, batch), some, rtol=1e-5, atol=1e-6)
    assert widths[3:] == [24] * 3
    of_goals = Anchors.of_goals
    monkeypatch.setattr(Anchors, "of_goals", lambda supervised_BT, steps: of_goals(supervised_BT, steps - 1))
    assert float(loss_and_gradients(head, batch)[0]) != pytest.approx(float(some[0]), rel=1e-3)


def test_what_tokens_add_is_computed_once_and_nothing_changes(target, monkeypatch):
    head = small("eagle3", target, steps=3)
    later = Projections.later
    for batch in (make_batch(target, head.config.taps), with_few_goals(make_batch(target, head.config.taps))):
        monkeypatch.setattr(head, "embeds_apart", True)
        apart = loss_and_gradients(head, batch)
        monkeypatch.setattr(head, "embeds_apart", False)
        torch.testing.assert_close(loss_and_gradients(head, batch), apart, rtol=1e-5, atol=1e-6)
        # A projection with something beside its weight, as a LoRA, is asked.
        monkeypatch.setattr(head, "embeds_apart", True)
        plain = head.layer.k_proj
        head.layer.k_proj = torch.nn.Sequential(plain, torch.nn.Dropout(0.0))
        torch.testing.assert_close(loss_and_gradients(head, batch)[0], apart[0], rtol=1e-5, atol=1e-6)
        head.layer.k_proj = torch.nn.Sequential(plain, torch.nn.Threshold(0.0, 1.0))
        assert float(loss_and_gradients(head, batch)[0]) != pytest.approx(float(apart[0]), rel=1e-3)
        head.layer.k_proj = plain
        with monkeypatch.context() as patch:
            patch.setattr(Projections, "later", lambda self, step, *given: later(self, step + 1, *given))
            assert float(loss_and_gradients(head, batch)[0]) != pytest.approx(float(apart[0]), rel=1e-4)


@pytest.mark.parametrize("changed", ["output", "rotary"])
def test_parity_of_later_steps_can_fail(target, changed, monkeypatch):
    """Negative control: feeding back something else than in training, or at another position, gives another loss."""
    head = small("eagle", target, steps=3)
    batch = make_batch(target, head.config.taps, lengths=(20,))
    only = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
    only.supervised_BT[0, 11] = True
    trained = float(head.loss(only).loss_S[2])
    assert loss_of_logits(head, batch, drafted_logits(head, batch, 7, 3, split=4)[2], 11) == pytest.approx(
        trained, rel=1e-4
    )
    if changed == "output":
        monkeypatch.setattr(head, "feed", lambda output: 1.01 * output)
    else:
        angles = head.rotary
        monkeypatch.setattr(head, "rotary", lambda x, position: angles(x, position + (position == position.max())))
    wrong = drafted_logits(head, batch, 7, 3, split=4)[2]
    assert loss_of_logits(head, batch, wrong, 11) != pytest.approx(trained, rel=1e-4)


def test_an_untrained_head_repeats_the_feature_that_it_reads():
    """The target's last layer writes at the scale of what the final norm reads, features have that of what the norm gives: a
    copy of the layer that spoke at once would drown them, and the more with each step that reads the step before."""
    loud = tiny.target(tiny.llama12("sdpa"), mode="tree")
    with torch.no_grad():
        layer = loud.model.model.layers[-1]
        layer.self_attn.o_proj.weight.mul_(100)
        layer.mlp.down_proj.weight.mul_(100)
    config_class, head_class = find_family("eagle")
    head = head_class(config_class.for_target(loud.info, draft_vocab_size=0, steps=3), loud.frozen).eval()
    torch.manual_seed(0)
    head.warm_start()
    batch = make_batch(loud, head.config.taps)
    with torch.no_grad():
        for predicted in unroll(head, batch.tap_BTF, head.embed(batch.token_BT), 3):
            assert (predicted - batch.tap_BTF).norm() < 0.2 * batch.tap_BTF.norm()


def test_the_loss_is_its_two_parts_by_definition(target):
    head = small("eagle", target)
    batch = make_batch(target, head.config.taps)
    parts = {}
    for name, weights in {"feature": (1.0, 0.0), "token": (0.0, 1.0), "both": (1.0, 0.1)}.items():
        fields = {"feature_weight": weights[0], "token_weight": weights[1]}
        head.config = dataclasses.replace(head.config, **fields)
        parts[name] = float(head.loss(batch).loss)
    assert parts["both"] == pytest.approx(parts["feature"] + 0.1 * parts["token"], rel=1e-5)
    assert parts["token"] == pytest.approx(float(head.loss(batch).loss_S[0]), rel=1e-5)
    # The feature at position j is predicted by the anchor at j - 1, and counts where the token after j is a goal.
    [predicted] = unroll(head, batch.tap_BTF, head.embed(batch.token_BT), 1)
    distance = []
    for b, j in (batch.supervised_BT[:, 1:]).nonzero().tolist():
        d = (predicted[b, j - 1] - batch.last_BTD[b, j]).abs()
        distance.append(torch.where(d < 1, d.square() / 2, d - 0.5).mean())
    assert parts["feature"] == pytest.approx(float(torch.stack(distance).mean()), rel=1e-5)


def test_both_parts_take_the_weights_of_the_steps(target):
    head = small("eagle", target, steps=2)
    batch = make_batch(target, head.config.taps)
    for part in ("feature_weight", "token_weight"):
        head.config = dataclasses.replace(head.config, **{"feature_weight": 0.0, "token_weight": 0.0, part: 1.0})
        loss = {}
        for weights in ((1.0, 0.0), (0.0, 1.0), (3.0, 2.0)):
            head.objective = Objective(step_weights=weights)
            loss[weights] = head.loss(batch).loss.item()
        assert loss[1.0, 0.0] != pytest.approx(loss[0.0, 1.0], rel=1e-3)
        assert loss[3.0, 2.0] == pytest.approx(3 * loss[1.0, 0.0] + 2 * loss[0.0, 1.0], rel=1e-5)


def test_noise_is_of_training_alone(target):
    head = small("eagle", target)
    batch = make_batch(target, head.config.taps)
    assert torch.equal(head.loss(batch).loss, head.loss(batch).loss)
    head.train()
    assert not torch.equal(head.loss(batch).loss, head.loss(batch).loss)
    head.config = dataclasses.replace(head.config, noise=0.0)
    assert torch.equal(head.loss(batch).loss, head.eval().loss(batch).loss)


def test_a_target_that_scales_its_logits_drafts_what_it_trained():
    scaled = tiny.target(tiny.build(3, model_type="granite", logits_scaling=4.0), mode="tree")
    for size in (0, 64):
        contract.test_training_and_drafting_compute_the_same(small("eagle", scaled, draft_vocab_size=size), scaled)


def test_drafts_over_the_whole_vocabulary(target):
    head = small("eagle", target, draft_vocab_size=0)
    assert head.draft_vocab is None
    settings = Settings(max_new_tokens=20, eos_ids=())
    [result] = generate(target, [Request([72, 101], settings)], head=head, policy=DynamicTree(3, 3, 8))
    assert result.token_ids == plain(target, [72, 101], settings)


def test_the_rows_of_the_draft_vocabulary_follow_it(target):
    head = small("eagle", target)
    assert torch.equal(head.lm_head(), target.frozen.lm_head_weight()[0:128:2])
    head.set_draft_vocab(torch.arange(1, 129, 2))
    with torch.inference_mode():
        assert torch.equal(head.lm_head(), target.frozen.lm_head_weight()[1:129:2])
    head.loss(make_batch(target, head.config.taps)).loss.backward()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"taps": [3]}, "LM head reads"),
        ({"steps": 0}, "steps"),
        ({"noise": -1.0}, "noise"),
        ({"feature_weight": 0.0, "token_weight": 0.0}, "nothing would be learned"),
    ],
)
def test_what_does_not_fit_is_refused(target, fields, named):
    config_class, _ = find_family("eagle")
    with pytest.raises(HeadwayError, match=named):
        config_class.for_target(target.info, **fields)


def test_a_target_that_caps_its_logits_is_refused():
    capped = tiny.target(tiny.build(3, model_type="gemma2", head_dim=16, final_logit_softcapping=30.0), mode="tree")
    with pytest.raises(HeadwayError, match="caps or shifts"):
        small("eagle", capped)
