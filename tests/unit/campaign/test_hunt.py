"""`moediag hunt`: what is checked, what counts, the page, exit codes, and resuming."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moediag.cli import app
from moediag.errors import ExitCode, ScenarioError, UsageError
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.hunt import findings_page, question, session
from moediag.lab.campaign.hunt.findings import Finding, Hunt, HuntCell, Key, State, group, remaining
from moediag.lab.campaign.hunt.question import Wanted
from moediag.lab.campaign.hunt.release_changes import Changes, changes
from moediag.lab.pipeline import register
from moediag.lab.pipeline.register import Entry
from moediag.lab.stacks.environment import Stack
from moediag.protocol import (
    CONDITIONS,
    ListedFamily,
    RelationOutcome,
    ReleaseListing,
    WayOutcome,
    build,
)
from moediag.report import answer_views
from moediag.report.text_layout import plain
from moediag.result.answer_blocks import AnswerState

RELATIONS = {"packing": "documents stay apart", "padding": "padding changes nothing"}
LISTING = ReleaseListing(
    [
        ListedFamily("alpha", "moe"),
        ListedFamily("beta", "moe"),
        ListedFamily("beta_all", "moe", same_as="beta"),
        ListedFamily("beta_two", "moe", same_as="beta", own_config=True),
        ListedFamily("gamma", "dense"),
        ListedFamily("odd", "", "ValueError: no"),
    ],
    RELATIONS,
)
MET: dict[str, bool | None] = dict.fromkeys(CONDITIONS, True)
HOLDS = WayOutcome("left", True)
WRONG = WayOutcome("left", False, "wrong", "logits", "1 of 2 tensors differ", 0.5, 1e-5, MET)
DOUBTED = WayOutcome("left", False, "wrong", "logits", "", 0.5, 1e-5,
                     {"control": True, "twice": False})  # fmt: skip


def cell(family: str, relation: str, *ways: WayOutcome, **more: Any) -> HuntCell:
    return HuntCell(RelationOutcome(family, relation, list(ways), **more), 0.1)


def found(*cells: HuntCell, known: tuple[Entry, ...] = (), **more: Any) -> Hunt:
    families = tuple(f for f in LISTING.families if f.name in {c.key[0] for c in cells})
    by_key = {c.key: c for c in cells}
    return Hunt({"transformers": "5.0.0"}, RELATIONS, families, by_key, known, **more)


# ------------------------------------------------------------------------ the question


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("moe",), ["alpha", "beta"]),
        (("dense",), ["gamma"]),
        (("all",), ["alpha", "beta", "gamma", "odd"]),
        (("beta_all",), ["beta"]),
        (("beta_two",), ["beta_two"]),
        (("moe", "beta_two"), ["alpha", "beta", "beta_two"]),
        (("gamma", "alpha"), ["alpha", "gamma"]),
    ],
)
def test_families_are_chosen_by_name_or_kind(words: tuple[str, ...], names: list[str]) -> None:
    chosen = question.chosen_families(Wanted(families=words), LISTING)
    assert [family.name for family in chosen] == names


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("alpha", "gamma"), []),
        (("dense",), []),
        (("beta_all",), ["beta_all is checked as beta,"]),
        (("beta_two",), ["beta_two has the model class of beta and is built with its own"]),
        (("moe",), ["not checked, because another family has the model class: beta_two (beta);"]),
        (("moe", "beta_two"), ["beta_two has the model class of beta"]),
    ],
)
def test_what_a_family_stands_for_is_told(words: tuple[str, ...], told: list[str]) -> None:
    wanted = Wanted(families=words)
    texts = list(question.resolutions(wanted, LISTING))
    assert len(texts) == len(told)
    assert all(text.startswith(start) for text, start in zip(texts, told, strict=True)), texts
    hunt = found(cell("alpha", "packing", HOLDS), resolutions=tuple(texts))
    page = "\n".join(plain(line) for line in answer_views.lines(findings_page.answer(hunt), 400))
    for text in texts:
        assert text in page and text in document(hunt)
    assert findings_page.to_json(hunt)["resolutions"] == texts


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="--family delta: the release has no such model type"):
        question.chosen_families(Wanted(families=("delta",)), LISTING)
    with pytest.raises(UsageError, match="--relation sizes"):
        question.chosen_relations(Wanted(relations=("sizes",)), LISTING)
    with pytest.raises(UsageError, match="--release"):
        Wanted(stack={"transformers": "5.0.0"}).request("5.0.0")


def test_a_family_that_is_not_built_costs_one_cell() -> None:
    families = question.chosen_families(Wanted(families=("all",)), LISTING)
    refused = cell("alpha", "packing", built=False, problem="KeyError: x")
    left = remaining(families, RELATIONS, {refused.key: refused})
    assert {family for family, _ in left} == {"beta", "gamma"}
    assert len(left) == 4


# ------------------------------------------------------------------------ findings


def test_one_cause_in_several_families_is_one_finding() -> None:
    (one,) = group([cell(f, "padding", WRONG) for f in ("alpha", "beta")], ())
    assert one.signature == "padding:wrong:logits"
    assert (one.state, one.families) == (State.NEW, ("alpha", "beta"))


def test_each_way_that_does_not_hold_is_a_finding() -> None:
    holds = WayOutcome("right", True)
    (one,) = group([cell("alpha", "padding", holds, WRONG)], ())
    assert [shown.way for shown in one.shown] == [WRONG]


def test_a_difference_counts_only_if_every_condition_is_met() -> None:
    (one,) = group([cell("alpha", "padding", DOUBTED)], ())
    assert one.state == State.NOT_CONFIRMED
    partly = WayOutcome("left", False, "wrong", "logits", conditions={"control": True})
    (one,) = group([cell("alpha", "padding", partly)], ())
    assert one.state == State.NOT_CONFIRMED, "conditions that were not checked are not met"


@pytest.mark.parametrize(
    ("met", "state"),
    [
        ({"control": True, "twice": True, "other-seed": False}, State.KNOWN),
        ({"control": True, "twice": False}, State.NOT_CONFIRMED),
        ({"control": False}, State.NOT_CONFIRMED),
    ],
)
def test_what_the_register_lists_has_to_show_twice(
    met: dict[str, bool | None], state: State
) -> None:
    entry = Entry(("padding",), "known", "https://…/1", "leaks")
    seen = WayOutcome("left", False, "wrong", "logits", conditions=met)
    (one,) = group([cell("alpha", "padding", seen)], (entry,))
    assert one.state == state
    (one,) = group([cell("alpha", "padding", seen)], ())
    assert one.state == State.NOT_CONFIRMED


def test_what_upstream_knows_comes_after_what_is_new() -> None:
    known = (
        Entry(("padding",), "known", "https://…/1", "leaks", families=("alpha",)),
        Entry(("packing",), "by-design", "its docstring", "needs flash attention"),
    )
    cells = [
        cell("alpha", "packing", WRONG),
        cell("alpha", "padding", WRONG),
        cell("beta", "padding", WRONG),
        cell("gamma", "padding", DOUBTED),
    ]
    states = [(f.state, f.families) for f in group(cells, known)]
    assert states == [
        (State.NEW, ("beta",)),
        (State.KNOWN, ("alpha",)),
        (State.BY_DESIGN, ("alpha",)),
        (State.NOT_CONFIRMED, ("gamma",)),
    ]


def test_the_register_that_moediag_has_is_readable() -> None:
    for entry in register.read():
        assert entry.where
        assert State(entry.status.replace("-", " ")) not in (State.NEW, State.NOT_CONFIRMED)
        if entry.status == "unreported":
            assert (Path(__file__).parents[3] / entry.where).is_file()
        assert entry.summary


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b", "not a list"),
        ("- 1", "entry 1 is not a mapping"),
        ("- {relations: [r]}", "entry 1: .*missing"),
        ("- {relations: [r], status: old, where: w, summary: s}", "status 'old' is none of"),
        ("- {relations: r, status: known, where: w, summary: s}", "relations: .* is not a list"),
        ("[" * 20_000, "nested too deeply"),
        ("- {relations: [r], status: known, where: w, summary: s, ways: 3}", "3 is not a list"),
        ("- {relations: [r], status: known, where: 2024-99-99, summary: s}", "known.yaml:1"),
    ],
)
def test_a_register_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((UsageError, ScenarioError), match=message):
        register.read(path)


# ------------------------------------------------------------------------ the page


def document(hunt: Hunt) -> str:
    return answer_views.markdown(findings_page.answer(hunt))


def text(hunt: Hunt) -> str:
    return "\n".join(plain(line) for line in answer_views.lines(findings_page.answer(hunt), 100))


def test_the_page_names_what_is_new_what_is_unsure_and_what_is_missing() -> None:
    page = text(
        found(
            cell("alpha", "padding", WRONG),
            cell("beta", "padding", DOUBTED),
            cell("gamma", "padding", built=False, problem="TypeError: no size"),
            cell("alpha", "packing", problem="the time limit was reached"),
        )
    )
    assert "4 cells, 2 of 3 families built; 1 new, 1 not confirmed" in page
    assert "NEW      padding (left), 1 family" in page
    assert "UNSURE   padding (left): beta" in page
    assert page.index("gamma:") < page.index("UNSURE") < page.index("NEW") < page.index("HUNT")
    assert "it shows twice" in page
    assert "gamma: TypeError: no size" in page
    assert "alpha packing: the time limit was reached" in page
    assert "1 cell" in page, "beta packing was not run"


def test_what_the_register_has_is_short_in_the_terminal_and_whole_in_markdown() -> None:
    entry = Entry(("padding",), "known", "https://…/1", "leaks")
    hunt = found(cell("alpha", "padding", WRONG), known=(entry,))
    page = text(hunt)
    assert "KNOWN    padding (left): alpha\n see      leaks (https://…/1)" in page
    assert "nothing new, 1 known\n WHY      not run: 1 cell" in page
    assert WRONG.text not in page and WRONG.text in document(hunt)


def test_the_page_of_a_hunt_without_findings_says_so() -> None:
    page = text(found(cell("alpha", "padding", HOLDS), cell("alpha", "packing", applicable="no")))
    told = "HUNT as expected: transformers 5.0.0: 2 cells, 1 of 1 family built; no finding"
    assert " ".join(page.split()) == told


def test_a_relation_whose_package_the_stack_lacks_is_listed_as_not_run() -> None:
    absent = [cell(f, "packing", applicable="no", lacks="peft") for f in ("alpha", "beta")]
    hunt = found(*absent, cell("alpha", "padding", HOLDS), cell("beta", "padding", applicable="no"))
    assert hunt.not_run == {"packing": "peft"}
    assert "packing: peft is not in this stack (--stack peft=VERSION)" in text(hunt)
    assert "packing: peft is not in this stack" in document(hunt)
    assert findings_page.to_json(hunt)["not_run"] == {"packing": "peft"}
    assert "not run: peft" in findings_page.cell_line(absent[0])[0]
    assert build(HuntCell, asdict(absent[0])) == absent[0]


def test_markdown_and_json_have_every_condition() -> None:
    hunt = found(cell("alpha", "padding", WRONG))
    assert "control yes, twice yes" in document(hunt)
    raw = json.loads(json.dumps(findings_page.to_json(hunt)))
    assert raw["findings"][0]["shown"][0]["conditions"] == MET
    assert build(HuntCell, raw["cells"][0]) == hunt.cells["alpha", "padding"]


def test_cells_are_cases_for_ci_and_what_the_register_lists_is_no_failure() -> None:
    cells = (
        cell("alpha", "padding", WRONG), cell("beta", "padding", DOUBTED),
        cell("gamma", "padding", built=False, problem="no size"),
        cell("alpha", "packing", applicable="no"), cell("beta", "packing", HOLDS),
    )  # fmt: skip
    cases = findings_page.answer(found(*cells)).cases
    assert {(case.group, case.name): case.state for case in cases} == {
        ("alpha", "padding"): AnswerState.FAILURE,
        ("beta", "padding"): AnswerState.INCONCLUSIVE,
        ("gamma", "padding"): AnswerState.INCONCLUSIVE,
        ("alpha", "packing"): None,
        ("beta", "packing"): AnswerState.AS_EXPECTED,
    }
    entry = Entry(("padding",), "known", "https://…/1", "leaks")
    (known,) = findings_page.answer(found(cells[0], known=(entry,))).cases
    assert known.state == AnswerState.AS_EXPECTED


def test_families_of_a_finding_in_the_register_share_a_row() -> None:
    entry = Entry(("padding",), "known", "https://…/1", "leaks")
    cells = [cell(family, "padding", WRONG) for family in ("alpha", "beta")]
    page = document(found(*cells, known=(entry,)))
    assert "| left | alpha, beta | control yes" in page
    assert document(found(*cells)).count("| alpha | left |") == 1


# ------------------------------------------------------------------------ the command


class World:
    """Replaces the environment and the processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Key] = []
        self.outcomes: dict[Key, HuntCell] = {}
        self.older: list[Key] = []
        self.ends_at: int | None = None

        def ensure(request: dict[str, str], *_: object) -> Stack:
            return Stack(Path("python"), {**request, "python": "3.11"}, "key", 0.0, [])

        monkeypatch.setattr(session.environment, "ensure", ensure)
        monkeypatch.setattr(session, "Workers", lambda *args: Older(self) if args[3] else self)
        monkeypatch.setattr(register, "REGISTER", Path("nowhere"))
        monkeypatch.setattr(session.register, "read", tuple)

    def listing(self) -> ReleaseListing:
        return LISTING

    def make(self, key: Key) -> HuntCell:
        if len(self.made) == self.ends_at:
            self.ends_at = None
            raise KeyboardInterrupt
        self.made.append(key)
        return self.outcomes.get(key, cell(*key, HOLDS))

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Older:
    """The processes of the earlier release, 4.0.0, which has no family alpha."""

    def __init__(self, world: World) -> None:
        self.world = world

    def listing(self) -> ReleaseListing:
        return ReleaseListing([f for f in LISTING.families if f.name != "alpha"], RELATIONS)

    def make(self, key: Key) -> HuntCell:
        self.world.older.append(key)
        return HuntCell(RelationOutcome(*key, [WRONG]), 0.1, release="4.0.0")

    def stop(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def hunt(out: Path, *words: str) -> int:
    return app.main(["hunt", "--release", "5.0.0", "--out", str(out), *words])


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (cell("alpha", "padding", HOLDS), ExitCode.OK),
        (cell("alpha", "padding", applicable="it has none"), ExitCode.OK),
        (cell("alpha", "padding", WRONG), ExitCode.FAILURE_FOUND),
        (cell("alpha", "padding", DOUBTED), ExitCode.INCONCLUSIVE),
        (cell("alpha", "padding", problem="killed"), ExitCode.INCONCLUSIVE),
        (cell("alpha", "padding", built=False, problem="no"), ExitCode.INCONCLUSIVE),
    ],
)
def test_the_exit_code_says_what_was_found(
    world: World, tmp_path: Path, outcome: HuntCell, code: int
) -> None:
    world.outcomes[outcome.key] = outcome
    assert hunt(tmp_path / "out", "--family", "alpha") == code
    assert (
        (tmp_path / "out" / session.PAGE_FILE).read_text(encoding="utf-8").startswith("## Hunt of")
    )


def test_the_page_is_written_in_other_formats(world: World, tmp_path: Path) -> None:
    world.outcomes["alpha", "padding"] = cell("alpha", "padding", WRONG)
    files = {kind: tmp_path / kind for kind in ("html", "markdown", "junit")}
    words = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert hunt(tmp_path / "out", "--family", "alpha", *words) == ExitCode.FAILURE_FOUND
    written = {kind: path.read_text(encoding="utf-8") for kind, path in files.items()}
    assert all("failure found" in text for text in written.values())
    assert WRONG.text in written["html"] and WRONG.text in written["markdown"]


def test_an_interrupted_hunt_is_resumed_and_repeats_nothing(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.ends_at = 1
    assert hunt(tmp_path / "out") == ExitCode.INTERRUPTED
    assert "interrupted after 1 finished cell" in capsys.readouterr().err
    assert hunt(tmp_path / "out", "--resume") == ExitCode.OK
    assert world.made == [
        ("alpha", "packing"), ("alpha", "padding"), ("beta", "packing"), ("beta", "padding"),
    ]  # fmt: skip
    assert hunt(tmp_path / "out", "--resume", "--family", "all") == ExitCode.INCONCLUSIVE
    assert world.made[4:] == [("gamma", "packing"), ("gamma", "padding")]


def test_no_cell_begins_after_the_time_limit(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hunt(tmp_path / "out", "--minutes", "0", "--json") == ExitCode.INCONCLUSIVE
    assert json.loads(capsys.readouterr().out)["missing"] == 4
    assert world.made == []


def test_another_timeout_is_another_question(world: World, tmp_path: Path) -> None:
    assert hunt(tmp_path / "out", "--family", "alpha") == ExitCode.OK
    again = hunt(tmp_path / "out", "--family", "alpha", "--timeout", "5", "--resume")
    assert again == ExitCode.USAGE


def test_a_cell_is_one_line_of_the_display(world: World, tmp_path: Path) -> None:
    lines: list[str] = []

    class Shown(Display):
        def show(self, line: Any) -> None:
            lines.append(line.text)

    wanted = Wanted("5.0.0", ("alpha",))
    world.outcomes["alpha", "padding"] = cell("alpha", "padding", WRONG)
    session.run(wanted, tmp_path / "out", False, ("moediag", "hunt"), Shown())
    assert lines == ["alpha  packing  0.10 s  holds", "alpha  padding  0.10 s  wrong (left)"]


def test_a_finding_names_each_way_once() -> None:
    other = WayOutcome("right", False, "wrong", "logits", conditions=MET)
    (one,) = group([cell("alpha", "padding", WRONG, other)], ())
    assert isinstance(one, Finding)
    assert one.ways == ("left", "right")


# ------------------------------------------------------------------------ two releases


def against(now: list[HuntCell], before: list[HuntCell]) -> Changes:
    earlier = found(*before)
    return changes(found(*now, before=earlier))


OTHER = WayOutcome("left", False, "crash", "KeyError in x", conditions=MET)
LOST = WayOutcome("left", None, text="the plain way failed")


@pytest.mark.parametrize(
    ("now", "before", "appeared", "gone", "same", "undecided"),
    [
        (WRONG, HOLDS, 1, 0, 0, 0),
        (HOLDS, WRONG, 0, 1, 0, 0),
        (WRONG, WRONG, 0, 0, 1, 0),
        (HOLDS, HOLDS, 0, 0, 0, 0),
        (WRONG, OTHER, 1, 1, 0, 0),
        (WRONG, DOUBTED, 0, 0, 1, 0),
        (DOUBTED, DOUBTED, 0, 0, 0, 0),
        (OTHER, DOUBTED, 0, 0, 0, 1),
        (DOUBTED, HOLDS, 0, 0, 0, 1),
        (WRONG, LOST, 0, 0, 0, 1),
        (LOST, WRONG, 0, 0, 0, 1),
    ],
)
def test_only_a_confirmed_difference_appears_or_goes_away(
    now: WayOutcome, before: WayOutcome, appeared: int, gone: int, same: int, undecided: int
) -> None:
    one = against([cell("alpha", "padding", now)], [cell("alpha", "padding", before)])
    counted = (len(one.appeared), len(one.gone), one.same, len(one.undecided))
    assert counted == (appeared, gone, same, undecided)


def test_a_new_family_appears_with_its_findings_and_a_crashed_cell_proves_nothing() -> None:
    one = against(
        [cell("alpha", "padding", WRONG), cell("beta", "padding", WRONG)],
        [cell("beta", "padding", problem="killed")],
    )
    assert [finding.families for finding in one.appeared] == [("alpha",)]
    assert one.added == ("alpha",)
    assert one.undecided == {("beta", "padding"): "5.0.0: killed"}


def test_against_checks_both_releases_by_turns_and_shows_what_differs(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.outcomes["alpha", "padding"] = cell("alpha", "padding", WRONG)
    words = ["--against", "4.0.0", "--relation", "padding"]
    assert hunt(tmp_path / "out", *words) == ExitCode.FAILURE_FOUND
    page = " ".join(capsys.readouterr().out.split())
    assert "5.0.0 against 4.0.0: 2 and 1 cell; 1 finding appeared, 1 went away" in page
    assert "5.0.0 has alpha; 4.0.0 has not" in page
    assert page.index("GONE") < page.index("APPEARED")
    assert (world.made, world.older) == ([("alpha", "padding"), ("beta", "padding")],
                                         [("beta", "padding")])  # fmt: skip
    assert hunt(tmp_path / "out", *words, "--resume", "--json") == ExitCode.FAILURE_FOUND
    raw = json.loads(capsys.readouterr().out)["against"]
    assert [f["signature"] for f in raw["gone"]] == ["padding:wrong:logits"]
    assert len(world.made) + len(world.older) == 3, "nothing is repeated"


def test_a_release_is_not_compared_with_itself(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hunt(tmp_path / "out", "--against", "5.0.0") == ExitCode.USAGE
    assert "it is the release that is checked" in capsys.readouterr().err
