"""What the vLLM job computes and decides, without vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway import foreign
from headway.foreign import as_drafted
from headway.heads.common.checkpoint import save_head
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.tree import chain
from tests import tiny
from tests.engines.vllm_job import DEPTH, FAULTS, IDS, count_accepted, damage, judge, rates
from tests.heads.test_contract import small


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.build(4, "sdpa"), mode="tree")


def test_positions_are_counted_while_tokens_are_missing():
    assert count_accepted([[4, 1, 2]], 100, 3) == (3, [2, 1, 1])
    assert count_accepted([[4, 1, 2]], 5, 3) == (1, [1, 1, 1])  # the first token and four
    assert count_accepted([[4, 1, 2]], 6, 3) == (2, [1, 1, 1])
    assert count_accepted([[1, 1], [3, 2]], 3, 3) == (3, [1, 1, 0])
    assert rates(4, [2, 1, 0]) == [0.5, 0.25, 0.0]
    assert rates(0, [0, 0]) == [0.0, 0.0]


def test_a_case_is_judged():
    plain, own = [[1, 2], [3, 4]], [0.5, 0.3, 0.1]
    good: dict[str, Any] = {"answers": plain, "num_drafts": 100, "num_accepted_tokens_per_pos": [51, 29, 10]}
    assert judge(plain, good, own) == []
    assert "prompts [1]" in judge(plain, good | {"answers": [[1, 2], [3, 5]]}, own)[0]
    assert "at each position" in judge(plain, good | {"num_accepted_tokens_per_pos": [53, 29, 10]}, own)[0]
    assert "at each position" in judge(plain, good | {"num_accepted_tokens_per_pos": [51, 29]}, own)[0]
    for few in ([0, 0, 0], [9, 0, 0]):
        low = good | {"num_accepted_tokens_per_pos": few}
        assert "not shown" in judge(plain, low, [n / 100 for n in few])[0]
    assert judge(plain, {"error": "ValueError: no"}, own) == ["ValueError: no"]


def test_no_draft_is_cut_short_where_positions_are_counted(target):
    """A row of n tokens has the rounds of a longer one up to there, which is why the job decodes more than it counts."""
    head = small("eagle3", target, draft_vocab_size=0)
    long, short = (
        next(generate(target, [Request(list(b"hello"), Settings(max_new_tokens=n, eos_ids=()))], head=head, policy=chain(DEPTH)))
        for n in (40 + DEPTH + 1, 40)
    )  # fmt: skip
    drafts, accepted = count_accepted([long.accepted_per_round], 40, DEPTH)
    assert drafts == short.rounds
    assert 1 + drafts + sum(accepted) >= 40


def test_an_eagle_head_is_served_without_its_draft_vocabulary(target):
    head = small("eagle", target, draft_vocab_size=64)
    served = as_drafted(head)
    assert (served.draft_vocab, served.config) == (None, replace(head.config, draft_vocab_size=0))
    assert torch.equal(served.state_dict()["fc.weight"], head.state_dict()["fc.weight"])
    other = small("medusa", target)
    assert as_drafted(other) is other


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_copy_is_what_it_says(target, tmp_path, name):
    fault = FAULTS[name]
    options: dict[str, Any] = {"lm_head": "own"} if fault.head == "medusa" else {"draft_vocab_size": 0}
    source = str(save_head(small(fault.head, target, **options), tmp_path / "head", target=target.info))
    whole = foreign.export(source, fault.layout, tmp_path / "out", target=target)
    damage(tmp_path / "out", tmp_path / "damaged", fault)
    (path,) = (tmp_path / "damaged").glob("*.safetensors")
    gone = set(whole.tensors) - set(load_file(path))
    config = json.loads((tmp_path / "damaged" / "config.json").read_text(encoding="utf-8"))
    assert bool(gone) is bool(fault.without)
    if not gone:
        assert config != {k: v for k, v in whole.config.items() if k != "headway"}
    if name == "taps":
        assert config[IDS] == [i - 1 for i in whole.config[IDS]]
