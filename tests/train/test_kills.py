"""A run that is killed with -9, wherever, and continued leaves the head of one that was left alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.data import shards as shards_module
from headway.heads.common import aside as aside_module
from headway.heads.common import checkpoint as checkpoint_module
from headway.heads.common.checkpoint import read_config
from headway.heads.medusa import Head as Medusa
from headway.inference.target import Target
from headway.train import loop, run_folder
from headway.train.config import TrainConfig, make_config
from headway.train.loop import train
from headway.train.run_folder import RunFolder
from tests.kills import Moment, killed, needs_fork
from tests.train.conftest import write_dialogs
from tests.train.runs import SHORT, log_of, same, weights

MOMENTS = [
    Moment("as the run folder is made", Path, "replace", of="run.json"),
    Moment("in a pass of the target for the cache", Target, "features", call=2),
    Moment("as features are put into the cache", shards_module, "save_file", call=2, of="batch-", how="half"),
    Moment("in the first step", Medusa, "loss"),
    Moment("in the fourth step, two after a state", Medusa, "loss", call=4),
    Moment("as a row of the log is written", RunFolder, "log", call=3, how="after"),
    Moment("as the weights of a state are written", run_folder, "save_file", call=3, how="half"),
    Moment("as the optimizer of a state is written", torch, "save", call=2, how="half"),
    Moment("as a state goes to the disk", aside_module, "_to_disk", call=6),
    Moment("as a state gets its name", Path, "replace", of="step-4"),
    Moment("before older states are removed", RunFolder, "_states", call=4),
    Moment("in the first evaluation", loop, "evaluate_accepted_length"),
    Moment("in the last evaluation, of the accepted length", loop, "evaluate_accepted_length", call=2),
    Moment("between the last state and the head", loop, "finish"),
    Moment("as the head is written", checkpoint_module, "save_file", how="half"),
    Moment("as the head gets its name", Path, "replace", of="head"),
    Moment("once the head is there", shutil, "rmtree", of="cache"),
]


def recipe_of(folder: Path, dialogs: Path) -> TrainConfig:
    kept = {"cache": "disk", "eval_every": 3, "ema": 0.9}
    return make_config({**SHORT, **kept, "dialogs": str(dialogs), "out": str(folder / "run")})


@pytest.fixture(scope="module")
def whole(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    config = recipe_of(folder, write_dialogs(folder / "dialogs"))
    train(config, target=tiny)
    return config


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Return what of a log row, or of a head's figures, depends on no clock and no memory."""
    return {k: v for k, v in row.items() if not k.endswith(("seconds", "tokens_per_s", "memory_gib"))}


def files(folder: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


@needs_fork
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_killed_run_ends_as_a_whole_one(whole: TrainConfig, tiny: Target, tmp_path: Path, moment: Moment) -> None:
    cut = recipe_of(tmp_path, Path(whole.dialogs))
    killed(lambda: train(cut, target=tiny), moment)
    head = Path(cut.out) / "head"
    assert head.exists() is (moment.what == "once the head is there")
    train(cut, target=tiny)
    assert same(weights(cut), weights(whole))
    assert figures(read_config(head)["metrics"]) == figures(read_config(whole.out + "/head")["metrics"])
    assert [figures(row) for row in log_of(cut)] == [figures(row) for row in log_of(whole)]
    assert files(cut.out) == files(whole.out)


@needs_fork
def test_a_run_killed_again_and_again_ends_as_a_whole_one(whole: TrainConfig, tiny: Target, tmp_path: Path) -> None:
    cut = recipe_of(tmp_path, Path(whole.dialogs))
    again = (
        Moment("in a step", Medusa, "loss", call=3),
        Moment("as the log is rewound", Path, "replace", of="log.jsonl"),
        Moment("as a state is written", run_folder, "save_file", call=2, how="half"),
        Moment("in a step of the continued run", Medusa, "loss", call=4),
        Moment("as the head is written", checkpoint_module, "save_file"),
    )
    for moment in again:
        killed(lambda: train(cut, target=tiny), moment)
    train(cut, target=tiny)
    assert same(weights(cut), weights(whole))
    assert [figures(row) for row in log_of(cut)] == [figures(row) for row in log_of(whole)]
    assert files(cut.out) == files(whole.out)
