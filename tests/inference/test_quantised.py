"""A target whose weights are quantised: run as it is, its heads begin from what its weights stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.heads.common.checkpoint import fingerprint, load_head, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Batch
from headway.inference.packed import Packed
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


class CodedLinear(nn.Module):
    """A linear layer whose codes and scale are buffers, and no parameters, as GPTQModel's are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("codes", (linear.weight.detach() * 128).round().to(torch.int16))
        self.register_buffer("bias", torch.linspace(-1, 1, linear.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return x times what the codes stand for."""
        return nn.functional.linear(x, self.codes.to(x.dtype) / 128, self.bias.to(x.dtype))


def replaced(change: int = 0, name: str = "tiny") -> Target:
    """A target of CodedLinear layers; `change` is added to the first code of the last."""
    model = llama12("sdpa")
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for key, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    part.set_submodule(key, CodedLinear(linear))
    model.model.layers[11].mlp.down_proj.codes[0, 0] += change
    return target(model, name)


def test_codes_in_buffers_are_handed_out_as_numbers() -> None:
    """The module says what its codes stand for: what it makes of unit vectors."""
    coded = replaced()
    up, weights = coded.layers[11].mlp.up_proj, coded.frozen.layer_weights(11)  # type: ignore[union-attr]
    torch.testing.assert_close(weights["mlp.up_proj.weight"], up.codes.float() / 128)  # type: ignore[operator, union-attr]
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"} <= set(weights)
    assert "mlp.up_proj.bias" in weights


def test_codes_in_buffers_are_in_the_fingerprints() -> None:
    one, same, other = replaced(), replaced(), replaced(change=40)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert fingerprint(one.frozen) == fingerprint(same.frozen) != fingerprint(other.frozen)


def test_a_head_of_other_codes_is_refused(tmp_path: Path) -> None:
    one, other = replaced(), replaced(change=40, name="other")
    folder = save_head(random_head("eagle3", one), tmp_path / "head", target=one.info)
    load_head(folder, replaced(name="copy"))
    with pytest.raises(HeadwayError, match="another name and other weights"):
        load_head(folder, other)


def test_weights_unpacked_by_the_first_pass_are_unpacked_at_once() -> None:
    """compressed-tensors' linear layers have no weight before the model's first pass."""
    model = llama12("sdpa")
    want, plain = hf_greedy(model, TEXT, 24), target(llama12("sdpa"))
    kept = {m: m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    for module, weight in kept.items():
        del module.weight
        module.weight_packed = nn.Parameter(weight.view(torch.int32), requires_grad=False)

    def unpack(*_: Any) -> None:
        hook.remove()
        for module in kept:
            module.weight = nn.Parameter(module.weight_packed.view(torch.float32), requires_grad=False)  # type: ignore[operator]
            del module.weight_packed

    hook = model.register_forward_pre_hook(unpack)
    unpacked = target(model)
    assert unpacked.mode == "tree"
    assert fingerprint(unpacked.frozen) == fingerprint(plain.frozen)
    assert (
        answer(unpacked, TEXT, random_head("eagle3", unpacked), POLICIES["binary"], max_new_tokens=24).token_ids == want
    )


def test_a_linear_layer_without_a_weight_is_not_packed() -> None:
    layer = nn.Linear(4, 4)
    del layer.weight
    assert Packed(nn.Sequential(layer, nn.Linear(4, 4))).reason == "weights are quantised"


@pytest.mark.parametrize("error", [RuntimeError("GPU is required"), NameError("name 'QuantizeConfig' is not defined")])
def test_what_a_quantiser_lacks_is_said(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPTQModel, transformers raises the first for a GPTQ target and optimum the second."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    llama12().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    monkeypatch.setattr("headway.inference.target.AutoModelForCausalLM.from_pretrained", refuse)
    with pytest.raises(
        HeadwayError, match="cannot load target .*by gptq, see that gptqmodel with optimum is installed"
    ):
        Target.load(tmp_path)


def test_an_error_that_no_quantiser_makes_stays_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full GPU, say: no other name of the target would help."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    llama12().config.save_pretrained(tmp_path)
    monkeypatch.setattr("headway.inference.target.AutoModelForCausalLM.from_pretrained", refuse)
    with pytest.raises(RuntimeError, match="^out of memory$"):
        Target.load(tmp_path)
