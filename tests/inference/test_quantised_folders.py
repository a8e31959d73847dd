"""GPTQ, AWQ and compressed-tensors folders as targets, where the library that runs them is installed.

pip install compressed-tensors                  the last
pip install gptqmodel optimum                   the others; without a GPU they run on its torch kernels
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.heads.common.checkpoint import fingerprint, load_head, read_config, save_head
from headway.heads.common.errors import HeadwayError
from headway.inference.target import Target
from headway.inference.tree import StaticTree
from headway.train.config import make_config
from headway.train.loop import train
from tests.inference.helpers import POLICIES, answer, encode, hf_greedy, random_head
from tests.quantised import KINDS, decoded, save_quantised
from tests.tiny import llama12
from tests.train.conftest import write_dialogs
from tests.train.runs import SHORT

TEXT = encode("The cat sat on")
NEEDS = {"gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",), "compressed-tensors": ("compressed_tensors",)}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """A method whose library is here."""
    missing = [name for name in NEEDS[request.param] if find_spec(name) is None]
    if missing:
        pytest.skip(f"{request.param} targets need {' and '.join(missing)}, which is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_quantised(llama12("sdpa"), tmp_path_factory.mktemp(kind) / "tiny", kind)


def test_the_answer_is_the_quantised_models(folder: Path) -> None:
    target = Target.load(folder)
    assert target.mode == "tree"
    assert all(type(m) is nn.Linear for m, _ in target.packed._forwards)
    want = hf_greedy(target.model, TEXT, 24)
    for family in ("medusa", "eagle3"):
        head = random_head(family, target)
        for policy in POLICIES.values():
            assert answer(target, TEXT, head, policy, max_new_tokens=24).token_ids == want


def test_the_answer_in_bfloat16_is_the_quantised_models_but_for_ties(folder: Path) -> None:
    """Two of its words get one and the same logit, and the stock model's cached steps and its full forward choose differently."""
    target = Target.load(folder, dtype="bfloat16")
    assert target.mode == "tree"
    for family in ("medusa", "eagle3"):
        head = random_head(family, target)
        for policy in POLICIES.values():
            got = answer(target, TEXT, head, policy, max_new_tokens=24).token_ids
            with torch.no_grad():
                logits_NV = target.model(torch.tensor([TEXT + got])).logits[0, len(TEXT) - 1 : -1].float()
            behind_N = logits_NV.amax(-1) - logits_NV.gather(1, torch.tensor(got)[:, None])[:, 0]
            assert float(behind_N.max()) < 0.15  # logits lie 0.03 apart there, and differ by 2 % of their norm


def test_heads_begin_from_what_the_codes_stand_for(folder: Path) -> None:
    weights, bare = Target.load(folder).frozen.layer_weights(11), llama12("sdpa")
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        want = decoded(bare.model.layers[11].get_submodule(name).weight.detach())
        torch.testing.assert_close(weights[f"{name}.weight"], want, rtol=2e-3, atol=2e-3)


def test_a_head_of_other_codes_is_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    target = Target.load(folder)
    other = llama12("sdpa")
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    refused = Target.load(save_quantised(other, tmp_path / "other", kind))
    copied = Target.load(save_quantised(llama12("sdpa"), tmp_path / "copy", kind))
    assert refused.fingerprint != target.fingerprint == copied.fingerprint
    assert fingerprint(refused.frozen) != fingerprint(target.frozen) == fingerprint(copied.frozen)
    head = save_head(random_head("eagle3", target), tmp_path / "head", target=target.info)
    load_head(head, copied)
    with pytest.raises(HeadwayError, match="another name and other weights"):
        load_head(head, refused)


def test_a_head_is_trained_on_its_features(folder: Path, tmp_path: Path) -> None:
    dialogs = write_dialogs(tmp_path / "dialogs")
    fields = {**SHORT, "target": str(folder), "dialogs": str(dialogs), "out": str(tmp_path / "run")}
    train(make_config(fields))
    target = Target.load(folder)
    assert read_config(tmp_path / "run" / "head")["weights_of"] == fingerprint(target.frozen)
    head = load_head(tmp_path / "run" / "head", target)
    want = hf_greedy(target.model, TEXT, 24)
    assert answer(target, TEXT, head, StaticTree(((0,), (1,), (0, 0), (0, 1))), max_new_tokens=24).token_ids == want
