"""`headway report RUN ...`: one self-contained page with a run's curves, figures, recipe and origin; several are overlaid."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from markupsafe import Markup

from headway import __version__
from headway.data.manifest import check_writable
from headway.heads.common.aside import file_aside
from headway.heads.common.errors import HeadwayError
from headway.heads.common.redact import hide_secrets, without_secrets
from headway.heads.common.report_tables import Table
from headway.train.beside import flatten, tables_beside
from headway.train.curves import Curve, chart, smooth, spell
from headway.train.page import MARK, render
from headway.train.run_log import BY, RunLog, read_run_log, spell_time, state

FILE = "report.html"
FIGURES = (
    ("step", "step", "steps"),
    ("loss", "loss", "steps"),
    ("learning rate", "lr", "steps"),
    ("gradient norm", "grad_norm", "steps"),
    ("tokens/s", "tokens_per_s", "steps"),
    ("memory, GiB", "memory_gib", "steps"),
    ("held-out loss", "held_out_loss", "evaluations"),
    ("accepted length", "accepted_length", "evaluations"),
    ("seconds of the last evaluation", "held_out_seconds", "evaluations"),
    ("of these for the accepted length", "accepted_seconds", "evaluations"),
)
SMOOTHED = "pale: as logged; strong: running mean; dots: held-out rows"
ORIGIN = ("argv", "code", "versions", "python", "host", "dtype", "processes", "weights", "mode", "started", "continued")
GIVEN = ("dialogs", "dialogs_sha256", "features", "rows")


def report(folders: Sequence[str | Path], out: Path | str | None = None, by: str = "steps") -> Path:
    """Write the page of one run or several, and return its path: `out`, or report.html in the one run's folder.

    Raises HeadwayError, before anything is written, for a folder that is no run and for a place that is not to be written.
    """
    if by not in BY:
        raise HeadwayError(f"--by is {by!r}; give one of {', '.join(BY)}")
    if out is None and len(folders) > 1:
        raise HeadwayError("several runs have no folder in common; say where the page goes: --out report.html")
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise HeadwayError("a run is given twice; give each once")
    logs = [read_run_log(folder) for folder in folders]
    path = Path(folders[0]) / FILE if out is None else Path(out)
    _check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(path) as aside:
        aside.write_text(page(logs, by), encoding="utf-8", errors="backslashreplace")
    return path


def page(logs: Sequence[RunLog], by: str = "steps") -> str:
    """Return the HTML of a report."""
    several = len(logs) > 1
    beside: list[Table] = []
    unknown: list[str] = []
    for log in logs:
        tables, names = tables_beside(log.folder)
        prefix = f"{log.name}/" if several else ""
        beside += [Table(prefix + t.title, t.heading, t.rows, t.note) for t in tables]
        unknown += [prefix + name for name in names]
    recipes = [dict(flatten(log.recipe)) for log in logs]
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    rows = [[key, *(recipe.get(key, "") for recipe in recipes)] for key in keys]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)  # what differs comes first
    return render(
        title=f"{len(logs)} runs" if several else f"Run {logs[0].name}",
        runs=[{"name": log.name, "state": state(log), "what": _what(log)} for log in logs],
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        by=by,
        several=several,
        wary=[(log.name, line) for log in logs for line in log.wary],
        # ElementTree escaped what is in the pictures.
        charts=[(name, note, Markup(svg)) for name, note, svg in charts(logs, by)],
        last=_last_values(logs),
        recipe=Table("", ["key", *(log.name for log in logs)], rows),
        beside=beside,
        unknown=unknown,
        provenance=[(log.name, _entries(log, ORIGIN)) for log in logs],
        data=[(log.name, _entries(log, GIVEN)) for log in logs],
    )


def charts(logs: Sequence[RunLog], by: str) -> list[tuple[str, str, str]]:
    """Return name, note and <svg> of each chart that has points: runs in colours, or the draft steps of a single run."""
    x_name = {"steps": "step", "tokens": "supervised tokens trained on", "minutes": "minutes of training steps"}[by]
    places = (
        log.points(name, by, rows)[0] for log in logs for name, rows in (("lr", "steps"), ("step", "evaluations"))
    )
    reach = max((xs[-1] for xs in places if xs), default=1.0)
    several = len(logs) > 1
    found = [("loss", SMOOTHED, _both(logs, "loss", "held_out_loss", by))]
    width = max(max(log.width("agreement_S"), log.width("held_out_agreement_S", "evaluations")) for log in logs)
    if several:
        found += [
            (
                f"agreement, draft step {i + 1}",
                SMOOTHED,
                _both(logs, f"agreement_S/{i}", f"held_out_agreement_S/{i}", by),
            )
            for i in range(width)
        ]
    else:
        curves = [
            curve
            for i in range(width)
            for curve in _both(logs, f"agreement_S/{i}", f"held_out_agreement_S/{i}", by, f"step {i + 1}", i)
        ]
        found.append(("agreement with the target, by draft step", SMOOTHED, curves))
    accepted = [
        Curve(log.name, *log.points("accepted_length", by, "evaluations"), i, "points") for i, log in enumerate(logs)
    ]
    drifts = _both(logs, "target_kl", "held_out_target_kl", by)
    found.append(("KL divergence from the unchanged target, nats a token", SMOOTHED, drifts))
    found.append(("accepted length", "emitted tokens per target pass, held-out prompts, the real decoder", accepted))
    for name, key in (
        ("learning rate", "lr"),
        ("gradient norm", "grad_norm"),
        ("tokens/s", "tokens_per_s"),
        ("memory, GiB", "memory_gib"),
    ):
        found.append((name, "", [Curve(log.name, *log.points(key, by), i) for i, log in enumerate(logs)]))
    drawn = [
        (name, note, chart(name, curves, x_name, reach, log=name == "gradient norm")) for name, note, curves in found
    ]
    return [one for one in drawn if one[2]]


def _both(logs: Sequence[RunLog], key: str, held_out: str, by: str, name: str = "", number: int = 0) -> list[Curve]:
    """Return a figure as logged and smoothed, and the same on held-out rows, of each run."""
    curves = []
    for i, log in enumerate(logs):
        called, colour = name or log.name, number + i
        xs, ys = log.points(key, by)
        curves += [Curve(called, xs, ys, colour, "faint"), Curve(called, xs, smooth(ys), colour)]
        curves.append(Curve(called, *log.points(held_out, by, "evaluations"), colour, "points"))
    return curves


def _last_values(logs: Sequence[RunLog]) -> Table:
    """Return the newest value of each figure that any of the runs has."""
    figures = list(FIGURES)
    for name, key, rows in (
        ("agreement", "agreement_S", "steps"),
        ("held-out agreement", "held_out_agreement_S", "evaluations"),
    ):
        width = max(log.width(key, rows) for log in logs)
        figures += [(f"{name}, draft step {i + 1}", f"{key}/{i}", rows) for i in range(width)]
    table = [[name, *(_value(log.last(key, rows)) for log in logs)] for name, key, rows in figures]
    newest = [(log.steps or log.evaluations or [{}])[-1] for log in logs]
    table.append(["tokens trained on", *(_value(row.get("total_tokens")) for row in newest)])
    seconds = [row.get("seconds") for row in newest]
    table.append(["time of the training steps", *("-" if s is None else spell_time(s) for s in seconds)])
    return Table("", ["", *(log.name for log in logs)], [row for row in table if set(row[1:]) != {"-"}])


def _value(value: float | None) -> str:
    return "-" if value is None else spell(value)


def _what(log: RunLog) -> str:
    """Return what a run trains, in a line."""
    recipe = log.recipe
    device = ", ".join((log.run.get("host") or {}).get("gpus") or []) or (log.run.get("host") or {}).get("cpu", "")
    parts = [f"{recipe.get('family')} for {recipe.get('target')}", log.run.get("dtype"), device]
    return hide_secrets(", ".join(str(part) for part in parts if part))


def _entries(log: RunLog, names: Sequence[str]) -> Table:
    """Return entries of run.json as a table of two columns."""
    rows = []
    for name in names:
        value = log.run.get(name)
        if name == "argv" and isinstance(value, list):
            value = " ".join(without_secrets([str(word) for word in value]))
        rows += flatten(value, name) if value is not None else []
    return Table("", ["", ""], [list(pair) for pair in rows])


def _check_place(path: Path) -> None:
    """Raise HeadwayError where a report cannot be written, or would take the place of something else."""
    check_writable(path)
    if path.is_dir():
        raise HeadwayError(f"{path} is a folder; give a file: --out {path / FILE}")
    if path.exists() and MARK.encode() not in path.read_bytes()[:2000]:
        raise HeadwayError(f"{path} is there already and is no report; give another --out")
