"""Each diagnosis of these tests is held whole against ``tests/golden/answers``."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

from moediag.diagnosis import trial_diagnosis
from moediag.result import Diagnosis
from tests import whole_answers

DRAWN = re.compile("test_properties.py|test_no_innocent_rank")  # with other evidence in each run


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    made: list[Diagnosis] = []

    def kept(**named: Any) -> Diagnosis:
        made.append(Diagnosis(**named))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_diagnosis, "Diagnosis", kept)
        passed = yield
    if not DRAWN.search(pyfuncitem.nodeid):
        whole_answers.hold(pyfuncitem, made)
    return passed
