"""Event files that TensorBoard reads: every number of metrics.csv and rounds.csv over rounds. No
package is needed.

A file is a row of records, each: length (uint64), its checksum, the data, their checksum. The data
are a protobuf message Event: 1 wall_time (double), 2 step (int64), 3 file_version (string), 5
summary { 1 value { 1 tag, 2 simple_value } }. The checksum is CRC-32C, rotated and shifted
("masked").
"""

from __future__ import annotations

import pathlib
import struct
import time
from typing import TYPE_CHECKING, Any

from fedjax_sim.runner.sinks import Segment, Sink, numbers

if TYPE_CHECKING:
    from fedjax_sim.runner.driver import ActiveRun


def _table() -> list[int]:
    out = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ (0x82F63B78 if n & 1 else 0)
        out.append(n)
    return out


TABLE = _table()


def crc32c(data: bytes) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def part(number: int, content: bytes) -> bytes:
    """A field of bytes: a string or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def event(when: float, step: int, values: dict[str, float]) -> bytes:
    scalar = lambda tag, value: part(1, part(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
    summary = b"".join(scalar(tag, value) for tag, value in values.items())
    return b"\x09" + struct.pack("<d", when) + b"\x10" + varint(step) + part(5, summary)


class TensorBoard(Sink):
    """One event file per run, in OUT/tensorboard (a run without a directory: runs/tensorboard)."""

    def __init__(self) -> None:
        self.files: dict[int, pathlib.Path] = {}

    def begin(self, run: ActiveRun, done: int) -> None:
        folder = (run.directory.path if run.directory else pathlib.Path("runs")) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self.files[id(run)] = folder / f"events.out.tfevents.{now:.6f}.{run.setup.config.hash()}"
        version = b"\x09" + struct.pack("<d", now) + part(3, b"brain.Event:2")
        self.files[id(run)].write_bytes(record(version))

    def segment(self, run: ActiveRun, segment: Segment, timings: list[dict[str, Any]]) -> None:
        now, out = time.time(), bytearray()
        for kind, rows in (("evaluation", segment.rows), ("round", segment.rounds)):
            for row in rows:
                out += record(
                    event(
                        now, int(row["round"]), {f"{kind}/{k}": v for k, v in numbers(row).items()}
                    )
                )
        with self.files[id(run)].open("ab") as file:
            file.write(out)
