"""A local clone of a package's source: its tags, the commits between two of them, and the package
at a commit. Changes nothing in the clone but git's list of worktrees."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from moediag.errors import StackError, UsageError
from moediag.records import dataclass

ABBREVIATED = 10  # characters of a commit hash
_GITS_OWN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit on the path between two releases."""

    hash: str
    newer: bool  # on the branch of the newer release; else on the older one's

    @property
    def name(self) -> str:
        return f"commit {self.hash[:ABBREVIATED]}"


@dataclass(frozen=True, slots=True)
class About:
    """Author date and message of a commit."""

    hash: str
    date: str  # author date, ISO 8601
    author: str
    subject: str  # first line of the message


class Clone:
    """Raises UsageError if ``path`` is not a git repository."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        if shutil.which("git") is None:
            raise UsageError("git is not installed", "Install it, or leave --repo away.")
        if not self.path.is_dir():
            raise UsageError(f"--repo {path}: no such folder")
        try:
            self.top = Path(self._git("rev-parse", "--show-toplevel"))
        except StackError as error:
            raise UsageError(
                f"--repo {path}: not a git repository with a working tree",
                "Give the folder of a clone of the package's source.",
            ) from error

    @property
    def head(self) -> str:
        return self._git("rev-parse", "HEAD")

    @property
    def changed(self) -> bool:
        """Whether tracked files differ from the commit that is checked out."""
        return bool(self._git("status", "--porcelain", "--untracked-files=no"))

    def present(self, top: str) -> Path | None:
        """Returns where the working tree has the package imported as ``top``, or None."""
        folder = self.folder("HEAD", top)
        place = self.top / folder if folder else None
        return place if place and place.exists() else None

    def own_file(self, name: str) -> Path:
        """Returns ``name`` inside git's own folder for this working tree."""
        return self.path / self._git("rev-parse", "--git-path", name)

    def tagged(self, package: str, version: str) -> str:
        """Returns the commit of the release's tag. Raises UsageError if there is none."""
        for tag in (f"v{version}", version, f"{package}-{version}", f"{package}-v{version}"):
            with contextlib.suppress(StackError):
                return self._git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
        raise UsageError(
            f"--repo {self.path}: it has no tag v{version}",
            f"Fetch the tags: git -C {self.path} fetch --tags",
        )

    def path_between(self, old: str, new: str, folders: Sequence[str]) -> list[Commit]:
        """Returns the path from ``old`` back to the common ancestor, then to ``new``. It follows
        first parents, and has both ends and the commits that change something below ``folders``.
        Neighbours differ by one commit. Raises UsageError without a common ancestor."""
        try:
            base = self._git("merge-base", old, new)
        except StackError as error:
            raise UsageError(
                f"--repo {self.path}: the two releases have no common history in it",
                "A shallow clone lacks it: git fetch --unshallow",
            ) from error
        back = [] if base == old else [old, *self._first_parents(base, old, folders)]
        on = [*self._first_parents(base, new, folders)[::-1], new]
        found = [Commit(h, newer=False) for h in back]
        found.append(Commit(base, newer=False))
        found += [Commit(h, newer=True) for h in on if h != base]
        return list({c.hash: c for c in found}.values())

    def about(self, commit: str) -> About:
        text = self._git("log", "-1", "--format=%H%x00%aI%x00%an%x00%s", commit)
        return About(*text.split("\0", 3))

    def folder(self, commit: str, top: str) -> str | None:
        """Returns the least deep folder of the package imported as ``top`` at ``commit``, e.g.
        ``src/transformers``, or None."""
        listed = self._git("ls-tree", "-r", "--name-only", "-z", commit).split("\0")
        found = []
        for file in map(PurePosixPath, listed):
            if file.parts[-2:] == (top, "__init__.py"):
                found.append(file.parent)
            elif file.name == f"{top}.py":
                found.append(file)
        return str(min(found, key=lambda f: (len(f.parts), str(f)))) if found else None

    @contextlib.contextmanager
    def worktree(self, commit: str, folders: Sequence[str], place: Path) -> Iterator[Path]:
        """Checks out ``folders`` of ``commit`` below ``place`` for the duration of the context.
        Removes what a killed moediag left there. Raises StackError."""
        self._remove(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        self._git("worktree", "add", "--detach", "--no-checkout", str(place), commit)
        try:
            self._git("checkout", commit, "--", *folders, where=place)
            yield place
        finally:
            self._remove(place)

    def _remove(self, place: Path) -> None:
        if place.exists():
            with contextlib.suppress(StackError):
                self._git("worktree", "remove", "--force", str(place))
            shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(StackError):
            self._git("worktree", "prune")

    def _first_parents(self, base: str, tip: str, folders: Sequence[str]) -> list[str]:
        """Returns commits after ``base`` up to ``tip``, newest first."""
        listed = self._git("rev-list", "--first-parent", f"{base}..{tip}", "--", *folders)
        return listed.split()

    def _git(self, *arguments: str, where: Path | None = None) -> str:
        # The clone's hooks are for its owner's checkouts.
        command = ["git", "-c", f"core.hooksPath={os.devnull}", *arguments]
        done = subprocess.run(
            command,
            cwd=where or self.path,
            # Inside a hook or an alias git sets its folder here, possibly another repository's.
            env={k: v for k, v in os.environ.items() if k not in _GITS_OWN},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()
            raise StackError(f"git {arguments[0]}: {said[-1] if said else 'failed'}")
        return done.stdout.strip("\n")


def overlay_folder(place: Path, parts: dict[str, Path]) -> Path:
    """Makes a folder at ``place`` with one link per import name. The rest of a repository
    (``tests``, ``utils``) must not be importable."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for top, target in parts.items():
        link = place / (target.name if target.is_file() else top)
        link.symlink_to(target, target_is_directory=target.is_dir())
    return place
