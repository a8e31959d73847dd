"""What every family must do. Families are found by walking headway.heads: a new one is tested by being there.

Letters: B batch, T positions, N frontier nodes, F tap width, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from headway.heads.common.checkpoint import load_head, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.objective import Objective
from headway.heads.common.protocol import Batch, Context, Frontier, Head, families, find_family
from headway.inference.generate import Request, generate, plain
from headway.inference.sampling import Settings
from headway.inference.tree import DynamicTree, StaticTree, chain
from tests import tiny

FAMILIES = families()
BINARY = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llama12("sdpa"))


def small(name: str, target, **fields) -> Head:
    """Return a head of a family with its defaults, a small draft vocabulary, and weights off their warm start."""
    config_class, head_class = find_family(name)
    known = {f.name for f in dataclasses.fields(config_class)}
    if "draft_vocab_size" in known:
        fields.setdefault("draft_vocab_size", 64)
    torch.manual_seed(0)
    head = head_class(config_class.for_target(target.info, **fields), target.frozen)
    if getattr(head.config, "draft_vocab_size", 0):
        head.set_draft_vocab(torch.arange(0, 128, 2))
    head.warm_start()
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return head.eval()


def make_batch(target, taps, lengths=(24, 17), supervised_from=6, seed=1) -> Batch:
    """Return rows of random tokens with the target's real features."""
    torch.manual_seed(seed)
    token_BT = torch.randint(0, 128, (len(lengths), max(lengths)))
    length_B = torch.tensor(lengths)
    tap_BTF, last_BTD = target.features(token_BT, length_B, taps)
    position = torch.arange(max(lengths))
    supervised_BT = (position >= supervised_from) & (position < length_B[:, None])
    return Batch(token_BT, length_B, supervised_BT, tap_BTF, last_BTD)


@pytest.fixture(params=FAMILIES)
def head(request, target):
    return small(request.param, target)


def test_loss_is_finite_and_falls_on_one_batch(head, target):
    batch = make_batch(target, head.config.taps)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        report = head.loss(batch)
        losses.append(float(report.loss.detach()))
        optimizer.zero_grad()
        report.loss.backward()
        optimizer.step()
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < losses[0] - 0.05


def test_gradients_reach_every_parameter_and_none_of_the_target(head, target):
    head.loss(make_batch(target, head.config.taps)).loss.backward()
    for name, p in head.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


def test_state_dict_holds_nothing_of_the_target(head, target):
    theirs = {p.data_ptr() for p in target.model.parameters()}
    assert not any(t.data_ptr() in theirs for t in head.state_dict().values())


def test_depth_adds_parameters(target):
    """Blocks that are asked for are made: one module repeated would leave the count as it was."""
    for name in FAMILIES:
        config_class, _ = find_family(name)
        if "num_layers" in {f.name for f in dataclasses.fields(config_class)}:
            counts = [sum(p.numel() for p in small(name, target, num_layers=n).parameters()) for n in (1, 2, 3)]
            assert counts[1] - counts[0] == counts[2] - counts[1] > 0


def test_no_look_ahead(head, target):
    """A prediction must not change with the token it predicts: change the last token of a row, its label."""
    batch = make_batch(target, head.config.taps, lengths=(20,))
    cut = dataclasses.replace(batch, supervised_BT=batch.supervised_BT.clone())
    cut.supervised_BT[:] = False
    cut.supervised_BT[0, -1] = True  # the last token is the only label, of every step
    changed = dataclasses.replace(cut, token_BT=cut.token_BT.clone())
    changed.token_BT[0, -1] = (changed.token_BT[0, -1] + 1) % 128
    assert torch.equal(head.loss(cut).loss_S, head.loss(changed).loss_S)
    seen = dataclasses.replace(cut, tap_BTF=cut.tap_BTF.clone())
    seen.tap_BTF[0, 5:] += 1.0  # negative control: what the anchors do read matters
    assert not torch.equal(head.loss(cut).loss_S, head.loss(seen).loss_S)


def drafted_logits(head: Head, batch: Batch, anchor: int, depth: int, split: int) -> list[torch.Tensor]:
    """Return the run-time logits of each depth for the path that the row's own tokens make, after `anchor`.

    Committed tokens are absorbed in two parts, cut at `split`.
    """
    state = None
    for a, b in ((0, split), (split, anchor + 1)):
        position = torch.arange(a, b)[None]
        next_BT = batch.token_BT[:, a + 1 : b + 1]
        state = head.start(Context(batch.tap_BTF[:, a:b], next_BT, position, [b - a]), state, 1)
    out = []
    for d in range(depth):
        token = batch.token_BT[:, anchor + 1 + d : anchor + 2 + d]
        # A second node beside the path's own: it must not disturb it.
        if d:
            frontier = Frontier(torch.cat([(token + 1) % 128, token], 1), torch.full((1, 2), 0 if d == 1 else 1), d)
        else:
            frontier = Frontier(token, torch.full((1, 1), -1), 0)
        logits, state = head.step(state, frontier)
        out.append(logits[0, -1])
    return out


def loss_of_logits(head: Head, batch: Batch, logits: torch.Tensor, label: int) -> float:
    """Return the head's objective, kl or tv, of run-time logits and the target's distribution before token `label`, by
    definition."""
    p = target_probability(head, batch, label - 1).double()
    logq = logits.detach().double().log_softmax(-1)
    p = p if head.draft_vocab is None else p[head.draft_vocab]
    if head.objective.name == "tv":
        return 1 - float(torch.minimum(p, logq.exp()).sum())
    inside = p / p.sum()
    return float(p.sum() * (inside @ (inside.log() - logq)))


def target_probability(head: Head, batch: Batch, position: int) -> torch.Tensor:
    return head.frozen.logits(batch.last_BTD[0, position]).float().softmax(-1)


def test_training_and_drafting_compute_the_same(head, target):
    """The loss at (anchor, step) is the objective of what start and step give for the same tokens."""
    batch = make_batch(target, head.config.taps, lengths=(20,))
    steps = int(head.loss(batch).loss_S.numel())
    for anchor in (7, 12):
        logits = drafted_logits(head, batch, anchor, steps, split=4)
        for s in range(steps):
            label = anchor + 2 + s
            only = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
            only.supervised_BT[0, label] = True
            report = head.loss(only)
            want = loss_of_logits(head, batch, logits[s], label)
            assert float(report.loss_S[s]) == pytest.approx(want, rel=1e-4, abs=1e-5), (anchor, s)


def test_a_head_minimises_the_objective_it_is_given(head, target):
    head.objective = Objective("tv")
    test_training_and_drafting_compute_the_same(head, target)


def test_every_step_has_its_weight(head, target):
    """A family hands its objective on: the weights of its steps are the recipe's, and a wrong number of them is refused."""
    batch = make_batch(target, head.config.taps)
    steps = head.loss(batch).loss_S.numel()
    assert head.config.num_steps == steps
    alone = []
    for s in range(steps):
        head.objective = Objective(step_weights=tuple(float(i == s) for i in range(steps)))
        report = head.loss(batch)
        alone.append(report.loss.item())
        if not hasattr(head.config, "feature_weight"):  # eagle's loss has a second part
            assert alone[s] == pytest.approx(report.loss_S[s].item(), rel=1e-5)
    head.objective = Objective(step_weights=tuple(float(s + 2) for s in range(steps)))
    assert head.loss(batch).loss.item() == pytest.approx(sum((s + 2) * x for s, x in enumerate(alone)), rel=1e-5)
    head.objective = Objective(step_weights=(1.0,) * (steps + 1))
    with pytest.raises(HeadwayError, match=f"the head has {steps} steps"):
        head.loss(batch)


def test_parity_check_can_fail(head, target):
    """Negative control: drafting from the wrong anchor gives another loss."""
    batch = make_batch(target, head.config.taps, lengths=(20,))
    only = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
    only.supervised_BT[0, 9] = True
    wrong = drafted_logits(head, batch, 8, 1, split=4)[0]
    assert float(head.loss(only).loss_S[0]) != pytest.approx(loss_of_logits(head, batch, wrong, 9), rel=1e-4, abs=1e-5)


def test_masked_positions_give_zero_loss_and_gradient(head, target):
    batch = make_batch(target, head.config.taps)
    none = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
    report = head.loss(none)
    report.loss.backward()
    assert float(report.loss) == 0
    assert int(report.count_S.sum()) == 0
    assert all(p.grad is None or float(p.grad.abs().sum()) == 0 for p in head.parameters())
    alone = make_batch(target, head.config.taps, lengths=(24,))
    both = copy.copy(batch)
    both.supervised_BT = batch.supervised_BT.clone()
    both.supervised_BT[1] = False  # a row without goals beside one with: the mean is over the goals
    one = dataclasses.replace(
        batch,
        token_BT=batch.token_BT[:1],
        length_B=batch.length_B[:1],
        supervised_BT=batch.supervised_BT[:1],
        tap_BTF=batch.tap_BTF[:1],
        last_BTD=batch.last_BTD[:1],
    )
    assert float(head.loss(both).loss) == pytest.approx(float(head.loss(one).loss), rel=1e-5)
    assert alone.token_BT.shape[0] == 1


def test_the_parts_of_a_batch_add_up_to_it(head, target):
    """Rows with labels from their beginning on, so that the steps have different counts."""
    whole = make_batch(target, head.config.taps, lengths=(24, 7), supervised_from=1)
    rows = [pick(whole, b) for b in (0, 1)]

    def loss_and_gradient(parts: list[Batch]) -> tuple[float, torch.Tensor]:
        head.zero_grad()
        losses = [head.loss(part).loss for part in parts]
        torch.stack(losses).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
        return float(torch.stack(losses).detach().sum()), gradient

    want_loss, want = loss_and_gradient([whole])
    count_S = head.count_labels(whole.supervised_BT)
    reported_S = head.loss(whole).count_S
    assert count_S[: len(reported_S)].tolist() == reported_S.tolist()
    assert len(set(reported_S.tolist())) > 1 or len(reported_S) == 1
    loss, got = loss_and_gradient([dataclasses.replace(row, whole_count_S=count_S) for row in rows])
    assert loss == pytest.approx(want_loss, rel=1e-5)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    means = [loss_and_gradient([row]) for row in rows]  # the mean of their means is something else
    assert sum(m[0] for m in means) / 2 != pytest.approx(want_loss, rel=1e-3)


def pick(batch: Batch, b: int) -> Batch:
    """Return one row of a batch, without its padding."""
    size = int(batch.length_B[b])
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(Batch)}
    cut = {k: v[b : b + 1] if v.ndim == 1 else v[b : b + 1, :size] for k, v in fields.items() if v is not None}
    return Batch(**cut)


@pytest.mark.parametrize("policy", [chain(3), BINARY, DynamicTree(3, 3, 8)], ids=["chain", "static", "dynamic"])
def test_greedy_generation_equals_the_plain_loop(head, target, policy):
    settings = Settings(max_new_tokens=40, eos_ids=())
    for prompt in ([72, 101, 108, 108, 111], [97]):
        want = plain(target, prompt, settings)
        [result] = generate(target, [Request(prompt, settings)], head=head, policy=policy)
        assert result.token_ids == want


def test_sampled_tokens_do_not_depend_on_the_head(head, target):
    settings = Settings(max_new_tokens=30, temperature=0.9, top_p=0.95, seed=5, eos_ids=())
    want = plain(target, [72, 105], settings)
    [result] = generate(target, [Request([72, 105], settings)], head=head, policy=DynamicTree(3, 3, 8))
    assert result.token_ids == want


@pytest.mark.parametrize("kept", [[0, 3, 2], [1, 3], [4, 1]])
def test_rows_keep_their_own_state(head, target, kept):
    """Rows leave in the middle and the last ones fill the holes; each goes on drafting as if it were alone."""
    batch = make_batch(target, head.config.taps, lengths=(12, 9, 11, 7, 10))
    count = [n - 1 for n in batch.length_B.tolist()]

    def start(rows):
        width = max(count[b] for b in rows)
        position = torch.arange(width).expand(len(rows), -1)
        context = Context(
            batch.tap_BTF[rows, :width], batch.token_BT[rows, 1 : width + 1], position, [count[b] for b in rows]
        )
        return head.start(context, None, len(rows))

    def draft(state, rows):
        root = torch.tensor([[int(batch.token_BT[b, count[b]])] for b in rows])
        return head.step(state, Frontier(root, torch.full((len(rows), 1), -1), 0))[0][:, 0]

    together = draft(head.select_rows(start(range(5)), kept), kept)
    for i, b in enumerate(kept):
        torch.testing.assert_close(together[i], draft(start([b]), [b])[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def test_two_generations_share_no_state(head, target):
    settings = Settings(max_new_tokens=24, eos_ids=())
    prompts = [[72, 101], [97, 98, 99], [50]]
    alone = [plain(target, p, settings) for p in prompts]
    first = generate(target, [Request(p, settings, id=i) for i, p in enumerate(prompts)], head=head, batch_size=2)
    second = generate(target, [Request(prompts[0], settings)], head=head)
    got = [next(first)]
    assert next(second).token_ids == alone[0]
    got += list(first)
    assert [r.token_ids for r in sorted(got, key=lambda r: r.id)] == alone


def test_save_and_load_give_the_same_head(head, target, tmp_path):
    save_head(head, tmp_path / "head", target=target.info)
    again = load_head(tmp_path / "head", target)
    assert head.state_dict().keys() == again.state_dict().keys()
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    batch = make_batch(target, head.config.taps, lengths=(20,))
    assert torch.equal(head.loss(batch).loss, again.loss(batch).loss)


def test_another_target_is_refused(head, target, tmp_path):
    save_head(head, tmp_path / "head", target=target.info)
    other = tiny.target(tiny.build(3, hidden_size=32), name="other", mode="tree")
    with pytest.raises(HeadwayError, match="32"):
        load_head(tmp_path / "head", other)


def test_config_survives_json(head):
    config = head.config
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


def test_unknown_field_names_the_nearest(head, target):
    with pytest.raises(HeadwayError, match="taps"):
        type(head.config).for_target(target.info, tapps=[1])


def test_bfloat16_runs(head, target):
    low = tiny.target(copy.deepcopy(target.model).to(torch.bfloat16), mode="tree")
    fast = small(type(head).__module__.rsplit(".", 1)[-1], low).to(torch.bfloat16)
    settings = Settings(max_new_tokens=12, eos_ids=())
    [result] = generate(low, [Request([72, 101], settings)], head=fast, policy=BINARY)
    assert result.new_tokens == 12
    batch = make_batch(low, fast.config.taps)
    with torch.autocast("cpu", torch.bfloat16):
        report = small(type(head).__module__.rsplit(".", 1)[-1], low).float().loss(batch)
    report.loss.backward()
    assert torch.isfinite(report.loss)
