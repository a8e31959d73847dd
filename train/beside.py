"""Reports of tune, bench, eval and audit that lie in a run or beside its head, as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.train.redact import hide_secrets

OURS = ("run.json", "config.json")
MOST_BYTES = 64 << 20
TREES = 6
"""Of those that tune compared, the best."""


@dataclass
class Table:
    """Rows of words; the first column is text, the others are figures."""

    title: str
    heading: list[str]
    rows: list[list[str]]
    note: str = ""


def tables_beside(run: Path) -> tuple[list[Table], list[str]]:
    """Return the tables of the reports found, and the names of JSON files that are no report that is known."""
    tables: list[Table] = []
    unknown = []
    for path in sorted([*run.glob("*.json"), *(run / "head").glob("*.json")]):
        if path.name in OURS or path.name.startswith("."):
            continue
        try:
            found = _tables(path) if path.stat().st_size <= MOST_BYTES else []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            found = []
        name = str(path.relative_to(run))
        tables += [Table(f"{name}: {t.title}", t.heading, t.rows, hide_secrets(t.note)) for t in found]
        unknown += [] if found else [name]
    return tables, unknown


def _tables(path: Path) -> list[Table]:
    report = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "tree.json":
        return [_tune(place, entry) for place, entry in report.items()]
    if "batches" in report:
        return [_bench(one) for one in report["batches"]]
    if "checks" in report:
        return [_audit(report)]
    if "rows" in report and "environment" in report:
        return [_bench(report)]
    if "rows" in report and "head" in report:
        return [_eval(report)]
    return []


def _tune(place: str, entry: dict[str, Any]) -> Table:
    rows = [
        [c["policy"], _fixed(c["accepted_length"]), _fixed(c["round_ms"], 1), _fixed(c["tokens_per_ms"] * 1000, 1)]
        for c in entry.get("candidates", [])[:TREES]
    ]
    for count, other in (entry.get("rows") or {}).items():
        rows.append([f"{count} at once: {other['policy']}", _fixed(other.get("expected_accepted_length")), "", ""])
    gain = f", {_fixed(entry.get('expected_ratio_vs_plain'))} x plain expected" if entry.get("candidates") else ""
    title = f"tune on {place}: {entry['policy']}{gain}"
    return Table(title, ["tree", "accepted", "round ms", "tokens/s"], rows, str(entry.get("reason", "")))


def _bench(report: dict[str, Any]) -> Table:
    place, settings = report["environment"], report.get("settings", {})
    keys = ("tokens_per_s", "ratio_vs_transformers", "ratio_vs_plain", "accepted_length", "ttft_ms", "itl_ms")
    rows = []
    for row in report["rows"]:
        name = f"{row['name']} (lossy)" if row.get("lossy") else str(row["name"])
        same = row.get("identical")
        rows.append([name, *(_fixed(row.get(key)) for key in keys), "-" if same is None else f"{same:.0%}"])
    count, batch = report["prompts"]["count"], settings.get("batch_size", 1)
    title = f"bench on {place['device']}, {place['dtype']}, {count} prompts, {batch} at once, {place.get('date', '')}"
    heading = ["method", "tokens/s", "speed-up", "x plain", "accepted", "ttft ms", "itl ms", "same"]
    note = report.get("command") or ""
    failed = [f"{e['name']}: {e['error']}" for e in [*report.get("refused", ()), *report.get("errors", ())]]
    return Table(title, heading, rows, "; ".join(filter(None, [note, *failed])))


def _eval(report: dict[str, Any]) -> Table:
    keys = ("prompts", "accepted_length", "tokens", "rounds")
    rows = [[str(row["category"]), *(_fixed(row[key]) for key in keys)] for row in report["rows"]]
    title = f"eval of {report['head']} on {report['target']}, {report.get('dtype', '')}, {report.get('tree', '')}"
    return Table(title, ["category", "prompts", "accepted length", "tokens", "rounds"], rows)


def _audit(report: dict[str, Any]) -> Table:
    rows = [[f"{c['name']}: {c['what']}", _fixed(c["tokens"]), str(c["verdict"])] for c in report["checks"]]
    exact = "exact" if report["exact"] else "NOT exact"
    return Table(f"audit, {exact}", ["check", "tokens", "verdict"], rows, str(report.get("command", "")))


def _fixed(value: Any, places: int = 2) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.{places}f}"


def flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Return the entries of nested mappings under dotted names, as words without secrets."""
    if isinstance(value, dict):
        return [pair for k, v in value.items() for pair in flatten(v, f"{name}.{k}" if name else str(k))]
    if isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, dict) for v in value):
        return [pair for i, v in enumerate(value) for pair in flatten(v, f"{name}.{i}")]
    word = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return [(name, hide_secrets(word))]
