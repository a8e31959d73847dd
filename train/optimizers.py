"""What makes a step of gradients: AdamW, or Muon for the hidden matrices with AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.train.config import TrainConfig


def check_optimizer(config: TrainConfig) -> None:
    """Raise HeadwayError when this torch lacks the optimizer of the recipe."""
    if config.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise HeadwayError(
            f"optimizer is 'muon', which torch {torch.__version__} does not have; install torch 2.9 or later, or set "
            "optimizer=adamw"
        )


def make_optimizer(config: TrainConfig, head: Head) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over what is trainable; weight decay falls on matrices only."""
    named = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if is_hidden_matrix(name, p)] if config.optimizer == "muon" else []
    taken = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.squeeze().ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.squeeze().ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if not hidden:
        return adamw(groups, config)
    # Updates of AdamW's size (arXiv 2502.16982), so that one learning rate serves both.
    muon = torch.optim.Muon(hidden, config.lr, config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return Both(muon, adamw(groups, config) if groups else None)


def adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW that passes over each weight once, where torch has that for the device of the weights."""
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon is meant for a parameter: a matrix between hidden states, neither LM head nor embedding."""
    words = ("lm_head", "embed")
    return parameter.ndim == 2 and not any(part.startswith(words) for part in name.split("."))


class Both(torch.optim.Optimizer):
    """Two optimizers that step together; the groups and states are theirs."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer | None) -> None:
        self.parts = {"muon": muon} | ({"adamw": adamw} if adamw else {})
        super().__init__(self._groups(), {})

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step both."""
        assert closure is None
        for part in self.parts.values():
            part.step()

    def forget(self) -> None:
        """Drop both states, as a new optimizer has none."""
        for part in self.parts.values():
            part.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return both states by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both states."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = self._groups()  # loading makes new ones
