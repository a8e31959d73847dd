"""A dialogs folder and a recipe for the tiny target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.data.dialogs import Dialog, DialogWriter
from headway.inference.target import Target
from headway.train.config import TrainConfig, make_config
from tests.tiny import build, target
from tests.train.runs import SHORT

NUM_DIALOGS = 16


@pytest.fixture(scope="session")
def tiny() -> Target:
    return target(build(0, num_hidden_layers=4), mode="tree")


def write_dialogs(folder: Path, num_dialogs: int = NUM_DIALOGS, vocab_size: int = 272) -> Path:
    """Write dialogs whose answers follow a rule that a head can learn: each byte is the one before it plus one."""
    with DialogWriter(folder, {"target": "tiny", "vocab_size": vocab_size}) as writer:
        for i in range(num_dialogs):
            prompt = [259, 65 + i % 20, 10]
            answer = [97 + (i + j) % 26 for j in range(8 + i % 7)] + [260]
            writer.add(Dialog(f"row-{i}", prompt + answer, [(len(prompt), len(prompt) + len(answer))], "stop"))
    return folder


@pytest.fixture
def dialogs(tmp_path: Path) -> Path:
    return write_dialogs(tmp_path / "dialogs")


@pytest.fixture
def recipe(tmp_path: Path, dialogs: Path) -> Callable[..., TrainConfig]:
    """Return a function that makes a config for a short Medusa run, with changes."""

    def make(**changes: Any) -> TrainConfig:
        fields = {**SHORT, "dialogs": str(dialogs), "out": str(tmp_path / "run")}
        return make_config(fields | changes)

    return make
