"""Ctrl-C and SIGTERM wait for a safe point.

An exception raised while XLA compiles or runs could corrupt its state. Inside `guard` a signal is
only noted; `check`, called between native calls, and the end of the guard raise it:
KeyboardInterrupt for Ctrl-C, SystemExit(143) for SIGTERM. A second signal, at least a second after
the first, ends the process at once, also in the middle of native code. Handlers that the program
itself has installed are left alone.

Compilation may take minutes and leaves nothing to save: `in_thread` runs it in another thread, and
a signal does not wait for it; inside `immediate` (Python code that only reads or traces) the signal
is raised where the code stands.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

APART = 1.0  # seconds between two separate signals: launchers send one of them twice
_USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
WAIT = 0.1  # seconds between two checks of a thread
T = TypeVar("T")
_depth = 0
_noted: int | None = None
_immediate = 0  # how many `immediate` and `in_thread` are open
_running: list[threading.Event] = []  # set when the native code in a thread ends
_last: int | None = None  # the signal that was raised last


def pending() -> int | None:
    """The signal that waits to be raised."""
    return _noted


def check() -> None:
    """Raise the noted signal, if any."""
    if _noted is not None:
        _raise(_noted)


def _raise(number: int) -> NoReturn:
    global _last
    _last = number
    if number == signal.SIGTERM:
        raise SystemExit(128 + number)
    raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _noted
    _noted = _noted or number
    if _immediate:
        _raise(number)


@contextlib.contextmanager
def immediate() -> Iterator[None]:
    """Inside, a signal is raised where the code stands, not at the next safe point."""
    global _immediate
    check()
    _immediate += 1
    try:
        yield
    finally:
        _immediate -= 1


def in_thread(call: Callable[[], T], tick: Callable[[float], None] = lambda seconds: None) -> T:
    """`call()`, native code without side effects, in another thread: a signal does not wait for it.

    tick: called with the seconds so far, several times a second.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    began = time.monotonic()
    done: list[T] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            done.append(call())
        except BaseException as problem:
            failed.append(problem)
        finally:
            ended.set()

    try:
        with immediate():
            _running.append(ended)
            threading.Thread(target=work, daemon=True).start()
            while not ended.wait(WAIT):
                tick(time.monotonic() - began)
    except BaseException:
        atexit.unregister(_end_now)
        atexit.register(_end_now)  # the last one registered is called first
        raise
    _running.remove(ended)
    if failed:
        raise failed[0]
    return done[0]


def _end_now() -> None:
    """At exit: end the process at once if native code still runs, which could crash while Python is
    shut down.

    `Thread.is_alive` would not do: it returns False after a signal has interrupted `join`.
    """
    if not all(ended.is_set() for ended in _running):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(128 + (_last or signal.SIGINT))


def _watch(receiver: socket.socket) -> None:
    """In a thread: read signals as they arrive, also while the main thread is in native code."""
    first: float | None = None
    while data := receiver.recv(1):
        if data[0] not in _USUAL:
            continue
        if first is not None and time.monotonic() - first >= APART:
            os._exit(128 + data[0])
        if first is None:
            first = time.monotonic()
            if _immediate or _last is not None:
                continue  # already raised
            with contextlib.suppress(Exception):
                print(
                    "\nstopping at the next safe point; repeat to stop at once",
                    file=sys.stderr,
                    flush=True,
                )


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Inside, signals are noted; they are raised at the end or by `check`. Guards may be nested;
    outside the main thread they do nothing."""
    global _depth, _noted, _last
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _depth:
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    taken = {number: usual for number, usual in _USUAL.items() if signal.getsignal(number) is usual}
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    for number in taken:
        signal.signal(number, _note)
    threading.Thread(target=_watch, args=(receiver,), daemon=True).start()
    _depth, _noted, _last = 1, None, None
    try:
        yield
        check()
    finally:
        for number, usual in taken.items():
            signal.signal(number, usual)
        signal.set_wakeup_fd(before)
        sender.close()  # ends the thread
        _depth, _noted = 0, None
