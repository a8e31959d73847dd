"""P-EAGLE: down-sampling changes which anchors train, not what they are trained to say; drafting is one pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Context, Frontier, find_family
from tests import tiny
from tests.heads.test_contract import drafted_logits, loss_of_logits, make_batch, small


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llama12("sdpa"))


@pytest.fixture(scope="module")
def head(target):
    return small("peagle", target, depths=4, num_layers=2)


def sampled(head, batch, seed):
    """Return the training report of a batch and the sample it was made of."""
    head.train()
    torch.manual_seed(seed)
    report = head.loss(batch)
    torch.manual_seed(seed)
    sample = head.sample(batch.supervised_BT)
    head.eval()
    return report, sample


def goals_of(sample, batch, depth):
    """Return the goals that a depth's sample of anchors predicts, by definition."""
    goals = torch.zeros_like(batch.supervised_BT)
    for b, n in enumerate(sample.count_KB[depth].tolist()):
        for t in sample.order_BT[b, :n].tolist():
            if t + 2 + depth < goals.shape[1]:
                goals[b, t + 2 + depth] = batch.supervised_BT[b, t + 2 + depth]
    return goals


def test_the_sampled_loss_is_the_whole_loss_of_the_sampled_anchors(head, target):
    batch = make_batch(target, head.config.taps)
    report, sample = sampled(head, batch, seed=3)
    full = head.loss(batch)
    assert int(report.count_S[0]) == int(full.count_S[0])
    for d in range(1, 4):
        goals = goals_of(sample, batch, d)
        assert 0 < int(goals.sum()) < int(full.count_S[d])
        assert int(report.count_S[d]) == int(goals.sum())
        want = head.loss(dataclasses.replace(batch, supervised_BT=goals)).loss_S[d]
        assert float(report.loss_S[d]) == pytest.approx(float(want), rel=1e-5)
        other = head.loss(dataclasses.replace(batch, supervised_BT=goals.roll(1, 1) & batch.supervised_BT)).loss_S[d]
        assert float(report.loss_S[d]) != pytest.approx(float(other), rel=1e-5)  # negative control: the anchors beside


def test_labels_are_counted_over_the_sample_that_the_loss_draws(head, target):
    batch = make_batch(target, head.config.taps, lengths=(24, 9), supervised_from=1)
    report, _ = sampled(head, batch, seed=3)
    counted = []
    head.train()
    for seed in (3, 4):
        torch.manual_seed(seed)
        counted.append(head.count_labels(batch.supervised_BT).tolist())
    head.eval()
    assert counted[0] == report.count_S.tolist() != counted[1]


def test_a_sample_is_nested_and_shrinks_as_the_ratio_says(head, target):
    batch = make_batch(target, head.config.taps, lengths=(40, 17), supervised_from=3)
    _, sample = sampled(head, batch, seed=0)
    eligible = torch.tensor([37, 14])  # anchors t with a goal at t + 3, from t = 0
    for d in range(1, 4):
        want = (eligible * max(0.7**d, 0.2)).ceil().long()
        assert torch.equal(sample.count_KB[d], want)
        assert (batch.supervised_BT[0, sample.order_BT[0, : want[0]] + 3]).all()
    assert sampled(head, batch, 0)[1].order_BT.equal(sample.order_BT)
    assert not sampled(head, batch, 1)[1].order_BT.equal(sample.order_BT)


def test_no_more_anchors_than_allowed_go_deep(head, target):
    batch = make_batch(target, head.config.taps)
    before = head.config
    head.config = dataclasses.replace(before, max_anchors=3)
    report, sample = sampled(head, batch, seed=0)
    head.config = before
    assert sample.size_K[1:] == [3, 3, 3]
    assert int(report.count_S[1]) <= 6 < int(report.count_S[0])


def test_with_ratio_one_training_is_on_every_anchor(head, target):
    batch = make_batch(target, head.config.taps)
    before = head.config
    head.config = dataclasses.replace(before, ratio=1.0)
    report, _ = sampled(head, batch, seed=0)
    head.config = before
    torch.testing.assert_close(report.loss_S[1], head.loss(batch).loss_S[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(report.count_S[1], head.loss(batch).count_S[1])


def test_a_batch_without_goals_reaches_every_parameter_with_nothing(head, target):
    batch = make_batch(target, head.config.taps)
    none = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
    report, _ = sampled(head, none, seed=0)
    report.loss.backward()
    assert float(report.loss) == 0
    assert all(p.grad is not None and float(p.grad.abs().sum()) == 0 for p in head.parameters())
    head.zero_grad()


def test_parity_of_depths_can_fail(head, target):
    """Negative control: another stand-in for what is to come, while drafting, gives another loss at depth 1 on."""
    batch = make_batch(target, head.config.taps, lengths=(20,))
    kept = head.mask_hidden.detach().clone()
    for d in (0, 2):
        only = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
        only.supervised_BT[0, 9 + d] = True
        trained = float(head.loss(only).loss_S[d])
        losses = []
        for change in (0.0, 0.5):
            head.mask_hidden.data.copy_(kept + change)
            losses.append(loss_of_logits(head, batch, drafted_logits(head, batch, 7, 3, split=4)[d], 9 + d))
        head.mask_hidden.data.copy_(kept)
        assert losses[0] == pytest.approx(trained, rel=1e-4)
        assert (losses[1] == pytest.approx(trained, rel=1e-4)) is (d == 0)


def test_ragged_rows_draft_as_if_alone(head, target):
    """The masks stand after a row's padding; they must not see it."""
    batch = make_batch(target, head.config.taps, lengths=(12, 9))
    width, count = 11, [11, 8]
    position = torch.arange(width).expand(2, -1)
    together = head.start(Context(batch.tap_BTF[:, :width], batch.token_BT[:, 1:], position, count), None, 2)
    for b, n in enumerate(count):
        one = Context(batch.tap_BTF[b : b + 1, :n], batch.token_BT[b : b + 1, 1 : n + 1], position[:1, :n], [n])
        alone = head.start(one, None, 1)
        torch.testing.assert_close(together.output_BKD[b], alone.output_BKD[0], atol=1e-4, rtol=1e-4)
    token = torch.zeros(2, 3, dtype=torch.long)
    logits, _ = head.step(together, Frontier(token, token, 2))
    assert torch.equal(logits[:, 0], logits[:, 2])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"depths": 0}, "depths"),
        ({"ratio": 0.0}, "ratio"),
        ({"mask_token_id": 272}, "0..271"),
        ({"draft_vocab_size": 100000}, "100000"),
        ({"max_anchors": 0}, "max_anchors"),
    ],
)
def test_what_does_not_fit_is_refused(target, fields, named):
    config_class, _ = find_family("peagle")
    with pytest.raises(HeadwayError, match=named):
        config_class.for_target(target.info, **fields)


def test_the_mask_token_is_one_without_a_word_where_there_is_one(target):
    config_class, _ = find_family("peagle")
    assert config_class.for_target(target.info).mask_token_id == 264
    full = dataclasses.replace(target.info, vocab_size=264)
    assert config_class.for_target(full).mask_token_id == 256
