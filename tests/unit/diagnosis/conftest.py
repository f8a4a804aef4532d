"""What each diagnosis of these tests says is held against ``tests/golden/diagnoses``: one file for
each module, so that no sentence and no named rank changes unseen."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

from moediag.diagnosis import trial_diagnosis
from moediag.result import Diagnosis
from tests import golden_lines

DRAWN = re.compile("test_properties.py|test_no_innocent_rank")  # with other evidence in each run
SAID = ("verdict", "confidence", "culprits", "victims", "cause", "suspicious", "next_step")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    made: list[Diagnosis] = []

    def kept(**named: Any) -> Diagnosis:
        made.append(Diagnosis(**named))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_diagnosis, "Diagnosis", kept)
        passed = yield
    if made and not DRAWN.search(pyfuncitem.nodeid):
        place = str(pyfuncitem.funcargs.get("tmp_path", "\0"))
        said = [
            " | ".join(_text(one, name) for name in SAID).replace(place, "PLACE") for one in made
        ]
        name = f"diagnoses/{pyfuncitem.path.stem.removeprefix('test_')}.json"
        golden_lines.hold(name, pyfuncitem.nodeid.partition("::")[2], said, needed=False)
    return passed


def _text(one: Diagnosis, name: str) -> str:
    value = getattr(one, name)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
