"""Recorded features: those the target computes, found by dialog, never another model's, whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_target import tiny_target

from headway.data.dialogs import read_dialogs
from headway.data.distill import distill
from headway.data.prompts import Row
from headway.data.recorded import FeatureWriter, Recorded, usual_taps
from headway.heads.common.errors import HeadwayError
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.train.batches import make_batches, make_rows
from headway.train.features import Features

SETTINGS = Settings(max_new_tokens=12, temperature=1.0, seed=3)
TAPS = (0, 1, "last")


def ask(count: int) -> list[Row]:
    return [Row(f"r/{i} é", [{"role": "user", "content": "word " * (1 + i % 3)}]) for i in range(count)]


@pytest.fixture
def target() -> Target:
    return tiny_target()


@pytest.fixture
def dialogs(target: Target, tmp_path: Path) -> Path:
    distill(target, ask(7), tmp_path / "d", settings=SETTINGS, batch_size=3, record=TAPS, show=False)
    return tmp_path / "d"


@pytest.mark.parametrize("batch_size", [1, 4])
def test_results_carry_the_features_of_every_token_but_the_last(target: Target, batch_size: int) -> None:
    requests = [Request([259, 65 + i] + [70] * i, SETTINGS, id=i, key=i) for i in range(6)]
    results = list(generate(target, requests, batch_size=batch_size, record=TAPS))
    bare = {r.id: r.token_ids for r in generate(target, requests, batch_size=batch_size)}
    for result in results:
        assert result.token_ids == bare[result.id]
        ids = torch.tensor([requests[result.id].prompt_ids + result.token_ids])
        tap_BTF, last_BTD = target.features(ids, torch.tensor([ids.shape[1]]), TAPS[:2])
        want = torch.cat([tap_BTF, last_BTD], -1)[0, :-1]
        assert result.feature_TF is not None
        assert result.feature_TF.dtype == torch.bfloat16
        torch.testing.assert_close(result.feature_TF.float(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("taps", [("last",), (0, 1), (1, 0)])
def test_training_reads_what_it_would_compute(target: Target, dialogs: Path, taps: tuple, monkeypatch) -> None:
    longest = sorted(len(d.token_ids) for d in read_dialogs(dialogs))[3]
    rows = make_rows(read_dialogs(dialogs), longest, 0.0, 0, "all").train  # some are cut
    assert any(len(row.token_ids) == longest for row in rows)
    batches = make_batches(rows, 3 * longest)
    computed = Features(target, taps, batches)
    want = [computed[n] for n in range(len(batches))]
    recorded = Recorded(dialogs, target)
    assert len(recorded) == len(read_dialogs(dialogs))
    assert "read" in recorded.spell(taps)
    read = Features(target, taps, batches, recorded=recorded)
    monkeypatch.setattr(Target, "features", None)  # asked for nothing
    for n in range(len(batches)):
        got = read[n]
        for b, length in enumerate(got.length_B.tolist()):
            for name in ("tap_BTF", "last_BTD", "normaliser_BT"):
                a, z = getattr(got, name)[b, : length - 1], getattr(want[n], name)[b, : length - 1]
                torch.testing.assert_close(a.float(), z.float(), atol=3e-2, rtol=2e-2)


def test_other_taps_other_weights_and_other_targets_are_not_read(target: Target, dialogs: Path) -> None:
    recorded = Recorded(dialogs, target)
    assert recorded.covers((0, "last"))
    assert not recorded.covers((0, 3))
    assert "computes" in recorded.spell((3,))
    other = tiny_target()
    with torch.no_grad():
        other.model.get_output_embeddings().weight[0, 0] += 1.0
    assert "weights" in Recorded(dialogs, other).reason
    assert not Recorded(dialogs, other).covers((0,))
    assert "target" in Recorded(dialogs, tiny_target("another")).reason
    assert tiny_target().fingerprint == target.fingerprint
    with pytest.raises(HeadwayError, match="weights"):
        FeatureWriter(dialogs, other, TAPS)
    with pytest.raises(HeadwayError, match="taps"):
        FeatureWriter(dialogs, target, (0, "last"))


def test_features_of_other_words_under_the_same_id_are_not_read(target: Target, dialogs: Path) -> None:
    for name in ("dialogs.jsonl", "dropped.jsonl", "manifest.json"):  # made again, with the old features left there
        (dialogs / name).unlink()
    distill(target, ask(7), dialogs, settings=replace(SETTINGS, seed=4), batch_size=3, show=False)
    recorded = Recorded(dialogs, target)
    assert recorded.covers(TAPS)
    for row in make_rows(read_dialogs(dialogs), 200, 0.0, 0).train:
        found = recorded.find(row.id, row.token_ids, TAPS)
        assert found is None or len(found) <= len(row.prompt)


def test_dialogs_that_were_not_recorded_are_said(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distill(target, ask(2), tmp_path, settings=SETTINGS, show=False)
    for count in (3, 3):  # what a killed run had not written yet is not recorded by the next
        distill(target, ask(count), tmp_path, settings=SETTINGS, record=TAPS)
        assert (
            f"headway: 2 dialogs have no features; `headway capture {tmp_path}` makes them" in capsys.readouterr().err
        )


def test_a_target_in_plain_mode_cannot_record(tmp_path: Path) -> None:
    target = tiny_target()
    target.mode, target.mode_reason = "plain", "it ignores masks"
    with pytest.raises(HeadwayError, match="plain mode .it ignores masks.*--record"):
        distill(target, ask(1), tmp_path / "d", settings=SETTINGS, record=TAPS, show=False)
    assert not (tmp_path / "d").exists()


def test_the_dtypes_that_features_were_made_in_are_said(target: Target, dialogs: Path) -> None:
    assert "made in float32" in Recorded(dialogs, target).spell(TAPS)
    target.model.bfloat16()
    distill(target, ask(8), dialogs, settings=SETTINGS, batch_size=3, record=TAPS, show=False)
    assert "made in bfloat16 and float32" in Recorded(dialogs, target).spell(TAPS)


def test_a_batch_with_an_unrecorded_row_is_computed(target: Target, dialogs: Path) -> None:
    distill(target, ask(9), dialogs, settings=SETTINGS, batch_size=3, show=False)  # two more, not recorded
    recorded = Recorded(dialogs, target)
    assert len(recorded) < len(read_dialogs(dialogs))
    batches = [make_rows(read_dialogs(dialogs), 200, 0.0, 0).train]
    got, want = Features(target, (0,), batches, recorded=recorded)[0], Features(target, (0,), batches)[0]
    assert got.tap_BTF.equal(want.tap_BTF)


def test_a_continued_run_adds_shards_and_a_torn_one_counts_for_nothing(target: Target, dialogs: Path) -> None:
    (dialogs / "features" / "shard-00007.tmp").write_bytes(b"torn")
    distill(target, ask(9), dialogs, settings=SETTINGS, batch_size=3, record=TAPS, show=False)
    assert len(Recorded(dialogs, target)) == len(read_dialogs(dialogs))
    (dialogs / "features" / "shard-00000.safetensors").unlink()
    assert 0 < len(Recorded(dialogs, target)) < len(read_dialogs(dialogs))
    distill(target, ask(11), dialogs, settings=SETTINGS, batch_size=3, record=TAPS, show=False)
    assert (dialogs / "features" / "shard-00002.safetensors").is_file()  # no shard is written over
    (dialogs / "features" / "shard-00001.safetensors").write_bytes(b"not a shard")
    with pytest.raises(HeadwayError, match="shard-00001"):
        Recorded(dialogs, target)


def test_usual_taps_serve_every_family(target: Target) -> None:
    assert usual_taps(target.info)[-1] == "last"
    assert {0, 1} <= set(usual_taps(target.info))
