"""A run as it lies in its folder, whole, interrupted or still going: its figures by step, its state, and what to be wary of."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.data.manifest import read_json
from headway.heads.common.errors import HeadwayError
from headway.heads.common.redact import hide_secrets

BY = {"steps": "step", "tokens": "total_tokens", "minutes": "seconds"}
"""What curves may run along, and the figure that says it."""


@dataclass
class RunLog:
    """What a report is made of."""

    name: str
    folder: Path
    run: dict[str, Any]
    """run.json."""
    steps: list[dict[str, Any]]
    """Rows of the log about a training step, in order."""
    evaluations: list[dict[str, Any]]
    """Rows of the log about held-out rows."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The finished head's figures."""
    wary: list[str] = field(default_factory=list)
    """What was left out, and where a lesser mode or a mixed origin was taken."""

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, nested fields under dotted names."""
        return dict(dotted(self.run["recipe"]))

    def points(self, name: str, by: str, rows: str = "steps") -> tuple[list[float], list[float]]:
        """Return the places and values of a figure; `agreement_S/1` is number 1 of a list."""
        key, _, index = name.partition("/")
        xs, ys = [], []
        for row in getattr(self, rows):
            value = row.get(key)
            if index:
                value = value[int(index)] if isinstance(value, list) and len(value) > int(index) else None
            x = row.get(BY[by])
            if is_number(value) and is_number(x):
                xs.append(x / 60 if by == "minutes" else float(x))
                ys.append(float(value))
        return xs, ys

    def last(self, name: str, rows: str = "steps") -> float | None:
        """Return the newest value of a figure, None where there is none."""
        _, ys = self.points(name, "steps", rows)
        return ys[-1] if ys else None

    def width(self, name: str, rows: str = "steps") -> int:
        """Return how many numbers a list figure has."""
        return max((len(v) for row in getattr(self, rows) if isinstance(v := row.get(name), list)), default=0)


def read_run_log(folder: Path | str, name: str | None = None) -> RunLog:
    """Return the run in a folder. Raises HeadwayError where it holds none."""
    folder = Path(folder)
    if not (folder / "run.json").is_file():
        inner = folder.name == "head" and (folder.parent / "run.json").is_file()
        remedy = f"give {folder.parent}" if inner else "give the folder that a recipe names as `out`"
        raise HeadwayError(f"{folder} is no run: it holds no run.json; {remedy}")
    run = read_json(folder / "run.json")
    if not isinstance(run.get("recipe"), dict) or "total_steps" not in run:
        raise HeadwayError(f"{folder / 'run.json'} describes no run; give the folder that a recipe names as `out`")
    rows, wary = _read_rows(folder / "log.jsonl")
    steps = [row for row in rows if "lr" in row]
    evaluations = [row for row in rows if any(key.startswith(("held_out_", "accepted_")) for key in row)]
    _add_speed(steps)
    log = RunLog(str(name or folder), folder, run, steps, evaluations, wary=wary)
    config = folder / "head" / "config.json"
    if config.is_file():
        found = read_json(config).get("metrics")
        log.metrics = found if isinstance(found, dict) else {}
    log.wary += [hide_secrets(line) for line in _wary_of(log)]
    return log


def state(log: RunLog, now: Callable[[], float] = time.time) -> str:
    """Return how far a run is, in words."""
    total: Any = log.run["total_steps"]
    if (log.folder / "head" / "config.json").is_file():
        return f"finished: {spell_count(log.metrics.get('steps', total))} steps"
    if not log.steps and not log.evaluations:
        return "begun; no step is logged yet"
    step: Any = max(row["step"] for row in [*log.steps, *log.evaluations])
    share = f" ({step / total:.0%})" if is_number(total) and total > 0 else ""
    age = spell_time(max(0.0, now() - (log.folder / "log.jsonl").stat().st_mtime))
    left = log.last("left_seconds")
    left_said = f"; then {spell_time(left)} of training steps were left" if left else ""
    return f"not finished: step {spell_count(step)} of {spell_count(total)}{share}, last figures {age} ago{left_said}"


def dotted(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested mappings, and of lists of them, under dotted names."""
    if isinstance(value, dict):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(v, dict) for v in value):
        inner = enumerate(value)
    else:
        yield name, value
        return
    for key, each in inner:
        yield from dotted(each, f"{name}.{key}" if name else str(key))


def is_number(value: Any) -> bool:
    """Return whether a figure is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def spell_count(value: Any) -> str:
    """Return a count with its thousands apart."""
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def spell_time(seconds: float) -> str:
    """Return a time as one says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows that can be read, and what could not be, in words. A missing log has none."""
    if not path.is_file():
        return [], ["there is no log.jsonl"]
    rows: list[dict[str, Any]] = []
    broken = odd = 0
    *lines, rest = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            row = json.loads(line)
            good = isinstance(row, dict) and is_number(row.get("step"))
        except (ValueError, RecursionError):
            good = False
        if not good:
            broken += bool(line.strip())
            continue
        odd += sum(isinstance(v, float) and not math.isfinite(v) for v in row.values())
        rows.append(row)
    wary = []
    if rest.strip():
        wary.append("the last line of log.jsonl is torn, or was being written; it is left out")
    if broken:
        wary.append(f"{broken} broken lines of log.jsonl are left out")
    if odd:
        wary.append(f"{odd} figures of log.jsonl are not finite, and are left out of the curves")
    return rows, wary


def _add_speed(steps: list[dict[str, Any]]) -> None:
    """Give the rows of a run of an older version their tokens per second, from the row before."""
    for before, row in pairwise(steps):
        figures: list[Any] = [r.get(key) for r in (before, row) for key in ("seconds", "total_tokens")]
        if "tokens_per_s" not in row and all(map(is_number, figures)):
            s0, t0, s1, t1 = figures
            if s1 > s0:
                row["tokens_per_s"] = (t1 - t0) / (s1 - s0)


def _wary_of(log: RunLog) -> Iterator[str]:
    """Yield what a reader of the figures should know."""
    run, rows = log.run, log.run.get("rows")
    if isinstance(rows, dict):
        if rows.get("cut"):
            yield f"{rows['cut']} rows were cut to the longest length (max_length)"
        if rows.get("without_goal"):
            yield f"{rows['without_goal']} rows were left out: no supervised token"
    if log.metrics.get("skipped_batches"):
        yield f"{log.metrics['skipped_batches']} batches had no supervised token and were skipped"
    if run.get("mode", "tree") != "tree":
        yield f"the target runs in {run['mode']} mode: {run.get('mode_reason', '')}"
    yield from _wary_of_data(run)
    yield from _wary_of_origin(run)
    if log.evaluations and not any("accepted_length" in row for row in log.evaluations):
        yield "no accepted length was measured: eval_prompts is 0, or no held-out prompt fits"


def _wary_of_data(run: dict[str, Any]) -> Iterator[str]:
    """Yield what was left out, cut or repaired on the way to the dialogs."""
    dialogs = run.get("dialogs")
    if not isinstance(dialogs, dict):
        return
    counts = dialogs.get("counts")
    for key, count in counts.items() if isinstance(counts, dict) else ():
        if count and (str(key).startswith(("dropped: ", "note: ")) or key == "truncated"):
            yield f"dialogs: {key}: {count}"
        elif count and key == "length":
            yield f"dialogs: {count} answers were ended by the length limit"
    for where, reasons in _accounts(dialogs):
        yield from (f"prompts: {count} rows {where}: {reason}" for reason, count in reasons.items() if count)
    target = (run["recipe"] or {}).get("target")
    if dialogs.get("target", target) != target:
        yield f"the dialogs were written by {dialogs['target']}, the head is trained for {target}"


def _accounts(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the reasons for which rows were skipped or repaired, wherever a manifest has them; parts are in their whole."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key in ("skipped", "repaired") and isinstance(inner, dict):
            yield key, inner
        elif key != "parts":
            yield from _accounts(inner)


def _wary_of_origin(run: dict[str, Any]) -> Iterator[str]:
    """Yield where a run was not made by one code on one machine."""
    code = run.get("code")
    if isinstance(code, dict) and code.get("changed"):
        yield "the code was a checkout with changes that no commit holds"
    for entry in run.get("continued") or ():
        if not isinstance(entry, dict):
            continue
        other = [name for name in ("code", "versions", "python", "host") if entry.get(name) != run.get(name)]
        if other:
            yield f"continued after step {entry.get('step')} with other {', '.join(other)}"
