"""A running average of a head's weights, which is smoother than the last of them (exponential moving average)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headway.heads.common.errors import HeadwayError


class Average:
    """The average of what is trainable in a head, beginning as a copy of it."""

    def __init__(self, head: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in head.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, head: nn.Module, step: int) -> None:
        """Take in the weights after step number `step`, from 0. Early on the decay is less, (1 + step) / (10 + step), so that
        the initial weights do not linger in a short run."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, p in head.named_parameters():
            if name in self.weights:
                self.weights[name].lerp_(p, 1 - decay)

    @contextmanager
    def instead(self, head: nn.Module) -> Iterator[None]:
        """Inside, the head has the average for weights; afterwards its own again, to the bit."""
        self._swap(head)
        try:
            yield
        finally:
            self._swap(head)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a saved average. Raises HeadwayError unless they are those of this head."""
        shapes = [{name: tuple(t.shape) for name, t in kept.items()} for kept in (self.weights, tensors)]
        if shapes[0] != shapes[1]:
            raise HeadwayError(
                "the saved average has other tensors than the head; begin anew in another folder: out=..."
            )
        for name, tensor in tensors.items():
            self.weights[name].copy_(tensor)

    @torch.no_grad()
    def _swap(self, head: nn.Module) -> None:
        for name, p in head.named_parameters():
            if name in self.weights:
                own = p.detach().clone()
                p.copy_(self.weights[name])
                self.weights[name] = own
