"""The chunked loss against its plain twin; numerics; the one shift."""

from __future__ import annotations

import pytest
import torch

from headway.heads.common import losses
from headway.heads.common.losses import distil_loss, label_positions, to_teacher
from headway.heads.common.protocol import Batch
from tests import tiny


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llama4("sdpa"), mode="tree")


def batch_of(target, lengths=(19, 11)) -> Batch:
    torch.manual_seed(2)
    token_BT = torch.randint(0, 200, (len(lengths), max(lengths)))
    length_B = torch.tensor(lengths)
    tap, last = target.features(token_BT, length_B, ("last",))
    position = torch.arange(max(lengths))
    return Batch(token_BT, length_B, (position >= 5) & (position < length_B[:, None]), tap, last)


def run(target, plain: bool, shared: bool, vocab, monkeypatch_chunk: int | None = None):
    batch = batch_of(target)
    torch.manual_seed(3)
    V = 272 if vocab is None else len(vocab)
    hidden = [torch.randn(*batch.tap_BTF.shape, requires_grad=True) for _ in range(3)]
    heads = [torch.randn(V, 64, requires_grad=True) for _ in range(1 if shared else 3)]
    report = distil_loss(target.frozen, batch, hidden, heads, vocab=vocab, plain=plain)
    report.loss.backward()
    return report, [h.grad for h in hidden], [w.grad for w in heads]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("vocab", [None, torch.arange(0, 200, 3)], ids=["whole", "draft"])
def test_chunked_equals_plain_with_gradients(target, monkeypatch, shared, vocab):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 272 * 4)  # several chunks
    fast, plain = run(target, False, shared, vocab), run(target, True, shared, vocab)
    torch.testing.assert_close(fast[0].loss, plain[0].loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fast[0].loss_S, plain[0].loss_S, rtol=1e-6, atol=1e-6)
    assert torch.equal(fast[0].agreement_S, plain[0].agreement_S)
    for got, want in zip(fast[1] + fast[2], plain[1] + plain[2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_labels_follow_the_label_not_the_anchor():
    """Two supervised spans, 6-11 and 17-20: step k of anchor h is taught when token h + 2 + k is supervised."""
    supervised = torch.zeros(1, 24, dtype=torch.bool)
    supervised[0, 6:12] = supervised[0, 17:21] = True
    batch = Batch(torch.arange(100, 124)[None], torch.tensor([24]), supervised, torch.empty(0), torch.empty(0))
    _, position = label_positions(batch)
    taught = {k: {j - 1 - k for j in position.tolist() if j - 1 - k >= 0} for k in range(4)}
    must = {0: {5, 6, 7, 8, 9, 16, 17, 18}, 1: {5, 6, 7, 8, 16, 17}, 2: {5, 6, 7, 16}, 3: {5, 6}}
    optional = {0: {4, 15}, 1: {3, 4, 14, 15}, 2: {2, 3, 4, 13, 14, 15}, 3: {1, 2, 3, 4, 12, 13, 14, 15}}
    for k in range(4):
        assert must[k] <= taught[k] <= must[k] | optional[k]


def test_the_shift():
    value = torch.arange(1.0, 6.0)[None, :, None]
    assert to_teacher(value, 0)[0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert to_teacher(value, 2)[0, :, 0].tolist() == [0, 0, 0, 1, 2]
    assert to_teacher(value, 9)[0, :, 0].tolist() == [0] * 5


def test_target_tokens_outside_the_draft_vocabulary_are_misses(target):
    batch = batch_of(target)
    row, position = label_positions(batch)
    argmax = target.frozen.logits(batch.last_BTD[row, position]).argmax(-1)
    vocab = torch.unique(argmax)[::2]
    inside = torch.isin(argmax, vocab)
    # Hidden states that make the draft argmax right wherever it can be: one-hot columns.
    weight = torch.eye(272, 64)[: len(vocab)] if len(vocab) <= 64 else None
    assert weight is not None
    hidden = torch.zeros_like(batch.last_BTD)
    for b, j, a in zip(row.tolist(), position.tolist(), argmax.tolist(), strict=True):
        if a in vocab:
            hidden[b, j - 1, int((vocab == a).nonzero())] = 9.0
    report = distil_loss(target.frozen, batch, [hidden], [weight], vocab=vocab)
    assert float(report.agreement_S[0]) == pytest.approx(float(inside.float().mean()), abs=1e-6)


def test_fp16_outliers_stay_finite(target):
    batch = batch_of(target)
    hidden = torch.full(batch.tap_BTF.shape, 0.5)
    hidden[..., 0] = 6e4
    hidden = hidden.half().requires_grad_()
    weight = (torch.randn(272, 64) * 1e-3).half().requires_grad_()
    report = distil_loss(target.frozen, batch, [hidden], [weight])
    report.loss.backward()
    assert torch.isfinite(report.loss)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()
