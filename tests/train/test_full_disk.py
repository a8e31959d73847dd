"""A file that cannot be written to its end: the error is the system's and names it, what was there stays, nothing torn is left."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.data.jsonl import AppendLog
from headway.data.manifest import write_json
from headway.data.shards import write_shard
from headway.heads.common.aside import file_aside, folder_aside, scratch_aside
from headway.heads.common.checkpoint import save_head
from headway.heads.common.errors import spell_os_error
from headway.heads.common.protocol import find_family
from headway.inference.target import Target
from headway.train.run_folder import Progress, RunFolder

resource = pytest.importorskip("resource")


@contextmanager
def full(num_bytes: int = 16384) -> Iterator[None]:
    """Inside, no file grows beyond so many bytes: what a full disk does, for this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def log(path: Path, size: int) -> None:
    with AppendLog(path / "log.jsonl") as rows:
        rows.append({"a": "x" * size})


def run_log(path: Path, size: int) -> None:
    path.mkdir(exist_ok=True)
    RunFolder(path).log({"step": 1, "a": "x" * size})


def state(path: Path, size: int) -> Any:
    return RunFolder(path).save(Progress(size), {"w": torch.zeros(size)}, {})


def optimizer(path: Path, size: int) -> Any:
    return RunFolder(path).save(Progress(size), {"w": torch.zeros(8)}, {"state": torch.zeros(size)})


WRITERS: dict[str, Callable[[Path, int], Any]] = {
    "log.jsonl": log,
    "run/log.jsonl": run_log,
    "manifest.json": lambda path, size: write_json(path / "manifest.json", "x" * size),
    "x.safetensors": lambda path, size: write_shard(path / "x.safetensors", {"a": torch.zeros(size)}),
    "state": state,
    "optimizer": optimizer,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_is_named_and_nothing_torn_is_left(tmp_path: Path, name: str) -> None:
    write = WRITERS[name]
    write(tmp_path / "run", 8) if name.startswith("run/") else write(tmp_path, 8)
    before = files(tmp_path)
    with full(), pytest.raises(OSError, match=".") as caught:
        write(tmp_path / "run", 100_000) if name.startswith("run/") else write(tmp_path, 100_000)
    said = spell_os_error(caught.value)
    assert str(tmp_path) in said
    assert said.split(": ")[0].endswith(name if "." in name else "step-100000")
    assert "\n" not in said
    if not name.endswith(".jsonl"):  # a log keeps a torn last line, which is left out when it is read
        assert files(tmp_path) == before


def test_a_head_that_cannot_be_written_leaves_the_one_before(tiny: Target, tmp_path: Path) -> None:
    config, cls = find_family("medusa")
    head = cls(config.for_target(tiny.info, draft_vocab_size=64, num_heads=2), tiny.frozen)
    head.set_draft_vocab(torch.arange(64))
    save_head(head, tmp_path / "head", target=tiny.info)
    before = files(tmp_path)
    with full(), pytest.raises(OSError, match=".") as caught:
        save_head(head, tmp_path / "head", target=tiny.info)
    assert spell_os_error(caught.value).startswith(f"{tmp_path / 'head'}: ")
    assert files(tmp_path) == before


@pytest.mark.parametrize("aside", [file_aside, folder_aside, scratch_aside])
def test_an_error_in_words_of_its_own_keeps_them(aside: Any, tmp_path: Path) -> None:
    """Such as transformers' of a model that it cannot load: no error of the system, so of no file."""
    with pytest.raises(OSError, match="^no such model$"), aside(tmp_path / "x"):
        raise OSError("no such model")


def test_a_connection_that_is_refused_names_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError) as caught, scratch_aside(tmp_path / "x"):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert spell_os_error(caught.value) == "Connection refused"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
