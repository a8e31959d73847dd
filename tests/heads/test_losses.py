"""The chunked loss against its plain twin; numerics; the one shift."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway.heads.common import losses
from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import distil_loss, feature_loss, label_positions, to_teacher
from headway.heads.common.objective import OBJECTIVES, Objective
from headway.heads.common.protocol import Batch, Frozen, TargetInfo
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


def stub(weight_VD: torch.Tensor) -> Frozen:
    """Return references into a target that is an LM head alone."""
    V, D = weight_VD.shape
    info = TargetInfo(name="stub", model_type="stub", hidden_size=D, vocab_size=V, num_tokens=V, num_layers=1)

    def logits(last: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        return last @ (weight_VD if rows is None else weight_VD[rows]).T

    return Frozen(info=info, embed=lambda ids: ids, logits=logits, lm_head_weight=lambda: weight_VD)


def batch_of_features(last_BTD: torch.Tensor, supervised_BT: torch.Tensor) -> Batch:
    B, T, _ = last_BTD.shape
    return Batch(torch.zeros(B, T, dtype=torch.long), torch.full((B,), T), supervised_BT, last_BTD, last_BTD)


def run(
    objective: Objective,
    plain: bool,
    shared: bool = True,
    vocab: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    supervised: slice = slice(5, None),
):
    """Return the report of three steps at two rows, and the gradients of hidden states and LM heads."""
    torch.manual_seed(3)
    V, D = (150 if vocab is None else len(vocab)), 32
    supervised_BT = torch.zeros(2, 19, dtype=torch.bool)
    supervised_BT[0, supervised] = supervised_BT[1, supervised] = True
    batch = batch_of_features(torch.randn(2, 19, D, dtype=dtype), supervised_BT)
    frozen = stub(torch.randn(150, D, dtype=dtype) * 0.5)
    hidden = [torch.randn(2, 19, D, dtype=dtype, requires_grad=True) for _ in range(3)]
    heads = [(torch.randn(V, D, dtype=dtype) * 0.5).requires_grad_() for _ in range(1 if shared else 3)]
    report = distil_loss(frozen, batch, hidden, heads, objective=objective, vocab=vocab, plain=plain)
    report.loss.backward()
    return report, [h.grad for h in hidden], [w.grad for w in heads]


DRAFT = torch.arange(0, 150, 3)
FEW = {name: Objective(name, top_k=9) for name in OBJECTIVES}


@pytest.fixture
def _several_chunks(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 150 * 4)


@pytest.mark.usefixtures("_several_chunks")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("vocab", [None, DRAFT], ids=["whole", "draft"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_chunked_equals_plain_with_gradients(name, vocab, shared):
    fast, plain = (run(FEW[name], p, shared, vocab) for p in (False, True))
    torch.testing.assert_close(fast[0].loss, plain[0].loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fast[0].loss_S, plain[0].loss_S, rtol=1e-6, atol=1e-6)
    assert torch.equal(fast[0].agreement_S, plain[0].agreement_S)
    for got, want in zip(fast[1] + fast[2], plain[1] + plain[2], strict=True):
        assert (got - want).abs().max() <= min(1e-6, 1e-5 * want.abs().max())


@pytest.mark.usefixtures("_several_chunks")
@pytest.mark.parametrize("vocab", [None, DRAFT], ids=["whole", "draft"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_in_float64_they_are_one(name, vocab):
    """Rounding left out, nothing else differs; lk too, whose share is held constant and so fails a gradcheck."""
    fast, plain = (run(FEW[name], p, False, vocab, torch.float64) for p in (False, True))
    for got, want in zip([fast[0].loss, *fast[1], *fast[2]], [plain[0].loss, *plain[1], *plain[2]], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("vocab", [None, torch.tensor([0, 2, 3, 7, 8])], ids=["whole", "draft"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_of_finite_differences(monkeypatch, name, vocab):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 18)
    torch.manual_seed(4)
    objective = Objective(name, top_k=3, eta=0.0)
    supervised_BT = torch.zeros(1, 6, dtype=torch.bool)
    supervised_BT[0, 2:] = True
    batch = batch_of_features(torch.randn(1, 6, 3, dtype=torch.float64), supervised_BT)
    frozen = stub(torch.randn(9, 3, dtype=torch.float64))
    V = 9 if vocab is None else len(vocab)

    def loss(*given):
        return distil_loss(frozen, batch, given[:2], given[2:], objective=objective, vocab=vocab).loss

    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 6, 3), (1, 6, 3), (V, 3))]
    assert torch.autograd.gradcheck(loss, given)


def test_a_second_backward_makes_the_gradients_again(target):
    batch = batch_of(target)
    hidden, weight = torch.randn(*batch.tap_BTF.shape, requires_grad=True), torch.randn(272, 64, requires_grad=True)
    loss = distil_loss(target.frozen, batch, [hidden], [weight], objective=Objective()).loss
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(2 * loss, [hidden, weight])
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(2 * a, c)


def test_no_gradients_are_made_where_none_are_wanted(target, monkeypatch):
    real, wanted = losses._pass, []
    monkeypatch.setattr(losses, "_pass", lambda *given: wanted.append(given[-1]) or real(*given))
    batch, weight = batch_of(target), torch.randn(272, 64, requires_grad=True)
    with torch.no_grad():
        quiet = distil_loss(target.frozen, batch, [batch.last_BTD], [weight], objective=Objective()).loss
    assert torch.equal(quiet, distil_loss(target.frozen, batch, [batch.last_BTD], [weight], objective=Objective()).loss)
    assert wanted == [[False, False], [False, True]]


@pytest.mark.parametrize("plain", [False, True], ids=["chunked", "plain"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_without_goals_is_exactly_zero(name, plain):
    report, *grads = run(FEW[name], plain, vocab=DRAFT, supervised=slice(0, 0))
    assert report.loss.item() == 0
    assert report.loss_S.tolist() == report.agreement_S.tolist() == report.count_S.tolist() == [0, 0, 0]
    assert all(float(g.abs().sum()) == 0 for part in grads for g in part)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_without_goals_do_not_dilute_the_mean(name):
    torch.manual_seed(5)
    supervised_BT = torch.tensor([[False, False, True, True], [False] * 4])
    batch, frozen = batch_of_features(torch.randn(2, 4, 8), supervised_BT), stub(torch.randn(30, 8))
    alone = batch_of_features(batch.last_BTD[:1], supervised_BT[:1])
    hidden, weight = torch.randn(2, 4, 8), torch.randn(30, 8)
    both = distil_loss(frozen, batch, [hidden], [weight], objective=FEW[name])
    one = distil_loss(frozen, alone, [hidden[:1]], [weight], objective=FEW[name])
    assert both.loss.item() > 0
    assert both.loss.item() == pytest.approx(one.loss.item(), rel=1e-6)
    assert both.count_S.tolist() == [2]


def test_steps_have_weights_of_their_own():
    report, hidden, _ = run(Objective(step_weights=(0.5, 0.0, 2.0)), False)
    assert report.loss.item() == pytest.approx(float((report.loss_S * torch.tensor([0.5, 0.0, 2.0])).sum()), rel=1e-6)
    assert [bool(g.abs().sum() > 0) for g in hidden] == [True, False, True]
    with pytest.raises(HeadwayError, match="step_weights has 2 numbers, the head has 3 steps"):
        run(Objective(step_weights=(1.0, 0.5)), False)


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


def test_target_tokens_outside_the_draft_vocabulary_are_misses():
    """Five labels, the target's words 0 5 2 7 1 and the head's 0 1 2 3 0 of a draft vocabulary 0-3: two of five are hits,
    and the cross-entropy of the two that the head cannot say is nothing, not a mean over three."""
    last = torch.nn.functional.one_hot(torch.tensor([[6, 0, 5, 2, 7, 1, 6]]), 8).float() * 9
    supervised = torch.tensor([[False, False] + [True] * 5])
    hidden = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 3, 0, 0, 0]]), 8).float() * 9
    frozen, weight, vocab = stub(torch.eye(8)), torch.eye(8)[:4], torch.arange(4)
    batch = batch_of_features(last, supervised)
    report = distil_loss(frozen, batch, [hidden], [weight], objective=Objective("ce"), vocab=vocab)
    assert float(report.agreement_S[0]) == pytest.approx(0.4)
    log_q = (hidden[0, :5] @ weight.T).log_softmax(-1)
    assert report.loss.item() == pytest.approx(-float(log_q[0, 0] + log_q[2, 2] + log_q[4, 1]) / 5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_lm_head_wider_than_the_tokenizer(name):
    """The target's likeliest word may be a row without a token, which no draft vocabulary has."""
    torch.manual_seed(6)
    frozen = stub(torch.cat([torch.randn(264, 16), 3 * torch.randn(8, 16)]))
    batch = batch_of_features(torch.randn(2, 30, 16), torch.ones(2, 30, dtype=torch.bool))
    row, position = label_positions(batch)
    padded = frozen.logits(batch.last_BTD[row, position]).argmax(-1) >= 264
    assert 0 < int(padded.sum()) < len(padded)
    hidden = batch.last_BTD.roll(-1, 1).clone().requires_grad_()
    given = (frozen, batch, [hidden], [frozen.lm_head_weight()[:264]])
    report, plain = (distil_loss(*given, objective=FEW[name], vocab=torch.arange(264), plain=p) for p in (False, True))
    torch.testing.assert_close(report.loss, plain.loss, rtol=1e-6, atol=1e-6)
    anchored = position >= 1
    assert float(report.agreement_S[0]) == pytest.approx(float((~padded[anchored]).float().mean()))
    report.loss.backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_fp16_outliers_stay_finite(name):
    """A feature of 6e4 in half precision, an LM head that makes logits beyond half precision of it, a target sure of itself."""
    torch.manual_seed(7)
    last = torch.zeros(1, 6, 64)
    last[..., 0], last[..., 1] = 70.0, -70.0
    hidden = torch.full((1, 6, 64), 0.5)
    hidden[..., 0] = 6e4
    hidden = hidden.half().requires_grad_()
    weight = torch.randn(272, 64).half().requires_grad_()
    assert (hidden.float() @ weight.float().T).abs().max() > torch.finfo(torch.float16).max
    batch = batch_of_features(last.half(), torch.ones(1, 6, dtype=torch.bool))
    for plain in (False, True):
        frozen = stub(torch.eye(272, 64).half())
        report = distil_loss(frozen, batch, [hidden], [weight], objective=FEW[name], plain=plain)
        hidden.grad = weight.grad = None
        report.loss.backward()
        assert torch.isfinite(report.loss)
        assert torch.isfinite(hidden.grad).all()
        assert torch.isfinite(weight.grad).all()


def test_smooth_l1_of_features():
    torch.manual_seed(8)
    supervised = torch.zeros(2, 7, dtype=torch.bool)
    supervised[0, 3:] = supervised[1, 1:3] = True
    batch = batch_of_features(torch.randn(2, 7, 5), supervised)
    feature = [(3 * torch.randn(2, 7, 5)).requires_grad_() for _ in range(2)]
    loss, mean_S = feature_loss(batch, feature, [1.0, 0.5])
    want = []
    for s in range(2):  # anchor t predicts the feature at t + 1 + s, where the label is token t + 2 + s
        each = []
        for b, t in ((b, t) for b in range(2) for t in range(7) if t + 2 + s < 7 and supervised[b, t + 2 + s]):
            d = (feature[s][b, t] - batch.last_BTD[b, t + 1 + s]).abs()
            each.append(torch.where(d < 1, d**2 / 2, d - 0.5).mean())
        want.append(torch.stack(each).mean())
    torch.testing.assert_close(mean_S, torch.stack(want).detach(), rtol=1e-6, atol=1e-6)
    got = torch.autograd.grad(loss, feature)
    for a, b in zip(got, torch.autograd.grad(want[0] + 0.5 * want[1], feature), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_smooth_l1_of_outliers_and_of_nothing():
    supervised = torch.ones(1, 4, dtype=torch.bool)
    feature = torch.full((1, 4, 8), 6e4).half().requires_grad_()
    loss, _ = feature_loss(batch_of_features(torch.full((1, 4, 8), -6e4).half(), supervised), [feature], [1.0])
    loss.backward()
    assert float(loss) == pytest.approx(119999.5, rel=1e-4)  # more than half precision holds
    assert torch.isfinite(feature.grad).all()
    feature.grad = None
    loss, mean_S = feature_loss(batch_of_features(torch.zeros(1, 4, 8), ~supervised), [feature], [1.0])
    loss.backward()
    assert float(loss) == float(mean_S) == float(feature.grad.abs().sum()) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_does_not_grow_with_the_tokens():
    """A logits matrix of 2048 tokens is 134 MB here."""
    script = Path(__file__).parents[2] / "docs" / "loss_memory.py"
    sizes = ["--hidden", "16", "--vocab", "16384", "--tokens", "512", "2048", "--plain", "--loss", "jsd"]
    done = subprocess.run([sys.executable, str(script), *sizes], capture_output=True, text=True, check=True)
    few, many, _, plain = (float(line.split()[-2]) for line in done.stdout.splitlines())
    assert many < few + 100
    assert many < 300
    assert plain > 800
