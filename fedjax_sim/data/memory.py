"""How much memory there is, asked before an array is made: a sentence comes before the machine
swaps or kills."""

from __future__ import annotations

import os
import pathlib

from fedjax_sim.errors import UserError

SMALL = 1 << 26  # below 64 MB the memory is not checked


def available() -> int | None:
    """Bytes that a new array may take: free memory and the container's limit; None if
    neither is known."""
    found = []
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        found.append(
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    except (OSError, ValueError):  # no such file, or the word max
        pass
    if not found:
        try:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (AttributeError, OSError, ValueError):
            return None
    return max(0, min(found))


def in_words(number: int) -> str:
    """A size with its unit.

    >>> in_words(3_200_000_000), in_words(640 * 10**12)
    ('3.2 GB', '640 TB')
    """
    for unit, size in (("EB", 10**18), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if number >= size:
            amount = f"{number / size:.3g}" if number < 1000 * size else f"{number // size}"
            return f"{amount} {unit}"
    return f"{number} bytes"


def refuse_if_too_large(number: int, what: str, advice: str) -> None:
    """One sentence if `number` bytes do not fit; an estimate, so it leaves the rest of the run its
    own checks."""
    if number <= SMALL:
        return
    room = available()
    if room is not None and number > room:
        raise UserError(
            f"{what} needs about {in_words(number)} of memory, but {in_words(room)} are free;"
            f" {advice}"
        )
