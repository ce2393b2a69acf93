"""A process that has an engine to itself, so that nothing that its front does holds up a step.

``python -P -m hotcold.hosting`` reads commands from standard input and writes to standard
output what happens (``messages.py``); what is printed goes to standard error. It ends when its front closes
the pipe, at once and whatever it does, and leaves Ctrl-C and SIGTERM to the front."""

import signal
import sys


def main() -> int:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    from hotcold.processes.channel import own_pipes  # after that, as this takes a moment

    reading, writing = own_pipes()
    from hotcold.hosting.host import serve

    return serve(reading, writing)


if __name__ == "__main__":
    sys.exit(main())
