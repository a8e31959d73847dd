"""The run folder: what made it, states to continue from, the log. Everything is written aside and renamed.

run.json                 recipe as resolved, number of steps, and what made the run (provenance.py), its continuations too
log.jsonl                one row per logged step or evaluation
state/step-120/          head.safetensors, optimizer.pt, state.json; with ema, average.safetensors
head/                    the result
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.data.jsonl import lock
from headway.data.manifest import check_writable, read_json, write_json
from headway.heads.common.aside import file_aside, folder_aside, naming
from headway.heads.common.checkpoint import read_tensors
from headway.heads.common.errors import HeadwayError
from headway.train.config import TrainConfig
from headway.train.provenance import continuation, provenance

KEEP = 2
FREE_KEYS = (
    "out", "tracker", "save_every", "log_every", "cache", "eval_every", "eval_prompts", "eval_tokens", "tree",
    "target_device", "shard_target", "compile",
)  # fmt: skip
"""Recipe keys that may change when a run is continued: they do not touch the weights, but for rounding."""


@dataclass
class Progress:
    """The counters of a run."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Supervised tokens trained on, by all processes."""
    seconds: float = 0.0
    """Time of the training steps, over all continuations."""
    eval_seconds: float = 0.0
    """Time of the evaluations, which is not in `seconds`."""
    skipped: int = 0
    """Batches without a supervised token."""
    evaluated_at: int = 0
    """Step of the last evaluation that ran to its end."""


@dataclass
class Saved:
    """A state read back, as one process would hold it."""

    progress: Progress
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    average: dict[str, Tensor] | None
    rng: dict[str, Any]


class RunFolder:
    """Reads and writes a run folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._held: BinaryIO | None = None

    def hold(self) -> None:
        """Keep other processes from training in this folder until `release`, and clear what one that was killed left.

        Raises HeadwayError when one trains in it.
        """
        if self._held is None:
            self._held = (self.path / ".lock").open("ab")
            lock(self._held, self.path)
            self._remove_old()

    def release(self) -> None:
        """Let others train in this folder; safe to call twice."""
        if self._held is not None:
            self._held.close()
            self._held = None

    @property
    def head(self) -> Path:
        """Where the result goes."""
        return self.path / "head"

    def check(self, config: TrainConfig, dialogs_sha256: str) -> dict[str, Any] | None:
        """Return what run.json holds, or None for a new run.

        Raises HeadwayError when the folder holds something else, or a run with another recipe or other dialogs, naming
        the first difference.
        """
        check_writable(self.path / "run.json")
        saved = self.read_run()
        if saved is not None:
            self._check_same(saved, json.loads(json.dumps(config.to_json())), dialogs_sha256)
        elif self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir()):
            raise HeadwayError(f"{self.path} is not empty and holds no run; give another folder: out=...")
        return saved

    def create(
        self,
        config: TrainConfig,
        argv: Sequence[str],
        manifest: dict[str, Any],
        dialogs_sha256: str,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Make the folder of a new run; `facts` are what it is to be continued with beside the recipe."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_run(
            {
                "recipe": config.to_json(),
                **provenance(argv),
                **(facts or {}),
                "dialogs": manifest,
                "dialogs_sha256": dialogs_sha256,
                "total_steps": None,
            }
        )

    def fix_total(self, total_steps: int) -> None:
        """Record the number of steps of the run."""
        self._write_run({**(self.read_run() or {}), "total_steps": total_steps})

    def note_continued(self, argv: Sequence[str], step: int) -> None:
        """Record that the run goes on after `step`, by what command, code and machine."""
        run = self.read_run() or {}
        self._write_run({**run, "continued": [*run.get("continued", []), continuation(argv, step)]})

    def read_run(self) -> dict[str, Any] | None:
        """Return run.json, or None where there is none."""
        path = self.path / "run.json"
        if not path.is_file():
            return None
        run = read_json(path)
        if not {"recipe", "total_steps", "dialogs_sha256"} <= set(run):
            raise HeadwayError(f"{path} describes no run; delete it to begin anew, or give another folder: out=...")
        return run

    def save(
        self,
        progress: Progress,
        weights: Mapping[str, Tensor],
        optimizer: dict[str, Any],
        average: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Write a state, from the whole state of what is trained, its optimizer and average, and remove all but the newest two.

        Raises HeadwayError for an empty tensor, as an engine leaves behind that keeps it in parts.
        """
        for name, tensor in weights.items():
            if tensor.numel() == 0:
                raise HeadwayError(f"tensor {name!r} is empty, so the state was not saved; gather the weights first")
        folder = self.path / "state" / f"step-{progress.step}"
        with folder_aside(folder) as aside:
            save_file(_copies(weights), aside / "head.safetensors")
            if average is not None:
                save_file(_copies(average), aside / "average.safetensors")
            torch.save({"optimizer": optimizer, "rng": _rng()}, aside / "optimizer.pt")
            (aside / "state.json").write_text(json.dumps(asdict(progress)) + "\n", encoding="utf-8")
        self._remove_old()
        return folder

    def load(self, *, average: bool) -> Saved | None:
        """Return the newest state, with its average if the run keeps one; None where there is no state.

        Raises HeadwayError for a damaged state, naming the file.
        """
        for folder in self._states():
            try:
                rest = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as e:
                raise _damaged(folder / "optimizer.pt", folder) from e
            try:
                progress = Progress(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as e:
                raise _damaged(folder / "state.json", folder) from e
            tensors = read_tensors(folder / "head.safetensors")
            averaged = read_tensors(folder / "average.safetensors") if average else None
            return Saved(progress, tensors, rest["optimizer"], averaged, rest["rng"])
        return None

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to log.jsonl."""
        path = self.path / "log.jsonl"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind_log(self, step: int) -> None:
        """Drop log rows after `step`, and a torn last line: the steps from there are done again."""
        path = self.path / "log.jsonl"
        if not path.is_file():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                continue
        with file_aside(path) as aside:
            aside.write_text("".join(kept), encoding="utf-8")

    def newest_step(self) -> int | None:
        """Return the step of the newest state, or None."""
        states = self._states()
        return int(states[0].name.removeprefix("step-")) if states else None

    def _states(self) -> list[Path]:
        """Return the states, newest first. Only whole ones carry such a name."""
        folder = self.path / "state"
        found = [p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit()] if folder.is_dir() else []
        return sorted(found, key=lambda p: -int(p.name.removeprefix("step-")))

    def _remove_old(self) -> None:
        """Remove all states but the newest, and what a process that was killed while it saved left: the folder is held."""
        torn = (self.path / "state").glob(".step-*")
        for old in [*self._states()[KEEP:], *torn]:
            shutil.rmtree(old, ignore_errors=True)

    def _write_run(self, run: dict[str, Any]) -> None:
        write_json(self.path / "run.json", run)

    def _check_same(self, saved: dict[str, Any], recipe: dict[str, Any], dialogs_sha256: str) -> None:
        # A run begun before a key existed was made with what is now its default.
        defaults = {f.name: f.default for f in fields(TrainConfig) if f.default is not MISSING}
        known = {**json.loads(json.dumps(defaults)), **saved["recipe"]}
        for key in {**saved["recipe"], **recipe}:
            before, after = known.get(key), recipe.get(key)
            if before != after and key not in FREE_KEYS:
                if isinstance(before, dict) and isinstance(after, dict):
                    inner = next(k for k in {**before, **after} if before.get(k) != after.get(k))
                    key, before, after = f"{key}.{inner}", before.get(inner), after.get(inner)
                raise HeadwayError(
                    f"{self.path} holds a run with {key} {before!r}, the recipe now says {after!r}; continue it with "
                    "the same value, or give another folder: out=..."
                )
        if saved["dialogs_sha256"] != dialogs_sha256:
            raise HeadwayError(
                f"{self.path} holds a run on other dialogs (those in {recipe['dialogs']} have changed since); give "
                "another folder: out=..."
            )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file. Raises HeadwayError where there is none."""
    if not path.is_file():
        raise HeadwayError(f"{path} does not exist; make the folder with `headway distill`")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _damaged(path: Path, folder: Path) -> HeadwayError:
    return HeadwayError(f"{path} is damaged; delete {folder} to continue from the state before it")


def _rng() -> dict[str, Any]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_rng(states: dict[str, Any]) -> None:
    """Go on with the random numbers of a state; of GPUs, as far as there are as many as there were."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
