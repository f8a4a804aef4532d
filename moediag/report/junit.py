"""JUnit XML: one suite per run, one case per trial, for the test views of CI systems.

An unmet expectation is a failure, and so is each failure found in a job that has no expectation
(watched or diagnosed). A trial that could not be judged is an error (red, but not a claim about the
tested code); not-applicable is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from moediag.report.finding import finding_of
from moediag.report.printable import printable
from moediag.report.tables import lines
from moediag.report.terminal import finding_lines
from moediag.report.text_layout import plain
from moediag.result import RunResult, TrialResult, Verdict, wording

WIDTH = 100  # of the texts, in characters


def render(results: Sequence[RunResult]) -> str:
    suites = []
    for result in results:
        cases = [_case(t, result) for t in result.trials]
        made = suite(result.scenario, cases, timestamp=result.started)
        suites.append(made)
        if result.tables:
            page = (plain(line) for table in result.tables for line in lines(table, WIDTH))
            ElementTree.SubElement(made, "system-out").text = printable("\n".join(page))
    return document("moediag", suites)


def document(name: str, suites: Sequence[ElementTree.Element]) -> str:
    """Returns the file of these suites."""
    root = ElementTree.Element("testsuites", name=name)
    root.extend(suites)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def suite(name: str, cases: Sequence[ElementTree.Element], **more: str) -> ElementTree.Element:
    """Returns the cases with the numbers that CI systems read. ``more``: further attributes."""
    kinds = [child.tag for case in cases for child in case]
    counts = {
        "tests": len(cases),
        "failures": kinds.count("failure"),
        "errors": kinds.count("error"),
        "skipped": kinds.count("skipped"),
        "time": f"{sum(float(case.get('time', 0)) for case in cases):.3f}",
    }
    attributes = {"name": name, **more, **{kind: str(number) for kind, number in counts.items()}}
    made = ElementTree.Element("testsuite", {k: printable(v) for k, v in attributes.items()})
    made.extend(cases)
    return made


def _case(t: TrialResult, result: RunResult) -> ElementTree.Element:
    name = t.variant + (f" #{t.repeat + 1}" if t.repeat else "")
    backend = wording.backend(t.backend, t.shared_gpu)
    ranks = wording.plural(t.world_size, "rank")
    where = " ".join([result.scenario, *wording.stack(t.stack), backend, ranks])
    case = ElementTree.Element(
        "testcase",
        name=printable(name),
        classname=printable(where),
        time=f"{t.seconds.total or 0:.3f}",
    )
    page = "\n".join(plain(line) for line in finding_lines(finding_of([t], result), WIDTH, None))
    wanted = f", expected {t.expected}" if t.expected else ""
    message = t.verdict + wanted + (f": {t.cause}" if t.cause else "")
    if t.verdict == Verdict.NOT_APPLICABLE:
        ElementTree.SubElement(case, "skipped", message=printable(t.cause or "not applicable"))
    elif not t.met or (not t.expected and t.verdict != Verdict.CLEAN):
        tag = "error" if t.verdict == Verdict.INCONCLUSIVE else "failure"
        child = ElementTree.SubElement(
            case, tag, message=printable(message), type=printable(t.verdict)
        )
        child.text = printable(page)
    ElementTree.SubElement(case, "system-out").text = printable(page)
    return case
