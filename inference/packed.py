"""Linear layers in oneDNN's blocked layout, on a CPU: a target's always, a head's while it drafts.

A plain weight is rearranged inside every product. For the few tokens of a decoding step that costs more than the
product itself: on a two-core AVX2 machine, an LM head of 49152 x 576 took 38 ms for 8 tokens as it lies and 12 ms packed.
Weights that do not change are rearranged once. It costs a second copy of them in memory.

float32 and bfloat16 are packed; bfloat16 only where oneDNN multiplies in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
SHARE = 0.25
"""Share of the machine's memory that packed copies may take."""
ROWS = 64
"""Rows the layout is chosen for; measured as good as any from 1 row to 512."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Relative difference from the plain product that is taken for rounding."""


class Packed:
    """Packed copies of a model's linear weights. Inside `with packed:` its linear layers use them; outside it is stock.

    `reason` says why there are none, and is empty where there are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forwards: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        self.num_bytes = 0
        linears = [m for m in model.modules() if type(m) is nn.Linear]
        size = sum(m.weight.nbytes for m in linears)
        self.reason = _reason(linears, size)
        if not self.reason:
            self._forwards = [(m, _packed_forward(m)) for m in linears]
            self.num_bytes = size

    def __enter__(self) -> None:
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)


_packed: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]], Packed]] = WeakKeyDictionary()


def pack(module: nn.Module) -> Packed:
    """Return the packed copies of a module whose weights may change: made again when one has, else those made before."""
    # A tensor made in inference mode counts no versions, and cannot be changed outside of it.
    state = [(p.data_ptr(), -1 if p.is_inference() else p._version) for p in module.parameters()]
    known = _packed.get(module)
    if known is None or known[0] != state:
        known = _packed[module] = (state, Packed(module))
    return known[1]


def _reason(linears: list[nn.Linear], size: int) -> str:
    """Return why these layers are not packed, or nothing where they can be."""
    if any(type(m.weight.data) is not Tensor for m in linears):
        return "weights are quantised"
    dtypes = {m.weight.dtype for m in linears}
    if len(dtypes) != 1 or not dtypes <= set(TOLERANCE) or any(m.weight.device.type != "cpu" for m in linears):
        return "packing is for layers of one dtype, float32 or bfloat16, on a CPU"
    if any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in linears):
        return "a linear layer carries hooks"
    if size > SHARE * _total_memory():
        return f"packed copies would take {size / 2**30:.1f} GiB, more than {SHARE:.0%} of the memory"
    try:
        wide = max(linears, key=lambda m: m.weight.numel())
        dtype = wide.weight.dtype
        x_MD = torch.linspace(-1, 1, 3 * wide.in_features).view(3, -1).to(dtype)
        with torch.no_grad():
            want = nn.functional.linear(x_MD, wide.weight, wide.bias).float()
            got = _packed_forward(wide)(x_MD).float()
        if float((got - want).norm()) > TOLERANCE[dtype] * float(want.norm()):
            return "this build's packed product differs from the plain one"
    except (AttributeError, RuntimeError, NotImplementedError) as e:
        return f"this build of torch has no packed product: {str(e).strip().splitlines()[0]}"
    return ""


def _packed_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), ROWS)
    bias = None if module.bias is None else module.bias.detach()
    product, dtype = torch.ops.mkldnn._linear_pointwise.default, module.weight.dtype

    def forward(x: Tensor) -> Tensor:
        if x.dtype != dtype:  # under autocast, say
            return nn.functional.linear(x, module.weight, module.bias)
        out: Tensor = product(x, weight, bias, "none", [], "")
        return out

    return forward


def _total_memory() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else ""
    return min(total, int(limit)) if limit.isdigit() else total
