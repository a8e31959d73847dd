"""A head's pass in training, compiled by torch.compile: what goes through `Head.training_pass`, forward and backward.

Batches differ in rows and positions, so one compiled graph takes them all, but for the few cases that torch makes one of their
own for: a single row, say. The LM head and the loss stay outside, where nothing of the size of all logits is kept.

What each new graph gives is compared with the plain pass, outputs and gradients; where it differs, or cannot be made, the pass
runs plainly from there on, which is said by name. The clock of the run stands still meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.compiled import BACKEND, Backend, check_compiler, reason_of, twin_of
from headway.inference.host import stop_clock
from headway.train.gathered import is_split
from headway.train.progress import say

MOST = 12
"""Graphs that are made; batches that fit none of them then run plainly."""
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
        self._device, self._backend = device, backend
        self._allowed = ALLOWED_ROUGH if rough else ALLOWED
        self._made: dict[Any, Pass] = {}
        self._full = False

    def __call__(self, function: Pass, head: Head, *arguments: Any) -> list[Tensor]:
        """Return `function(head, *arguments)`."""
        if self.reason:
            return function(head, *arguments)
        before, begin, draws = self.num_graphs, perf_counter(), _draws(self._device)
        try:
            if before:
                out = self._run(function, head, *arguments)
            if self.num_graphs > before or not before:
                self._compare(function, head, arguments, draws)
                _set_draws(self._device, draws)
                out = self._run(function, head, *arguments)
        except Exception as e:  # noqa: BLE001 - any failure of the compiler means the lesser mode, named
            reason = str(e) if isinstance(e, HeadwayError) else reason_of(e)
            out = self._stop(reason, draws, function, head, *arguments)
        if self.num_graphs > before or self.reason:
            self._count(perf_counter() - begin, arguments)
        return out

    def figures(self) -> dict[str, Any]:
        """Return what belongs in the figures of a run: whether its pass was compiled, else why not; graphs, and seconds."""
        return {
            "compiled": self.reason or True,
            "compiled_graphs": self.num_graphs,
            "compile_seconds": round(self.seconds, 1),
        }

    def _run(self, function: Pass, head: Head, *arguments: Any) -> list[Tensor]:
        if function not in self._made:
            # Several functions of a head, or a head after another, would share what torch keeps of one code object.
            self._made[function] = torch.compile(
                twin_of(function, "compiled"), fullgraph=True, dynamic=True, backend=self._make
            )
        with self._settings():
            return self._made[function](head, *arguments)

    def _make(self, graph: Any, inputs: Sequence[Any]) -> Any:
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
        given = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
        inputs = [*given, *(p for p in head.parameters() if p.requires_grad)]
        found = []
        for run in (function, lambda *a: self._run(function, *a)):
            _set_draws(self._device, draws)
            outputs = run(head, *arguments)
            trained = [out for out in outputs if out.requires_grad]  # with a LoRA some may not be
            generator = torch.Generator(self._device).manual_seed(0)
            along = [torch.randn(o.shape, dtype=o.dtype, device=o.device, generator=generator) for o in trained]
            grads = torch.autograd.grad(trained, inputs, along, allow_unused=True)
            found.append([torch.cat([out.detach().flatten() for out in outputs]), *grads])
        worst = difference(*found)
        if not worst <= self._allowed:
            raise HeadwayError(f"it differs from the plain one by {worst:.2g}")

    def _stop(self, reason: str, draws: Any, function: Pass, *arguments: Any) -> list[Tensor]:
        self.reason = reason
        self._made.clear()
        _set_draws(self._device, draws)
        say(f"{self.name} is not compiled and runs as it is: {reason}")
        return function(*arguments)

    def _count(self, seconds: float, arguments: tuple[Any, ...]) -> None:
        self.seconds += seconds
        stop_clock(seconds)
        if self.reason:
            return
        rows, positions = next(a for a in arguments if isinstance(a, Tensor)).shape[:2]
        say(
            f"compiled {self.name}, graph {self.num_graphs}, for {rows} rows of {positions} positions, in {seconds:.0f} s"
        )
        if self.num_graphs >= MOST and not self._full:
            self._full = True
            say(f"{self.name} has {MOST} graphs; batches that fit none of them run as they are from here on")


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
