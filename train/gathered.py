"""What a run trains, its average and its optimizer as one process would hold them, whatever the engine split over the processes.

States on disk are written from this and read into it, so that a run goes on with another number of processes, or on
another engine. Everything here is called by all processes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.train.average import Average
from headway.train.optimizers import Both

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps for each weight."""


def is_split(accelerator: Accelerator) -> bool:
    """Return whether a process may hold parts of the head only, which it can then not call by itself."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


class Gathered:
    """Made before `accelerator.prepare`, which splits the head in place; `adopt` is called with what came out of it.

    `weights` is what is trained: the head, or where nothing is split a module that has it inside.
    """

    def __init__(
        self, accelerator: Accelerator, head: Head, weights: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.accelerator, self.head, self.weights = accelerator, head, weights
        self.is_split = is_split(accelerator)
        self.optimizer: Any = optimizer
        self.average: Average | None = None
        self._groups = [] if isinstance(optimizer, Both) else optimizer.state_dict()["param_groups"]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def adopt(self, optimizer: Any, ema: float) -> None:
        """Take the prepared optimizer, and begin the average of the weights if `ema` asks for one."""
        self.optimizer = optimizer
        if ema:
            with self._whole_parameters():
                self.average = Average(self.weights, ema)

    def update_average(self, step: int) -> None:
        """Take the weights after step number `step`, from 0, into the average."""
        if self.average is not None:
            with self._whole_parameters():
                self.average.update(self.weights, step)

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state dict of what is trained, on every process."""
        if not self.is_split:
            return self.weights.state_dict()
        with self._whole_parameters():
            return {name: _full(tensor).detach().cpu().clone() for name, tensor in self.weights.state_dict().items()}

    def average_tensors(self) -> dict[str, Tensor] | None:
        """Return the whole average, on every process; None where there is none."""
        return None if self.average is None else _map(self.average.weights, _full)  # type: ignore[no-any-return]

    def load_average(self, tensors: dict[str, Tensor] | None) -> None:
        """Take the weights of a whole average. Raises HeadwayError unless they are those of this head."""
        if self.average is not None and tensors is not None:
            self.average.load({name: self._like(self.average.weights.get(name), t) for name, t in tensors.items()})

    @contextmanager
    def result(self, wanted: bool) -> Iterator[Head | None]:
        """Give the head that the run would leave, its average where one is kept, for a process to call by itself; or None
        where it is not `wanted`."""
        if not self.is_split:
            with nullcontext() if self.average is None else self.average.instead(self.weights):
                yield self.head if wanted else None
            return
        tensors = self.tensors() | (self.average_tensors() or {})
        if not wanted:
            yield None
            return
        twin = type(self.head)(self.head.config, self.head.frozen)
        twin.objective = self.head.objective
        twin.load_state_dict(tensors)
        yield twin.to(self.accelerator.device)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's whole state in torch's layout, on every process."""
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return self._from_deepspeed()
        state: dict[str, Any] = self.optimizer.state_dict()
        return _map(state, lambda tensor: _full(tensor).cpu()) if self.is_split else state  # type: ignore[no-any-return]

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Fill the optimizer from a whole state. Raises HeadwayError when it is of another optimizer."""
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            self._to_deepspeed(state)
            return
        if self.is_split:
            raw = getattr(self.optimizer, "optimizer", self.optimizer)
            if isinstance(raw, Both):
                state = {name: self._split(part, state[name]) for name, part in raw.parts.items()}
            else:
                state = self._split(raw, state)
        self.optimizer.load_state_dict(state)

    def _whole_parameters(self) -> AbstractContextManager[Any]:
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([p for p in self.weights.parameters() if hasattr(p, "ds_id")])  # type: ignore[no-any-return]

    def _split(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
        """Return a whole state with each parameter's split as the parameter is."""
        now = [p for group in optimizer.param_groups for p in group["params"]]
        state = {
            i: {key: self._like(now[i], value) if isinstance(value, Tensor) else value for key, value in values.items()}
            for i, values in whole["state"].items()
        }
        return {**whole, "state": state}

    def _like(self, p: Tensor | None, value: Tensor) -> Tensor:
        """Return a whole tensor split as a tensor of the same shape is."""
        if p is None or not hasattr(p, "placements") or value.shape != p.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(self.accelerator.device), p.device_mesh, p.placements)  # type: ignore[attr-defined]

    def _zero_states(self) -> list[dict[str, Any]]:
        """Return what DeepSpeed's inner optimizer keeps for each flat part of this process; made where it is not yet."""
        zero = self.optimizer.optimizer
        flats = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
        for flat in flats:
            if not zero.optimizer.state[flat]:
                fresh = {key: torch.zeros_like(flat) for key in MOMENTS}
                # As the fused AdamW keeps it: beside the weights.
                zero.optimizer.state[flat] = {"step": torch.tensor(0.0, device=flat.device), **fresh}
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            # It links weights to these once, after the first group has stepped: the other groups' are then missing.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        return [zero.optimizer.state[flat] for flat in flats]

    def _from_deepspeed(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        step = self._zero_states()[0]["step"]
        state: dict[int, dict[str, Tensor]] = {}
        for i, p in enumerate(self._parameters):
            whole = {key: safe_get_full_optimizer_state(p, key).detach().cpu().clone() for key in MOMENTS}
            state[i] = {"step": step.detach().cpu().clone(), **whole}
        return {"state": state, "param_groups": self._groups}

    def _to_deepspeed(self, state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        wanted = {"step", *MOMENTS}
        if any(set(values) != wanted for values in state["state"].values()):
            raise HeadwayError("the state is of another optimizer than AdamW, and DeepSpeed continues that alone")
        for values in self._zero_states():
            values["step"] = torch.full_like(values["step"], float(state["state"][0]["step"]))
        for i, p in enumerate(self._parameters):
            for key in MOMENTS:
                value = state["state"][i][key].to(self.accelerator.device)
                if hasattr(p, "ds_tensor"):  # ZeRO-3: its part, the last one padded
                    size, rank = p.ds_tensor.numel(), self.accelerator.process_index
                    part = torch.nn.functional.pad(value.flatten(), (0, size * self.accelerator.num_processes))
                    safe_set_local_optimizer_state(p, part[rank * size :][:size], key)
                else:
                    safe_set_full_optimizer_state(p, value, key)


def _full(tensor: Tensor) -> Tensor:
    """Return a tensor whole, which FSDP may have split."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator, no-any-return]


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested dicts and lists with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return [_map(item, change) for item in value] if isinstance(value, list) else value
