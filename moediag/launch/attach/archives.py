"""Evidence as one file: collected on a cluster, diagnosed elsewhere."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from moediag.errors import EvidenceError, UsageError
from moediag.masking import Redaction

_MOST_BYTES = 1 << 30  # of an archive's files together
_MOST_FILES = 50_000


def pack(folder: Path, target: Path, redact: bool, hosts: Iterable[str] = ()) -> None:
    """Writes the files below ``folder`` into a compressed archive at ``target``. ``redact``:
    replaces names of this host and ``hosts``, its user and folders. Raises UsageError if it cannot
    be written."""
    names = Redaction.of_machine(hosts) if redact else None
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    data = path.read_bytes()
                    if names is not None:
                        data = names.text(data.decode("utf-8", "replace")).encode()
                    member = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder)}")
                    member.size, member.mtime = len(data), int(path.stat().st_mtime)
                    archive.addfile(member, io.BytesIO(data))
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"--collect {target}: {error.strerror or error}") from error


@contextmanager
def unpacked(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yields ``paths`` with a folder in place of each archive. Raises EvidenceError for one that
    cannot be read."""
    with tempfile.TemporaryDirectory(prefix="moediag-") as root:
        found = []
        for at, path in enumerate(paths):
            if path.is_file() and _is_archive(path):
                folder = Path(root) / str(at) / path.name
                folder.mkdir(parents=True)
                extract(path, folder)
                found.append(folder)
            else:
                found.append(path)
        yield found


def _is_archive(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except OSError:
        return False


def extract(path: Path, folder: Path) -> None:
    """Writes the regular files of an archive; whatever names a place outside ``folder`` is left
    out."""
    left = _MOST_BYTES
    try:
        with tarfile.open(path) as archive:
            for number, member in enumerate(archive):
                name = PurePosixPath(member.name)
                left -= abs(member.size)
                if number >= _MOST_FILES or left < 0:
                    raise EvidenceError(f"{path}: the archive is larger than moediag reads")
                source = archive.extractfile(member) if member.isfile() else None
                if source is not None and not name.is_absolute() and ".." not in name.parts:
                    target = folder.joinpath(*name.parts)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(source.read())
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise EvidenceError(f"{path}: the archive cannot be read: {error}") from error
