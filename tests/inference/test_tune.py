"""The tree is chosen among priced candidates, from a recording that smaller trees are parts of."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference import tune as tuning
from headway.inference.economy import Price
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import OFF, ByRows, DynamicTree, StaticTree, Tree, chain, parse_policy, static_from_hits
from headway.inference.tune import Recording, load_policy, load_tuned, save_policy, tune
from tests.inference.helpers import PROMPTS, encode, random_head
from tests.tiny import llama4, target


def test_a_recording_prices_smaller_trees() -> None:
    # root 0; nodes 1 and 2 below it, 3 below 1; the ranking by score is 0, 2, 1, 3
    tree = Tree.from_parents(torch.tensor([[5, 6, 7, 8]]), [[-1, 0, 0, 1]])
    tree.score_BN = torch.tensor([[0.0, -2.0, -1.0, -3.0]])
    recording = Recording()
    recording.observe(tree, [[0, 1, 3]])
    recording.observe(tree, [[0, 2]])
    recording.observe(tree, [[0]])
    assert recording.accepted(nodes=4, depth=2) == pytest.approx((2 + 1 + 0) / 3)
    assert recording.accepted(nodes=4, depth=1) == pytest.approx((1 + 1 + 0) / 3)
    assert recording.accepted(nodes=3, depth=2) == pytest.approx((1 + 1 + 0) / 3)
    assert recording.accepted(nodes=2, depth=2) == pytest.approx((0 + 1 + 0) / 3)
    # Of depth 1 there are two nodes: the deeper one takes no place from them.
    assert recording.accepted(nodes=3, depth=1) == pytest.approx((1 + 1 + 0) / 3)
    assert recording.accepted(nodes=2, depth=1) == pytest.approx((0 + 1 + 0) / 3)
    deep = Tree.from_parents(torch.tensor([[5, 6, 7, 8]]), [[-1, 0, 0, 1]])
    deep.score_BN = torch.tensor([[0.0, -1.0, -3.0, -2.0]])  # the second choice stands behind the first one's child
    recording = Recording()
    recording.observe(deep, [[0, 2]])
    assert recording.accepted(nodes=3, depth=2) == 0
    assert recording.accepted(nodes=3, depth=1) == 1


def first_tree(loaded: Target, head: Head, policy: DynamicTree) -> Tree:
    trees: list[Tree] = []
    request = Request(encode(PROMPTS[0]), Settings(max_new_tokens=2))
    list(generate(loaded, [request], head=head, policy=policy, observe=lambda tree, paths: trees.append(tree)))
    return trees[0]


def paths_of(tree: Tree) -> list[list[int]]:
    """Return the nodes from the root to each node."""
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.parents[0]):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def test_a_recording_knows_which_nodes_a_smaller_tree_has() -> None:
    loaded = target(llama4())
    head = random_head("eagle3", loaded)
    wide = first_tree(loaded, head, DynamicTree(depth=3, top_k=4, nodes=200))
    token = wide.token_BN[0].tolist()
    for depth in (1, 2, 3):
        for nodes in (2, 3, 5, 8):
            small = first_tree(loaded, head, DynamicTree(depth=depth, top_k=4, nodes=nodes))
            drafted = {tuple(small.token_BN[0, path].tolist()) for path in paths_of(small)}
            for path in paths_of(wide):
                recording = Recording()
                recording.observe(wide, [path])
                inside = sum(tuple(token[n] for n in path[: m + 1]) in drafted for m in range(1, len(path)))
                assert recording.accepted(nodes, depth) == inside, (depth, nodes, path)


def test_recorded_chains_of_the_first_choices() -> None:
    tree = Tree.from_parents(torch.tensor([[5, 6, 7, 8]]), [[-1, 0, 0, 1]])
    tree.score_BN = torch.tensor([[0.0, -2.0, -1.0, -3.0]])
    recording = Recording()
    for path in ([0, 1, 3], [0, 2], [0]):
        recording.observe(tree, [path])
    assert recording.choices == [(0, 0), (1,), ()]
    # At depth 1 the first and the second choice were right once each in three rounds; below one, in two rounds, once.
    torch.testing.assert_close(recording.hits(2, 2), torch.tensor([[1 / 3, 1 / 3], [1 / 2, 0.0]], dtype=torch.float64))
    both = static_from_hits(recording.hits(2, 2), 3)
    assert set(both.paths) == {(0,), (1,)}
    assert recording.accepted_static(both) == pytest.approx((1 + 1 + 0) / 3)
    assert recording.accepted_static(StaticTree(((0,), (0, 0)))) == pytest.approx((2 + 0 + 0) / 3)
    assert recording.accepted_chain(2) == pytest.approx((2 + 0 + 0) / 3)


def test_the_best_candidate_is_taken_and_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = target(llama4())
    head = random_head("eagle3", loaded)
    monkeypatch.setattr(tuning, "WIDTHS", (1, 2, 4, 8))
    answers = []
    report = tune(
        loaded, head, [encode(p) for p in PROMPTS], depth=2, top_k=3, max_new_tokens=8, context=8, repeats=1,
        rows=(1, 2, 3), seconds=0, on_progress=lambda items, tokens: answers.append(items),
    )  # fmt: skip
    assert sum(answers) == 1  # no time: one prompt is answered all the same
    assert report["policy"] == report["candidates"][0]["policy"]
    assert report["expected_ratio_vs_plain"] >= 1.0  # no draft at all is among the candidates
    save_policy(tmp_path, loaded, report)
    policy = load_policy(tmp_path, loaded.dtype, str(loaded.device))
    assert policy is not None
    shapes = [policy.of(rows) for rows in (1, 2, 3)] if isinstance(policy, ByRows) else [policy] * 3
    assert [shape.describe() for shape in shapes] == [r["policy"] for r in (report, *report["rows"].values())]
    tuned = load_tuned(tmp_path, loaded.dtype, str(loaded.device))
    assert tuned is not None
    assert set(tuned.prices) == {1, 2, 3}
    assert tuned.drafting != OFF
    with pytest.raises(HeadwayError, match="calibration"):
        tune(loaded, head, [])


def test_trees_and_prices_by_rows_are_read(tmp_path) -> None:
    def found(best: str, *rows: tuple[str, float, float]) -> dict[str, Any]:
        names = ("policy", "accepted_length", "round_ms")
        listed = [{**dict(zip(names, row, strict=True)), "tokens_per_ms": row[1] / row[2]} for row in rows]
        return {"policy": best, "plain_ms": 10.0, "candidates": listed}

    many = {"4": found("off", ("off", 1.0, 10.0), ("chain:1", 1.4, 16.0), ("chain:2", 1.5, 20.0))}
    one = found("chain:3", ("chain:3", 2.0, 12.0), ("off", 1.0, 10.0))
    (tmp_path / "tree.json").write_text(json.dumps({"cpu float32": {**one, "rows": many}}))
    tuned = load_tuned(tmp_path, "float32")
    assert tuned is not None
    assert tuned.best == parse_policy("1=chain:3 4=off")
    assert tuned.drafting == parse_policy("1=chain:3 4=chain:1")
    assert tuned.prices == {1: Price(1.2, 2.0), 4: Price(1.6, 1.4)}
    (tmp_path / "tree.json").write_text(json.dumps({"cpu float32": one}))  # of one number of rows
    tuned = load_tuned(tmp_path, "float32")
    assert tuned is not None
    assert tuned.best == tuned.drafting == chain(3)


def test_compiled_passes_have_a_tree_of_their_own(tmp_path) -> None:
    loaded = target(llama4(), mode="tree")
    found = {"policy": "chain:2", "plain_ms": 1.0, "candidates": []}
    save_policy(tmp_path, loaded, found)
    assert load_policy(tmp_path, "float32", compiled=True) is None
    loaded.compile("eager")
    save_policy(tmp_path, loaded, {**found, "policy": "chain:1"})
    assert load_policy(tmp_path, "float32") == chain(2)
    assert load_policy(tmp_path, "float32", compiled=True) == chain(1)


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff\xfe\x00", b"[]", b'{"cpu float32": {}, "x": 1}'])
def test_a_broken_tree_file_is_named(tmp_path, content: bytes) -> None:
    (tmp_path / "tree.json").write_bytes(content)
    if content.startswith(b"{"):
        assert load_policy(tmp_path, "float32") is None
        return
    with pytest.raises(HeadwayError, match="tree.json is broken"):
        load_policy(tmp_path, "float32")
