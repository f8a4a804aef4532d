"""A folder on a file system that behaves as a loaded NFS server may: it is slow, shows new names to
other processes late, reports stale handles now and then, and fails in fsync and close.

``python -m bench.endurance.late_files FOLDER PLACE delay,hide,stale,close SEED`` shows FOLDER at
PLACE until it is unmounted. It needs the package ``mfusepy``, libfuse and /dev/fuse.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HIDDEN = 1.0  # seconds for which a new name is hidden from other processes
DELAY = 0.01  # seconds that an operation takes; one of 200 takes 50 times as long
STALE = 0.01  # share of operations on a path
CLOSE = 0.05  # share of fsync and close
_WAIT = 20.0  # seconds for the mount
_STAT = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_atime", "st_mtime", "st_ctime",
         "st_ino")  # fmt: skip


def missing() -> str:
    """Why no such folder can be made here; "" if it can."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"mfusepy: {error}"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "/dev/fuse cannot be opened"


@contextmanager
def mounted(folder: Path, place: Path, faults: str, seed: int = 0) -> Iterator[None]:
    """Shows ``folder`` at ``place`` for the duration of the context."""
    folder.mkdir(exist_ok=True)
    place.mkdir(exist_ok=True)
    words = [sys.executable, "-m", __name__, str(folder), str(place), faults, str(seed)]
    server = subprocess.Popen(words, cwd=Path(__file__).parents[2])
    until = time.monotonic() + _WAIT
    try:
        while not place.is_mount():
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{place} was not mounted")
            time.sleep(0.05)
        yield
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(place)], check=False)
        with suppress(subprocess.TimeoutExpired):
            server.wait(_WAIT)
        server.kill()
        server.wait()


class LateFiles:
    """The operations that FUSE calls; each raises OSError."""

    use_ns = True

    def __init__(self, folder: str, faults: str, seed: int, caller: Any) -> None:
        self.folder = folder
        self.faults = faults.split(",")
        self.chance = random.Random(seed)  # noqa: S311 - repeatable
        self.caller = caller
        self.new: dict[str, tuple[float, int]] = {}  # path -> when and by whom it was made

    def _at(self, path: str) -> str:
        """The path below the folder, late, or hidden from its caller."""
        if "delay" in self.faults:
            slow = 50 if self.chance.random() < 0.005 else 1
            time.sleep(self.chance.uniform(0, 2 * DELAY) * slow)
        if self._hides(path):
            raise OSError(errno.ENOENT, "hidden")
        if "stale" in self.faults and path != "/" and self.chance.random() < STALE:
            raise OSError(errno.ESTALE, "stale")
        return self.folder + path

    def _hides(self, path: str) -> bool:
        made, by = self.new.get(path, (0.0, 0))
        recent = "hide" in self.faults and time.monotonic() - made < HIDDEN
        return recent and by != self._process()

    def _made(self, path: str) -> None:
        self.new[path] = time.monotonic(), self._process()

    def _process(self) -> int:
        """The process of the caller, which is a thread."""
        with suppress(OSError), open(f"/proc/{self.caller()[2]}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
        return 0

    def _closes(self) -> None:
        if "close" in self.faults and self.chance.random() < CLOSE:
            raise OSError(errno.EIO, "close")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.fstat(fh) if fh is not None else os.lstat(self._at(path))
        return {
            name: getattr(found, name + "_ns" if name.endswith("time") else name) for name in _STAT
        }

    def readdir(self, path: str, _fh: int) -> list[str]:
        names = os.listdir(self._at(path))
        return [".", "..", *(n for n in names if not self._hides(os.path.join(path, n)))]

    def create(self, path: str, mode: int) -> int:
        found = os.open(self.folder + path, os.O_RDWR | os.O_CREAT, stat.S_IMODE(mode))
        self._made(path)
        return found

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~(os.O_APPEND | os.O_CREAT | os.O_EXCL))

    def read(self, _path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, _path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def flush(self, _path: str, _fh: int) -> int:
        self._closes()
        return 0

    def fsync(self, _path: str, _datasync: int, fh: int) -> int:
        self._closes()
        os.fsync(fh)
        return 0

    def release(self, _path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self.folder + path, mode)
        self._made(path)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.replace(self._at(old), self.folder + new)
        self._made(new)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(fh if fh is not None else self._at(path), length)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self.folder + target)
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self.folder + path)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}


def main(words: list[str]) -> None:
    import mfusepy

    folder, place, faults, seed = words
    files = LateFiles(folder, faults, int(seed), mfusepy.fuse_get_context)
    never = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}
    served = type("Served", (LateFiles, mfusepy.Operations), {})
    files.__class__ = served
    mfusepy.FUSE(files, place, foreground=True, fsname="late", **never)


if __name__ == "__main__":
    main(sys.argv[1:])
