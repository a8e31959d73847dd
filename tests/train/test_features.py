"""Features: kept or computed anew, the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.data.shards import STORES, Store
from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import label_positions
from headway.inference.target import Target
from headway.train import features
from headway.train.batches import Row
from headway.train.features import Features, Memory, choose_cache
from tests.tiny import build, target

ROWS = [
    [
        Row("a", [259, 65, 10, 97, 98, 260], [False] * 3 + [True] * 3, []),
        Row("b", [259, 66, 10, 98], [False] * 3 + [True], []),
    ]
]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("taps", [("last",), (0, 2, "last")])
def test_kept_features_are_those_computed_anew(
    tiny: Target, tmp_path: Path, taps: tuple[int | str, ...], store: Store
) -> None:
    plain = Features(tiny, taps, ROWS, store=store)[0]  # type: ignore[arg-type]
    for kept in ("memory", "disk"):
        twice = Features(tiny, taps, ROWS, kept, tmp_path / "cache", store=store)  # type: ignore[arg-type]
        for batch in (twice[0], twice[0]):
            for name in ("token_BT", "tap_BTF", "last_BTD", "normaliser_BT", "argmax_BT"):
                assert getattr(batch, name).equal(getattr(plain, name)), name
    assert plain.tap_BTF.shape == (2, 6, len(taps) * 64)


def test_eight_bits_are_near_and_half_as_large(tiny: Target) -> None:
    whole, half = (Features(tiny, (0, 2), ROWS, store=store) for store in STORES)
    a, b = whole[0].tap_BTF, half[0].tap_BTF
    assert not a.equal(b)
    assert float((a - b).norm() / a.norm()) < 0.02
    assert half.num_bytes < 0.7 * whole.num_bytes


def test_a_damaged_batch_on_the_disk_is_made_again(
    tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = Features(tiny, (0,), ROWS, "disk", tmp_path)[0]
    path = tmp_path / "batch-0.safetensors"
    whole = path.read_bytes()
    for bad in (whole[: len(whole) // 2], whole[:-5] + b"\xff" + whole[-4:], b""):
        path.write_bytes(bad)
        (tmp_path / ".batch-7.safetensors.1.tmp").write_bytes(b"torn")
        again = Features(tiny, (0,), ROWS, "disk", tmp_path)[0]
        assert "batch-0.safetensors is damaged" in capsys.readouterr().err
        assert again.tap_BTF.equal(want.tap_BTF)
        assert path.read_bytes() == whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["batch-0.safetensors", "manifest.json"]


def test_features_of_something_else_on_the_disk_are_refused(tiny: Target, tmp_path: Path) -> None:
    Features(tiny, (0,), ROWS, "disk", tmp_path)[0]
    other = target(build(1, num_hidden_layers=4), mode="tree")
    rows = [[Row("a", [259, 65, 11, 97, 98, 260], [False] * 3 + [True] * 3, [])]]
    for kept, named in (
        (Features(other, (0,), ROWS, "disk", tmp_path), "weights"),
        (Features(tiny, (1,), ROWS, "disk", tmp_path), "taps"),
        (Features(tiny, (0,), rows, "disk", tmp_path), "batches"),
        (Features(tiny, (0,), ROWS, "disk", tmp_path, store="int8"), "store"),
    ):
        with pytest.raises(HeadwayError, match=f"keeps features made with {named}"):
            kept[0]
    (tmp_path / "manifest.json").unlink()
    assert Features(other, (0,), ROWS, "disk", tmp_path)[0].tap_BTF.equal(Features(other, (0,), ROWS)[0].tap_BTF)


def test_looking_ahead_gives_the_same_batches(tiny: Target) -> None:
    rows = [[replace(ROWS[0][i % 2], id=str(i))] for i in range(4)]
    ahead = Features(tiny, (0, 2), rows)
    want = [ahead[n].tap_BTF for n in range(4)]
    ahead.look_ahead()
    for n, then in ((2, 0), (0, 3), (1, 1), (1, 2), (2, 2)):  # one was not foreseen
        assert ahead.take(n, then).tap_BTF.equal(want[n])
    ahead.settle()
    assert ahead[3].tap_BTF.equal(want[3])
    ahead.close()
    ahead.close()
    assert ahead.take(3, 0).tap_BTF.equal(want[3])


def test_a_second_look_asks_the_target_nothing(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    features = Features(tiny, ("last",), ROWS, "memory")
    features[0]
    monkeypatch.setattr(Target, "features", None)
    features[0]


def test_teacher_figures_are_the_targets(tiny: Target) -> None:
    batch = Features(tiny, ("last",), ROWS)[0]
    assert batch.normaliser_BT is not None
    assert batch.argmax_BT is not None
    logits = tiny.frozen.logits(batch.last_BTD)
    row, position = label_positions(batch)
    torch.testing.assert_close(batch.normaliser_BT[row, position], logits.logsumexp(-1)[row, position])
    assert batch.argmax_BT[row, position].equal(logits.argmax(-1)[row, position])


def test_bytes_are_told_before_they_are_taken(tiny: Target) -> None:
    positions = 2 * 6
    assert Features(tiny, ("last",), ROWS).num_bytes == positions * (64 * 2 + 12)
    assert Features(tiny, (0, 1, 2), ROWS).num_bytes == positions * (64 * 4 * 2 + 12)


def test_where_features_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choose_cache("auto", 1000, repeats=True)[0] == "memory"
    assert choose_cache("auto", 1000, repeats=False)[0] == "off"
    assert choose_cache("auto", 1 << 60, repeats=True)[0] == "off"
    assert choose_cache("auto", 1 << 28, repeats=True)[0] == "memory"
    where, why = choose_cache("auto", 1 << 28, repeats=True, num_local=1000)  # each process keeps all
    assert where == "off"
    assert "1000 processes" in why
    monkeypatch.setattr(features, "free_memory", lambda: 1000)
    monkeypatch.setattr(features, "free_disk", lambda folder: 4000)
    assert [choose_cache("auto", n, True, folder=tmp_path)[0] for n in (400, 1900, 2100)] == ["memory", "disk", "off"]
    assert choose_cache("disk", 3900, True, folder=tmp_path)[0] == "disk"
    with pytest.raises(HeadwayError, match="does not fit"):
        choose_cache("disk", 4100, True, folder=tmp_path)
    assert choose_cache("disk", 1000, repeats=False)[0] == "disk"
    assert choose_cache("memory", 900, True)[0] == "memory"
    with pytest.raises(HeadwayError, match="cache=memory does not fit"):
        choose_cache("memory", 900, True, num_local=2)


def test_runs_share_features(tiny: Target) -> None:
    """A head on `last` reads what a head on other taps left; taps are not taken for other taps."""
    shared: Memory = {}
    first = Features(tiny, (0, 2), ROWS, "memory", shared=shared)[0]
    narrow = Features(tiny, ("last",), ROWS, "memory", shared=shared)
    assert narrow.num_missing == 0
    assert narrow[0].tap_BTF.equal(first.last_BTD)
    other = Features(tiny, (1,), ROWS, "memory", shared=shared)
    assert other.num_missing == 1
    assert other[0].tap_BTF.equal(Features(tiny, (1,), ROWS)[0].tap_BTF)
