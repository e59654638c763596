"""`python -m omnimodel.cli`: the same as `omni`."""

from __future__ import annotations

from omnimodel.cli import main

if __name__ == "__main__":
    main()
