"""One way of a relation on one family as one Python file that does not need moediag."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import moediag
from moediag.errors import UsageError
from moediag.lab.upstream.export.flat_program import ROOT, flat
from moediag.lab.upstream.export.write_file import literal
from moediag.records import dataclass

_RELATIONS = "moediag.lab.relations"
_FAMILIES = "moediag.lab.step.models"
# What builds the model: the configuration is written out instead of derived by rules.
_CONFIGURATION = '''
def configuration(family: ReleaseFamily, size: Size) -> Any:
    """Returns the configuration above, whatever the size."""
    return family.config.from_dict(copy.deepcopy(CONFIG))
'''
_FILE = '''\
"""{title}

{text}

Written by moediag {version}. Needs torch and transformers {release}, no download, one process on
the CPU. Exit code 1 if it shows, 0 if not.
"""

from __future__ import annotations

import sys

import transformers
{program}


# The smallest configuration of {family} that was found to show it.
MODEL = {model}
CONFIG = {config}


def main() -> int:
    """Compares the two ways."""
    family = ReleaseFamily({family!r}, transformers.CONFIG_MAPPING[{family!r}], MODEL)
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = gap({relation}(), Case(family), {way!r})
    print(f"transformers {{transformers.__version__}}: {{found.text or 'no difference'}}")
    return 1 if found.shows else 0


if __name__ == "__main__":
    sys.exit(main())
'''


@dataclass(frozen=True, slots=True)
class Shown:
    """What the file has to show."""

    family: str
    relation: str
    way: str
    title: str
    text: str
    release: str
    model: str  # name of the model class
    config: Mapping[str, Any] = field(default_factory=dict)


def export(shown: Shown) -> str:
    """Returns the file's text. Raises UsageError for a relation that one file cannot express."""
    module, name = _class_of(shown.relation)
    wanted = [
        (module, name),
        (f"{_RELATIONS}.conditions", "gap"),
        (f"{_RELATIONS}.relation", "Case"),
        (f"{_FAMILIES}.release_families", "ReleaseFamily"),
    ]
    program = flat(wanted, {(f"{_FAMILIES}.tiny_family", "configuration"): _CONFIGURATION})
    return _FILE.format(
        title=_plain(shown.title), text=_plain(shown.text), version=moediag.__version__,
        release=shown.release, program=program, model=literal(shown.model),
        config=literal(dict(shown.config)), family=shown.family, relation=name, way=shown.way,
    )  # fmt: skip


def _class_of(relation: str) -> tuple[str, str]:
    """Returns the module and the class of a relation in one process."""
    for path in sorted((ROOT / "lab" / "relations").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and _named(node, relation):
                return f"{_RELATIONS}.{path.stem}", node.name
    raise UsageError(f"{relation} needs several ranks and cannot be exported")


def _named(node: ast.ClassDef, relation: str) -> bool:
    values = [
        one.value.value
        for one in node.body
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)
        and any(isinstance(t, ast.Name) and t.id == "name" for t in one.targets)
    ]  # fmt: skip
    return values == [relation]


def _plain(text: str) -> str:
    """Returns text that cannot end the docstring around it."""
    flat_text = " ".join(text.split()).replace("\\\\", "/").replace('"', "'")
    return textwrap.fill(flat_text, 98)
