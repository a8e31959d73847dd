"""The wheel: all packages and data files are in it, under one top-level name, and a checkout has one copy of each."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
SUBS = ("heads", "train", "data", "inference")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_on_disk() -> dict[str, str]:
    found = {"headway": "headway"}
    for sub in SUBS:
        for init in (ROOT / sub).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT).as_posix()
            found["headway." + folder.replace("/", ".")] = folder
    return found


def test_every_package_is_listed(config: dict[str, Any]) -> None:
    tool, found = config["tool"]["setuptools"], packages_on_disk()
    assert sorted(tool["packages"]) == sorted(found)
    for name, folder in tool["package-dir"].items():
        assert found[name] == folder


def test_every_folder_with_code_is_a_package() -> None:
    """A module in a folder without `__init__.py` works in a checkout and is missing from the wheel."""
    folders = {path.parent for sub in SUBS for path in (ROOT / sub).rglob("*.py")}
    assert [f for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of the sources, so that nothing is left behind in the checkout."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is too old to build with; install headway[dev]")
    work = tmp_path_factory.mktemp("wheel")
    copy = work / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("headway", *SUBS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = f"import setuptools.build_meta as b; b.build_wheel({str(work)!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    (path,) = work.glob("headway-*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_has_one_top_level_name(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"headway"}
    assert not any(name.startswith("headway/tests") for name in wheel)


def test_the_wheel_holds_every_file(wheel: list[str]) -> None:
    wanted = {"headway/py.typed"}
    wanted |= {f"headway/{path.name}" for path in (ROOT / "headway").glob("*.py")}
    for sub in SUBS:
        for path in (ROOT / sub).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                wanted.add("headway/" + path.relative_to(ROOT).as_posix())
    held = {name for name in wheel if ".dist-info/" not in name}
    assert sorted(wanted - held) == [], "missing from the wheel: list the package or the package-data in pyproject.toml"
    assert sorted(held - wanted) == []
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_one_copy_of_each_module() -> None:
    import headway.heads.common.protocol as protocol

    assert "heads" not in sys.modules
    if "site-packages" not in str(protocol.__file__):
        assert Path(str(protocol.__file__)).resolve() == ROOT / "heads" / "common" / "protocol.py"
