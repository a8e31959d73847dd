"""Several processes for a test, forked from it: they find torch imported, so that they take no longer than their work.

`run(2, function)` calls the function in two processes that accelerate takes for a launch with a config of recipes/accelerate,
and raises in the test what one of them raised. `run_elastic` starts them all again when one dies, as torchrun does. FSDP2 and
DeepSpeed, which accelerate itself offers on GPUs only, they get on a CPU.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

TIMEOUT = 240
CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"
Function = Callable[[], Any]


def read_config(name: str) -> Any:
    """Return what `accelerate launch` makes of a config in recipes/accelerate."""
    given = ["--config_file", str(CONFIGS / f"{name}.yaml"), "--main_process_port", str(free_port()), "train_heads.py"]
    return _validate_launch_command(launch_command_parser().parse_args(given))[0]


def environment(name: str) -> dict[str, str]:
    """Return what `accelerate launch` tells processes of a config in recipes/accelerate."""
    args = read_config(name)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(
            load_config_from_file(args.config_file).deepspeed_config
        )
        told = prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        told = prepare_multi_gpu_env(args)
    else:
        told = prepare_simple_launcher_cmd_env(args)[1]
    return {key: value for key, value in told.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


def run(num_processes: int, function: Function, config: str = "cpu", **changes: str) -> None:
    """Call the function in each of several processes that know one another; fail with what the first one raised.

    `changes` are made to the environment that the config gives them.
    """
    told = environment(config) | changes
    told |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]
    fork([lambda rank=rank: as_launched(function, config, told | rank) for rank in ranks])  # type: ignore[misc]


def run_elastic(num_processes: int, function: Function, max_restarts: int) -> None:
    """As `run`, under torch's elastic agent, which starts all again when one of them dies."""
    told = environment("cpu")
    launch = LaunchConfig(
        1, 1, num_processes, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id="test", max_restarts=max_restarts,
        start_method="fork", monitor_interval=0.05,
    )  # fmt: skip
    # In a process of its own, as the agent leaves signal handlers behind.
    fork([lambda: elastic_launch(launch, lambda: as_launched(function, "cpu", told))()])


def fork(functions: list[Function]) -> None:
    """Call each function in a process; fail with what the first one raised."""
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    children = [context.Process(target=_child, args=(function, errors)) for function in functions]
    for child in children:
        child.start()
    for child in children:
        child.join(TIMEOUT)
    alive = [child for child in children if child.is_alive()]
    for child in alive:
        child.kill()
    if not errors.empty():
        pytest.fail(errors.get())
    assert not alive, f"still running after {TIMEOUT} s"
    assert [child.exitcode for child in children] == [0] * len(children)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def as_launched(function: Function, config: str, told: dict[str, str]) -> None:
    """Call the function in this process as accelerate would have launched it."""
    os.environ |= told
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    if config == "fsdp2":
        PartialState(backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if config.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, in minutes
    function()


def _child(function: Function, errors: Any) -> None:
    try:
        function()
    except BaseException:  # noqa: BLE001 - it is raised in the test
        errors.put(traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)  # the others may be waiting for it
    os._exit(0)
