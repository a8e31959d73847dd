"""Passes compiled by torch.compile, in shapes that are few (heads/common/static.py): the target's over a tree, a head's draft.

Letters: B rows, N new tokens, M uncommitted tokens, S slots, V vocabulary.

Each set of shapes has a compiled function of its own, made when it is first met, without a guard on anything that changes
from round to round. What it gives is compared with the plain pass then; where it differs, or cannot be made, the passes run
plainly from there on, which is said by name. On a GPU the compiled functions are captured as CUDA graphs (torch's mode
`reduce-overhead`): buffers stay where they are, and what a graph returns is copied before it runs again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head, Tap
from headway.heads.common.static import TOKENS, Outputs, Placed, filled, places, token_bucket
from headway.inference.attention import use_grouped, wide_bias
from headway.inference.cache import SlotCache, SlotLayer
from headway.inference.host import stop_clock
from headway.inference.probe import relative_error, rounding

if TYPE_CHECKING:
    from headway.inference.target import Target

Backend = str | Callable[..., Any]
BACKEND = "inductor"
"""What compiles, unless another is asked for."""
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
        give_up: Callable[[], None],
    ) -> None:
        """`allowed` is the relative difference that is taken for rounding; `around` makes what a run happens within;
        `give_up` is called when there will be no further one."""
        self.name = name
        self.made: dict[Any, Callable[..., Outputs]] = {}
        self.reason = ""
        """Why nothing is compiled any more; else empty."""
        self._checks: dict[Any, int] = {}
        self._device, self._backend, self._allowed = device.type, backend, allowed
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
        plain = plain or (lambda: tuple(_cut(out, cut) for out in function(*arguments)))
        kind = (function, *((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments))
        if self._checks.get(kind) != 0:
            return self._compared(kind, function, arguments, cut, plain())
        try:
            return self._run(self.made[kind], arguments, cut)
        except Exception as e:  # noqa: BLE001 - what was changed since, an adapter say, may be what no compiler takes
            self._stop(reason_of(e))
            return plain()

    def _compared(
        self,
        kind: Any,
        function: Callable[..., Outputs],
        arguments: tuple[Any, ...],
        cut: tuple[int, ...],
        want: Outputs,
    ) -> Outputs:
        """Return the outputs of a function that is new, after comparing them with those of the plain pass."""
        begin, run = perf_counter(), self.made.get(kind)
        try:
            if run is None:
                run = self._compiled(function)
            got = self._run(run, arguments, cut)
        except Exception as e:  # noqa: BLE001 - any failure of a foreign model or compiler means the lesser mode, named
            self._stop(reason_of(e))
            return want
        finally:
            stop_clock(perf_counter() - begin)
        worst = max(_error(g, w) for g, w in zip(got, want, strict=True))
        if not worst <= self._allowed:
            self._stop(f"a compiled pass differs from the plain one by {worst:.2g}")
            return want
        if kind not in self.made:
            self.made[kind], self._checks[kind] = run, CHECKS.get(self._device, 1)
            seconds = perf_counter() - begin
            if seconds > SLOW:
                size = " x ".join(map(str, next(a for a in arguments if isinstance(a, Tensor)).shape[: len(cut)]))
                print(f"headway: compiled {self.name} for {size} tokens in {seconds:.0f} s", file=sys.stderr)
        self._checks[kind] -= 1
        return got

    def _compiled(self, method: Any) -> Callable[..., Outputs]:
        """Return a function or method compiled for the shapes it is first called with."""
        # A code object for each set of shapes has one entry.
        function = getattr(method, "__func__", method)
        twin = twin_of(function, str(len(self.made)))
        graphs = self._backend == BACKEND and self._device == "cuda"
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
        self.reason = reason
        self.made.clear()
        self._checks.clear()
        print(f"headway: {self.name} is not compiled and runs as it is: {reason}", file=sys.stderr)
        self._give_up()


def twin_of(function: Any, suffix: str) -> FunctionType:
    """Return the function with a code object of its own: torch keeps what it compiled by code object, looks through all of it
    at each call and stops after a few."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{suffix}")
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


def reason_of(e: Exception) -> str:
    """Return one line that says what failed. torch's of a backend begin with "backend='inductor' raised:"."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(e).__name__}: {' '.join(lines[:2]) if lines[0].endswith(':') else lines[0]}"


def _cut(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return x if tuple(x.shape[: len(sizes)]) == sizes else x[tuple(slice(size) for size in sizes)]


def _error(got: Tensor, want: Tensor) -> float:
    """Return the largest relative difference along the last axis; what is not finite in both is no difference."""
    return float(relative_error(got.float().nan_to_num(), want.float().nan_to_num()).max())


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
        nothing = torch.empty(0)
        # One for all passes, so that a compiled function finds it where it was: each pass fills it.
        self._placed = Placed({}, nothing, nothing)
        self._cache = Cache(layers=[SlotLayer(self._placed, i) for i in range(target.info.num_layers)])
        self._taps = _Taps([*enumerate(target.layers), ("last", target.decoder)])
        self._graphs = Graphs(target.info.name, *self._with, self._around, self._give_up)
        self._heads: dict[Head, Graphs] = {}
        self._too_wide = False

    @property
    def num_graphs(self) -> int:
        """Compiled functions there are, of the target and of heads."""
        return sum(len(graphs.made) for graphs in (self._graphs, *self._heads.values()))

    @property
    def reasons(self) -> dict[str, str]:
        """Why drafts are not compiled, by head, where they are not."""
        return {graphs.name: graphs.reason for graphs in self._heads.values() if graphs.reason}

    @contextmanager
    def _around(self) -> Iterator[None]:
        with use_grouped(self.target.model), self.target.packed, self._taps:
            yield

    def _give_up(self) -> None:
        self.target.compiled, self.target.compiled_reason = None, self._graphs.reason

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
            self._say_too_wide(token_BN.shape[1])
            return None
        sizes = (place.rows, place.tokens)
        new_position_BM = None
        if before_BM is not None:
            seen = place.ancestor_BNM.shape[2]
            new_position_BM = filled(torch.cat([before_BM, position_BN], 1), place.rows, seen)
        arguments = (
            filled(token_BN, *sizes),
            filled(position_BN, *sizes),
            new_position_BM,
            place.ancestor_BNM,
            slots.capacity,
            tuple(taps),
        )
        placed = self._placed
        placed.pairs, placed.slot_BN, placed.length_B = slots.whole(place.rows), place.slot_BN, place.length_B
        try:
            with wide_bias(self.target.text_config, slots.capacity):
                return self._graphs(self._pass, arguments, tuple(token_BN.shape), plain)
        finally:
            placed.pairs = {}  # else the buffers of a cache that is gone would be kept

    def _pass(
        self,
        token_BN: Tensor,
        position_BN: Tensor,
        new_position_BM: Tensor | None,
        ancestor_BNM: Tensor,
        size: int,
        taps: tuple[Tap, ...],
    ) -> Outputs:
        """`size` is the number of slots: another one is another compiled function."""
        new_position_BM = position_BN if new_position_BM is None else new_position_BM
        mask = self.target.masks(new_position_BM, position_BN, ancestor_BNM, self._placed.relative())
        self._taps.kept = {}
        out = self.target.call(token_BN, position_BN, mask, self._cache)
        kept, self._taps.kept = self._taps.kept, {}  # else all that was kept would be returned
        return (out.logits, torch.cat([kept[tap] for tap in taps], dim=-1)) if taps else (out.logits,)

    def _say_too_wide(self, tokens: int) -> None:
        """Say once that so many tokens are not compiled, where they are not."""
        if token_bucket(tokens) is None and not self._too_wide:
            self._too_wide = True
            print(
                f"headway: passes of {tokens} tokens are not compiled; those of up to {TOKENS[-1]} are", file=sys.stderr
            )

    def drafts(self, head: Head) -> Graphs | None:
        """Return what a head drafts through, its `static`; None after it turned out that it cannot be compiled."""
        if head not in self._heads:
            family = type(head).__module__.rpartition(".")[2]

            def give_up() -> None:
                head.static = None

            name = f"the draft of the {family} head"
            self._heads[head] = Graphs(name, *self._with, lambda: self.target.packed, give_up)
        graphs = self._heads[head]
        return None if graphs.reason else graphs


@functools.cache
def check_compiler(device: str, without: str = "do without --compile") -> None:
    """Compile a trifle, so that what is missing is found before any work.

    Raises HeadwayError where torch.compile does not work on this machine: without a C++ compiler, say. `without` is the other
    remedy that it names.
    """
    try:
        torch.compile(_trifle, backend=BACKEND, fullgraph=True)(torch.ones(8, device=device))
    except Exception as e:
        raise HeadwayError(
            f"torch.compile does not work here: {reason_of(e)}. On a CPU it needs a C++ compiler (g++ or clang++) and "
            f"Python's headers, on a GPU triton and a C compiler; install them, or {without}"
        ) from e


def _trifle(x: Tensor) -> Tensor:
    return 2 * x + 1
