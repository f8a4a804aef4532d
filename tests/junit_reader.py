"""JUnit files as a reader of CI systems takes them: junitparser, which others wrote."""

from __future__ import annotations

import pytest


def as_read(text: str) -> dict[str, list[str]]:
    """Returns the outcome of each case (passed, failure, error, skipped) by suite, and checks that
    the reader's own counts are those in the file. Skips without the reader."""
    junitparser = pytest.importorskip("junitparser")
    found: dict[str, list[str]] = {}
    for suite in junitparser.JUnitXml.fromstring(text):
        told = [suite.tests, suite.failures, suite.errors, suite.skipped, suite.time]
        suite.update_statistics()
        counted = [suite.tests, suite.failures, suite.errors, suite.skipped, suite.time]
        assert told == pytest.approx(counted), suite.name
        cases = [*suite]
        assert len({(case.classname, case.name) for case in cases}) == len(cases), "cases merge"
        assert all(case.classname and case.name and len(case.result) <= 1 for case in cases)
        found[suite.name] = [case.result[0]._tag if case.result else "passed" for case in cases]
    return found
