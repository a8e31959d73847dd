"""How many steps a run has, and the learning rate of each."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from headway.heads.common.protocol import Batch
from headway.inference.host import clock
from headway.train.config import TrainConfig
from headway.train.features import Features

NUM_TIMED = 6
TIMING_SHARE = 0.05
"""Timing stops after this share of the budget, with one batch timed at least."""


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Return the rate of the step after `step` done ones: linear warm-up, then down to min_lr_ratio, along a cosine or, with
    wsd, along a line over the last `cooldown` steps."""
    warmup = config.warmup * total_steps if config.warmup < 1 else config.warmup
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "wsd":
        cooldown = config.cooldown * total_steps if config.cooldown < 1 else config.cooldown
        start = max(warmup, total_steps - cooldown)
        share = min(1.0, max(0.0, step - start) / max(1.0, total_steps - start))
        return config.lr * (1 - (1 - config.min_lr_ratio) * share)
    share = min(1.0, (step - warmup) / max(1.0, total_steps - warmup))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * share)))


def steps_by_count(config: TrainConfig, batches_per_step: int, num_batches: int) -> int | None:
    """Return the steps that epochs and max_steps allow; None when neither is given."""
    limits = []
    if config.epochs is not None:
        limits.append(max(1, round(config.epochs * num_batches / batches_per_step)))
    if config.max_steps is not None:
        limits.append(config.max_steps)
    return min(limits) if limits else None


def steps_by_time(config: TrainConfig, features: Features, trial: Callable[[Batch], None]) -> int:
    """Return the steps that max_seconds buys, from the time of a few batches.

    `trial` is a whole step that leaves the weights as they are. Kept features are computed once, so later epochs are
    cheaper: with N batches, M of them without features yet, f seconds for the features of one and t for its step, n
    batches take min(n, M) f + n t.
    """
    assert config.max_seconds is not None
    N = len(features.batches)
    chosen = torch.linspace(0, N - 1, min(NUM_TIMED + 1, N)).long().tolist()
    start = clock()
    M = features.num_missing
    look_up = features.compute if M else features.__getitem__
    trial(look_up(chosen[0]))  # not counted: the first is slow
    f_sum = t_sum = 0.0
    num_timed = 0
    for n in chosen[1:] or chosen:
        begin = clock()
        batch = look_up(n)
        middle = clock()
        trial(batch)
        end = clock()
        f_sum, t_sum, num_timed = f_sum + middle - begin, t_sum + end - middle, num_timed + 1
        if end - start > TIMING_SHARE * config.max_seconds:
            break
    f, t = f_sum / num_timed, t_sum / num_timed
    once = M * (f + t)
    if features.kept == "off" or config.max_seconds <= once:
        batches = config.max_seconds / (f + t)
    else:
        batches = M + (config.max_seconds - once) / t
    return max(1, round(batches / config.grad_accum))
