"""The accelerator of a run, as `accelerate launch` or torchrun set it up; what would silently be something else is refused."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch.distributed import PrefixStore, TCPStore, init_process_group

from headway.heads.common.errors import HeadwayError

if TYPE_CHECKING:
    from headway.train.config import TrainConfig

CONFIGS = "recipes/accelerate"
ENGINES = {"ACCELERATE_USE_FSDP": DistributedType.FSDP, "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED}


def launch(config: TrainConfig) -> Accelerator:
    """Return the accelerator. Raises HeadwayError unless it is the one that was asked for, and one that heads train on."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    asked = next((kind for name, kind in ENGINES.items() if os.environ.get(name, "false").lower() == "true"), None)
    if asked == DistributedType.DEEPSPEED and find_spec("deepspeed") is None:
        raise HeadwayError(
            "accelerate was told to use DeepSpeed, which is not installed; run `pip install 'headway[deepspeed]'`"
        )
    trackers = None if config.tracker == "none" else [config.tracker]
    no_gpu = world_size > 1 and not torch.cuda.is_available()
    # Without a GPU processes find each other only where accelerate is told to stay on the CPU; and DeepSpeed only where not.
    on_cpu = no_gpu and asked is None
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")] if no_gpu and not on_cpu else []
    _meet_again(world_size)
    accelerator = Accelerator(
        cpu=on_cpu, log_with=trackers, project_dir=config.out if trackers else None, kwargs_handlers=handlers
    )
    if accelerator.num_processes != world_size:
        raise HeadwayError(
            f"{world_size} processes were launched, but accelerate sees {accelerator.num_processes}; launch one, or "
            f"see {CONFIGS}/cpu.yaml for several on a CPU"
        )
    _check(accelerator, asked)
    return accelerator


def _meet_again(world_size: int) -> None:
    """Make the process group of processes that torch's agent has started again.

    The agent keeps one store over all restarts, where the dead have left the addresses at which they listened; without a name of
    its own each restart would try to reach those.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if world_size == 1 or restarts == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=False)
    init_process_group(
        store=PrefixStore(f"restart {restarts}", store), rank=int(os.environ["RANK"]), world_size=world_size
    )


def _check(accelerator: Accelerator, asked: DistributedType | None) -> None:
    kind = accelerator.distributed_type
    if asked is not None and kind != asked:
        raise HeadwayError(
            f"accelerate was configured for {asked.value} and gave {kind.value}, as it does without a GPU; on a CPU use "
            f"{CONFIGS}/cpu.yaml"
        )
    plain = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if kind not in (*plain, *ENGINES.values()):
        raise HeadwayError(
            f"accelerate was configured for {kind.value}; heads train on one process, with plain data parallelism "
            f"(MULTI_GPU), FSDP2 or DeepSpeed: see {CONFIGS}"
        )
    if kind in ENGINES.values() and accelerator.mixed_precision != "no":
        raise HeadwayError(
            f"mixed_precision is {accelerator.mixed_precision}, which would have {kind.value} keep the weights in it; set it to "
            "'no' in the accelerate config: the recipe's autocast runs the products in bfloat16"
        )
    if kind == DistributedType.FSDP:
        _check_fsdp(accelerator)


def _check_fsdp(accelerator: Accelerator) -> None:
    plugin = accelerator.state.fsdp_plugin
    policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
    if not accelerator.is_fsdp2:
        raise HeadwayError(f"FSDP1 is not supported; set fsdp_version: 2, as in {CONFIGS}/fsdp2.yaml")
    if policy != "NO_WRAP":
        raise HeadwayError(
            f"fsdp_auto_wrap_policy is {policy}; a head's loss reads its weights as one unit: set it to NO_WRAP, as in "
            f"{CONFIGS}/fsdp2.yaml"
        )
    if plugin.cpu_ram_efficient_loading or plugin.activation_checkpointing:
        raise HeadwayError(
            "fsdp_cpu_ram_efficient_loading and fsdp_activation_checkpointing are for large models; set them to false, as in "
            f"{CONFIGS}/fsdp2.yaml"
        )
