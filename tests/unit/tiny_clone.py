"""A clone of a package's source, small: ``mini``, whose one file says by its first letter how a
probe of it ends (see ``bisect_worlds.KINDS``). Run as a program it is what ``git bisect run`` runs,
with a prober that only reads that letter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moediag.lab.campaign.bisect.commits import commits
from moediag.lab.campaign.bisect.commits.clone import Clone
from moediag.lab.campaign.bisect.commits.git_bisect import code, judge_checkout
from moediag.lab.campaign.engine.display import Lines
from moediag.lab.stacks.releases import Release
from tests.unit.bisect_fakes import Fake, question

PERSON = {
    "GIT_AUTHOR_NAME": "Ann", "GIT_AUTHOR_EMAIL": "ann@example.org",
    "GIT_COMMITTER_NAME": "Ann", "GIT_COMMITTER_EMAIL": "ann@example.org",
    "GIT_AUTHOR_DATE": "2025-06-05T12:00:00Z", "GIT_COMMITTER_DATE": "2025-06-05T12:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip


class TinyClone:
    """``path``: of its working tree. ``commits``: by message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commits: dict[str, str] = {}
        path.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.path, env={**os.environ, **PERSON},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def commit(self, message: str, letter: str = "", tag: str = "") -> str:
        """With ``letter`` the package changes; otherwise only another file does."""
        file = self.path / "src" / "mini" / "__init__.py"
        if letter:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"# {letter} {message}\n", encoding="utf-8")
        else:  # files that are not in the package
            (self.path / "README").write_text(message, encoding="utf-8")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        self.commits[message] = self.git("rev-parse", "HEAD")
        if tag:
            self.git("tag", tag)
        return self.commits[message]

    def remove(self, message: str) -> None:
        """A commit without the package."""
        self.git("rm", "-q", "-r", "src")
        self.git("commit", "-q", "-m", message)
        self.commits[message] = self.git("rev-parse", "HEAD")


def from_letters(path: Path, letters: str) -> TinyClone:
    """Commit N is called "change N"; the first is tagged v1.0, the last v1.1."""
    clone = TinyClone(path)
    for number, letter in enumerate(letters):
        last = number == len(letters) - 1
        clone.commit(f"change {number}", letter, {0: "v1.0"}.get(number, "v1.1" if last else ""))
    return clone


def installs_mini(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits.environment, "ready", lambda request: SimpleNamespace(python=None))
    mini = SimpleNamespace(compiled=False, tops=("mini",))
    monkeypatch.setattr(commits, "installed", lambda python, name: mini)


def main(folder: str) -> int:
    """Judges the checkout of this folder; its verdicts are kept in ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        installs_mini(patch)
        asked = question("GB", 1)
        prober = Fake("GB")
        verdict = judge_checkout(
            asked, Clone(Path.cwd()), Path(folder), ["moediag"], lambda *_: prober,
            Lines(lambda text: print(text, file=sys.stderr)),
        )  # fmt: skip
    print(f"probed {len(prober.asked)}")
    return code(verdict)


if __name__ == "__main__":
    assert Release("1.0")
    sys.exit(main(sys.argv[1]))
