"""Finds scenarios: shipped ones by name, a user's own by path."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from moediag.errors import ScenarioError
from moediag.lab.content import folder
from moediag.records import dataclass

_SUFFIXES = (".yaml", ".yml")

# As in every shipped file. Parsing the whole files takes over a second.
_TITLE = re.compile(r'^title: "?(.+?)"?$', re.MULTILINE)
_RANKS = re.compile(r"^world: \{default: (\d+)", re.MULTILINE)
_STACK = re.compile(r"^stack: \{(.+?)\}$", re.MULTILINE)
_SHOWN = re.compile(
    r"role: unfixed\n(?:    .*\n)*?    expect:\s*\{verdict: (\[.*?\]|\{.*?\}|[\w-]+)"
)
_REPORT = re.compile(
    r"(?:https?://)?(?:github\.com/)?(?P<repository>[\w.-]+/[\w.-]+)?"
    r"(?:/(?:issues|pull|discussions)/|#|(?<![^/])(?=\d))(?P<number>\d+)(?:[/#?].*)?"
)
_VERDICT = re.compile(r"[\w-]+\b(?!:)")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list says about a shipped scenario."""

    name: str
    title: str
    ranks: int  # by default
    stack: str  # "transformers 5.23.0, accelerate 1.15.0"
    shows: tuple[str, ...]  # verdicts of the unfixed variants, those of the first one first

    @property
    def needs(self) -> str:
        return f"{self.ranks} ranks, {self.stack}"

    @property
    def group(self) -> str:
        """The heading under which it is listed: what the user of unfixed code sees first."""
        first = next((verdict for verdict in self.shows if verdict != "clean"), "clean")
        return _GROUPS.get(first, WRONG)


WRONG = "wrong numbers without an error"
_GROUPS = {
    "hang": "a hang, or an error of the backend, because ranks disagree",
    "collective-mismatch": "a hang, or an error of the backend, because ranks disagree",
    "crash": "an exception",
    "clean": "reported, and not reproduced",
}
GROUPS = (*dict.fromkeys([_GROUPS["hang"], WRONG, *_GROUPS.values()]),)


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.yaml"))


def summaries() -> Iterator[Summary]:
    """Yields the shipped scenarios by name."""
    for name in names():
        text = (folder() / f"{name}.yaml").read_text("utf-8")
        shown = [word for told in _SHOWN.findall(text) for word in _VERDICT.findall(told)]
        stack = _STACK.findall(text)[0].replace('"', "").replace(":", "")
        yield Summary(
            name, _TITLE.findall(text)[0], int(_RANKS.findall(text)[0]), stack,
            (*dict.fromkeys(shown),),
        )  # fmt: skip


def citation(word: str) -> re.Pattern[str] | None:
    """Returns what finds a report in a text: of ``#123``, ``123``, ``owner/repo#123`` or the
    address of an issue or a pull request, which share their numbers. None for another word."""
    found = _REPORT.fullmatch(word)
    if found is None:
        return None
    repository = re.escape(found["repository"] or "")
    return re.compile(rf"{repository}/(?:issues|pull|discussions)/{found['number']}\b")


def citing(word: str) -> list[str]:
    """Returns the names of the shipped scenarios that cite a report."""
    wanted = citation(word)
    if wanted is None:
        return []
    return [name for name in names()
            if wanted.search((folder() / f"{name}.yaml").read_text("utf-8"))]  # fmt: skip


def _cited(word: str) -> Path | None:
    """The scenario that cites a report; None for another word. Raises ScenarioError for none or
    several."""
    if citation(word) is None or Path(word).is_file():
        return None
    found = citing(word)
    if len(found) == 1:
        return folder() / f"{found[0]}.yaml"
    told = f"{len(found)} scenarios cite {word}: {', '.join(found)}" if found else (
        f"no scenario cites {word}"
    )  # fmt: skip
    raise ScenarioError(told, f"`moediag explain {word}` also searches the findings of the hunt.")


def find(name_or_path: str) -> Path:
    """Returns the file of a shipped scenario, by name or by a report that it cites, or of the
    user's own. A word with a suffix or a slash is a path. Raises ScenarioError with the nearest
    names."""
    if name_or_path in names():
        return folder() / f"{name_or_path}.yaml"
    if (cited := _cited(name_or_path)) is not None:
        return cited
    path = Path(name_or_path)
    looks_like_path = path.suffix in _SUFFIXES or "/" in name_or_path or "\\" in name_or_path
    if not looks_like_path and not path.is_file():
        near = difflib.get_close_matches(name_or_path, names(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ScenarioError(
            f"no scenario is called {name_or_path!r}{hint}",
            "`moediag list` lists them. Name your own file by its path.",
        )
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name too long, a zero byte
        exists = False
    if not exists:
        raise ScenarioError(
            f"{name_or_path}: no such file", "`moediag list` lists the shipped scenarios."
        )
    return path
