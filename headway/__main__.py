"""`python -m headway` is the console script `headway`."""

from __future__ import annotations

from headway.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
