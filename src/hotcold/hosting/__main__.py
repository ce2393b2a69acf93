"""The engine process. It has its own interpreter, so that no work of its front delays a step.

``python -P -m hotcold.hosting`` reads commands from standard input and writes events to standard output
(``messages.py``); printed text goes to standard error. It ends at once when its front closes the pipe, and
leaves Ctrl-C and SIGTERM to the front."""

import signal
import sys


def main() -> int:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    from hotcold.processes.channel import own_pipes  # imported after that, since it takes a moment

    reading, writing = own_pipes()
    from hotcold.hosting.host import serve

    return serve(reading, writing)


if __name__ == "__main__":
    sys.exit(main())
