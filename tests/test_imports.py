"""Who may import whom: heads <- inference <- data <- train <- headway, and nothing optional on the way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["heads", "inference", "data", "train"]
OPTIONAL = ["deepspeed", "gguf", "matplotlib", "peft", "tensorboard", "trackio", "wandb"]
FILES = sorted(p for folder in ORDER for p in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import that can run; a relative one starts with a dot.

    What stands under `if TYPE_CHECKING:` names a type in a signature, and makes nothing depend on anything.
    """
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def faults(source: str, folder: str) -> list[str]:
    """Say what is wrong with the imports of a file of the folder."""
    found = []
    for line, name in imported(ast.parse(source)):
        first, _, rest = name.partition(".")
        second = rest.partition(".")[0]
        if first == "":
            found.append(f"{line}: {name} is relative, which breaks a script run as a file")
        elif first in ORDER:
            found.append(f"{line}: {name} is a bare name, import headway.{name}")
        elif first == "headway" and second not in ORDER and second != "__version__":
            found.append(f"{line}: {name} belongs to the outermost layer")
        elif first == "headway" and second in ORDER and ORDER.index(second) > ORDER.index(folder):
            found.append(f"{line}: {name} points right, {folder} comes before {second}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_point_left(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8"), path.relative_to(ROOT).parts[0]) == []


@pytest.mark.parametrize(
    "line",
    [
        "from headway.train.loop import run",
        "import headway.data.jsonl",
        "from headway import generate",
        "from headway.cli import main",
        "import heads",
        "from inference.target import Target",
        "from .cache import SlotCache",
        "def f():\n    from headway.data import jsonl",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from headway.data import jsonl",
    ],
)
def test_the_rule_catches(line: str) -> None:
    assert faults(line, "inference")


def test_the_rule_lets_pass() -> None:
    good = (
        "import torch\nfrom headway import __version__\nfrom headway.heads.medusa import Head\nimport headway.inference"
    )
    assert faults(good, "inference") == []


def test_nothing_optional_is_imported() -> None:
    """Every module is imported in a fresh process, with no GPU and no hub; no optional package comes in with them."""
    names = []
    for path in [*FILES, *sorted((ROOT / "headway").glob("*.py"))]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "headway" else ("headway", *parts)
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    code = "\n".join(
        [
            "import importlib, sys",
            f"for name in {sorted(set(names))}: importlib.import_module(name)",
            f"print(sorted(set({OPTIONAL}) & set(sys.modules)))",
        ]
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip().splitlines()[-1] == "[]"
