"""Tables of figures are printed whole on a narrow terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from headway.inference.bench import print_crossover
from headway.inference.whole_table import print_table


@pytest.mark.parametrize("width", [20, 200])
def test_no_figure_is_cut_short(width: int) -> None:
    table = Table(box=SIMPLE, title="milliseconds")
    for heading in ("method", "tok/s", "speed-up", "x plain"):
        table.add_column(heading, no_wrap=True)
    table.add_row("transformers lookup", "123.4", "1.23", "0.98")
    console = Console(width=width, file=StringIO())
    print_table(table, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said
    assert any("transformers lookup" in line and "0.98" in line for line in said.splitlines())
    assert console.width == width


def test_a_bench_of_several_batches_is_whole() -> None:
    rows = [{"name": "n-gram or a head of a long name", "ratio_vs_plain": 1.25}]
    console = Console(width=20, file=StringIO())
    print_crossover([{"rows": rows, "settings": {"batch_size": size}} for size in (1, 2, 4)], console)
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]
