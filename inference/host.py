"""What the host asks of the device, and the time."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor


def fetch(*tensors: Tensor) -> list[Any]:
    """Return tensors of one device as lists; a GPU is waited for once for all of them."""
    device = tensors[0].device
    if device.type == "cuda":
        # Not waiting, a copy goes to pinned memory.
        tensors = tuple(t.to("cpu", non_blocking=True) for t in tensors)
        torch.cuda.current_stream(device).synchronize()
    return [t.tolist() for t in tensors]


_stopped = 0.0


def clock() -> float:
    """Return the time in seconds, without those that were spent compiling: what is timed will run again, that will not."""
    return perf_counter() - _stopped


def stop_clock(seconds: float) -> None:
    """Take seconds out of what `clock` counts."""
    global _stopped
    _stopped += seconds


def stopped() -> float:
    """Return the seconds that `clock` left out so far."""
    return _stopped
