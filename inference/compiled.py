"""Passes compiled by torch.compile, in shapes that are few (heads/common/static.py): the target's over a tree, a head's draft.

Letters: B rows, N new tokens, M uncommitted tokens, S slots, V vocabulary.

Each set of shapes has a compiled function of its own, made when it is first met, without a guard on anything that changes
from round to round. What it gives is compared with the plain pass then; where it differs, or cannot be made, the passes run
plainly from there on, which is said by name. On a GPU the compiled functions are captured as CUDA graphs (torch's mode
`reduce-overhead`): buffers stay where they are, and what a graph returns is copied before it runs again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from headway.heads.common.protocol import Head, Tap
from headway.heads.common.slots import Pair
from headway.heads.common.static import Outputs, filled, places, put
from headway.inference.attention import use_grouped
from headway.inference.cache import SlotCache
from headway.inference.host import stop_clock
from headway.inference.probe import relative_error, rounding

if TYPE_CHECKING:
    from headway.inference.target import Target

Backend = str | Callable[..., Any]
BACKEND: Backend = "inductor"
"""What torch.compile is told unless the caller says otherwise."""
SLOW = 2.0
"""Seconds of compiling that are worth a line."""
CHECKS = {"cuda": 3}
"""Runs of a compiled function that are compared with the plain pass; else the first. A CUDA graph is captured in the second
run and replayed from the third on."""


class Graphs:
    """Compiled functions of tensors, one for each set of shapes."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        backend: Backend,
        allowed: float,
        around: Callable[[], AbstractContextManager[Any]],
        give_up: Callable[[str], None],
    ) -> None:
        """`allowed` is the relative difference that is taken for rounding; `around` makes what a run happens within;
        `give_up(reason)` is called when there will be no further one."""
        self.made: dict[Any, Callable[..., Outputs]] = {}
        self._checks: dict[Any, int] = {}
        self._name, self._device, self._backend, self._allowed = name, device.type, backend, allowed
        self._around, self._give_up = around, give_up

    def __call__(
        self,
        function: Callable[..., Outputs],
        arguments: tuple[Any, ...],
        cut: tuple[int, ...],
        plain: Callable[[], Outputs] | None = None,
    ) -> Outputs:
        """Return the function's outputs, each cut to the leading sizes `cut`; `plain` gives the same without compiling, by
        default the function itself."""
        kind = (function, *((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments))
        run = self.made.get(kind)
        if run is not None and not self._checks[kind]:
            return self._run(run, arguments, cut)
        want = plain() if plain is not None else tuple(_cut(out, cut) for out in function(*arguments))
        begin = perf_counter()
        try:
            if run is None:
                run = self._compiled(function)
            got = self._run(run, arguments, cut)
        except Exception as e:  # noqa: BLE001 - any failure of a foreign model or compiler means the lesser mode, named
            self._stop(f"{type(e).__name__}: {(str(e).strip().splitlines() or ['no reason given'])[0]}")
            return want
        finally:
            stop_clock(perf_counter() - begin)
        worst = max(_error(g, w) for g, w in zip(got, want, strict=True))
        if not worst <= self._allowed:
            self._stop(f"a compiled pass differs from the plain one by {worst:.2g}")
            return want
        if kind not in self.made:
            self.made[kind], self._checks[kind] = run, CHECKS.get(self._device, 1)
            if perf_counter() - begin > SLOW:
                first = next(a for a in arguments if isinstance(a, Tensor))
                size = " x ".join(map(str, first.shape[: len(cut)]))
                print(
                    f"headway: compiled {self._name} for {size} tokens in {perf_counter() - begin:.0f} s",
                    file=sys.stderr,
                )
        self._checks[kind] -= 1
        return got

    def _compiled(self, method: Any) -> Callable[..., Outputs]:
        """Return a function or method compiled for the shapes it is first called with."""
        # torch keeps what it compiled by code object, looks through all of it at each call and stops after a few: a code
        # object for each set of shapes has one entry.
        function = getattr(method, "__func__", method)
        code = function.__code__.replace(co_name=f"{function.__name__}_{len(self.made)}")
        twin = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
        graphs = self._backend == "inductor" and self._device == "cuda"
        compiled: Callable[..., Outputs] = torch.compile(
            MethodType(twin, method.__self__) if function is not method else twin,
            fullgraph=True,
            dynamic=False,
            backend=self._backend,
            mode="reduce-overhead" if graphs else None,
        )
        return compiled

    def _run(self, run: Callable[..., Outputs], arguments: tuple[Any, ...], cut: tuple[int, ...]) -> Outputs:
        on_gpu = self._device == "cuda"
        if on_gpu:
            # Nothing that an earlier graph returned is read any more: each run is a step of its own.
            torch.compiler.cudagraph_mark_step_begin()
        with self._around():
            out = run(*arguments)
        return tuple(_cut(t, cut).clone() if on_gpu else _cut(t, cut) for t in out)

    def _stop(self, reason: str) -> None:
        self.made.clear()
        print(f"headway: {self._name} is not compiled and runs as it is: {reason}", file=sys.stderr)
        self._give_up(reason)


def _cut(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return x if tuple(x.shape[: len(sizes)]) == sizes else x[tuple(slice(size) for size in sizes)]


def _error(got: Tensor, want: Tensor) -> float:
    """Return the largest relative difference along the last axis; what is not finite in both is no difference."""
    return float(relative_error(got.float().nan_to_num(), want.float().nan_to_num()).max())


class _StaticLayer(CacheLayerMixin):
    """One decoder layer's whole buffers during a compiled pass."""

    is_sliding = False
    is_croppable = False
    is_compileable = True

    def __init__(self, cache: _StaticCache) -> None:
        super().__init__()
        self.place = cache.place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        assert self.keys is not None
        assert self.values is not None
        put(self.keys, self.place.slot_BN, key_states)
        put(self.values, self.place.slot_BN, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.size, 0

    def get_seq_length(self) -> int:
        # The rows' lengths change from pass to pass, and positions and masks are given.
        return self.place.size - self.place.slot_BN.shape[1]

    def get_max_length(self) -> int:
        return self.place.size


class _Place:
    """Where the tokens of a compiled pass are written, and the number of slots."""

    slot_BN: Tensor
    size: int


class _StaticCache(Cache):
    """What a model is given as its cache in a compiled pass; each time it is bound to other slots."""

    def __init__(self, num_layers: int) -> None:
        self.place = _Place()
        super().__init__(layers=[_StaticLayer(self) for _ in range(num_layers)])

    def bind(self, pairs: dict[int, Pair], slot_BN: Tensor, size: int) -> None:
        """Take the buffers of each layer, the slots of the new tokens and the number of slots."""
        self.place.slot_BN, self.place.size = slot_BN, size
        for i, (key, value) in pairs.items():
            layer = self.layers[i]
            assert isinstance(layer, _StaticLayer)
            layer.keys, layer.values = key, value


class _Taps:
    """Keeps what layers return during a compiled pass. Inside `with taps:` they have forwards that do, always the same: hooks
    that come and go would be guarded. Outside they are stock."""

    def __init__(self, modules: Sequence[tuple[Tap, nn.Module]]) -> None:
        self.kept: dict[Tap, Tensor] = {}
        self._forwards = [
            (module, module.__dict__.get("forward"), self._keeping(tap, module)) for tap, module in modules
        ]

    def _keeping(self, tap: Tap, module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self.kept[tap] = output if isinstance(output, Tensor) else output[0]
            return output

        return forward

    def __enter__(self) -> None:
        for module, _, keeping in self._forwards:
            module.__dict__["forward"] = keeping

    def __exit__(self, *error: object) -> None:
        for module, before, _ in self._forwards:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before


class CompiledTarget:
    """The compiled passes of a target, and those of the heads that draft for it."""

    def __init__(self, target: Target, backend: Backend) -> None:
        self.target, self._with = target, (target.device, backend, rounding(target))
        self._cache = _StaticCache(target.info.num_layers)
        self._taps = _Taps([*enumerate(target.layers), ("last", target.decoder)])
        self.graphs = [Graphs(target.info.name, *self._with, self._around, self._give_up)]
        """The target's, then those of each head."""

    @property
    def num_graphs(self) -> int:
        """Compiled functions there are, of the target and of heads."""
        return sum(len(graphs.made) for graphs in self.graphs)

    @contextmanager
    def _around(self) -> Iterator[None]:
        with use_grouped(self.target.model), self.target.packed, self._taps:
            yield

    def _give_up(self, reason: str) -> None:
        self.target.compiled, self.target.compiled_reason = None, reason

    def forward(
        self,
        token_BN: Tensor,
        position_BN: Tensor,
        ancestor_BNM: Tensor,
        cache: SlotCache,
        taps: Sequence[Tap],
        before_BM: Tensor | None,
        plain: Callable[[], Outputs],
    ) -> Outputs | None:
        """Return logits and, where there are taps, features, of a pass as `Target.forward` takes it; None for one that
        is not compiled. `plain` runs it plainly."""
        slots = cache.slots
        place = places(slots, ancestor_BNM)
        if place is None:
            return None
        sizes = (place.rows, place.tokens)
        self._cache.bind(slots.whole(place.rows), place.slot_BN, slots.capacity)
        new_position_BM = None
        if before_BM is not None:
            seen = place.ancestor_BNM.shape[2]
            new_position_BM = filled(torch.cat([before_BM, position_BN], 1), place.rows, seen)
        arguments = (
            filled(token_BN, *sizes),
            filled(position_BN, *sizes),
            new_position_BM,
            place.length_B,
            place.ancestor_BNM,
            slots.capacity,
            tuple(taps),
        )
        return self.graphs[0](self._pass, arguments, tuple(token_BN.shape), plain)

    def _pass(
        self,
        token_BN: Tensor,
        position_BN: Tensor,
        new_position_BM: Tensor | None,
        length_B: Tensor,
        ancestor_BNM: Tensor,
        size: int,
        taps: tuple[Tap, ...],
    ) -> Outputs:
        relative_BS = torch.arange(size, device=length_B.device) - length_B[:, None]
        new_position_BM = position_BN if new_position_BM is None else new_position_BM
        mask = self.target.masks(new_position_BM, position_BN, ancestor_BNM, relative_BS)
        self._taps.kept = {}
        out = self.target.call(token_BN, position_BN, mask, self._cache)
        kept, self._taps.kept = self._taps.kept, {}  # else all that was kept would be returned
        return (out.logits, torch.cat([kept[tap] for tap in taps], dim=-1)) if taps else (out.logits,)

    def take(self, head: Head) -> None:
        """Have a head draft in compiled passes from now on."""
        if head.static is not None:
            return
        family = type(head).__module__.rpartition(".")[2]

        def give_up(reason: str) -> None:
            head.static = None

        name = f"the draft of the {family} head"
        head.static = graphs = Graphs(name, *self._with, lambda: self.target.packed, give_up)
        self.graphs.append(graphs)
