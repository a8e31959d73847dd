"""Headway: train Medusa and EAGLE heads on a frozen language model, and decode with them.

The subpackages are the folders `heads/`, `train/`, `data/` and `inference/` at the root of the
repository. The wheel holds them inside the package; a source checkout is told here where they are.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "heads" / "__init__.py").is_file():
    __path__.insert(0, str(_root))
del _root

if TYPE_CHECKING:
    from headway.heads.common.checkpoint import load_head, save_head
    from headway.heads.common.errors import HeadwayError
    from headway.hub import pull_from_hub, push_to_hub
    from headway.inference.custom_generate import headway_generate
    from headway.inference.generate import Request, Result, generate
    from headway.inference.generator import Generator
    from headway.inference.sampling import Settings
    from headway.inference.target import Target

__version__ = "0.1.0"

_LAZY = {
    "Generator": "headway.inference.generator",
    "HeadwayError": "headway.heads.common.errors",
    "Request": "headway.inference.generate",
    "Result": "headway.inference.generate",
    "Settings": "headway.inference.sampling",
    "Target": "headway.inference.target",
    "generate": "headway.inference.generate",
    "headway_generate": "headway.inference.custom_generate",
    "load_head": "headway.heads.common.checkpoint",
    "pull_from_hub": "headway.hub",
    "push_to_hub": "headway.hub",
    "save_head": "headway.heads.common.checkpoint",
}
__all__ = [
    "Generator",
    "HeadwayError",
    "Request",
    "Result",
    "Settings",
    "Target",
    "__version__",
    "generate",
    "headway_generate",
    "load_head",
    "pull_from_hub",
    "push_to_hub",
    "save_head",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
