"""Packed weights: the same products as the stock layers, only inside the block, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.inference import attention, packed, target
from headway.inference.packed import Packed, pack
from tests.tiny import llama4


@pytest.fixture
def model() -> torch.nn.Module:
    return llama4().eval().requires_grad_(False)


def test_packed_equals_stock_and_leaves_it_stock(model: torch.nn.Module) -> None:
    ids = torch.arange(12)[None]
    want = model(ids).logits
    weights = Packed(model)
    if weights.reason:
        pytest.skip(weights.reason)
    with weights:
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert linears
        assert all("forward" in m.__dict__ for m in linears)
        torch.testing.assert_close(model(ids).logits, want, atol=1e-5, rtol=1e-4)
    with pytest.raises(KeyError), weights:
        raise KeyError
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(model(ids).logits, want)


def test_packed_copies_are_the_weights_of_their_own_layer(model: torch.nn.Module) -> None:
    weights = Packed(model)
    if weights.reason:
        pytest.skip(weights.reason)
    for module in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        x = torch.randn(5, module.in_features)
        want = module(x)
        with weights:
            torch.testing.assert_close(module(x), want, atol=1e-5, rtol=1e-4)
            assert not torch.allclose(module(x), torch.nn.functional.linear(x, module.weight.roll(1, 0)), atol=1e-3)


class Projections(torch.nn.Module):
    """Attention's three products, of inputs that may differ."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(16, n, bias=bias) for n in (24, 8, 8))

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        layers = (self.q_proj, self.k_proj, self.v_proj)[: len(inputs)]
        return [m(x) for m, x in zip(layers, inputs, strict=True)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("asked", ["same", "other keys", "queries alone", "twice"])
def test_queries_keys_and_values_as_one_product(asked: str, bias: bool) -> None:
    layer = Projections(bias).requires_grad_(False)
    weights = Packed(layer)
    if weights.reason:
        pytest.skip(weights.reason)
    for _ in range(2):
        x, other = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
        inputs = {"same": [x] * 3, "other keys": [x, other, other], "queries alone": [x], "twice": [x] * 3}[asked]
        with weights:
            got = layer(*inputs)
            got = layer(*inputs) if asked == "twice" else got
        for mine, want in zip(got, layer(*inputs), strict=True):
            torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-4)
    # One product while it serves all three.
    assert (weights._together[0]._multiply is not None) == (asked in ("same", "twice"))


def test_a_compiler_sees_the_packed_product_as_one_operator() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Linear(16, 16, bias=False)).requires_grad_(False)
    together = Projections().requires_grad_(False)
    weights, joined = pack(layer), pack(together)
    if weights.reason:
        pytest.skip(weights.reason)
    x, graphs = torch.randn(2, 3, 64), []

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        hidden = layer(x)
        return together(hidden, hidden, hidden)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for _ in range(2):
        with weights, joined:
            for got, want in zip(compiled(x), run(x), strict=True):
                assert torch.equal(got, want)
    (graph,) = graphs
    # Queries, keys and values are one product, and nothing but them comes out.
    assert sum("packed_linear" in str(node.target) for node in graph.graph.nodes) == 3
    assert len(next(node for node in graph.graph.nodes if node.op == "output").args[0]) == 3


def test_bfloat16_is_packed_where_the_processor_has_it() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(64, 48)).bfloat16().requires_grad_(False)
    if pack(layer).reason:
        pytest.skip(pack(layer).reason)
    for rows in (1, 3, 70):
        x = torch.randn(rows, 64).bfloat16()
        with pack(layer):
            got = layer(x)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, layer(x), atol=2e-2, rtol=2e-2)


def test_low_precision_inputs_go_the_stock_way() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(16, 8)).requires_grad_(False)
    x = torch.randn(3, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), pack(layer):
        assert layer(x).dtype == torch.bfloat16


def test_packing_is_refused(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "one dtype" in Packed(llama4().half()).reason
    assert "one dtype" in Packed(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16())).reason
    with monkeypatch.context() as patch:
        patch.setattr(packed, "SHARE", 0.0)
        assert "memory" in Packed(model).reason
    linear = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    handle = linear.register_forward_hook(lambda *_: None)
    assert "hooks" in Packed(model).reason
    handle.remove()
    with monkeypatch.context() as patch:
        patch.setattr(packed, "_packed_forward", lambda module: lambda x: module(x) * 1.01)
        assert "differs" in Packed(model).reason
    with Packed(llama4().half()):
        assert not any("forward" in m.__dict__ for m in model.modules())


def test_logits_of_a_target_keep_their_gradient(model: torch.nn.Module) -> None:
    frozen = target.Target(model, None, "tiny", mode="tree").frozen  # type: ignore[arg-type]
    last = torch.randn(3, frozen.info.hidden_size, requires_grad=True)
    frozen.logits(last).sum().backward()
    assert last.grad is not None
    assert bool(last.grad.any())
    torch.testing.assert_close(frozen.logits(last.detach()), frozen.logits(last).detach(), atol=1e-5, rtol=1e-4)


def test_the_fast_dtype_is_the_one_that_was_timed_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    # A processor that does a few tokens faster in bfloat16 and many faster in float32.
    seconds = {(torch.float32, 8): 2.0, (torch.bfloat16, 8): 1.0, (torch.float32, 128): 2.0, (torch.bfloat16, 128): 3.0}
    monkeypatch.setattr(target, "_layer_seconds", lambda dtype, tokens: seconds[dtype, tokens])
    target.fast_dtype.cache_clear()
    assert target.fast_dtype("cpu") == "bfloat16"
    assert target.fast_dtype("cpu", 128) == "float32"
    target.fast_dtype.cache_clear()


def test_a_step_is_timed_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: 1.0}
    monkeypatch.setattr(target, "_step_seconds", lambda dtype, tokens: seconds[dtype])
    monkeypatch.setattr(target, "_layer_seconds", lambda dtype, tokens: seconds[dtype])
    target.fast_dtype.cache_clear()
    assert target.fast_dtype("cpu", 512) == "bfloat16"  # a tie
    assert target.fast_dtype("cpu", 512, training=True) == "float32"
    target.fast_dtype.cache_clear()


def test_the_dtypes_are_timed_for_real() -> None:
    assert all(target._step_seconds(dtype, 2) > 0 for dtype in (torch.float32, torch.bfloat16))
    assert all(target._layer_seconds(dtype, 2) > 0 for dtype in (torch.float32, torch.bfloat16))


def test_changed_weights_are_packed_again() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(16, 8))
    if pack(layer).reason:
        pytest.skip(pack(layer).reason)
    assert pack(layer) is pack(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before, x = pack(layer), torch.randn(3, 16)
    layer(x).sum().backward()
    optimizer.step()
    assert pack(layer) is not before
    with torch.no_grad(), pack(layer):
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer[0].weight, layer[0].bias))


def test_a_module_made_in_inference_mode_is_packed_too() -> None:
    with torch.inference_mode():
        layer = torch.nn.Sequential(torch.nn.Linear(16, 8))
    assert pack(layer) is pack(layer)


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(packed, "CONTAINER_LIMIT", limit)
    whole = packed._total_memory()
    limit.write_text("max\n")
    assert packed._total_memory() == whole
    limit.write_text("1048576\n")
    assert packed._total_memory() == 1 << 20


def test_attention_takes_a_kernel_that_swaps_axes_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the memory-efficient kernel of a GPU does."""
    real = torch.nn.functional.scaled_dot_product_attention
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    mask = torch.zeros(2, 1, 5, 9)
    want, _ = attention.grouped_attention(torch.nn.Module(), q, k, v, mask)

    def swapped(*given: torch.Tensor, **named: object) -> torch.Tensor:
        return real(*given, **named).transpose(1, 2).contiguous().transpose(1, 2)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", swapped)
    got, _ = attention.grouped_attention(torch.nn.Module(), q, k, v, mask)
    assert got.equal(want)
