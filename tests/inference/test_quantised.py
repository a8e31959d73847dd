"""A target whose weights are quantised: run as it is, its heads begin from what its weights stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.heads.common.protocol import Batch
from headway.inference.target import Target
from tests.inference.helpers import POLICIES, answer, encode, hf_greedy, random_head
from tests.tiny import llama12, target

TEXT = encode("The cat sat on")


class Coded(torch.Tensor):
    """A weight kept as codes, sixteenths of what it stands for, as a quantising library's tensor subclass keeps it."""

    def dequantize(self) -> Tensor:
        """Return what the codes stand for."""
        return self.as_subclass(torch.Tensor) / 16

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            args = tuple(a.dequantize() if isinstance(a, Coded) else a for a in args)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def coded() -> Target:
    model = llama12("sdpa")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            codes = (module.weight.detach() * 16).mul(8).round().div(8)
            module.weight = nn.Parameter(codes.as_subclass(Coded), requires_grad=False)
    return target(model)


@pytest.mark.parametrize("family", ["medusa", "eagle3"])
def test_the_answer_is_the_quantised_models(family: str, coded: Target) -> None:
    want = hf_greedy(coded.model, TEXT, 24)
    assert want != hf_greedy(llama12("sdpa"), TEXT, 24)
    assert coded.mode == "tree"
    assert coded.packed.reason == "weights are quantised"
    head = random_head(family, coded)
    for policy in POLICIES.values():
        assert answer(coded, TEXT, head, policy, max_new_tokens=24).token_ids == want


def test_weights_are_handed_out_as_numbers(coded: Target) -> None:
    words, layer = coded.frozen.lm_head_weight(), coded.frozen.layer_weights(11)
    for weight, module in ((words, coded.model.lm_head), (layer["mlp.up_proj.weight"], coded.layers[11].mlp.up_proj)):  # type: ignore[union-attr]
        assert type(weight) is Tensor
        x = torch.randn(3, weight.shape[1])
        torch.testing.assert_close(x @ weight.T, module(x).as_subclass(Tensor))


def test_it_has_a_fingerprint_of_its_own(coded: Target) -> None:
    assert coded.fingerprint != target(llama12("sdpa")).fingerprint


def test_codes_are_not_taken_for_numbers(coded: Target) -> None:
    """Where a library keeps integers and cannot say what they stand for, a head begins without them."""
    up = coded.layers[11].mlp.up_proj  # type: ignore[union-attr]
    up.weight = nn.Parameter(torch.zeros(128, 64, dtype=torch.int8), requires_grad=False)  # type: ignore[union-attr]
    assert "mlp.up_proj.weight" not in coded.frozen.layer_weights(11)
    assert "mlp.down_proj.weight" in coded.frozen.layer_weights(11)


def test_a_head_learns_from_it(coded: Target) -> None:
    head = random_head("eagle3", coded).train()
    token_BT, length_B = torch.tensor([TEXT]), torch.tensor([len(TEXT)])
    tap, last = coded.features(token_BT, length_B, head.config.taps)
    batch = Batch(token_BT, length_B, torch.ones_like(token_BT, dtype=torch.bool), tap.clone(), last.clone())
    loss = head.loss(batch).loss
    loss.backward()
    assert bool(loss.isfinite())
