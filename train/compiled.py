"""A head's pass in training, compiled by torch.compile: what goes through `Head.training_pass`, forward and backward.

Batches differ in rows and positions, so one compiled graph takes them all, but for the few cases that torch makes one of their
own for: a single row, say. The LM head and the loss stay outside, where nothing of the size of all logits is kept.

What each new graph gives is compared with the plain pass, outputs and gradients; where it differs, cannot be made, or fails
later, the pass runs plainly from there on, which is said by name. The clock of the run stands still while something is compiled
or compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.compiled import BACKEND, Backend, check_compiler, reason_of, twin_of
from headway.inference.host import stop_clock
from headway.train.gathered import is_split
from headway.train.progress import say

MOST = 12
"""Graphs that are made; batches that fit none of them then run plainly."""
CHECKS = 2
"""Batches that are compared after each new graph: the second has other sizes, mostly."""
ALLOWED, ALLOWED_ROUGH = 1e-3, 0.05
"""Difference from the plain pass that is taken for rounding, as a share of the norm; the second with bfloat16 products."""
SHARE = 0.01
"""A gradient smaller than this share of all together is compared on that scale: alone it may be rounding and nothing else."""
SAID = (
    "compile: torch.compile makes the head's pass in the first steps, which takes long, and again where a batch needs a graph of "
    "its own; that time counts neither in the figures nor in max_seconds"
)

Pass = Callable[..., list[Tensor]]


def check_compile(accelerator: Accelerator) -> None:
    """Raise HeadwayError where training cannot be compiled: under an engine that splits the head, or without a compiler."""
    if is_split(accelerator):
        raise HeadwayError(
            f"compile: a head that {accelerator.distributed_type.value} splits over processes is not compiled; leave out compile, "
            "or launch with recipes/accelerate/ddp.yaml"
        )
    check_compiler(accelerator.device.type, "leave out compile")


class Compiled:
    """The compiled pass of one head: `Head.compiled`."""

    def __init__(self, family: str, device: torch.device, *, rough: bool = False, backend: Backend = BACKEND) -> None:
        """`rough` says that products are in bfloat16."""
        self.name = f"the training pass of the {family} head"
        self.num_graphs = 0
        self.seconds = 0.0
        """Spent on compiling and comparing, by this process."""
        self.reason = ""
        """Why the pass is not compiled any more; else empty."""
        self.device, self._backend = device, backend
        self._allowed = ALLOWED_ROUGH if rough else ALLOWED
        self._made: dict[Any, Pass] = {}
        self._unchecked = 0
        self._full = False

    def __call__(self, function: Pass, head: Head, *arguments: Any) -> list[Tensor]:
        """Return `function(head, *arguments)`."""
        if self.reason:
            return function(head, *arguments)
        before, begin, draws = self.num_graphs, perf_counter(), _draws(self.device)
        inputs = _trained(head, arguments)
        compared = False
        try:
            if before:
                out = _Backward.apply(self, function, head, arguments, *inputs)
            if self.num_graphs > before or not before:
                self._unchecked = CHECKS
            compared = self._unchecked > 0
            if compared:
                self._compare(function, head, arguments, draws)
                self._unchecked -= 1
                _set_draws(self.device, draws)
                out = _Backward.apply(self, function, head, arguments, *inputs)
        except Exception as e:  # noqa: BLE001 - any failure of the compiler means the lesser mode, named
            self.stop(str(e) if isinstance(e, HeadwayError) else reason_of(e))
            _set_draws(self.device, draws)
            out = function(head, *arguments)
        if compared or self.reason:
            self._count(perf_counter() - begin, self.num_graphs > before, arguments)
        return list(out)

    def run(self, function: Pass, head: Head, *arguments: Any) -> list[Tensor]:
        """Return what the compiled function does; it is made where none fits."""
        if function not in self._made:
            # Several functions of a head, or a head after another, would share what torch keeps of one code object.
            self._made[function] = torch.compile(
                twin_of(function, "compiled"), fullgraph=True, dynamic=True, backend=self._make
            )
        with self._settings():
            return self._made[function](head, *arguments)

    def stop(self, reason: str) -> None:
        """Compile nothing from here on, and say so."""
        self.reason = reason
        self._made.clear()
        say(f"{self.name} is not compiled and runs as it is: {reason}")

    def figures(self) -> dict[str, Any]:
        """Return what belongs in the figures of a run: whether its pass was compiled, else why not; graphs, and seconds."""
        return {
            "compiled": self.reason or True,
            "compiled_graphs": self.num_graphs,
            "compile_seconds": round(self.seconds, 1),
        }

    def _make(self, graph: Any, inputs: list[Tensor]) -> Any:
        from torch._dynamo import lookup_backend

        self.num_graphs += 1
        return (lookup_backend(self._backend) if isinstance(self._backend, str) else self._backend)(graph, inputs)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Inside, torch compiles as training needs it."""
        import torch._dynamo.config
        import torch._inductor.config
        import torch.fx.experimental._config

        with ExitStack() as stack:
            # Axes that have the same size in the first batch are not taken for one. A graph is not cut along the buckets of
            # data parallelism, which would be several. Dropout draws what it draws plainly.
            stack.enter_context(torch.fx.experimental._config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
            stack.enter_context(torch._dynamo.config.patch(optimize_ddp=False, recompile_limit=MOST + 1))
            stack.enter_context(torch._inductor.config.patch(fallback_random=True))
            if self.num_graphs >= MOST:
                stack.enter_context(torch.compiler.set_stance("eager_on_recompile"))
            yield

    def _compare(self, function: Pass, head: Head, arguments: tuple[Any, ...], draws: Any) -> None:
        """Raise HeadwayError unless the compiled pass gives outputs and gradients of the plain one. The plain one comes first:
        it brings what it keeps to the device."""
        inputs = _trained(head, arguments)
        found = []
        for run in (function, lambda *a: self.run(function, *a)):
            _set_draws(self.device, draws)
            outputs = run(head, *arguments)
            generator = torch.Generator(self.device).manual_seed(0)
            along = [torch.randn(o.shape, dtype=o.dtype, device=o.device, generator=generator) for o in outputs]
            grads = _gradients(outputs, inputs, along)
            found.append([torch.cat([out.detach().flatten() for out in outputs]), *grads])
        plain, compiled = found
        worst = difference(compiled, plain)
        if not worst <= self._allowed:
            raise HeadwayError(f"it differs from the plain one by {worst:.2g}")

    def _count(self, seconds: float, is_new: bool, arguments: tuple[Any, ...]) -> None:
        self.seconds += seconds
        stop_clock(seconds)
        if self.reason or not is_new:
            return
        rows, positions = next(a for a in arguments if isinstance(a, Tensor)).shape[:2]
        say(
            f"compiled {self.name}, graph {self.num_graphs}, for {rows} rows of {positions} positions, in {seconds:.0f} s"
        )
        if self.num_graphs >= MOST and not self._full:
            self._full = True
            say(f"{self.name} has {MOST} graphs; batches that fit none of them run as they are from here on")


class _Backward(torch.autograd.Function):
    """A compiled pass whose backward, should it fail, is done by the plain pass: torch makes code for sizes that it did not see."""

    @staticmethod
    def forward(
        ctx: Any, compiled: Compiled, function: Pass, head: Head, arguments: tuple[Any, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        device = compiled.device
        draws = _draws(device)
        with torch.enable_grad():
            outputs = compiled.run(function, head, *arguments)
        ctx.autocast = torch.autocast(
            device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        )
        ctx.given, ctx.draws, ctx.outputs = (compiled, function, head, arguments, inputs), draws, outputs
        return tuple(out.detach() for out in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor) -> tuple[Any, ...]:
        compiled, function, head, arguments, inputs = ctx.given
        outputs, ctx.outputs, ctx.given = ctx.outputs, None, None
        try:
            grads = _gradients(outputs, inputs, along)
        except Exception as e:  # noqa: BLE001 - any failure of the compiler means the lesser mode, named
            compiled.stop(reason_of(e))
            now = _draws(compiled.device)
            _set_draws(compiled.device, ctx.draws)
            with torch.enable_grad(), ctx.autocast:
                outputs = function(head, *arguments)
            _set_draws(compiled.device, now)
            grads = _gradients(outputs, inputs, along)
        return (None, None, None, None, *grads)


def _trained(head: Head, arguments: Sequence[Any]) -> list[Tensor]:
    """Return what a pass may have gradients of."""
    given = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    return [*given, *(p for p in head.parameters() if p.requires_grad)]


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], along: Sequence[Tensor]) -> Sequence[Tensor | None]:
    # With a LoRA some outputs may depend on nothing that is trained.
    pairs = [(out, a) for out, a in zip(outputs, along, strict=True) if out.requires_grad]
    found, directions = zip(*pairs, strict=True)
    return torch.autograd.grad(found, inputs, directions, allow_unused=True)


def difference(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    """Return the largest difference of an output or a gradient, as a share of its norm; infinite where only one has it.

    The first are outputs, the others gradients of one pass.
    """
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if g is not None or w is not None]
    if any(g is None or w is None for g, w in pairs):
        return float("inf")
    norms = torch.stack([w.float().norm() for _, w in pairs])  # type: ignore[union-attr]
    errors = torch.stack([(g.float() - w.float()).norm() for g, w in pairs])  # type: ignore[union-attr]
    floor = SHARE * norms[1:].norm()
    return float((errors / norms.clamp_min(floor).clamp_min(torch.finfo(torch.float32).tiny)).max())


def _draws(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_draws(device: torch.device, states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
