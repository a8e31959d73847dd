"""Trains a head: `accelerate launch train/train_heads.py recipes/X.yaml key=value ...`, or `headway train` likewise."""

from __future__ import annotations

if not __package__:  # run as a file: take this checkout's headway, and nothing in train/ by its bare name
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import os
import sys
from collections.abc import Sequence

from headway.heads.common.errors import HeadwayError, Interrupted, spell_os_error

USAGE = """usage: accelerate launch train/train_heads.py RECIPE.yaml [key=value ...]
       headway train RECIPE.yaml [key=value ...]

Trains the head that the recipe describes, or continues the run in its `out` folder. Any key of the recipe can be given
on the command line, head.x=y included, for example: lr=1e-3 head.num_heads=3 max_seconds=600 out=runs/mine

With --estimate it says what the run would take in time, memory and disk, from the config of the target alone, and ends
(1 where something does not fit). --rows N --mean-tokens N stand in for dialogs that are not there yet, --on 8xH100 for
this machine; --json prints one object.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 after an error of the user's, or 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    from headway.train.config import load_recipe

    try:
        if "--estimate" in argv:
            from headway.train.estimate import main as estimate

            return estimate(argv)
        config = load_recipe(argv[0], argv[1:])
        from headway.train.loop import train  # after the recipe: torch takes seconds to import

        train(config, argv=argv)
    except HeadwayError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: {spell_os_error(e)}", file=sys.stderr)
        return 2
    except Interrupted as e:
        if os.environ.get("RANK", "0") == "0":  # of several processes one says it
            print(f"train: {e}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("train: stopped; the same command continues from the last saved state", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    from headway.train.train_heads import main as run  # what it defines pickles as headway.train.*, not __main__

    raise SystemExit(run())
