"""`framework` and `python -m framework`.

Importing this module costs nothing: processes that the engine spawns import it again, and Ctrl-C has to be silent from
the first moment on.
"""

from __future__ import annotations

import os
import sys

JOIN = 2.0
"""See `_leave`."""


def main() -> None:
    """Run the command line. Exit codes: 0, 1 (failed), 2 (wrong usage or settings), 130 (Ctrl-C)."""
    import signal

    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # an import may make anything of a KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from .cli import app

        signal.signal(signal.SIGINT, heard)
        app(prog_name="framework")
    except KeyboardInterrupt:
        _leave(130)
    except SystemExit as end:
        _leave(end.code)


def _leave(code: str | int | None) -> None:
    """Nothing is owed to anybody any more: a thread that goes on, as a plugin's route may have left one, holds the
    process up for `JOIN` seconds, and until the next signal."""
    import signal
    import threading
    from contextlib import suppress

    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        status = code if isinstance(code, int) else int(code is not None)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(status))
        timer = threading.Timer(JOIN, os._exit, [status])
        timer.daemon = True
        timer.start()
    sys.exit(code)


if __name__ == "__main__":
    main()
