"""Reports of tune, bench, eval and audit that lie in a run or beside its head, as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.heads.common.redact import hide_secrets
from headway.heads.common.report_tables import Table, figure, report_tables
from headway.train.run_log import dotted

OURS = ("run.json", "config.json")
MOST_BYTES = 64 << 20
TREES = 6
"""Of those that tune compared, the best."""


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
    return [_audit(report)] if "checks" in report else report_tables(report)


def _tune(place: str, entry: dict[str, Any]) -> Table:
    rows = [
        [c["policy"], figure(c["accepted_length"]), figure(c["round_ms"], 1), figure(c["tokens_per_ms"] * 1000, 1)]
        for c in entry.get("candidates", [])[:TREES]
    ]
    for count, other in (entry.get("rows") or {}).items():
        rows.append([f"{count} at once: {other['policy']}", figure(other.get("expected_accepted_length")), "", ""])
    gain = f", {figure(entry.get('expected_ratio_vs_plain'))} x plain expected" if entry.get("candidates") else ""
    title = f"tune on {place}: {entry['policy']}{gain}"
    return Table(title, ["tree", "accepted", "round ms", "tokens/s"], rows, str(entry.get("reason", "")))


def _audit(report: dict[str, Any]) -> Table:
    rows = [[f"{c['name']}: {c['what']}", figure(c["tokens"]), str(c["verdict"])] for c in report["checks"]]
    exact = "exact" if report["exact"] else "NOT exact"
    return Table(f"audit, {exact}", ["check", "tokens", "verdict"], rows, str(report.get("command", "")))


def flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Return the entries of `dotted`, as words without secrets."""
    return [
        (key, hide_secrets(entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)))
        for key, entry in dotted(value, name)
    ]
