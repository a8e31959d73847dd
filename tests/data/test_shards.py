"""Shards: rounding that repeats, files that are whole or refused, the same bytes from the same tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.data.shards import (
    STORES,
    Shard,
    ShardError,
    decode,
    encode,
    feature_bytes,
    require_finite,
    row_bytes,
    write_shard,
)
from headway.heads.common.errors import HeadwayError


def features(rows: int = 40, width: int = 64) -> torch.Tensor:
    """Rows as a residual stream has them: most numbers near one, two channels that are far larger."""
    torch.manual_seed(0)
    value = torch.randn(rows, width) * torch.logspace(-2, 3, rows)[:, None]
    value[:, 3] *= 500
    value[:, 40] *= -300
    return value


@pytest.mark.parametrize("store", STORES)
def test_storing_again_what_was_read_changes_nothing(store) -> None:
    stored = encode(features(), store)
    assert stored.nbytes == 40 * row_bytes(64, store)
    once = decode(stored, 64)
    assert decode(encode(once, store), 64).equal(once)
    assert decode(encode(once.float(), store), 64).equal(once)
    assert decode(encode(torch.zeros(2, 3, 64), store), 64).equal(torch.zeros(2, 3, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_single_row_is_read_as_any_other(rows: int) -> None:
    stored = encode(features(), "int8")
    assert decode(stored[:rows], 64).equal(decode(stored, 64)[:rows])
    assert decode(stored[5:][:rows], 64).equal(decode(stored, 64)[5:][:rows])


def test_large_channels_do_not_round_the_others_away() -> None:
    value = features()
    error = (decode(encode(value, "int8"), 64).float() - value).abs()
    usual = value[:, [i for i in range(64) if i not in (3, 40)]].pow(2).mean(-1).sqrt()
    assert (error[:, 4:40].amax(-1) < 0.02 * usual).all()
    assert (error[:, [3, 40]] <= 0.004 * value[:, [3, 40]].abs() + 0.02 * usual[:, None]).all()
    scale = value.abs().amax(-1, keepdim=True) / 127  # one scale for all: what this is better than
    assert (((value / scale).round() * scale - value).abs()[:, 4:40].amax(-1) > 0.3 * usual).float().mean() > 0.9


@pytest.mark.parametrize("store", STORES)
def test_half_precision_outliers_survive(store) -> None:
    row = torch.full((2, 64), 0.5, dtype=torch.float16)
    row[:, 0] = 60000.0
    back = decode(encode(row, store), 64)
    assert back[:, 1:].eq(0.5).all()
    assert (back[:, 0] - 60000).abs().max() < 256  # of bfloat16
    row[0, 5] = float("inf")
    with pytest.raises(HeadwayError, match="of row 7 that are not finite"):
        require_finite(row, "row 7")


def test_a_sharegpt_dump_is_priced_to_the_byte() -> None:
    tokens = 68_000 * 1300
    assert feature_bytes(tokens, 4096, 1, "bfloat16") == 724_172_800_000
    assert feature_bytes(tokens, 4096, 4, "bfloat16") == 2_896_691_200_000
    assert feature_bytes(tokens, 4096, 4, "int8") < 0.51 * 2_896_691_200_000


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    tensors = {f"dialog {i}": torch.arange(i + 1) for i in range(20)}
    for name, order in (("a", tensors), ("b", dict(reversed(tensors.items())))):
        write_shard(tmp_path / name, order, {"dtype": "float32", "n": 3})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    shard = Shard(tmp_path / "a")
    assert shard.facts == {"dtype": "float32", "n": 3}
    assert all(shard.read(name).equal(tensors[name]) for name in shard.names)
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_a_shard_is_whole_or_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "shard-1.safetensors"
    write_shard(path, {"x": torch.arange(1000), "y": torch.zeros(0)})
    whole = path.read_bytes()
    for at in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:at])
        with pytest.raises(ShardError, match=r"shard-1\.safetensors is damaged"):
            Shard(path)
    path.write_bytes(whole[:-9] + b"\x01" + whole[-8:])
    shard = Shard(path)
    with pytest.raises(ShardError, match=r"shard-1\.safetensors is damaged .the checksum of 'x' is wrong"):
        shard.read("x")
    path.write_bytes(whole)
    assert Shard(path).read("x").equal(torch.arange(1000))
    with pytest.raises(ShardError, match="nowhere"):
        Shard(tmp_path / "nowhere")
