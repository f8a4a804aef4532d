"""`moediag init`: parse, call, exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moediag.errors import UsageError
from moediag.lab.cli import completions
from moediag.lab.cli import options as o
from moediag.report import stderr


@o.with_options
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The new scenario file.")],
    from_: Annotated[str, typer.Option(autocompletion=completions.scenarios)] = "",
    set_: o.SetPairs = [],  # noqa: B006
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Write your own scenario: a copy of another one with your changes.

    In a terminal, what no option says is asked for: the scenario to begin with, the title, the
    model family and the release of transformers. A file that exists is not overwritten.

    Options:
    --from NAME: Begin with this scenario. In a terminal it is asked
        for.  [default: expert-starvation]
    """
    from moediag.lab.scenario import catalogue
    from moediag.lab.scenario.load import load
    from moediag.report import views

    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{file}: a scenario file ends in .yaml")
    if file.exists():
        raise UsageError(f"{file} exists", "Give another name, or remove it.")
    asks = sys.stdin.isatty() and sys.stderr.isatty()
    begun = from_ or (_asked("begin with", "expert-starvation") if asks else "expert-starvation")
    source = load(catalogue.find(begun), set_)
    given = {text.partition("=")[0].strip() for text in set_}
    name = file.stem.lower().replace("_", "-").replace(" ", "-")
    changes = [f"name={name}"] if "name" not in given else []
    changes += [f"{field}={value}" for field, value in _OWN.items() if field not in given]
    questions = {
        "title": "my failure", "model.family": source.model.family,
        "stack.transformers": source.stack.get("transformers", ""),
    }  # fmt: skip
    for field, default in questions.items() if asks else ():
        if field not in given and default:
            answer = _asked(field, default)
            changes += [f"{field}={answer}"] if answer != default else []
    scenario = load(catalogue.find(begun), [*set_, *changes])
    text = scenario.to_yaml(with_defaults=False, beside=file.parent)
    stderr.line(views.put(file, text, "FILE.yaml"))
    ranks = scenario.world.default
    stderr.line(f"Change the variants and what they expect. Then: moediag run {file} --cpu {ranks}")


# A copy describes another failure: what says whose it was is not taken over.
_OWN = {"title": "my failure", "description": "''", "sources": "[]"}


def _asked(what: str, default: str) -> str:
    answer: str = typer.prompt(what, default=default, err=True)
    return answer.strip()
