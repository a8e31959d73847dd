"""Prints a table whole, also where the terminal is narrower: a figure that is cut short says nothing."""

from __future__ import annotations

from typing import Any


def print_table(table: Any, console: Any = None) -> None:
    """Print a rich Table, to the terminal without a `console`. Its lines are as long as it needs, whatever the width there."""
    from rich.console import Console

    console = console or Console()
    before = console.width
    console.width = max(before, Console(width=10_000).measure(table).maximum)
    try:
        console.print(table)
    finally:
        console.width = before
