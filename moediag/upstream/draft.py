"""A draft of an upstream bug report: one failing trial, in the order in which a project asks.

Nothing is filed. What a maintainer runs comes from :mod:`moediag.upstream.export`: a file without
moediag. Where that cannot be written, the command that shows it stands in its place, with the
reason. The text stays below what GitHub takes; what does not fit is left out from the least
important end, and a file that does not fit is to be attached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moediag.errors import UsageError
from moediag.report.finding import finding_of
from moediag.report.markdown import LIMIT, fenced
from moediag.report.terminal import finding_lines
from moediag.report.text_layout import plain
from moediag.result import FAILURES, Role, RunResult, TrialResult, Verdict, wording
from moediag.upstream.templates import TEMPLATES, Part, Section

WIDTH = 100
NOTICE = "> Draft, written by moediag. Nobody has filed it: read it, check it, then do.\n"
_CUT = "\n\n*(cut at the size limit)*\n"


@dataclass(frozen=True, slots=True)
class Program:
    """The exported file: ``name`` and ``text``; or ``problem``, why there is none, and the
    ``command`` of moediag that shows the failure."""

    name: str = ""
    text: str = ""
    command: str = ""
    problem: str = ""
    run: str = ""  # the torchrun command of the file


@dataclass(frozen=True, slots=True)
class Material:
    """``system``: lines about the stack and the machine that failed; ``title``: the scenario's in
    words; ``sources``: where the failure was told of before; ``began``: what a bisect says."""

    system: Sequence[str]
    program: Program
    title: str = ""
    sources: Sequence[str] = ()
    began: str = ""


def failing(result: RunResult, variant: str = "") -> TrialResult | None:
    """The trial that a report is about: of ``variant``, else the first unfixed one that failed,
    else any that did."""
    failed = [t for t in result.trials if t.verdict in FAILURES and variant in ("", t.variant)]
    return min(failed, key=lambda t: t.role != Role.UNFIXED, default=None)


def draft(
    project: str, result: RunResult, trial: TrialResult, material: Material, limit: int = LIMIT
) -> str:
    """The report on ``trial`` for ``project``, a name of templates.TEMPLATES; at most ``limit``
    characters. Raises UsageError for another name."""
    if project not in TEMPLATES:
        raise UsageError(f"--for {project}: one of {', '.join(TEMPLATES)}")
    page = _page(trial, result)
    inline = True
    # By and by without the page's end, then without the inlined file.
    for shown, inlined in ((len(page), True), (60, True), (60, False), (20, False)):
        inline = inlined
        text = _text(project, result, trial, material, page[:shown], inline)
        if len(text) <= limit:
            return text
    return text[: limit - len(_CUT)] + _CUT


def inlined(text: str, program: Program) -> bool:
    """Whether the draft ``text`` holds the whole file."""
    return bool(program.text) and program.text.rstrip() in text


def _text(
    project: str, result: RunResult, trial: TrialResult, material: Material, page: Sequence[str],
    inline: bool,
) -> str:  # fmt: skip
    template = TEMPLATES[project]
    said = {
        Part.SYSTEM: "\n".join(material.system),
        Part.WHAT: _what(trial, result, material, page),
        Part.REPRODUCTION: _reproduction(material.program, inline),
        Part.EXPECTED: _expected(result, with_label=project in ("pytorch", "torchtitan")),
    }
    if project == "accelerate":
        said[Part.SYSTEM] = fenced(said[Part.SYSTEM], "Shell").rstrip()
    versions = ", ".join(wording.stack(trial.stack))
    title = (
        f"# {_title(trial, material)} ({versions})" if versions else f"# {_title(trial, material)}"
    )
    pieces = [f"{title}\n", NOTICE, f"For https://github.com/{template.repository}/issues\n"]
    pieces += [_section(section, said) for section in template.sections]
    return "\n".join(pieces).rstrip() + "\n"


def _section(section: Section, said: Mapping[Part, str]) -> str:
    parts = [section.text if part == Part.FIXED else said[part] for part in section.parts]
    return f"### {section.heading}\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _title(trial: TrialResult, material: Material) -> str:
    what = {
        Verdict.HANG: "Hang", Verdict.COLLECTIVE_MISMATCH: "Collective mismatch",
        Verdict.WRONG_GRADIENTS: "Wrong gradients", Verdict.WRONG_WEIGHTS: "Wrong weights",
    }  # fmt: skip
    said = next(
        (text for v, text in what.items() if v == trial.verdict), trial.verdict.capitalize()
    )
    return f"{said}: {material.title}" if material.title else said


def _what(trial: TrialResult, result: RunResult, material: Material, page: Sequence[str]) -> str:
    on = f"{wording.plural(trial.world_size, 'rank')} on {_backend(trial)}"
    parts = [f"{trial.cause}\n\nSeen with {on}; verdict `{trial.verdict}`."]
    parts.append(fenced("\n".join(page)).rstrip())
    other = {t.variant for t in result.trials if t.other_batch}  # trains on less: no repair
    right = [f.variant for f in result.conclusion.fixes if f.correct and f.variant not in other]
    if right:
        parts.append(f"What repairs it here: {', '.join(f'`{name}`' for name in right)}.")
    if material.began:
        parts.append(material.began.strip())
    if material.sources:
        parts.append("See also:\n" + "\n".join(f"- {source}" for source in material.sources))
    return "\n\n".join(parts)


def _backend(trial: TrialResult) -> str:
    return wording.backend(trial.backend, trial.shared_gpu, trial.stack.get("nccl")) or "one node"


def _page(trial: TrialResult, result: RunResult) -> list[str]:
    # The cause stands above it, and nobody upstream has the evidence.
    found = replace(finding_of([trial], result), cause="", evidence="", attached=())
    return [plain(line) for line in finding_lines(found, WIDTH, None)]


def _reproduction(program: Program, inline: bool) -> str:
    if not program.text:
        why = f"\n\nNo file without moediag shows it: {program.problem}." if program.problem else ""
        return f"{fenced(program.command, 'console').rstrip()}{why}"
    head = f"Runs without moediag:\n\n{fenced(program.run, 'console')}"
    if not inline:
        return f"{head}\nThe file `{program.name}` is attached."
    code = fenced(program.text.rstrip(), "python")
    return f"{head}\n<details><summary>{program.name}</summary>\n\n{code}\n</details>"


def _expected(result: RunResult, with_label: bool) -> str:
    text = (
        "Every rank issues the same collectives and the step ends, and each gradient equals that "
        "of the same step in a single process."
    )
    clean = [t.variant for t in result.trials if t.role == Role.CONTROL and t.verdict == "clean"]
    if clean:
        text += f" So it is with {', '.join(f'`{name}`' for name in dict.fromkeys(clean))}."
    return f"Expected: {text}" if with_label else text
