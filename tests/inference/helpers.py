"""What the runtime tests share: transformers' own greedy answer, heads of random weights, prompts and trees."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from headway.heads.common.protocol import Head, find_family
from headway.inference.generate import Request, Result, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import DynamicTree, Policy, StaticTree, chain

NO_EOS = 10**6
"""An end id that no tiny target emits."""
PROMPTS = ("Hello wo", "a", "The cat sat on the mat and then", "12345")
BINARY = StaticTree(tuple(p for p in [(0,), (1,)]) + tuple((a, b) for a in (0, 1) for b in (0, 1)))
BINARY3 = StaticTree(BINARY.paths + tuple((*p, r) for p in BINARY.paths if len(p) == 2 for r in (0, 1)))
POLICIES: dict[str, Policy] = {
    "chain": chain(4),
    "binary": BINARY3,
    "dynamic": DynamicTree(depth=3, top_k=4, nodes=12),
}
SMALL: dict[str, dict[str, Any]] = {"medusa": {"draft_vocab_size": 200}, "eagle3": {"draft_vocab_size": 200}}


def encode(text: str) -> list[int]:
    """Return the bytes of a text, taken as ids."""
    return list(text.encode())


def hf_greedy(
    model: PreTrainedModel, prompt: list[int], count: int, eos: int | list[int] = NO_EOS, **kwargs: Any
) -> list[int]:
    """Return the new tokens of transformers' greedy decoding."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=eos,
        pad_token_id=0,
        **kwargs,
    )
    return out[0, len(prompt) :].tolist()


def random_head(family: str, target: Target, seed: int = 1, noise: float = 0.1, **fields: Any) -> Head:
    """Return an untrained head: warm started, then every weight shaken so hard that it drafts at random."""
    Config, Family = find_family(family)
    head = Family(Config.for_target(target.info, **{**SMALL.get(family, {}), **fields}), target.frozen)
    head.warm_start()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return head.eval()


def answer(
    target: Target,
    prompt: list[int],
    head: Head | None = None,
    policy: Policy | None = None,
    key: int = 0,
    **settings: Any,
) -> Result:
    """Return the result of one request; the end ids are ignored unless given."""
    request = Request(prompt, Settings(**{"eos_ids": (), **settings}), key=key)
    (result,) = generate(target, [request], head=head, policy=policy)
    return result
