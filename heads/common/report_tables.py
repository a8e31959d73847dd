"""Reports of `headway bench` and `headway eval` as tables, for the card of a head and for the page of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Table:
    """Rows of words; the first column is text, the others are figures."""

    title: str
    heading: list[str]
    rows: list[list[str]]
    note: str = ""


BENCH = {
    "tree": "tree",
    "tokens_per_s": "tokens/s",
    "ratio_vs_transformers": "x transformers",
    "ratio_vs_plain": "x plain",
    "accepted_length": "accepted length",
    "ttft_ms": "ttft ms",
    "itl_ms": "itl ms",
}
"""Columns by the key of a row; those that no row has are left out."""
EVAL = {"prompts": "prompts", "accepted_length": "accepted length", "tokens": "tokens", "rounds": "rounds"}


def report_tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables of a report of `headway bench` (of one batch size or several) or `headway eval`; none where it is
    another's. Raises KeyError, TypeError, ValueError or AttributeError where it is not whole."""
    if "batches" in report:
        return [_bench(one) for one in report["batches"]]
    if "rows" not in report:
        return []
    if "environment" in report:
        return [_bench(report)]
    return [_eval(report)] if "head" in report else []


def _bench(report: dict[str, Any]) -> Table:
    place, prompts, settings = report["environment"], report["prompts"], report.get("settings", {})
    kinds = ", ".join(map(str, prompts.get("categories", ())))
    title = (
        f"headway bench, {place['dtype']}, {place['device']}, {prompts['count']} prompts{f' ({kinds})' if kinds else ''}, "
        f"{settings.get('batch_size', 1)} at once, temperature {settings.get('temperature', 0):g}, {place.get('date', 'undated')}"
    )
    columns = {k: name for k, name in BENCH.items() if any(row.get(k) is not None for row in report["rows"])}
    rows = []
    for row in report["rows"]:
        name = f"{row['name']} (lossy)" if row.get("lossy") else str(row["name"])
        same = row.get("identical")
        rows.append([name, *(figure(row.get(key)) for key in columns), "-" if same is None else f"{same:.0%}"])
    failed = [f"{e['name']}: {e['error']}" for e in [*report.get("refused", ()), *report.get("errors", ())]]
    note = "; ".join(filter(None, [report.get("command") or "", *failed]))
    return Table(title, ["method", *columns.values(), "same"], rows, note)


def _eval(report: dict[str, Any]) -> Table:
    rows = [[str(row["category"]), *(figure(row[key]) for key in EVAL)] for row in report["rows"]]
    title = f"headway eval, {report.get('dtype', '')}, {report.get('tree', '')}"
    return Table(title, ["category", *EVAL.values()], rows, f"{report['head']} on {report.get('target', '')}")


def figure(value: Any, places: int = 2) -> str:
    """Return a figure in words, - where there is none; what is text already as it is."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int | str) else f"{value:.{places}f}"
