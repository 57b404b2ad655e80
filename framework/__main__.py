"""`framework` and `python -m framework`.

Importing this module costs nothing: processes that the engine spawns import it again, and Ctrl-C has to be silent from
the first moment on.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Exit codes: 0, 1 (failed), 2 (wrong usage or settings), 130 (Ctrl-C)."""
    try:
        from .cli import app

        app(prog_name="framework")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
