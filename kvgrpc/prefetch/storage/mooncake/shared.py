"""Which memory of this process another one can map too: what lies in a shared mapping of a file that is open here."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (...)(.) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)")


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Descriptor of this process, where in its file the memory begins, and which file that is (device, inode): the
    descriptor may be another one's one day, and the address too."""

    descriptor: int
    offset: int
    file: tuple[int, int]


def shared_file(address: int, nbytes: int) -> SharedFile | None:
    """The file behind this memory (a memfd, or one of /dev/shm), if all of it lies in one shared mapping of it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            found = _LINE.match(line)
            if found is None or not int(found[1], 16) <= address < int(found[2], 16):
                continue
            if found[4] != "s" or address + nbytes > int(found[2], 16) or found[8] == "0":
                return None
            file = os.makedev(int(found[6], 16), int(found[7], 16)), int(found[8])
            descriptor = _descriptor_of(*file)
            offset = int(found[5], 16) + address - int(found[1], 16)
            return None if descriptor is None else SharedFile(descriptor, offset, file)
    return None


def _descriptor_of(device: int, inode: int) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            status = os.fstat(int(name))
            if path.startswith(("/memfd:", "/dev/shm/")) and (status.st_dev, status.st_ino) == (device, inode):
                return int(name)
    return None
