"""Capture: whole shards or none, the same bytes after a kill, nothing of another target, nothing that does not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import tiny_target

from headway.data import capture as module
from headway.data import shards as shards_module
from headway.data.capture import capture, captured_bytes
from headway.data.dialogs import Dialog, DialogWriter, read_dialogs
from headway.data.distill import distill
from headway.data.manifest import read_json, write_json
from headway.data.prompts import Row
from headway.data.recorded import Recorded
from headway.data.shards import Shard, Store, write_shard
from headway.heads.common import aside as aside_module
from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import label_positions
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.train.batches import make_batches, make_rows
from headway.train.features import Features
from tests.kills import Moment, killed, needs_fork

TAPS = (0, 1, "last")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def dialogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty dialogs; a shard takes about eight of them, a pass three."""
    monkeypatch.setattr(module, "SHARD_TOKENS", 120)
    monkeypatch.setattr(module, "PASS_TOKENS", 50)
    return write(tmp_path / "d", 40)


def write(folder: Path, count: int) -> Path:
    with DialogWriter(folder, {"target": "tiny", "vocab_size": 264, "template_sha256": "t"}) as writer:
        for i in range(len(writer.done), count):
            ids = [259, *(40 + (i * 7 + j) % 90 for j in range(8 + (i * 5) % 13)), 260]
            writer.add(Dialog(f"d/{i} é", ids, [(4, len(ids))], "stop"))
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}


@pytest.mark.parametrize("store", ["bfloat16", "int8"])
def test_training_reads_what_it_would_compute(
    target: Target, dialogs: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = capture(target, dialogs, TAPS, store=store, show=False)
    assert counts["dialogs"] == 40
    assert counts["made"] == len(digests(dialogs / "features")) > 3
    rows = make_rows(read_dialogs(dialogs), 18, 0.0, 0).train
    batches = make_batches(rows, 60)
    for taps in ((0, 1), (1,), ("last",)):
        computed = Features(target, taps, batches, store=store)
        want = [computed[n] for n in range(len(batches))]
        read = Features(target, taps, batches, store=store, recorded=Recorded(dialogs, target))
        with monkeypatch.context() as patch:
            patch.setattr(Target, "features", None)  # asked for nothing
            patch.setattr("headway.train.features.summarise", None)
            got = [read[n] for n in range(len(batches))]
        for a, b in zip(got, want, strict=True):
            for row, length in enumerate(a.length_B.tolist()):
                torch.testing.assert_close(
                    a.tap_BTF[row, : length - 1], b.tap_BTF[row, : length - 1], atol=0.05, rtol=0.02
                )
            at = label_positions(a)
            assert a.normaliser_BT is not None
            assert a.argmax_BT is not None
            logits = target.frozen.logits(a.last_BTD[at])
            torch.testing.assert_close(a.normaliser_BT[at], logits.logsumexp(-1))
            assert a.argmax_BT[at].equal(logits.argmax(-1))


MOMENTS = [
    Moment("as the manifest is written", Path, "replace", of="manifest.json"),
    Moment("in the first pass of the target", Target, "features"),
    Moment("in a later pass", Target, "features", call=8),
    Moment("as the first shard is written", shards_module, "save_file", how="half"),
    Moment("as the third shard is written", shards_module, "save_file", call=3, how="half"),
    Moment("before the third shard is written", module, "write_shard", of="capture-00002"),
    Moment("as a shard goes to the disk", aside_module, "_to_disk", call=3),
    Moment("as a shard gets its name", Path, "replace", of="capture-00001"),
    Moment("once a shard has its name", Path, "replace", of="capture-00001", how="after"),
    Moment("as the last shard gets its name", Path, "replace", of="capture-00004"),
]


@needs_fork
@pytest.mark.parametrize("store", ["bfloat16", "int8"])
def test_a_capture_killed_anywhere_ends_with_the_same_bytes(
    target: Target, dialogs: Path, tmp_path: Path, store: Store
) -> None:
    capture(target, dialogs, TAPS, out=tmp_path / "whole", store=store, show=False)
    whole = digests(tmp_path / "whole")
    for moment in MOMENTS if store == "bfloat16" else MOMENTS[3:5]:
        out = tmp_path / moment.what
        killed(lambda out=out: capture(target, dialogs, TAPS, out=out, store=store, show=False), moment)  # type: ignore[misc]
        there = digests(out)
        assert len(there) < len(whole) or moment.how == "after"
        assert there.items() <= whole.items(), moment  # whole ones, or none
        counts = capture(target, dialogs, TAPS, out=out, store=store, show=False)
        assert counts["kept"] == len(there)
        assert digests(out) == whole, moment
        assert sorted(p.name for p in out.iterdir()) == [".lock", *sorted(whole), "manifest.json"], moment
        assert read_json(out / "manifest.json") == read_json(tmp_path / "whole" / "manifest.json"), moment


@needs_fork
def test_a_capture_killed_again_and_again_ends_with_the_same_bytes(
    target: Target, dialogs: Path, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    capture(target, dialogs, TAPS, out=whole, show=False)
    again = Moment("one shard further", shards_module, "save_file", call=2, how="half")
    for _ in range(1, len(digests(whole))):
        killed(lambda: capture(target, dialogs, TAPS, out=cut, show=False), again)
    assert capture(target, dialogs, TAPS, out=cut, show=False)["made"] == 1
    assert digests(cut) == digests(whole)


def test_more_dialogs_are_added_and_whole_shards_stay(target: Target, dialogs: Path) -> None:
    capture(target, dialogs, TAPS, show=False)
    before = digests(dialogs / "features")
    write(dialogs, 55)
    counts = capture(target, dialogs, TAPS, show=False)
    after = digests(dialogs / "features")
    assert counts["kept"] >= len(before) - 1
    assert sum(after.get(name) == digest for name, digest in before.items()) >= len(before) - 1
    assert len(Recorded(dialogs, target)) == 55


def cut(path: Path, shard: dict[str, torch.Tensor]) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, shard: dict[str, torch.Tensor]) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def nan(path: Path, shard: dict[str, torch.Tensor]) -> None:
    name = next(name for name in shard if name.startswith("dialog"))
    shard[name][4] = float("nan")
    write_shard(path, shard, {"dtype": "float32"})


def short(path: Path, shard: dict[str, torch.Tensor]) -> None:
    name = next(name for name in shard if name.startswith("dialog"))
    write_shard(path, shard | {name: shard[name][:-1]}, {"dtype": "float32"})


def foreign(path: Path, shard: dict[str, torch.Tensor]) -> None:
    save_file(shard, path)


def read_everything(target: Target, dialogs: Path) -> None:
    recorded = Recorded(dialogs, target)
    for dialog in read_dialogs(dialogs):
        assert recorded.find(dialog.id, dialog.token_ids, TAPS) is not None
        recorded.find_teacher(dialog.id)


@pytest.mark.parametrize(
    ("spoil", "said", "verify"),
    [
        (cut, "damaged", False),
        (foreign, "no checksums", False),
        (short, "features of shape", False),
        (flip, "checksum", True),
        (nan, "not finite", True),
    ],
)
def test_a_bad_shard_is_refused_by_name_and_made_again(
    target: Target, dialogs: Path, spoil: Callable, said: str, verify: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    capture(target, dialogs, TAPS, show=False)
    before = digests(dialogs / "features")
    path = dialogs / "features" / "capture-00001.safetensors"
    spoil(path, load_file(path))
    with pytest.raises(HeadwayError, match=said) as refused:
        read_everything(target, dialogs)
    assert "capture-00001.safetensors" in str(refused.value)
    counts = capture(target, dialogs, TAPS, verify=verify)
    assert counts["made again"] == counts["made"] == 1
    assert "capture-00001.safetensors is damaged" in capsys.readouterr().err
    assert digests(dialogs / "features") == before
    read_everything(target, dialogs)


def test_other_taps_templates_targets_and_revisions_are_refused(target: Target, dialogs: Path, tmp_path: Path) -> None:
    capture(target, dialogs, TAPS, show=False)
    other = tiny_target()
    with torch.no_grad():
        other.model.get_output_embeddings().weight[0, 0] += 1.0
    for given, taps, store, named in (
        (target, (0, "last"), "bfloat16", "taps"),
        (target, TAPS, "int8", "store"),
        (other, TAPS, "bfloat16", "weights"),
        (tiny_target("another"), TAPS, "bfloat16", "target"),
    ):
        with pytest.raises(HeadwayError, match=f"made with other settings: {named}"):
            capture(given, dialogs, taps, store=store, show=False)
    with pytest.raises(HeadwayError, match="'last': add it"):
        capture(target, dialogs, (0, 1), show=False)
    for key, file in (("template_sha256", dialogs / "manifest.json"), ("revision", dialogs / "features/manifest.json")):
        known = read_json(file)
        write_json(file, known | {key: "changed"})
        with pytest.raises(HeadwayError, match=key):
            capture(target, dialogs, TAPS, show=False)
        recorded = Recorded(dialogs, target)
        assert key in recorded.reason
        with pytest.raises(HeadwayError, match=f"{key}.*headway capture"):
            recorded.require((0,))
        write_json(file, known)
    with pytest.raises(HeadwayError, match="of taps.*not of all of"):
        Recorded(dialogs, target).require((3,))
    Recorded(dialogs, target).require((0, "last"))


def test_dialogs_of_another_vocabulary_are_refused(target: Target, dialogs: Path) -> None:
    known = read_json(dialogs / "manifest.json")
    write_json(dialogs / "manifest.json", known | {"vocab_size": 300})
    with pytest.raises(HeadwayError, match="made by tiny with 300 token ids"):
        capture(target, dialogs, TAPS, show=False)
    write_json(dialogs / "manifest.json", known | {"vocab_size": None})
    with (dialogs / "dialogs.jsonl").open("a") as file:
        file.write('{"id": "far", "token_ids": [1, 264], "spans": [[1, 2]], "finish": "stop"}\n')
    with pytest.raises(HeadwayError, match="'far'.* has token 264"):
        capture(target, dialogs, TAPS, show=False)


def test_what_was_recorded_while_distilling_is_not_captured(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row(f"r{i}", [{"role": "user", "content": f"word {i}"}]) for i in range(6)]
    settings = Settings(max_new_tokens=8, temperature=1.0)
    distill(target, rows[:4], tmp_path / "d", settings=settings, record=TAPS, show=False)
    recorded = len(Recorded(tmp_path / "d", target))
    distill(target, rows, tmp_path / "d", settings=settings, show=False)
    counts = capture(target, tmp_path / "d", TAPS, show=False)
    total = len(read_dialogs(tmp_path / "d"))
    assert (counts["recorded"], counts["dialogs"]) == (recorded, total - recorded)
    assert len(Recorded(tmp_path / "d", target)) == total
    cut(next((tmp_path / "d" / "features").glob("shard-*")), {})
    counts = capture(target, tmp_path / "d", TAPS)
    assert "its dialogs are captured" in capsys.readouterr().err
    assert (counts["removed"], counts["dialogs"]) == (1, total)
    assert len(Recorded(tmp_path / "d", target)) == total


def test_what_does_not_fit_on_the_disk_is_not_begun(
    target: Target, dialogs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = sum(len(d.token_ids) - 1 for d in read_dialogs(dialogs))
    need = captured_bytes(tokens, 32, 3, "bfloat16")
    monkeypatch.setattr(module, "free_disk", lambda folder: need - 1)
    with pytest.raises(HeadwayError, match="in bfloat16.*free; --store int8"):
        capture(target, dialogs, TAPS, show=False)
    assert not digests(dialogs / "features")
    monkeypatch.setattr(module, "free_disk", lambda folder: need)
    capture(target, dialogs, TAPS, show=False)
    shards = [Shard(path).read_all() for path in (dialogs / "features").glob("*.safetensors")]
    assert sum(tensor.nbytes for shard in shards for tensor in shard.values()) == need


def test_features_that_are_not_finite_are_refused_by_name(dialogs: Path) -> None:
    target = tiny_target()
    with torch.no_grad():
        target.model.model.layers[1].input_layernorm.weight[0] = float("nan")
    with pytest.raises(HeadwayError, match=r"features of dialog 'd/\d+ é' that are not finite"):
        capture(target, dialogs, TAPS, show=False)
    assert not digests(dialogs / "features")
