"""Training of a head together with a LoRA on its target (Medusa-2, arXiv 2401.10774): the target changes.

Letters: B rows, T positions, M labels, D hidden, V vocabulary.

The features that the head reads come from the target with the adapter as it is at that step, so the head's loss reaches the
adapter through them. What holds the target is a second term, the KL divergence from the target's own distribution to that
with the adapter. The unchanged target is the same model with the adapter turned off: no weight is there twice.

    loss = head's loss(features of the adapted target) + weight x KL(unchanged target || adapted target)

The head is taught what it will be verified by: the adapted target's distribution. No gradient goes through that, or the
target would be drawn to whatever the head finds easy; only features carry the head's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from headway.heads.common.aside import folder_aside
from headway.heads.common.errors import HeadwayError
from headway.heads.common.lora import PREFIX, write_lora
from headway.heads.common.losses import CHUNK_ELEMENTS, label_positions, mean_over
from headway.heads.common.objective import LEAST_LOG
from headway.heads.common.protocol import Batch, Frozen, Head, LossReport, TargetInfo
from headway.train.batches import Rows, make_batches
from headway.train.config import TrainConfig
from headway.train.features import Features
from headway.train.gathered import is_split
from headway.train.schedule import steps_by_count

if TYPE_CHECKING:
    from headway.inference.target import Target

FOLDER = "adapter"
"""Where the adapter is left, in the run's folder."""
NAME = "joint"
"""What PEFT calls it while it trains."""
KL, TOP1 = "target_kl", "target_top1"
"""Figures of the drift: KL divergence in nats a token, and the share of tokens whose likeliest word is still the same."""

CARD = """---
library_name: peft
base_model: {target}
tags:
- lora
- speculative-decoding
---

# LoRA of {target}, trained together with a draft head

With it the target is another one: {drift}.
It was trained by Headway with the head beside it (`head/`), which drafts for the target with this adapter on and for no other.

```sh
headway generate --target {target} --target-adapter {place} --head {run} --prompt "Why is the sky blue?"
```
"""


def check_joint(config: TrainConfig, accelerator: Accelerator, target: Target | None) -> None:
    """Raise HeadwayError, before any weights are read, where a target cannot be trained together with its head."""
    if config.joint is None:
        return
    from headway.inference.adapter import require_peft

    require_peft()
    if accelerator.num_processes > 1:
        raise HeadwayError(
            f"joint trains in one process, {accelerator.num_processes} were launched; launch one, or leave out joint"
        )
    if is_split(accelerator):
        kind = accelerator.distributed_type.value
        raise HeadwayError(f"joint trains in one process, not on {kind}; launch one without it, or leave out joint")
    if target is None:
        from headway.inference.target import read_model_config

        if not config.target.endswith(".gguf"):  # of which dense weights are made
            known = read_model_config(config.target, revision=config.revision)
            _refuse_quantised(getattr(known, "quantization_config", None) is not None, config.target)
        return
    if target.info.adapter is not None:
        raise HeadwayError(
            f"joint puts a LoRA of its own on the target, {target.info.name} has {target.info.adapter} on; merge that into "
            "its weights first (PEFT's merge_and_unload) and give the result as the target"
        )
    _refuse_quantised(any(type(p.data) is not Tensor for p in target.model.parameters()), target.info.name)
    _refuse_quantised(bool(getattr(target.model, "is_quantized", False)), target.info.name)


def _refuse_quantised(quantised: bool, name: str) -> None:
    if quantised:
        raise HeadwayError(
            f"joint trains a LoRA through the target, and the weights of {name} are quantised; give the target as it was "
            "before, in bfloat16 or float32, or leave out joint"
        )


def joint_batches(
    config: TrainConfig, target: Target, head: Head, rows: Rows, batches_per_step: int
) -> tuple[int | None, Features, Features, list[str]]:
    """Return what `setup.prepare_features` does, for a target whose features change with every step: none are kept.

    Raises HeadwayError for modules that the target has not, and for a target that `dtype: auto` loaded in float16.
    """
    assert config.joint is not None
    if target.dtype == torch.float16:
        raise HeadwayError("joint: gradients overflow in float16, which dtype=auto chose here; set dtype=float32")
    chosen_modules(target, config.joint["modules"])
    made = [
        Tokens(target, head.config.taps, make_batches(r, config.tokens_per_batch)) for r in (rows.train, rows.held_out)
    ]
    said = [
        "features: computed at each step, as the target changes; none are kept, and none that were recorded are read"
    ]
    return steps_by_count(config, batches_per_step, len(made[0].batches)), made[0], made[1], said


class Tokens(Features):
    """Batches without features, which are computed with the adapter as it is when they are used."""

    def __getitem__(self, n: int) -> Batch:
        return self._tokens(n)

    def compute(self, n: int) -> Batch:
        """Return batch n."""
        return self._tokens(n)


class Joint(nn.Module):
    """A head and the LoRA on its target, whose forward is the loss of both. Its weights are exactly what is trained.

    The target given carries the LoRA until `take_off`. Raises HeadwayError for modules that the target has not.
    """

    def __init__(self, config: TrainConfig, target: Target, head: Head, *, autocast: bool = False) -> None:
        super().__init__()
        assert config.joint is not None
        self.head, self.autocast, self.alone = head, autocast, False
        self.fields, self._recipe = config.joint, config
        self.target = target  # no Module, so none of its frozen weights are registered
        self.names = chosen_modules(target, self.fields["modules"])
        wrapped = put_on(target, self.names, config)
        self._wrapped = (wrapped,)
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): p for name, p in wrapped.named_parameters() if p.requires_grad}
        )
        self._dropouts = [m.lora_dropout for m in wrapped.modules() if hasattr(m, "lora_dropout")]

    def begin(self, step: int, total_steps: int, lr: float, optimizer: Any) -> None:
        """Set what the step after `step` done ones trains: the head alone, or the adapter too, at its own rate.

        When it joins, its rate rises over as many steps as the recipe's warm-up has.
        """
        alone = _steps(self.fields["warmup"], total_steps)
        self.alone = step < alone
        ramp = min(1.0, (step - alone + 1) / (_steps(self._recipe.warmup, total_steps) + 1))
        for group in optimizer.param_groups:
            if group.get("adapter"):
                group["lr"] = 0.0 if self.alone else lr * self.fields["lr_scale"] * ramp

    def forward(self, batch: Batch) -> tuple[Any, ...]:
        """Return the fields of the LossReport of a training step."""
        report = self.loss(batch, training=True)
        return report.loss, report.loss_S, report.agreement_S, report.count_S, report.figures

    def loss(self, batch: Batch, training: bool = False) -> LossReport:
        """Return the loss of a batch of tokens, with the drift of the target among its figures."""
        if training and self.alone:
            return self._alone(batch)
        taps = self.head.config.taps
        with self.unchanged():
            _, unchanged_BTD = self.target.features(batch.token_BT, batch.length_B, ("last",))
        with self._dropping(batch) if training else nullcontext():
            tap_BTF, last_BTD = self.target.trained_features(batch.token_BT, batch.length_B, taps)
        report = self._head_loss(replace(batch, tap_BTF=tap_BTF, last_BTD=last_BTD.detach()), training)
        row_M, position_M = label_positions(batch)
        anchored_M = position_M >= 1  # those that the head's first step is taught, so that one count serves both
        row_M, position_M = row_M[anchored_M], position_M[anchored_M]
        kl, top1 = drift(self.target.frozen, last_BTD[row_M, position_M], unchanged_BTD[row_M, position_M])
        share = report.count_S[0] / mean_over(batch, report.count_S)[0]  # of the step's labels, as the head's loss is
        total = report.loss + self.fields["weight"] * kl * share
        return replace(report, loss=total, figures={KL: kl.detach(), TOP1: top1})

    def _alone(self, batch: Batch) -> LossReport:
        # The adapter is still nothing: turned off, the target is the same and costs less.
        with self.unchanged():
            tap_BTF, last_BTD = self.target.features(batch.token_BT, batch.length_B, self.head.config.taps)
        report = self._head_loss(replace(batch, tap_BTF=tap_BTF, last_BTD=last_BTD), training=True)
        return replace(report, figures={KL: torch.zeros_like(report.loss), TOP1: torch.ones_like(report.loss)})

    def _head_loss(self, batch: Batch, training: bool) -> LossReport:
        with torch.autocast(batch.token_BT.device.type, torch.bfloat16, enabled=self.autocast and training):
            return self.head.loss(batch)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, the adapter is off: the target is what it was."""
        with self._wrapped[0].disable_adapter():
            yield

    @contextmanager
    def _dropping(self, batch: Batch) -> Iterator[None]:
        for dropout in self._dropouts:
            dropout.train()
        # Where the step's labels were counted before, the head has to draw what they were counted of.
        devices = [batch.token_BT.device] if batch.token_BT.is_cuda else []
        try:
            with torch.random.fork_rng(devices, enabled=batch.whole_count_S is not None):
                yield
        finally:
            for dropout in self._dropouts:
                dropout.eval()

    def spell(self) -> str:
        """Return a line that says what is trained beside the head."""
        size = sum(p.numel() for p in self.adapter.parameters())
        return (
            f"joint: a LoRA of rank {self.fields['rank']} on {len(self.names)} layers of the target, {size / 1e6:.2f} M "
            f"trainable weights; it changes the target, held by KL x {self.fields['weight']:g}"
        )

    def save(self, folder: Path, metrics: dict[str, Any]) -> tuple[TargetInfo, dict[str, Any]]:
        """Write the adapter as PEFT does, whole or not at all; return the target with it, and what the head's config says."""
        import peft

        from headway.inference.adapter import read_adapter

        tensors = peft.get_peft_model_state_dict(self._wrapped[0], adapter_name=NAME, save_embedding_layers=False)
        named = {f"{PREFIX}{name.removeprefix(PREFIX)}": tensor for name, tensor in tensors.items()}
        written = self._wrapped[0].peft_config[NAME].to_dict() | {"inference_mode": True}
        written = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in written.items()}
        said = {**self.fields, "modules": list(ends(self.names)), **_measured(metrics)}
        with folder_aside(folder) as aside:
            write_lora(aside, named, written)
            fields = {
                "target": self.target.info.name,
                "place": folder,
                "run": folder.parent,
                "drift": spell_drift(said),
            }
            (aside / "README.md").write_text(CARD.format(**fields), encoding="utf-8")
        return replace(self.target.info, adapter=read_adapter(folder)), said


def put_on(target: Target, names: Sequence[str], config: TrainConfig) -> Any:
    """Return PEFT's model around the target's, with a new LoRA, which is nothing yet, on the layers of those names.

    Its weights are in float32. The target computes with it from now on.
    """
    import peft

    assert config.joint is not None
    fields = peft.LoraConfig(
        r=config.joint["rank"],
        lora_alpha=config.joint["alpha"],
        lora_dropout=config.joint["dropout"],
        target_modules=list(_short(target, names)),
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(target.model, fields, adapter_name=NAME)  # type: ignore[arg-type]
    known = wrapped.peft_config[NAME]
    known.base_model_name_or_path, known.revision = target.info.name, target.info.revision
    target.model.eval()
    return wrapped


def take_off(target: Target) -> None:
    """Leave the target as it was before `Joint`, whose adapter is gone; nothing where it carries none."""
    if NAME not in getattr(target.model, "peft_config", {}):
        return
    import peft

    fields = target.model.peft_config[NAME]  # type: ignore[index, union-attr]
    for parent in target.model.modules():
        for name, module in list(parent.named_children()):
            if isinstance(module, peft.tuners.lora.LoraLayer):
                setattr(parent, name, module.get_base_layer())
    del target.model.peft_config, fields


def chosen_modules(target: Target, wanted: Sequence[str]) -> list[str]:
    """Return the names of the linear layers in the target's decoder layers that end in one of `wanted`, or all of them.

    Raises HeadwayError where one of `wanted` is none, naming those there are, and where there are none at all.
    """
    inside = {id(m) for m in target.layers.modules() if type(m) is nn.Linear}
    allowed = [name for name, m in target.model.named_modules() if id(m) in inside]
    if not allowed:
        raise HeadwayError(
            f"{type(target.model).__name__} has no linear layers of torch in its decoder layers for a LoRA; leave out joint"
        )
    for end in wanted:
        if not any(_ends(name, end) for name in allowed):
            raise HeadwayError(f"joint.modules has {end!r}, the target can have one on {', '.join(ends(allowed))}")
    return [name for name in allowed if any(_ends(name, end) for end in wanted)] if wanted else allowed


def drift(frozen: Frozen, last_MD: Tensor, unchanged_MD: Tensor, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean KL(unchanged target || adapted target) and the share of labels whose likeliest word is the same.

    Both are given as features after the final norm. In chunks: the gradient is made in the same pass, so that neither
    logits of size [M, V] are kept nor any are made twice; with `plain` all at once, by autograd.
    """
    M = len(last_MD)
    if M == 0:
        return last_MD.sum() * 0.0, last_MD.new_ones((), dtype=torch.float32)
    if plain:
        kl, same = _divergence(frozen, last_MD, unchanged_MD)
        return kl / M, same / M
    wanted = last_MD.requires_grad and torch.is_grad_enabled()
    grad_MD = torch.zeros_like(last_MD)
    kl_sum = same_sum = torch.zeros((), device=last_MD.device)
    size = max(1, CHUNK_ELEMENTS // frozen.info.vocab_size)
    for at in range(0, M, size):
        part = slice(at, at + size)
        x_ND = last_MD[part].detach().requires_grad_(wanted)
        kl, same = _divergence(frozen, x_ND, unchanged_MD[part])
        if wanted:
            (grad_MD[part],) = torch.autograd.grad(kl, x_ND)
        kl_sum, same_sum = kl_sum + kl.detach(), same_sum + same
    mean = kl_sum / M
    if wanted:  # a sum of zero that has the gradient
        mean = mean + ((last_MD - last_MD.detach()) * (grad_MD / M)).sum()
    return mean, same_sum / M


def _divergence(frozen: Frozen, last_ND: Tensor, unchanged_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the KL divergences, and how many likeliest words are the same."""
    log_q_NV = frozen.logits(last_ND).float().log_softmax(-1).clamp(min=LEAST_LOG)
    with torch.no_grad():
        log_p_NV = frozen.logits(unchanged_ND).float().log_softmax(-1).clamp(min=LEAST_LOG)
    same = (log_q_NV.argmax(-1) == log_p_NV.argmax(-1)).sum().float()
    return F.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True), same


def spell_drift(said: dict[str, Any]) -> str:
    """Return how far an adapted target is from the unchanged one, as part of a sentence."""
    if said.get(KL) is None:
        return "how far it is from the unchanged one was not measured, as no rows were held out"
    return (
        f"on {said['tokens']} held-out tokens its KL divergence from the unchanged one is {said[KL]:.4g} nats a token, and its "
        f"likeliest word is the same at {said[TOP1]:.2%}"
    )


def _measured(metrics: dict[str, Any]) -> dict[str, Any]:
    names = {KL: f"held_out_{KL}", TOP1: f"held_out_{TOP1}", "tokens": "held_out_tokens"}
    return {name: metrics.get(key) for name, key in names.items()}


def ends(names: Sequence[str]) -> list[str]:
    """Return the last parts of names, each once."""
    return sorted({name.rpartition(".")[2] for name in names})


def _short(target: Target, names: Sequence[str]) -> Sequence[str]:
    """Return the last parts where they name the same layers to PEFT, as other tools expect them; else the names."""
    short = ends(names)
    found = {name for name, _ in target.model.named_modules() if any(_ends(name, end) for end in short)}
    return short if found == set(names) else names


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _steps(warmup: float, total_steps: int) -> int:
    """Return a number of steps that is given as such or, below 1, as a share."""
    return round(warmup * total_steps if warmup < 1 else warmup)
