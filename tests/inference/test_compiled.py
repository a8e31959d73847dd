"""Compiled passes: the same tokens, as many compiled functions as there are shapes, and what cannot be compiled says so.

What is compiled here is traced and then run as it was traced. torch takes about half a second for each layer and shape, so the
models have one layer where they can, and few shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from time import perf_counter
from typing import Any

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.heads.common.slots import SLOTS, Slots, slot_bucket
from headway.heads.common.static import TOKENS, filled, places, row_bucket, token_bucket
from headway.inference.bench import compiling
from headway.inference.cache import SlotCache
from headway.inference.compiled import Graphs, check_compiler
from headway.inference.drafter import Drafter, HeadDrafter
from headway.inference.drafters.hybrid import HybridDrafter
from headway.inference.drafters.ngram import NgramDrafter
from headway.inference.economy import Economy
from headway.inference.generate import Request, Times, generate, plain
from headway.inference.host import fetch, stopped
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import ByRows, DynamicTree, Policy, Tree, chain
from tests.inference.helpers import PROMPTS, encode, hf_greedy, random_head
from tests.tiny import build, target

NEW = 9
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixed windows": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "mla": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
    },
}
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"taps": (0, "last"), "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "eagle": {"draft_vocab_size": 100},
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2, "num_layers": 1, "draft_vocab_size": 100},
    "peagle": {"taps": (0, "last"), "depths": 2, "num_layers": 2, "draft_vocab_size": 100},
}
DYNAMIC = DynamicTree(depth=2, top_k=2, nodes=4)
TREES: dict[str, Policy] = {
    "eagle3": DYNAMIC,
    "eagle": chain(2),
    "medusa": ByRows(((1, chain(1)), (4, chain(2)))),
    "hydra": chain(2),
    "peagle": DYNAMIC,
}


class Counting:
    """A backend that runs what was traced, and counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


def small(name: str = "llama", **changes: Any) -> Target:
    return target(build(0, "sdpa", **{**SMALL, **MODELS[name], **changes}), name, mode="tree")


def answers(
    loaded: Target,
    head: Head | Drafter | None = None,
    policy: Policy | None = None,
    batch: int = 1,
    new: int = NEW,
    **more: Any,
) -> list[list[int]]:
    """Return the answers to three prompts, of lengths that make rows leave and others enter at different rounds."""
    requests = [
        Request(encode(p), Settings(max_new_tokens=new - 2 * i, eos_ids=()), id=i) for i, p in enumerate(PROMPTS[:3])
    ]
    made = {r.id: r.token_ids for r in generate(loaded, requests, head=head, policy=policy, batch_size=batch, **more)}
    return [made[i] for i in range(len(requests))]


def drafts(loaded: Target, head: Head, policy: Policy, batch: int) -> tuple[list[list[int]], list[Any]]:
    """Return the answers, and the tokens, shape and path of every tree."""
    trees: list[Any] = []

    def observe(tree: Tree, paths: list[list[int]]) -> None:
        trees.append((tree.token_BN.tolist(), tree.parents, [list(path) for path in paths]))

    return answers(loaded, head, policy, batch, observe=observe), trees


def stock(loaded: Target, new: int = NEW) -> list[list[int]]:
    """Return transformers' own answers to what `answers` asks."""
    return [hf_greedy(loaded.model, encode(prompt), new - 2 * i) for i, prompt in enumerate(PROMPTS[:3])]


@pytest.fixture(autouse=True)
def _few_shapes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to four new tokens are one size, and so are up to four rows; each size is traced once."""
    if request.node.name not in ("test_buckets", "test_places_of_padding_are_free_and_see_themselves"):
        monkeypatch.setattr("headway.heads.common.static.TOKENS", (4, 8))
        monkeypatch.setattr("headway.heads.common.static.seen_bucket", lambda count: -(-count // 4) * 4)
        monkeypatch.setattr("headway.heads.common.static.row_bucket", lambda count: 4)


class Traced:
    """A compiled target, its backend, its own answers, and heads: what is traced of them serves all tests."""

    def __init__(self) -> None:
        self.target, self.backend = small(), Counting()
        self.want = stock(self.target)
        self.heads = {family: random_head(family, self.target, **HEADS[family]) for family in HEADS}
        self.plain = {family: drafts(self.target, self.heads[family], TREES[family], 2) for family in HEADS}
        self.target.compile(self.backend)


@pytest.fixture(scope="module")
def traced() -> Traced:
    return Traced()


@pytest.mark.parametrize("family", HEADS)
def test_every_family_gives_the_same_drafts_and_tokens(family: str, traced: Traced) -> None:
    loaded, head, tree = traced.target, traced.heads[family], TREES[family]
    assert head.static is None
    assert answers(loaded, head, tree, 3) == traced.want
    assert isinstance(head.static, Graphs)
    assert head.static.made
    # Nothing that a second run meets is new, nor with other rows. What is verified shows what was drafted.
    before = traced.backend.count
    assert drafts(loaded, head, tree, 2) == traced.plain[family]
    assert traced.plain[family][0] == traced.want
    assert traced.backend.count == before
    assert not any("forward" in module.__dict__ for module in loaded.model.modules())


def test_drafters_without_weights_and_an_economy(traced: Traced) -> None:
    loaded, head = traced.target, HeadDrafter(traced.heads["medusa"], chain(1))
    ngram, economy = NgramDrafter(depth=3, shortest=1), Economy()
    assert answers(loaded, ngram, batch=2) == traced.want
    assert answers(loaded, HybridDrafter(head, ngram), batch=3) == traced.want
    assert answers(loaded, head, batch=3, economy=economy) == traced.want
    assert economy.plain
    assert economy.drafted


def test_what_is_recorded_is_the_same_and_no_buffers_are_kept(traced: Traced) -> None:
    requests = [
        Request(encode(p), Settings(max_new_tokens=NEW - i, eos_ids=()), id=i) for i, p in enumerate(PROMPTS[:3])
    ]
    taps = traced.heads["eagle3"].config.taps
    made, compiled = [], traced.target.compiled
    assert compiled is not None
    for way in (compiled, None):
        traced.target.compiled = way
        results = generate(traced.target, requests, batch_size=2, record=taps)
        made.append([r.feature_TF for r in sorted(results, key=lambda r: r.id)])
    traced.target.compiled = compiled
    for got, want in zip(*made, strict=True):
        assert torch.allclose(got.float(), want.float(), atol=1e-2)
    assert not compiled._placed.pairs


def test_a_head_whose_slots_grow_gives_the_same_drafts(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, head, grown = encode(PROMPTS[2]), traced.heads["eagle3"], []

    class Few(Slots):
        """Has room for the first draft after the prompt, padding included, and grows in a later one."""

        def __init__(self, num_layers: int, rows: int, static: bool = False) -> None:
            super().__init__(num_layers, rows, static=static)
            self.capacity = len(prompt) + 5

        def _grow(self, needed: int) -> None:
            super()._grow(needed)
            grown.append(self.static)

    monkeypatch.setattr("headway.heads.common.draft_layer.Slots", Few)
    compiled, made = traced.target.compiled, []
    for way in (compiled, None):
        traced.target.compiled = way
        request, trees = Request(prompt, Settings(max_new_tokens=NEW, eos_ids=())), []
        observe = lambda tree, paths: trees.append(tree.token_BN.tolist())  # noqa: B023, E731
        list(generate(traced.target, [request], head=head, policy=chain(2), observe=observe))
        assert (head.static is None) == (way is None)
        made.append(trees)
    traced.target.compiled = compiled
    assert len(made[0]) > 3
    assert made[0] == made[1]
    assert grown == [True, False]


def test_a_tree_too_wide_says_so(traced: Traced, capsys: pytest.CaptureFixture[str]) -> None:
    wide = DynamicTree(depth=2, top_k=4, nodes=10)
    assert answers(traced.target, traced.heads["eagle3"], wide, 3) == traced.want
    assert (
        capsys.readouterr().err == f"headway: passes of 10 tokens are not compiled; those of up to {TOKENS[-1]} are\n"
    )


def test_sampling_draws_the_same_tokens(traced: Traced) -> None:
    settings = Settings(max_new_tokens=NEW, eos_ids=(), temperature=0.9, seed=3)
    request = Request(encode("a"), settings)
    (result,) = generate(traced.target, [request], head=traced.heads["medusa"], policy=chain(1))
    assert result.token_ids == plain(traced.target, encode("a"), settings)


ASKING = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""What reads from the device; a GPU would be waited for."""


@pytest.mark.parametrize(
    ("family", "tree", "waits"), [("eagle3", chain(2), 1), ("medusa", chain(2), 1), ("eagle3", DYNAMIC, 2)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_reads_once_a_round(
    family: str, tree: Policy, waits: int, compiled: bool, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = traced.target if compiled else small()
    head = traced.heads[family] if compiled else random_head(family, loaded, **HEADS[family])
    answers(loaded, head, tree, 1)  # what is compiled is compared, once
    fetched = asked = 0

    def asking(method: Any) -> Any:
        def count(*args: Any) -> Any:
            nonlocal asked
            asked += 1
            return method(*args)

        return count

    def once(*tensors: torch.Tensor) -> list[Any]:
        nonlocal fetched, asked
        fetched, before = fetched + 1, asked
        lists, asked = fetch(*tensors), before
        return lists

    for name in ASKING:
        monkeypatch.setattr(torch.Tensor, name, asking(getattr(torch.Tensor, name)))
    monkeypatch.setattr("headway.inference.generate.fetch", once)
    monkeypatch.setattr("headway.inference.draft.fetch", once)
    request, seen = Request(encode("The cat"), Settings(max_new_tokens=NEW, eos_ids=())), []
    list(generate(loaded, [request], head=head, policy=tree, observe=lambda *_: seen.append((fetched, asked))))
    assert len(seen) > 2
    prefill = seen[0][1]
    assert seen == [(waits * n, prefill) for n in range(1, len(seen) + 1)]


# Beyond this, other models are made, and torch traces what it has traced of `traced` again: transformers keeps a list of them.


@pytest.mark.parametrize("name", ["mixed windows", pytest.param("mla", marks=pytest.mark.slow)])
def test_every_kind_of_attention_gives_the_same_tokens(name: str) -> None:
    loaded = small(name)
    want = stock(loaded)
    loaded.compile(Counting())
    assert answers(loaded, batch=3) == want
    assert loaded.compiled is not None
    assert loaded.compiled.num_graphs == 1


def test_a_long_text_is_bounded_by_its_buckets_and_compiling_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small buckets, so that the text passes through several.
    monkeypatch.setattr("headway.heads.common.slots.SLOTS", 64)
    loaded, backend, times = small(), Counting(), Times()
    want = hf_greedy(loaded.model, encode("a"), 80)
    loaded.compile(backend)
    assert loaded.compiled is not None
    monkeypatch.setattr(loaded, "new_cache", lambda rows, capacity=0: SlotCache(1, rows, 64, static=True))
    begin, before = perf_counter(), stopped()
    (result,) = generate(loaded, [Request(encode("a"), Settings(max_new_tokens=80, eos_ids=()))], times=times)
    spent = stopped() - before
    assert result.token_ids == want
    assert {slot_bucket(size) for size in range(2, 81)} == {64, 128}
    assert backend.count == loaded.compiled.num_graphs == 2
    assert spent > 0
    assert times.draft + times.verify + times.other <= perf_counter() - begin - spent


def test_without_compile_nothing_is_static() -> None:
    loaded = small()
    head = random_head("eagle3", loaded, **HEADS["eagle3"])
    answers(loaded, head, chain(1))
    assert loaded.compiled is None
    assert head.static is None
    assert loaded.new_cache(3, 5).slots.capacity == 5


def test_a_target_that_cannot_be_traced_says_so_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = small()
    want = answers(loaded)
    layer = loaded.layers[0]
    layer.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    loaded.compile(Counting())
    assert answers(loaded) == want
    assert loaded.compiled is None
    assert "Unsupported" in loaded.compiled_reason
    said = capsys.readouterr().err
    assert said.startswith("headway: llama is not compiled and runs as it is: Unsupported")
    assert said.count("\n") == 1


def test_a_compiled_pass_that_differs_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return lambda *args: tuple(out.roll(1, -1) for out in graph.forward(*args))

    loaded = small()
    want = answers(loaded)
    loaded.compile(wrong)
    assert answers(loaded) == want
    assert loaded.compiled is None
    assert "llama is not compiled and runs as it is: a compiled pass differs" in capsys.readouterr().err


def test_what_fails_later_says_so_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    runs = 0

    def failing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 4:
                raise RuntimeError("out of luck\nand more")
            return graph.forward(*args)

        return run

    loaded = small()
    want = answers(loaded)
    loaded.compile(failing)
    assert answers(loaded) == want
    assert loaded.compiled is None
    assert compiling(loaded)["compiled"] == "RuntimeError: out of luck"
    assert capsys.readouterr().err.endswith("llama is not compiled and runs as it is: RuntimeError: out of luck\n")


def test_without_a_compiler_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    check_compiler.cache_clear()
    monkeypatch.setattr(torch, "compile", none)
    with pytest.raises(HeadwayError, match=r"RuntimeError: no C\+\+ compiler.*g\+\+ or clang\+\+.*without --compile"):
        Target.load("no such target", compile=True)
    with pytest.raises(HeadwayError, match="does not work here"):
        small().compile()


def test_a_head_that_cannot_be_compiled_says_so_and_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = small()
    head = random_head("medusa", loaded, num_heads=1)
    want = answers(loaded, head, chain(1))

    def failing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not any("index_put" in str(node.target) or "setitem" in str(node.target) for node in graph.graph.nodes):
            raise NotImplementedError("no heads today")
        return graph.forward

    loaded.compile(failing)
    assert answers(loaded, head, chain(1)) == want
    assert loaded.compiled is not None
    said, draft = capsys.readouterr().err, "the draft of the medusa head"
    assert f"headway: {draft} is not compiled and runs as it is: " in said
    assert "no heads today" in compiling(loaded)["not_compiled"][draft]
    assert answers(loaded, head, chain(1)) == want
    assert head.static is None
    assert not capsys.readouterr().err


def test_a_target_without_slots_is_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = target(build(0, "sdpa", **SMALL), "tiny", mode="plain")
    loaded.compile(Counting())
    assert loaded.compiled is None
    assert capsys.readouterr().err == "headway: tiny is not compiled: it runs in plain mode\n"


@pytest.mark.slow
def test_inductor_gives_the_same_tokens() -> None:
    loaded = small()
    head = random_head("eagle3", loaded, **HEADS["eagle3"])
    want = answers(loaded, head, chain(1))
    loaded.compile("inductor")
    assert answers(loaded, head, chain(1)) == want
    assert loaded.compiled is not None
    assert isinstance(head.static, Graphs)
    assert head.static.made


def test_buckets() -> None:
    assert [token_bucket(n) for n in (1, 2, 3, 5, 33, 64, 65)] == [1, 2, 4, 8, 64, 64, None]
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]
    assert [slot_bucket(n) for n in (1, 256, 257, 600, 1025, 1536, 1537, 2049)] == [
        256, 256, 512, 768, 1536, 1536, 2048, 3072
    ]  # fmt: skip
    sizes = [slot_bucket(n) for n in range(1, 32768)]
    assert all(n <= size and size % SLOTS == 0 for n, size in enumerate(sizes, 1))
    assert all(size <= 1.5 * n + 1 for n, size in enumerate(sizes, 1) if n > 2 * SLOTS)
    assert len(set(sizes)) == 14


def test_whole_buffers_follow_what_holds_them() -> None:
    slots = Slots(1, 1, 4, static=True)
    slots.place(1, "cpu")
    slots.write(0, torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert slots.whole(1)[0][0].shape == (1, 1, SLOTS, 2)
    assert slots.whole(1)[0] is slots.whole(1)[0]
    assert slots.whole(2)[0][0].shape == (2, 1, SLOTS, 2)
    slots.make_room(SLOTS + 1)
    whole = slots.whole(2)[0][0]
    assert whole.shape == (2, 1, 2 * SLOTS, 2)
    assert whole.data_ptr() == slots.stacks[0][0].data_ptr()
    copied = deepcopy(slots)
    assert copied.whole(2)[0][0].data_ptr() == copied.stacks[0][0].data_ptr() != whole.data_ptr()


def test_places_of_padding_are_free_and_see_themselves() -> None:
    slots = Slots(1, 3, 4, static=True)
    ancestor_BNM = torch.ones(3, 3, 3, dtype=torch.bool).tril()
    assert places(slots, ancestor_BNM) is None  # nothing was written
    slots.place(4, "cpu")
    slots.write(0, torch.ones(3, 1, 4, 2), torch.ones(3, 1, 4, 2))
    slots.commit([[0], [0, 1, 2], []])
    place = places(slots, ancestor_BNM)
    assert place is not None
    assert (place.rows, place.tokens) == (4, 4)
    assert place.length_B.tolist() == [1, 3, 0, 0]
    assert place.slot_BN.tolist() == [[n, n + 1, n + 2, n + 3] for n in (1, 3, 0, 0)]
    assert place.ancestor_BNM[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    assert place.ancestor_BNM[3].equal(torch.eye(4, dtype=torch.bool))
    behind = places(slots, torch.ones(3, 1, 3, dtype=torch.bool))
    assert behind is not None
    assert behind.slot_BN.tolist() == [[3], [5], [2], [2]]
    assert behind.ancestor_BNM.int().tolist()[2:] == [[[1, 1, 1, 0]], [[0, 0, 1, 0]]]
    assert places(slots, torch.ones(3, TOKENS[-1] + 1, TOKENS[-1] + 1, dtype=torch.bool)) is None


def test_filled_has_one_layout() -> None:
    x = torch.arange(6).view(2, 3)
    assert filled(x, 2, 3) is x
    assert filled(x, 2, 4).tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]
    odd = x[:1, :2]  # stride 3 at an axis of size 1
    assert odd.stride() == (3, 1)
    assert filled(odd, 1, 2).stride() == (2, 1)
    assert filled(torch.ones(1).expand(2, 2), 2).stride() == (2, 1)
