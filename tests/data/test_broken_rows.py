"""A file of which one row in a hundred is broken, in fifteen ways: what is good is used, what is not is counted by kind.

HEADWAY_TEST_MB=100 makes the file that large, and converts it too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from broken_rows import KINDS, write_rows
from byte_tokenizer import byte_tokenizer
from transformers import LlamaConfig

from headway.data.dialogs import each_dialog, read_manifest

MEGABYTES = int(os.environ.get("HEADWAY_TEST_MB", "1"))
GIGABYTE = 1 << 30

READ = """
import json, sys
from headway.data.prompts import read_rows
rows, report = read_rows(sys.argv[1], answers=True)
print(json.dumps({**report.to_json(), "kept": len(rows), "first": report.first, "lines": report.broken_lines,
                  "peak": PEAK}))
"""
CONVERT = """
import sys
from headway.cli import main
code = main(sys.argv[1:])
print(PEAK)
sys.exit(code)
"""
# What getrusage says would include the process that started this one.
PEAK = "next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM'))"
READ, CONVERT = (script.replace("PEAK", PEAK) for script in (READ, CONVERT))
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, Counter[str]]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return path, *write_rows(path, MEGABYTES)


@linux
def test_all_good_rows_are_used_and_all_bad_ones_counted(rows: tuple[Path, int, Counter[str]]) -> None:
    path, good, broken = rows
    assert len(broken) == len(KINDS) == 15
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", READ, path], env=env, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["used"] == report["kept"] == good
    assert report["skipped"] == dict(broken)
    assert report["rows"] == good + sum(broken.values())
    assert report["first"] == {reason: 50 + 100 * k for k, (reason, _) in enumerate(KINDS)}
    assert report["lines"][:4] == [50, 150, 1550, 1650][: len(report["lines"])]
    assert report["peak"] < GIGABYTE
    if MEGABYTES > 1:
        print(f"read: {report['rows']} rows, peak {report['peak'] / 1e6:.0f} MB")


@pytest.mark.skipif(MEGABYTES < 2, reason="only with HEADWAY_TEST_MB")
def test_a_large_file_is_converted_in_little_memory(rows: tuple[Path, int, Counter[str]], tmp_path: Path) -> None:
    path, good, broken = rows
    byte_tokenizer().save_pretrained(tmp_path / "target")
    LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=264).save_pretrained(
        tmp_path / "target"
    )
    argv = ["convert", "-p", path, "-t", tmp_path / "target", "--out", tmp_path / "dialogs"]
    done = subprocess.run([sys.executable, "-c", CONVERT, *map(str, argv)], capture_output=True, text=True, check=True)
    manifest = read_manifest(tmp_path / "dialogs")
    assert manifest["counts"]["dialogs"] == good == sum(1 for _ in each_dialog(tmp_path / "dialogs"))
    assert manifest["intake"]["skipped"] == dict(broken)
    assert int(done.stdout) < GIGABYTE
    print(f"converted: {good} dialogs, peak {int(done.stdout) / 1e6:.0f} MB")
