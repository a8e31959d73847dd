"""Measures the memory that a training loss and its gradients take, beyond what goes into them.

    python docs/loss_memory.py --tokens 4096 --vocab 128256 --hidden 576 --loss kl [--plain]

One draft step with an LM head of its own that is trained; the target's last features and LM head are given, and the
target's logits are made from them. Prints the greatest resident memory of loss and backward, less that before them, in MB;
with --plain that of the plain twin too. Linux.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import torch
from torch import Tensor

from headway.heads.common.losses import distil_loss
from headway.heads.common.objective import parse_objective
from headway.heads.common.protocol import Batch, Frozen, TargetInfo


def resident() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def peak() -> float:
    """Return the greatest resident memory that this process has had, in MB. (What getrusage says begins with the peak of the
    process that started this one.)"""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def loss_and_backward(loss: str, tokens: int, weight: Tensor, frozen: Frozen, plain: bool) -> float:
    """Compute a loss with its gradients and return the peak of this process over what was resident before."""
    T, D = tokens + 2, frozen.info.hidden_size  # the first two tokens have no anchor
    position = torch.arange(T)[None]
    last, hidden = torch.randn(1, T, D), torch.randn(1, T, D, requires_grad=True)
    batch = Batch(position, torch.tensor([T]), position >= 2, last, last)
    before = resident()
    report = distil_loss(frozen, batch, [hidden], [weight], objective=parse_objective(loss), plain=plain)
    report.loss.backward()
    weight.grad = None
    return peak() - before


def main() -> None:
    """Measure: few tokens first, as a first product brings its libraries along, then as many as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="several in rising order")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--loss", default="kl")
    parser.add_argument("--plain", action="store_true", help="the plain twin, everything at once, too")
    args = parser.parse_args()
    V, D = args.vocab, args.hidden
    lm_head, weight = torch.randn(V, D) / D**0.5, (torch.randn(V, D) / D**0.5).requires_grad_()
    info = TargetInfo(name="none", model_type="none", hidden_size=D, vocab_size=V, num_tokens=V, num_layers=1)
    frozen = Frozen(info, lambda ids: ids, lambda last, rows=None: last @ lm_head.T, lambda: lm_head)
    loss_and_backward(args.loss, 4, weight, frozen, False)
    for plain in (False, True) if args.plain else (False,):
        for tokens in args.tokens:
            size = loss_and_backward(args.loss, tokens, weight, frozen, plain)
            how = "plain" if plain else "chunked"
            print(f"{args.loss} {how}: {tokens} tokens x {V} words, hidden {D}, fp32: {size:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
