"""Pasted texts, each with what the page must say, what it must not, and the exit code.

``texts/*.yaml`` hold them: written by us in the forms of public reports, whose addresses they name.
What is right was written before a page about the text was read.
"""

from __future__ import annotations

import functools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moediag.errors import EvidenceError
from moediag.pipeline.examine import examine
from moediag.report import page
from moediag.result import Diagnosis

TEXTS = Path(__file__).parent / "texts"
WRONG, REJECTED, SILENT, WEAK, RIGHT = "wrong", "rejected", "silent", "weak", "right"
OUTCOMES = (RIGHT, WEAK, SILENT, REJECTED, WRONG)


@dataclass(frozen=True)
class Pasted:
    """One pasted text, or several files, and the right answer."""

    name: str
    #: The kind: the name of its file.
    kind: str
    #: The address of a public report in this form, or who writes it.
    source: str
    #: Path below the folder -> content.
    files: dict[str, str]
    #: Any of these; none if nothing in the text is evidence.
    verdicts: tuple[str, ...]
    culprits: tuple[int, ...]
    #: Regular expressions that the page must contain, whatever the case of letters.
    says: tuple[str, ...]
    #: Those that it must not contain.
    never: tuple[str, ...]
    exits: tuple[int, ...]
    #: Why the answer is not right yet, or "".
    known: str = ""


@dataclass(frozen=True)
class Answer:
    """What moediag said."""

    #: "" if it refused the text.
    verdict: str
    culprits: tuple[int, ...]
    page: str
    exit: int


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


@functools.cache
def texts() -> tuple[Pasted, ...]:
    """All texts, in the order of their files."""
    return tuple(
        Pasted(
            name=raw["name"],
            kind=file.stem,
            source=raw["source"],
            files=raw.get("files") or {raw.get("file", "train.log"): raw["text"]},
            verdicts=_several(raw.get("verdict")),
            culprits=_several(raw.get("culprits")),
            says=_several(raw.get("says")),
            never=_several(raw.get("never")),
            exits=_several(raw.get("exit", 1)),
            known=raw.get("known", ""),
        )
        for file in sorted(TEXTS.glob("*.yaml"))
        for raw in yaml.safe_load(file.read_text())
    )


def first_run() -> dict[str, list[str]]:
    """Outcome -> the texts that had it before any repair; all others were right."""
    found: dict[str, list[str]] = yaml.safe_load((TEXTS.parent / "first_run.yaml").read_text())
    return found


def asked(pasted: Pasted) -> Answer:
    """What `moediag diagnose` says of the text."""
    with tempfile.TemporaryDirectory(prefix="pasted-") as folder:
        for name, content in pasted.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode())
        try:
            result = examine([Path(folder)]).result
        except EvidenceError as error:
            return Answer("", (), str(error), error.exit_code)
        (trial,) = result.trials
        return Answer(
            trial.diagnosis.verdict,
            trial.diagnosis.culprits,
            _page(trial.diagnosis, trial.world_size).replace(folder, "PASTED"),
            page.exit_code(result),
        )


def _page(found: Diagnosis, size: int) -> str:
    """All that the page says, each piece with its title, each on a line."""
    pieces = [
        *(f"CULPRIT rank {rank}" for rank in found.culprits),
        *(f"VICTIM rank {rank}" for rank in found.victims),
        f"RANKS {size} ranks" if size else "",
        found.cause,
        f"NEXT {found.next_step}",
        *(f"NOTE {note}" for note in found.notes),
        *(f"NOT SEEN {text}" for text in found.not_seen),
    ]
    return "\n".join(" ".join(piece.split()) for piece in pieces if piece)


def problems(pasted: Pasted, answer: Answer) -> tuple[str, list[str]]:
    """(the outcome, each thing that is not as it must be)."""
    if not pasted.verdicts:
        ok = not answer.verdict and answer.exit in pasted.exits
        return (RIGHT, []) if ok else (WEAK, [f"not refused: exit code {answer.exit}"])
    if not answer.verdict:
        return REJECTED, [answer.page]
    flags = re.IGNORECASE | re.MULTILINE
    said = [f"says {t!r}" for t in pasted.never if re.search(t, answer.page, flags)]
    innocent = sorted({*answer.culprits} - {*pasted.culprits})
    said += [f"names the innocent rank {rank}" for rank in innocent]
    if said:
        return WRONG, said
    lacking = [f"does not say {t!r}" for t in pasted.says if not re.search(t, answer.page, flags)]
    silent = lacking and answer.verdict == "inconclusive"
    if answer.culprits != pasted.culprits:
        lacking.append(f"names {answer.culprits}, not {pasted.culprits}")
    if answer.verdict not in pasted.verdicts:
        lacking.append(f"verdict {answer.verdict}")
    if answer.exit not in pasted.exits:
        lacking.append(f"exit code {answer.exit}")
    return (SILENT if silent else WEAK if lacking else RIGHT), lacking
