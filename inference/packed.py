"""Linear layers in oneDNN's blocked layout, on a CPU: a target's always, a head's while it drafts.

A plain weight is rearranged inside every product. For the few tokens of a decoding step that costs more than the
product itself: on a two-core AVX2 machine, an LM head of 49152 x 576 took 38 ms for 8 tokens as it lies and 12 ms packed.
Weights that do not change are rearranged once. It costs a second copy of them in memory.

float32 and bfloat16 are packed; bfloat16 only where oneDNN multiplies in it.

A compiler cannot look into a blocked weight. In a compiled pass the product is an operator of our own, which is told the number of
the weight.

Queries, keys and values of one layer are one product: for SmolLM2-135M in bfloat16 on two cores a pass of one token takes 45 ms in
place of 48, of six 57 in place of 59 (means of passes by turns; the fastest passes are equal).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
SHARE = 0.25
"""Share of the machine's memory that packed copies may take."""
ROWS = 64
"""Rows the layout is chosen for; measured as good as any from 1 row to 512."""
TOGETHER = ("q_proj", "k_proj", "v_proj")
"""Layers of one module that are given the same input."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Relative difference from the plain product that is taken for rounding."""


class Packed:
    """Packed copies of a model's linear weights. Inside `with packed:` its linear layers use them; outside it is stock.

    `reason` says why there are none, and is empty where there are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forwards: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        self._together: list[_Together] = []
        self.num_bytes = 0
        linears = [m for m in model.modules() if type(m) is nn.Linear]
        # compressed-tensors' have no weight before it unpacks them.
        size = sum(getattr(m, "weight", torch.empty(0)).nbytes for m in linears)
        self.reason = _reason(linears, size)
        if not self.reason:
            self._together = [_Together(group) for group in _groups(model)]
            joined = {m: together.part(i) for together in self._together for i, m in enumerate(together.modules)}
            self._forwards = [(m, joined[m] if m in joined else _packed_forward(m)) for m in linears]
            self.num_bytes = size

    def drop(self, reason: str) -> None:
        """Go without packed copies from now on, for a reason."""
        self._forwards, self._together, self.num_bytes, self.reason = [], [], 0, reason

    def __enter__(self) -> None:
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)
        for together in self._together:
            together.clear()


_packed: WeakKeyDictionary[nn.Module, tuple[list[Any], Packed]] = WeakKeyDictionary()


def pack(module: nn.Module) -> Packed:
    """Return the packed copies of a module whose weights may change: made again when one has, else those made before."""
    # A tensor made in inference mode counts no versions, and cannot be changed outside of it.
    state: list[Any] = [(p.data_ptr(), -1 if p.is_inference() else p._version) for p in module.parameters()]
    # PEFT adds an adapter to the weights past the count of versions, and notes it.
    state += [tuple(merged) for m in module.modules() if (merged := getattr(m, "merged_adapters", None)) is not None]
    known = _packed.get(module)
    if known is None or known[0] != state:
        known = _packed[module] = (state, Packed(module))
    return known[1]


def _reason(linears: list[nn.Linear], size: int) -> str:
    """Return why these layers are not packed, or nothing where they can be."""
    if any(not hasattr(m, "weight") or type(m.weight.data) is not Tensor for m in linears):
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
    multiply, dtype = _product(module.weight, module.bias), module.weight.dtype

    def forward(x: Tensor) -> Tensor:
        if x.dtype != dtype:  # under autocast, say
            return nn.functional.linear(x, module.weight, module.bias)
        return multiply(x)

    return forward


class _Weight:
    """A packed weight and its bias; they live as long as what multiplies with them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias


_numbered: WeakValueDictionary[int, _Weight] = WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op(
    "headway::packed_linear",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, int number, int out_features) -> Tensor",
)
def _packed_linear(x: Tensor, number: int, out_features: int) -> Tensor:
    """Return the product with the packed weight of that number."""
    held = _numbered[number]
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, held.weight, held.bias, "none", [], "")
    return out


@_packed_linear.register_fake
def _(x: Tensor, number: int, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return what multiplies with a packed copy of the weight."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    bias = None if bias is None else bias.detach()
    product = torch.ops.mkldnn._linear_pointwise.default
    held, number, out_features = _Weight(packed, bias), next(_numbers), weight.shape[0]
    _numbered[number] = held

    def multiply(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _packed_linear(x, number, out_features)
        out: Tensor = product(x, packed, bias, "none", [], "")
        return out

    multiply.__dict__["held"] = held
    return multiply


def _groups(model: nn.Module) -> list[list[nn.Linear]]:
    """Return the layers that are taken together: those of TOGETHER in one module, of one width and with or without a bias."""
    groups = []
    for module in model.modules():
        group = [m for m in (getattr(module, name, None) for name in TOGETHER) if type(m) is nn.Linear]
        if len(group) == len(TOGETHER) and len({(m.in_features, m.bias is None) for m in group}) == 1:
            groups.append(group)
    return groups


class _Together:
    """Linear layers of one input as one product: the first that is called makes it, the others take their parts.

    Where a layer is given something else than the first was, or nothing, all are multiplied by themselves from then on.
    """

    def __init__(self, modules: list[nn.Linear]) -> None:
        self.modules = modules
        self._size = [m.out_features for m in modules]
        bias = None if modules[0].bias is None else torch.cat([m.bias.detach() for m in modules])
        self._multiply: Callable[[Tensor], Tensor] | None = _product(
            torch.cat([m.weight.detach() for m in modules]), bias
        )
        self._alone: list[Callable[[Tensor], Tensor]] = []
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        """What was not asked for yet."""

    def clear(self) -> None:
        """Forget the last product."""
        if self._parts:
            self._take_apart()
        self._input, self._parts = None, {}

    def part(self, i: int) -> Callable[[Tensor], Tensor]:
        """Return the forward of the i-th layer."""
        module = self.modules[i]
        dtype = module.weight.dtype  # when it was packed; a model may be turned into another since

        def forward(x: Tensor) -> Tensor:
            if x.dtype != dtype:  # under autocast, say
                return nn.functional.linear(x, module.weight, module.bias)
            if self._multiply is not None:
                taken = self._take(i, x)
                if taken is not None:
                    return taken
                self._take_apart()
            return self._alone[i](x)

        return forward

    def _take(self, i: int, x: Tensor) -> Tensor | None:
        """Return the i-th part of the product with x; None where others were not asked for theirs."""
        if x is not self._input or i not in self._parts:
            if self._parts:
                return None
            assert self._multiply is not None
            self._input, self._parts = x, dict(enumerate(self._multiply(x).split(self._size, dim=-1)))
        out = self._parts.pop(i)
        if not self._parts:  # a compiler would return what is kept
            self._input = None
        return out

    def _take_apart(self) -> None:
        """Pack each layer by itself."""
        self._alone = [_packed_forward(m) for m in self.modules]
        self._multiply, self._input, self._parts = None, None, {}


def _total_memory() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else ""
    return min(total, int(limit)) if limit.isdigit() else total
