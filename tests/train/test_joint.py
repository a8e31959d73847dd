"""A head and a LoRA on its target, trained together: what is trained, what holds the target, what is left of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import Tensor

from headway.data.dialogs import read_dialogs
from headway.heads.common.checkpoint import load_head, read_config, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Batch, LossReport, families, find_family
from headway.inference.adapter import attach
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.train import joint as module
from headway.train import loop
from headway.train.batches import make_rows
from headway.train.config import TrainConfig, make_config
from headway.train.joint import Joint, check_joint, drift, take_off
from headway.train.loop import train
from headway.train.progress import Line
from headway.train.run_folder import Progress
from tests.tiny import build, target
from tests.train.conftest import write_dialogs
from tests.train.runs import killed_after_step, log_of, same, weights

peft = pytest.importorskip("peft")

JOINT = {"rank": 4, "alpha": 8.0, "warmup": 2, "lr_scale": 1.0, "modules": ["q_proj", "down_proj"]}
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def bare() -> Target:
    """A target of this module alone, as adapters are put on it."""
    return target(build(0, num_hidden_layers=4), mode="tree")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainConfig]:
    """Return a function that makes a config for a short joint run, with changes."""
    root = tmp_path_factory.mktemp("joint")
    write_dialogs(root / "dialogs")

    def config(out: str = "run", joint: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
        fields: dict[str, Any] = {
            "family": "medusa", "target": "tiny", "dialogs": str(root / "dialogs"), "out": str(root / out),
            "head": {"num_heads": 2, "draft_vocab_size": 64}, "max_steps": 12, "tokens_per_batch": 96, "eval_rows": 3,
            "eval_fraction": 0.2, "eval_prompts": 0, "save_every": 2, "log_every": 1, "lr": 0.01,
            "joint": JOINT | (joint or {}),
        }  # fmt: skip
        return make_config(fields | changes)

    return config


@pytest.fixture(scope="module")
def held(make: Any, bare: Target) -> dict[float, TrainConfig]:
    """Finished runs by the weight of the KL term."""
    before = [p.clone() for p in bare.model.parameters()]
    configs = {weight: make(f"held-{weight}", {"weight": weight}) for weight in (0.0, 100.0)}
    for config in configs.values():
        train(config, target=bare)
        now = list(bare.model.parameters())
        assert len(now) == len(before)
        assert all(a.equal(b) for a, b in zip(now, before, strict=True))  # it is given back as it was
    return configs


@pytest.fixture(scope="module")
def carrying(held: dict[float, TrainConfig]) -> dict[str, Target]:
    """The target with the adapter that little held, attached and merged."""
    folder, made = Path(held[0.0].out) / "adapter", {}
    for name, merge in (("attached", False), ("merged", True)):
        model, info = attach(build(0, num_hidden_layers=4), folder, merge=merge)
        made[name] = Target(model, None, "tiny", mode="tree", adapter=info)
    return made


def tokens() -> Batch:
    token_BT = torch.arange(24).view(2, 12) + 70
    return Batch(token_BT, torch.tensor([12, 12]), torch.ones_like(token_BT).bool(), torch.empty(0), torch.empty(0))


def new_head(family: str, on: Target) -> Any:
    config, cls = find_family(family)
    torch.manual_seed(1)
    head = cls(config.for_target(on.info), on.frozen)
    if getattr(head.config, "draft_vocab_size", 0):
        head.set_draft_vocab(torch.arange(head.config.draft_vocab_size))
    head.warm_start()
    return head.float()


def stir(both: Joint) -> None:
    """Make the adapter something, which it is not at first."""
    with torch.no_grad():
        for name, p in both.adapter.items():
            p.add_(torch.randn_like(p) * 0.1 if "lora_B" in name else 0.0)


@pytest.mark.parametrize("family", families())
def test_gradients_reach_the_head_and_the_adapter_and_nothing_else(family: str, bare: Target, make: Any) -> None:
    try:
        both = Joint(make(joint={"weight": 1.0}), bare, new_head(family, bare))
        torch.manual_seed(2)  # some families draw what they are trained on
        report = LossReport(*both(tokens()))
        assert float(report.figures["target_kl"]) == 0  # it begins as nothing
        assert float(report.figures["target_top1"]) == 1
        stir(both)
        report = LossReport(*both(tokens()))
        assert float(report.figures["target_kl"]) > 0
        report.loss.backward()
        missing = [n for n, p in both.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
        # What is taught by the target alone may have no gradient of a head that begins as it; the adapter always has.
        assert not [name for name in missing if name.startswith("adapter")]
        assert len(missing) < len(list(both.head.parameters()))
        trained = {id(p) for p in both.parameters()}
        assert all(p.grad is None for p in bare.model.parameters() if id(p) not in trained)
        assert len(both.adapter) == 2 * 2 * 4  # A and B of two modules in four layers
    finally:
        take_off(bare)


def test_no_gradient_goes_through_what_the_head_is_taught(bare: Target, make: Any) -> None:
    # EAGLE is taught the features themselves: with gradients the target would come to meet the head.
    head = new_head("eagle", bare)
    loss = head.loss
    try:
        both = Joint(make(joint={"weight": 0.0}), bare, head)
        head.loss = lambda batch: loss(replace(batch, tap_BTF=batch.tap_BTF.detach()))
        both(tokens())[0].backward()
        assert all(p.grad is None or not p.grad.any() for p in both.adapter.values())
    finally:
        take_off(bare)


def test_the_parts_of_a_batch_add_up_to_it(bare: Target, make: Any) -> None:
    whole = tokens()
    whole = replace(whole, length_B=torch.tensor([12, 5]), supervised_BT=torch.arange(12) < whole.length_B[:, None])
    whole.supervised_BT[1, 5:] = False
    parts = [
        Batch(
            *(getattr(whole, name)[b : b + 1] for name in ("token_BT", "length_B", "supervised_BT")),
            torch.empty(0),
            torch.empty(0),
        )
        for b in (0, 1)
    ]
    try:
        both = Joint(make(joint={"weight": 50.0}), bare, new_head("medusa", bare))
        torch.manual_seed(2)
        stir(both)

        def loss_and_gradient(batches: list[Batch]) -> tuple[float, Tensor]:
            both.zero_grad()
            total = torch.stack([both(batch)[0] for batch in batches]).sum()
            total.backward()
            return float(total.detach()), torch.cat(
                [p.grad.flatten() for p in both.adapter.values() if p.grad is not None]
            )

        want_loss, want = loss_and_gradient([whole])
        count_S = both.head.count_labels(whole.supervised_BT)
        loss, got = loss_and_gradient([replace(part, whole_count_S=count_S) for part in parts])
        assert loss == pytest.approx(want_loss, rel=1e-5)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)
        assert loss_and_gradient(parts)[0] / 2 != pytest.approx(want_loss, rel=1e-2)  # the mean of their means
    finally:
        take_off(bare)


def test_the_adapter_s_dropout_leaves_the_head_the_draws_that_were_counted(bare: Target, make: Any) -> None:
    # P-EAGLE trains on a sample of the labels, and labels are counted without a pass of the target.
    batch = tokens()
    batch.supervised_BT[0, :7], batch.supervised_BT[1, :3] = False, False
    try:
        both = Joint(make(joint={"dropout": 0.5}), bare, new_head("peagle", bare)).train()
        apart = 0
        for seed in range(8):
            torch.manual_seed(seed)
            count_S = both.head.count_labels(batch.supervised_BT)
            reported = []
            for whole_S in (count_S, None):  # without it nothing was counted, and draws go on from one to the next
                torch.manual_seed(seed)
                reported.append(LossReport(*both(replace(batch, whole_count_S=whole_S))).count_S.tolist())
            assert reported[0] == count_S.tolist()
            apart += reported[1] != reported[0]
        assert apart
    finally:
        take_off(bare)


def divergence(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Return the mean KL(p || q), from logits."""
    p_NV, q_NV = p_NV.double().softmax(-1), q_NV.double().softmax(-1)
    return (p_NV * (p_NV / q_NV).log()).sum(-1).mean()


def test_the_drift_in_chunks_is_the_plain_one(bare: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = bare.frozen
    torch.manual_seed(0)
    unchanged_MD, last_MD = torch.randn(11, 64), torch.randn(11, 64)
    want = divergence(frozen.logits(unchanged_MD), frozen.logits(last_MD))
    agree = (frozen.logits(unchanged_MD).argmax(-1) == frozen.logits(last_MD).argmax(-1)).float().mean()
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 4 * frozen.info.vocab_size)
    grads = []
    for plain in (False, True):
        x_MD = last_MD.clone().requires_grad_()
        kl, top1 = drift(frozen, x_MD, unchanged_MD, plain=plain)
        assert float(kl.detach()) == pytest.approx(float(want), rel=1e-5)
        assert float(top1) == pytest.approx(float(agree))
        (3 * kl).backward()
        grads.append(x_MD.grad)
    assert torch.allclose(grads[0], grads[1], atol=1e-7, rtol=1e-5)
    assert float(drift(frozen, unchanged_MD, unchanged_MD)[0]) == pytest.approx(0, abs=1e-6)
    assert float(drift(frozen, last_MD[:0], unchanged_MD[:0])[0]) == 0


def test_the_term_holds_the_target_and_without_it_the_target_drifts(held: dict[float, TrainConfig]) -> None:
    kl = {weight: read_config(Path(c.out) / "head")["joint"]["target_kl"] for weight, c in held.items()}
    assert kl[0.0] > 0.02
    assert 0 < kl[100.0] < 0.2 * kl[0.0]


def test_the_head_trains_alone_at_first(held: dict[float, TrainConfig]) -> None:
    drifts = [row["target_kl"] for row in log_of(held[0.0]) if "lr" in row]
    assert drifts[:3] == [0, 0, 0]  # in step 3 the adapter is there, and still nothing
    assert all(drifts[3:])


def test_what_was_measured_is_what_the_two_targets_say(
    held: dict[float, TrainConfig], bare: Target, carrying: dict[str, Target]
) -> None:
    config = held[0.0]
    rows = make_rows(read_dialogs(config.dialogs), config.max_length, config.eval_fraction, config.eval_rows).held_out
    p, q = [], []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        taught = torch.tensor(row.supervised[2:])
        for logits, on in ((p, bare), (q, carrying["attached"])):
            logits.append(on.model(input_ids=ids).logits[0, 1:-1][taught].detach())
    said = read_config(Path(config.out) / "head")["joint"]
    assert said["tokens"] == sum(map(len, p))
    assert said["target_kl"] == pytest.approx(float(divergence(torch.cat(p), torch.cat(q))), rel=1e-4)
    agree = torch.cat(p).argmax(-1) == torch.cat(q).argmax(-1)
    assert said["target_top1"] == pytest.approx(float(agree.float().mean()))


def test_the_head_is_for_the_target_with_the_adapter_and_says_so(
    held: dict[float, TrainConfig], bare: Target, carrying: dict[str, Target]
) -> None:
    out = Path(held[0.0].out)
    with pytest.raises(HeadwayError, match=f"give --target-adapter {out}/adapter"):
        load_head(out / "head", bare)
    with pytest.raises(HeadwayError, match="was made with adapter"):
        load_head(Path(held[100.0].out) / "head", carrying["attached"])
    assert read_config(out / "head")["target_changed"] is True
    card = (out / "head" / "README.md").read_text()
    assert "**The target changed.**" in card
    assert f"likeliest word the same | {read_config(out / 'head')['joint']['target_top1']:.4g} |" in card
    assert f"--target-adapter {out}/adapter" in card
    assert "nats a token" in (out / "adapter" / "README.md").read_text()


def test_it_decodes_as_the_adapted_target_alone_merged_or_attached(
    held: dict[float, TrainConfig], bare: Target, carrying: dict[str, Target]
) -> None:
    ids = torch.tensor([[259, 65, 10]])
    request = Request(ids[0].tolist(), Settings(max_new_tokens=8, eos_ids=()))
    plain = carrying["attached"].model.generate(
        ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=256
    )
    for on in carrying.values():
        head = load_head(Path(held[0.0].out) / "head", on)
        (result,) = generate(on, [request], head=head)
        assert list(result.token_ids) == plain[0, 3:].tolist()
    logits = {name: on.model(input_ids=ids).logits for name, on in carrying.items()}
    assert torch.allclose(logits["attached"], logits["merged"], atol=1e-4)
    assert not torch.allclose(logits["attached"], bare.model(input_ids=ids).logits, atol=1e-2)


def test_a_run_that_was_killed_is_continued_to_the_same_weights(
    make: Any, bare: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"joint": {"dropout": 0.3}, "max_steps": 6, "ema": 0.9}
    whole, cut = make("whole", **fields), make("cut", **fields)
    train(whole, target=bare)
    with killed_after_step(5):
        train(cut, target=bare)

    def dies(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("killed between the adapter and the head")

    monkeypatch.setattr(loop, "save_head", dies)
    with pytest.raises(RuntimeError, match="between"):
        train(cut, target=bare)
    monkeypatch.setattr(loop, "save_head", save_head)
    train(cut, target=bare)
    for file in (ADAPTER, "head/model.safetensors"):
        assert same(weights(whole, file), weights(cut, file))
    assert any(p.any() for name, p in weights(whole, ADAPTER).items() if "lora_B" in name)


def test_progress_says_how_far_the_target_is() -> None:
    line = Line(10, show=False)
    line.add(Progress(step=1, tokens=10, seconds=1.0), {})
    assert "target KL 0.0125" in line.text(
        Progress(step=1, tokens=10, seconds=1.0), {"loss": 1.0, "agreement_S": [0.5], "target_kl": 0.01254}
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"features": "x"}, "features is 'x': .* captured ones are of the target as it was"),
        ({"cache": "memory"}, "cache is 'memory': .* use cache=off"),
        ({"cache": "disk"}, "cache is 'disk'"),
        ({"store": "int8"}, "store is 'int8'"),
        ({"target_device": "cpu"}, "target_device is 'cpu'"),
        ({"shard_target": True}, "shard_target is True: .* which one process then holds whole"),
        ({"target_adapter": "x"}, "target_adapter is 'x': .* merge_and_unload"),
        ({"lora": {}, "init_from": "x"}, "lora is .* leave one out"),
        ({"dtype": "float16"}, "dtype is 'float16': gradients overflow"),
        ({"joint": {"ranks": 1}}, "unknown key joint.ranks; did you mean joint.rank"),
        ({"joint": {"rank": 0}}, "joint.rank is 0"),
        ({"joint": {"weight": -1.0}}, "joint.weight is -1.0"),
        ({"joint": {"lr_scale": 0.0}}, "joint.lr_scale is 0.0"),
        ({"joint": {"dropout": 1.0}}, "joint.dropout is 1.0"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(changes: dict[str, Any], said: str, make: Any) -> None:
    with pytest.raises(HeadwayError, match=said):
        make(**changes)


def test_float16_chosen_by_auto_is_refused_before_a_step(make: Any) -> None:
    half = target(build(0, num_hidden_layers=4).half(), mode="tree")
    config = make("half", dtype="auto")
    with pytest.raises(HeadwayError, match="overflow in float16, which dtype=auto chose here; set dtype=float32"):
        train(config, target=half)
    assert not (Path(config.out) / "log.jsonl").exists()


def test_dotted_keys_reach_it(make: Any) -> None:
    config = make_config(make().to_json(), ["joint.rank=3", "joint.weight=2"])
    assert config.joint is not None
    assert (config.joint["rank"], config.joint["weight"], config.joint["modules"]) == (3, 2.0, ("q_proj", "down_proj"))


def test_targets_that_cannot_be_trained_are_refused(
    make: Any, bare: Target, carrying: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make("refused")
    with pytest.raises(HeadwayError, match="has .*adapter .* on; merge that"):
        train(config, target=carrying["attached"])
    with pytest.raises(HeadwayError, match="joint.modules has 'fc', the target can have one on down_proj, gate_proj"):
        train(make("refused", {"modules": ["fc"]}), target=bare)
    monkeypatch.setattr(bare.model, "is_quantized", True, raising=False)
    with pytest.raises(HeadwayError, match="the weights of tiny are quantised"):
        train(config, target=bare)
    with pytest.raises(HeadwayError, match="trains in one process, 2 were launched"):
        check_joint(config, SimpleNamespace(num_processes=2), bare)  # type: ignore[arg-type]
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        with pytest.raises(HeadwayError, match=f"trains in one process, not on {kind.value}"):
            check_joint(config, SimpleNamespace(num_processes=1, distributed_type=kind), bare)  # type: ignore[arg-type]
    assert not Path(config.out).exists()


def test_a_quantised_target_is_refused_before_its_weights_are_read(make: Any, tmp_path: Path) -> None:
    build(0, num_hidden_layers=1).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(HeadwayError, match="quantised; give the target as it was before"):
        train(make("quantised", target=str(tmp_path)))
