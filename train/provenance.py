"""What made a run: code, versions, devices, command, data. Kept in run.json; no secret of a command is (redact.py)."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from headway import __version__
from headway.data.manifest import digest_file, read_json
from headway.data.recorded import FOLDER
from headway.heads.common.redact import without_secrets
from headway.inference.bench import cpu_name
from headway.train.config import TrainConfig

if TYPE_CHECKING:
    from headway.inference.target import Target
    from headway.train.batches import Rows

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "datasets", "numpy")
ROOT = Path(__file__).resolve().parent.parent
"""Of a checkout; of an installed package its own folder."""


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Return code, versions, host and command, JSON-ready."""
    return {
        "argv": without_secrets(argv),
        "code": code_version(),
        "versions": package_versions(),
        "python": platform.python_version(),
        "host": host(),
        "started": now(),
    }


def continuation(argv: Sequence[str], step: int) -> dict[str, Any]:
    """Return what is kept of a run's continuation at `step`."""
    entry = provenance(argv)
    return {"step": step, "at": entry.pop("started"), **entry}


def now() -> str:
    """Return the time, in UTC, as run.json has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def package_versions() -> dict[str, str]:
    """Return the versions of what a run computes with."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # installed by other means
            continue
    return found


def code_version() -> dict[str, Any]:
    """Return the package's version, and of a git checkout the commit, and whether files were changed since."""
    if not (ROOT / ".git").exists():
        return {"version": __version__}
    try:
        commit = _git("rev-parse", "HEAD").strip()
        changed = bool(_git("status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):  # no git here, or a checkout of another user's
        return {"version": __version__}
    return {"version": __version__, "commit": commit, "changed": changed}


def _git(*command: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "--no-optional-locks", *command],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return done.stdout


def host() -> dict[str, Any]:
    """Return what this machine is made of; not what it is called."""
    found: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda or torch.version.hip
    return found


def data_facts(config: TrainConfig, rows: Rows, target: Target) -> dict[str, Any]:
    """Return what a run was given: rows used and left out, features there already, and how well the target can be run."""
    facts: dict[str, Any] = {
        "rows": {
            "train": len(rows.train),
            "held_out": len(rows.held_out),
            "cut": rows.num_cut,
            "without_goal": rows.num_without_goal,
        },
        "mode": target.mode,
        "mode_reason": target.mode_reason,
    }
    manifest = Path(config.features or Path(config.dialogs) / FOLDER) / "manifest.json"
    if manifest.is_file():
        facts["features"] = {"folder": str(manifest.parent), "sha256": digest_file(manifest), **read_json(manifest)}
    return facts
