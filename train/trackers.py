"""Where a run's figures go besides log.jsonl: wandb, tensorboard or trackio, through accelerate. None needs an account."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from headway.train.config import TrainConfig
from headway.train.progress import say
from headway.train.run_log import dotted


def begin_tracking(config: TrainConfig, accelerator: Accelerator, *, continued: bool) -> None:
    """Begin the tracker's run, if the recipe names a tracker; wandb without an account keeps its run in the run folder."""
    if config.tracker == "none":
        return
    if config.tracker == "wandb" and not knows_wandb_account():
        os.environ["WANDB_MODE"] = "offline"
        say(f"no wandb account is set up here: its run is kept in {config.out}/wandb; `wandb sync` sends it")
    name = str(Path(config.out))
    options = {
        "wandb": {"dir": config.out, "name": name},
        "trackio": {"name": name, "resume": "allow" if continued else "never"},
    }
    accelerator.init_trackers("headway", config=flat(config), init_kwargs=options)


def send(accelerator: Accelerator, row: dict[str, Any]) -> None:
    """Send a log row; of a list each number has a name of its own, such as agreement_S/0."""
    numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
    lists = {f"{k}/{i}": x for k, v in row.items() if isinstance(v, list) for i, x in enumerate(v)}
    accelerator.log({**numbers, **lists}, step=row["step"])


def end_tracking(accelerator: Accelerator) -> None:
    """Have the trackers write what they still hold; processes stay connected, which `end_training` would end."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []


def knows_wandb_account() -> bool:
    """Return whether wandb was told how to run, or would find a key; without one it would ask on the terminal."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def flat(config: TrainConfig) -> dict[str, Any]:
    """Return the recipe as trackers take it: plain values under dotted names."""
    return {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in dotted(config.to_json())}
