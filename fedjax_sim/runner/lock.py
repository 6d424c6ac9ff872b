"""One process at a time in a run directory. A lock ends with the process that holds it, however
that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib

from fedjax_sim.errors import UserError
from fedjax_sim.runner.files import reason

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"


class InUse(UserError):
    """Another process holds the lock."""


class Lock:
    """The lock of one directory, held from `take` to `release`; both may be called again."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.handle: int | None = None

    def take(self) -> None:
        if self.handle is not None or fcntl is None:
            return
        file = self.folder / NAME
        while True:
            try:
                handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as problem:
                raise UserError(f"'{self.folder}' cannot be written: {reason(problem)}") from None
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                os.close(handle)
                if problem.errno in (errno.EAGAIN, errno.EACCES):
                    raise InUse(
                        f"'{self.folder}' is in use by another process; wait for it to end, or use"
                        " another directory"
                    ) from None
                return  # a file system without locks: as before there were any
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(file)):
                    self.handle = handle
                    return
            os.close(handle)  # its holder removed it in between: try the next one

    def release(self) -> None:
        if self.handle is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(
                self.folder / NAME
            )  # while it is held: nobody can hold another one of this name
        os.close(self.handle)
        self.handle = None
