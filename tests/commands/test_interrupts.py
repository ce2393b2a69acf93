"""Ctrl-C at every moment: heard once, and never lost."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
from support.threads import begun_threads

from hotcold.commands.interrupts import Interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
PATIENCE_S = 60


def test_a_signal_that_ends_no_read_is_heard_all_the_same() -> None:
    """A signal just before the read does not end the read. Here another thread takes the signal, which has
    the same effect."""
    read, write = os.pipe()
    give_up = threading.Timer(PATIENCE_S, os.write, (write, b"lost"))
    give_up.daemon = True
    give_up.start()
    with Interrupts() as interrupts:

        def interrupt() -> None:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt), interrupts.heard():
            os.read(read, 10)
        assert give_up.is_alive()  # else its bytes ended the read, and only then the signal was heard
    give_up.cancel()
    os.close(read)
    os.close(write)


def test_it_is_heard_later_where_it_would_do_harm() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached = True
        with pytest.raises(KeyboardInterrupt), interrupts.heard():
            reached = False
        assert reached
        with interrupts.heard():  # once for both
            pass


def test_what_an_interrupt_ends_is_not_interrupted_again() -> None:
    cleaned = False
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.heard():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                cleaned = True
        with interrupts.heard():
            pass
    assert cleaned


def test_afterwards_everything_is_as_before() -> None:
    names = [signal.SIGINT, signal.SIGUSR1]
    before = [signal.getsignal(name) for name in names]
    begun = begun_threads()
    for _ in range(3):
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt), interrupts.heard():
                pass
    assert [signal.getsignal(name) for name in names] == before
    assert not begun()
    assert signal.set_wakeup_fd(-1) == -1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
