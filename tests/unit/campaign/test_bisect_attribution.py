"""What changed at a boundary: functions that differ, ranked by what the failing trial ran."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moediag.errors import StackError
from moediag.lab.campaign.bisect import answer_page
from moediag.lab.campaign.bisect.beyond import Beyond
from moediag.lab.campaign.bisect.executed import Executed
from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD
from moediag.lab.campaign.bisect.search.answer import Answer, Boundary, Status
from moediag.lab.campaign.bisect.suspects import attribution as module
from moediag.lab.campaign.bisect.suspects import suspects
from moediag.lab.campaign.bisect.suspects.attribution import attribute
from moediag.lab.campaign.bisect.suspects.functions import TOP, ChangedFunction, How, changed
from moediag.lab.campaign.bisect.suspects.installed_source import compare, installed, repository
from moediag.lab.campaign.bisect.suspects.ranking import Clues, named, ranked
from moediag.lab.campaign.bisect.suspects.suspects import Attribution
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.protocol import error_file, executed_file, write_json
from moediag.result import Conclusion, FirstDivergence, RankSide, RunResult
from tests.unit import trial_results
from tests.unit.bisect_fakes import STARVED, TARGET
from tests.unit.campaign.test_bisect_signatures import trial

OLD = '''\
"""A model."""
import torch

LIMIT = 3


class Block(torch.nn.Module):
    """Routes."""

    scale = 1

    def forward(self, x):
        """Every expert."""
        for expert in range(self.n):  # all of them
            x = self.experts[expert](x)
        return x

    def same(self):
        return 1


class Model:
    def forward(self, x):
        return self.block(x)

    def unused(self):
        return 0


def gone():
    def inner():
        return 1

    return inner
'''
NEW = '''\
"""A model, described otherwise."""
import torch

LIMIT = 3


class Experts(torch.nn.Module):
    def forward(self, x):
        return x

    def other(self):
        return 2


class Block(torch.nn.Module):
    """Routes in another way."""

    scale = 1

    def forward(self, x):
        for expert in hit(self.n):
            x = self.experts[expert](x)
        return x

    def same(self):
        # Nothing but a comment and layout.
        return (
            1
        )


class Model:
    def forward(self, x):
        return self.block(x) + 0

    def unused(self):
        return None
'''


def found(old: str | None = OLD, new: str | None = NEW) -> dict[str, ChangedFunction]:
    return {c.name: c for c in changed("m.py", old, new)}


def test_changed_added_and_removed_functions_are_found() -> None:
    assert {name: c.how for name, c in found().items()} == {
        "Experts": How.ADDED,  # and not each of its methods
        "Block.forward": How.CHANGED,
        "Model.forward": How.CHANGED,
        "Model.unused": How.CHANGED,
        "gone": How.REMOVED,
    }
    diff = found()["Block.forward"].diff
    assert "-    for expert in range(self.n):" in diff
    assert "+    for expert in hit(self.n):" in diff
    assert not any("Every expert" in line for line in diff), "a docstring does not run"
    assert found()["Block.forward"].size == 2
    assert any("def other" in line for line in found()["Experts"].diff)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("x = 1\n", "x = 2\n", {TOP}),
        ("class A:\n    x = 1\n    def f(): 0\n", "class A:\n    x = 2\n    def f(): 0\n", {"A"}),
        ("class A: pass\n", "class A(B): pass\n", {"A"}),
        ("@a\ndef f(): pass\n", "@b\ndef f(): pass\n", {"f"}),
        ("def f():\n    def g(): return 1\n", "def f():\n    def g(): return 2\n", {"f"}),
        ("if x:\n    def f(): return 1\n", "if x:\n    def f(): return 2\n", {"f"}),
        ("try: 0\nexcept E:\n    def f(): 1\n", "try: 0\nexcept E:\n    def f(): 2\n", {"f"}),
        ("async def f(): pass\n", "def f(): pass\n", {"f"}),
        ("def f(): pass\n", "def f():\n    '''Said.'''\n", set()),
        ("def f(x: int): return x\n", "# moved\n\n\ndef f(x: int): return x\n", set()),
        (None, "def f(): pass\n", {"f", TOP}),
        ("def f(): pass\n", None, {"f", TOP}),
    ],
)  # fmt: skip
def test_only_code_differences_count(old: str | None, new: str | None, names: set[str]) -> None:
    assert set(found(old, new)) == names


def test_a_file_of_a_later_python_is_a_syntax_error() -> None:
    with pytest.raises(SyntaxError):
        changed("m.py", "def f(:\n", "")
    with pytest.raises((SyntaxError, ValueError)):
        changed("m.py", "\0", "")


def line_of(source: str, text: str) -> int:
    return source.splitlines().index(text) + 1


def clues(**more: Any) -> Clues:
    ran_old = {line_of(OLD, "    def forward(self, x):"), line_of(OLD, "def gone():") + 1}
    ran_old.add(line_of(OLD, "class Model:") + 1)
    ran_new = {line_of(NEW, "    def forward(self, x):"), line_of(NEW, "class Model:") + 1}
    old = Executed(
        {"m.py": {0, *ran_old}}, {("m.py", "Block"): {"layers.*.mlp"}, ("m.py", "Model"): {""}}
    )
    new = Executed({"m.py": {0, *ran_new}}, {("m.py", "Experts"): {"layers.*.mlp.experts"}})
    values = {"parameters": ("layers.1.mlp.experts.3.up.weight",), "old": old, "new": new, **more}
    return Clues(**values)


def test_functions_around_the_failed_parameters_are_ranked_first() -> None:
    order = ranked(found().values(), clues())
    assert [s.change.name for s in order] == [
        "Experts", "Block.forward", "Model.forward", "gone", "Model.unused",
    ]  # fmt: skip
    assert [s.depth for s in order] == [4, 3, 0, -1, 0]
    assert [s.ran for s in order] == [True, True, True, True, False]
    assert order[1].why == "code of layers.*.mlp, around what failed; ran"
    assert order[-1].why == "code of the model, around what failed; imported, did not run"


def test_parameters_elsewhere_in_the_model_do_not_raise_the_rank() -> None:
    order = ranked(found().values(), clues(parameters=("embed.weight",)))
    assert {s.change.name: s.depth for s in order if s.depth >= 0} == {
        "Model.forward": 0, "Model.unused": 0,
    }  # fmt: skip


def test_functions_in_the_failing_stack_are_ranked_first() -> None:
    line = line_of(OLD, "        return 0")
    order = ranked(found().values(), clues(frames=(("m.py", line), ("other.py", 1))))
    assert order[0].change.name == "Model.unused" and order[0].in_stack
    assert sum(s.in_stack for s in order) == 1


def test_the_most_specific_names_are_used() -> None:
    assert named("w", ("a", "a"), ("b",), "m") == ("a",)
    assert named("w", (), ("b",), "m") == ("b", "w")
    assert named(None, (), (), "m") == ("m",)
    assert named(None, (), (), "") == ()


# ------------------------------------------------------------------------ installed packages


def environment(folder: Path, version: str, files: Mapping[str, str]) -> Path:
    """A virtual environment in which ``mini`` is installed; its interpreter."""
    site = folder / "lib" / "python3.11" / "site-packages"
    about = site / f"mini-{version}.dist-info"
    about.mkdir(parents=True)
    home = "https://github.com/someone/mini"
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: mini\nVersion: {version}\nHome-page: {home}\n", "utf-8"
    )
    rows = []
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
        rows.append(f"{name},sha256={hashlib.sha256(text.encode()).hexdigest()},{len(text)}")
    rows += ["../../../bin/mini,,", "mini/data.bin,,", f"mini-{version}.dist-info/RECORD,,"]
    (about / "RECORD").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def test_an_installed_package_is_read(tmp_path: Path) -> None:
    python = environment(tmp_path, "1.0", {"mini/__init__.py": "", "mini/m.py": OLD, "one.py": ""})
    package = installed(python, "mini")
    assert (package.version, set(package.files)) == (
        "1.0",
        {"mini/__init__.py", "mini/m.py", "one.py"},
    )
    assert (package.tops, package.compiled) == (("mini", "one"), False)
    assert package.repository == "https://github.com/someone/mini"
    assert package.text("mini/m.py") == OLD
    assert package.text("mini/none.py") is None
    with pytest.raises(StackError, match="has no other"):
        installed(python, "other")


GITHUB = "https://github.com"
ADDRESSES: list[tuple[list[tuple[str, str]], str]] = [
    ([("Home-page", f"{GITHUB}/huggingface/transformers")], f"{GITHUB}/huggingface/transformers"),
    (
        [
            ("Project-URL", "Homepage, https://pytorch.org"),
            ("Project-URL", f"Repository, {GITHUB}/pytorch/pytorch"),
        ],
        f"{GITHUB}/pytorch/pytorch",
    ),
    (
        [
            ("Project-URL", f"Documentation, {GITHUB}/a/docs/tree/x"),
            ("Project-URL", f"Source Code, {GITHUB}/a/b.git"),
        ],
        f"{GITHUB}/a/b",
    ),
    ([("Home-page", "https://example.org")], ""),
    ([], ""),
]


@pytest.mark.parametrize(("fields", "address"), ADDRESSES)
def test_repository_is_read_from_the_metadata(fields: list[tuple[str, str]], address: str) -> None:
    about = Message()
    for name, value in fields:
        about[name] = value
    assert repository(about) == address  # type: ignore[arg-type]


def test_compare_links_to_the_difference_of_two_tags() -> None:
    assert (
        compare("https://github.com/a/b", "1.0", "2.0")
        == "https://github.com/a/b/compare/v1.0...v2.0"
    )
    assert compare("https://gitlab.com/a/b", "1", "2") == "https://gitlab.com/a/b/-/compare/v1...v2"
    assert compare("", "1.0", "2.0") == ""


# ------------------------------------------------------------------------ attribution


@pytest.fixture
def bisected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[ProbeRecord], Path]:
    """Two probed releases of ``mini``: 1.0 is good, 1.1 bad; what their trials left behind."""
    pythons = {}
    records = []
    for version, source, verdict in (("1.0", OLD, GOOD), ("1.1", NEW, BAD)):
        files = {"mini/m.py": source, "mini/never.py": f"x = '{version}'\n"}
        pythons[version] = environment(tmp_path / version, version, files)
        run = tmp_path / "probes" / version
        place = run / "unfixed"
        place.mkdir(parents=True)
        one = trial("clean" if verdict is GOOD else STARVED, "unfixed", "unfixed")
        missing = RankSide("reduce_scatter", 1, "float32", ("layers.1.mlp.experts.3.up.weight",))
        divergence = FirstDivergence(0, "dp", "backward", "layers.1", {"1": missing})
        one = trial_results.changed(
            one, evidence="unfixed", culprits=(1,), first_divergence=divergence
        )
        RunResult("s", "", "0", {}, (one,), Conclusion(reproduced=None)).write(run)
        lines = [[0, "mini/m.py"], [0, 0], [0, "Block", "layers.*.mlp"]]
        lines += [[0, line_of(source, "class Block(torch.nn.Module):") + (5)]]
        text = "\n".join(map(json.dumps, lines))
        (place / executed_file(0)).write_text(text, encoding="utf-8")
        records.append(ProbeRecord(version, verdict, evidence=f"probes/{version}"))
    monkeypatch.setattr(
        module.environment,
        "ready",
        lambda request: SimpleNamespace(python=pythons[request["mini"]]),
    )
    return records, tmp_path


def attributed(records: list[ProbeRecord], folder: Path) -> Attribution:
    requests = {v: {"mini": v} for v in ("1.0", "1.1")}
    return attribute("mini", requests, "1.0", "1.1", records, TARGET, folder)


def test_probes_are_attributed_to_a_function(bisected: tuple[list[ProbeRecord], Path]) -> None:
    records, folder = bisected
    result = attributed(records, folder)
    assert not result.problem
    assert (result.files, result.imported, result.functions, result.ran) == (2, 1, 5, 1)
    assert [s.change.name for s in result.shown] == ["Block.forward"]
    text = suspects.lines(result)
    assert "1 of them imported" in text[0]
    assert "Block.forward  mini/m.py:20  (code of layers.*.mlp, around what failed; ran)" in text[1]
    assert text[-1] == "  https://github.com/someone/mini/compare/v1.0...v1.1"
    raw = suspects.to_json(result)
    assert raw["changed"][0]["file"] == "mini/m.py"
    assert raw["changed"][0]["lines"] == {"old": [12, 16], "new": [20, 23]}


def test_a_function_in_the_traceback_is_marked(bisected: tuple[list[ProbeRecord], Path]) -> None:
    records, folder = bisected
    place = folder / "probes" / "1.1" / "unfixed"
    file = folder / "1.1" / "lib/python3.11/site-packages/mini/m.py"
    stack = f'  File "{file}", line {line_of(NEW, "        return None")}, in unused\n'
    stack += '  File "/x/site-packages/torch/nn/f.py", line 3, in linear\n'
    error = {"message": {"message": "E", "extraInfo": {"py_callstack": stack}}}
    write_json(place / error_file(1), error)
    assert attributed(records, folder).shown[0].change.name == "Block.forward"
    first = attributed(records, folder).suspects[0]
    assert first.change.name == "Model.unused" and first.in_stack and not first.ran


def test_missing_parts_are_reported(
    bisected: tuple[list[ProbeRecord], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    records, folder = bisected
    for path in folder.glob("probes/*/*/*.executed.jsonl"):
        path.unlink()
    result = attributed(records, folder)
    assert result.problem == "no trial noted which functions it ran"
    assert result.compare.endswith("v1.0...v1.1")
    monkeypatch.setattr(module.environment, "ready", lambda request: None)
    text = suspects.lines(attributed(records, folder))
    assert "the environment of mini 1.0 is not there any more" in text[0]


def test_suspects_are_on_the_page_and_in_the_json(bisected: tuple[list[ProbeRecord], Path]) -> None:
    records, folder = bisected
    boundary = Boundary(bad=1, good=0, limit=0, confirmed=True)
    report = answer_page.Report(
        "mini", "s", Answer(Status.FOUND, 1, BAD, began=boundary), ("1.0", "1.1"),
        {0: GOOD, 1: BAD}, tuple(records), beyond={"began": Beyond(attributed(records, folder))},
    )  # fmt: skip
    text = answer_page.markdown(report)
    assert "| `Block.forward` in `mini/m.py` | changed |" in text
    assert "+    for expert in hit(self.n):" in text
    assert "https://github.com/someone/mini/compare/v1.0...v1.1" in text
    raw = answer_page.to_json(report)
    assert raw["began"]["attribution"]["changed"][0]["function"] == "Block.forward"


def test_a_long_difference_is_truncated() -> None:
    body = "\n".join(f"    x = {n}" for n in range(200))
    (change,) = changed("m.py", "def f():\n    x = -1\n", f"def f():\n{body}{'0' * 300}\n")
    (suspect,) = ranked([change], Clues())
    shown = suspects.difference(suspect)
    assert len(shown) == suspects.LINES
    assert shown[-1].startswith("... ") and shown[-1].endswith(" more lines")
    assert max(map(len, shown)) <= suspects.WIDTH
