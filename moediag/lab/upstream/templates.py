"""The issue templates of upstream projects: their sections, in order, with their own headings.

The headings are those that GitHub makes from the forms (``### Label``), so a draft can be copied
into the form's fields from top to bottom.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from moediag.records import dataclass
from moediag.result.verdicts import StrEnum


class Part(StrEnum):
    """The parts of a draft; ``FIXED`` is text of the template itself."""

    SYSTEM = "system"
    WHAT = "what happens, in words"
    REPRODUCTION = "how to see it"
    EXPECTED = "what should happen"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Section:
    heading: str
    parts: tuple[Part, ...]
    text: str = ""  # of Part.FIXED


@dataclass(frozen=True, slots=True)
class Template:
    """One project's template."""

    #: Where the report would be filed.
    repository: str
    sections: tuple[Section, ...]


_INFORMATION = Section(
    "Information",
    (Part.FIXED,),
    "- [ ] The official example scripts\n- [x] My own modified scripts",
)


def _tasks(official: str) -> Section:
    text = f"- [ ] {official}\n- [x] My own task or dataset (give details below)"
    return Section("Tasks", (Part.FIXED,), text)


_SYSTEM = Section("System Info", (Part.SYSTEM,))
_REPRODUCTION = Section("Reproduction", (Part.WHAT, Part.REPRODUCTION))
_EXPECTED = Section("Expected behavior", (Part.EXPECTED,))

TEMPLATES: Mapping[str, Template] = {
    "transformers": Template(
        "huggingface/transformers",
        (
            _SYSTEM,
            Section("Who can help?", (Part.FIXED,), "_No response_"),
            _INFORMATION,
            _tasks(
                "An officially supported task in the `examples` folder (such as GLUE/SQuAD, ...)"
            ),
            _REPRODUCTION,
            _EXPECTED,
        ),
    ),
    "accelerate": Template(
        "huggingface/accelerate",
        (
            _SYSTEM,
            _INFORMATION,
            _tasks(
                "One of the scripts in the examples/ folder of Accelerate or an officially "
                "supported `no_trainer` script in the `examples` folder of the `transformers` repo "
                "(such as `run_no_trainer_glue.py`)"
            ),
            _REPRODUCTION,
            _EXPECTED,
        ),
    ),
    "pytorch": Template(
        "pytorch/pytorch",
        (
            Section("🐛 Describe the bug", (Part.WHAT, Part.REPRODUCTION, Part.EXPECTED)),
            Section("Versions", (Part.SYSTEM,)),
        ),
    ),
    "torchtitan": Template(
        "pytorch/torchtitan",
        (
            Section("Bug description", (Part.WHAT, Part.REPRODUCTION, Part.EXPECTED)),
            Section("Versions", (Part.SYSTEM,)),
        ),
    ),
}


def upstream(sources: Iterable[str], packages: Iterable[str]) -> str | None:
    """The project that has the bug, as far as a scenario tells, or None.

    It is the first project among the scenario's ``sources`` (addresses, or ``accelerate 1.15.0,
    accelerate/utils/…``), else the first among the ``packages`` of its stack.
    """
    for source in sources:
        for name, template in TEMPLATES.items():
            word = "torch" if name == "pytorch" else name
            if f"github.com/{template.repository}/" in source or re.match(rf"{word}\b", source):
                return name
    named = ["pytorch" if package == "torch" else package for package in packages]
    return next((name for name in ("torchtitan", *TEMPLATES) if name in named), None)
