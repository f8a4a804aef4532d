"""What readers return to these tests is held whole against ``tests/golden/answers``."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests import whole_answers


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    with pytest.MonkeyPatch.context() as patch:
        answers = whole_answers.listen(pyfuncitem, patch, "moediag.evidence")
        passed = yield
    if pyfuncitem.path.stem != "test_file_reader":  # it draws its data
        whole_answers.hold(pyfuncitem, answers)
    return passed
