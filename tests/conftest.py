"""What all tests share: no hub, few threads, and the real model where it can be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker has a core, and so has what it starts

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.inference.embedded import FOLDER, smollm2

ROOT = Path(__file__).resolve().parent.parent
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
torch.set_num_threads(1)  # tiny models gain nothing from a second one


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, kept under runs/ between runs; HEADWAY_TEST_MODEL names another."""
    folder = Path(os.environ.get("HEADWAY_TEST_MODEL") or ROOT / FOLDER)
    try:
        return smollm2(folder)
    except HeadwayError as e:
        pytest.skip(f"the real model cannot be had: {e}")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that a test leaves unfinished are no other test's beginning, nor left in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _real_needs_the_model(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test marked `real` gets the model, or is skipped, even when it does not name the fixture; and more cores."""
    if not request.node.get_closest_marker("real"):
        yield
        return
    request.getfixturevalue("real_model")
    few = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(few)
