"""What a run of training left, and how one is interrupted."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway.heads.common.protocol import Batch, Head, LossReport
from headway.train import loop
from headway.train.config import TrainConfig

SHORT: dict[str, Any] = {
    "family": "medusa",
    "target": "tiny",
    "head": {"num_heads": 2, "draft_vocab_size": 64},
    "max_steps": 6,
    "tokens_per_batch": 48,
    "eval_rows": 3,
    "eval_fraction": 0.2,
    "eval_prompts": 2,
    "eval_tokens": 8,
    "save_every": 2,
    "log_every": 1,
    "lr": 0.01,
}
"""A recipe of a short Medusa run, but for dialogs and out."""


def weights(config: TrainConfig, file: str = "head/model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(Path(config.out) / file)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def log_of(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]


@contextmanager
def interrupted_in_step(
    number: int, head: type[Head], signals: Sequence[signal.Signals] = (signal.SIGINT,)
) -> Iterator[None]:
    """Inside, Ctrl-C or other signals come in the midst of step `number`, from 1, of training a head."""
    real, calls = head.loss, []

    def loss(self: Head, batch: Batch) -> LossReport:
        calls.append(1)
        if len(calls) == number:
            for each in signals:
                signal.raise_signal(each)
        return real(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "loss", loss)
        yield


@contextmanager
def killed_after_step(number: int) -> Iterator[None]:
    """Inside, training dies of an error after step `number`; on leaving it has to have died."""
    real = loop.accumulate

    def accumulate(run: Any, order: Any) -> Any:
        if run.progress.step == number:
            raise RuntimeError("killed")
        return real(run, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "accumulate", accumulate)
        with pytest.raises(RuntimeError, match="killed"):
            yield
