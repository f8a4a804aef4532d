"""`moediag bisect` as a command: exit codes, streams, files, estimate and progress."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from moediag.cli import app
from moediag.errors import ExitCode
from moediag.lab.campaign.bisect import answer_page, session
from moediag.lab.campaign.bisect import probe as probing
from moediag.lab.campaign.bisect import question as asking
from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.drive import drive
from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, Kind, ProbeVerdict, other
from moediag.lab.campaign.bisect.question import Asked, Question
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.timeline import ProbeRecord, probe_line, target_lines
from moediag.lab.campaign.engine import Line
from moediag.lab.campaign.engine.display import Live
from moediag.lab.campaign.executors import Maker
from moediag.lab.scenario.schema import Scenario
from tests.unit.bisect_fakes import STARVED, Fake, opened, question
from tests.unit.tiny_clone import PERSON, from_letters

HISTORY = "GGGGGBBBBBBBGGGGGGGG"


class World:
    """Replaces index, environments and ranks."""

    def __init__(self) -> None:
        self.letters = HISTORY
        self.asked = Asked()
        self.prober: Callable[[str], Fake] = Fake

    def ask(self, scenario: Scenario, asked: Asked) -> Question:
        self.asked = asked
        return question(self.letters, 7, asked.window)

    def make(self, asked: Question, folder: Path, *_: Any, launch: Any) -> Fake:
        return self.prober(self.letters)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    found = World()
    monkeypatch.setattr(asking, "ask", found.ask)
    monkeypatch.setattr(probing, "Releases", found.make)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = app.main(["bisect", "expert-starvation", *arguments])
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


def test_an_answer_is_printed_and_saved(world: World, run: Any) -> None:
    code, out, err = run("--window", "--out", "found")
    assert code == ExitCode.OK
    assert " 1.3 G  1.4 G  1.5 B … 1.11 B  1.12 G  1.13 G  1.19 G\n" in out
    told = " transformers 1.5 is the first bad release; 1.4 is the last good one\n"
    assert f" BISECT   answered:{told}" in out
    assert "transformers 1.12 is the first good release after it" in out
    assert err.splitlines()[1].startswith("looking for (exact): collective-mismatch")
    folder = Path("found")
    raw = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert (raw["began"]["bad"], raw["ended"]["good"]) == ("1.5", "1.12")
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.startswith("### expert-starvation by release of transformers\n")
    assert f"**answered**:{told}" in text
    assert "moediag run expert-starvation --variant unfixed" in text
    assert "--stack transformers=1.12" in text


def test_the_page_is_written_in_other_formats(world: World, run: Any) -> None:
    code, out, _ = run("--html", "page.html", "--junit", "probes.xml", "--markdown", "-")
    assert code == ExitCode.OK
    assert out.startswith("## expert-starvation by release of transformers\n")
    assert "1.5 is the first bad release" in Path("page.html").read_text(encoding="utf-8")
    assert 'name="1.5" classname="probe"' in Path("probes.xml").read_text(encoding="utf-8")


def test_json_is_one_object_on_stdout(world: World, run: Any) -> None:
    code, out, _ = run("--json", "--out", "found")
    raw = json.loads(out)
    assert code == ExitCode.OK
    assert raw == json.loads(Path("found/result.json").read_text(encoding="utf-8"))
    assert len(raw["probes"]) == len(states.read(Path("found")).probes)


@pytest.mark.parametrize(
    ("letters", "code", "says"),
    [
        ("GGGGGGGGGG", ExitCode.INCONCLUSIVE, "Not reproduced: transformers 1.7"),
        ("GGGGGGGSGG", ExitCode.INCONCLUSIVE, "could not be judged: skipped"),
        ("SSSSSSSBSS", ExitCode.INCONCLUSIVE, "No good release older than transformers 1.7"),
        ("BBBBBBBBBB", ExitCode.OK, "Bad as far back as transformers 1.0"),
        ("GGGGSSSBBB", ExitCode.OK, "is one of transformers 1.4 to 1.7"),
    ],
)
def test_exit_codes(world: World, run: Any, letters: str, code: int, says: str) -> None:
    world.letters = letters
    found, out, _ = run()
    assert says in " ".join(out.split())
    assert found == code


def test_default_folder_is_a_new_one_below_the_runs(world: World, run: Any) -> None:
    _, out, _ = run()
    (folder,) = Path("moediag-runs").iterdir()
    assert folder.name.endswith("-bisect-expert-starvation")
    assert out.splitlines()[-1] == f" REPORT   {folder / 'report.md'}"


def test_ctrl_c_prints_the_command_to_resume(world: World, run: Any) -> None:
    class Interrupts(Fake):
        def of_release(self, version: str, attempt: int) -> ProbeRecord:
            if version == "1.5":
                raise KeyboardInterrupt
            return super().of_release(version, attempt)

    world.prober = Interrupts
    code, out, err = run("--window", "--match", "class", "--out", "it is mine")
    assert (code, out) == (ExitCode.INTERRUPTED, "")
    assert "error: interrupted after" in err
    (line,) = [line for line in err.splitlines() if line.startswith("To resume: ")]
    command = "moediag bisect expert-starvation --window --match class --out 'it is mine' --resume"
    assert line == f"To resume: {command}"
    world.prober = Fake
    code, out, err = run("--window", "--match", "class", "--out", "it is mine", "--resume")
    assert code == ExitCode.OK
    assert "finished by an earlier command" in err
    assert "transformers 1.5 is the first bad release" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--resume",), "--resume needs the folder"),
        (("--resume", "--out", "none"), "there is no"),
        (("--hold", "accelerate"), "--hold 'accelerate' is not of the form"),
        (("--match", "nearly"), "nearly"),
        (("--jobs", "0"), "--jobs"),
        (("--cpu", "2", "--gpus", "2"), "exclude each other"),
    ],
)
def test_wrong_usage_is_an_error(
    world: World, run: Any, arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (ExitCode.USAGE, "")
    assert says in err


def test_an_error_is_not_a_verdict_for_git(world: World, run: Any, tmp_path: Path) -> None:
    """To `git bisect run` exit codes up to 124 say that the commit is bad."""
    for arguments in (("--match", "nearly"), ("--cpu", "2", "--gpus", "2"), ("--repo", "none")):
        code, out, _ = run("--git-bisect", *arguments)
        assert (code, out) == (128 + ExitCode.USAGE, "")
    code, _, err = run("--git-bisect")  # this folder is no clone
    assert code == 128 + ExitCode.USAGE
    assert "not a git repository" in err


def test_a_clone_without_the_tag_is_refused_before_probing(
    world: World, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PERSON.items():
        monkeypatch.setenv(name, value)
    from_letters(tmp_path / "clone", "GB")
    code, _, err = run("--repo", str(tmp_path / "clone"), "--out", "out")
    assert code == ExitCode.USAGE
    assert "it has no tag v1.7" in err
    assert "fetch --tags" in err
    assert not Path("out").exists()


def test_a_second_bisect_in_a_folder_is_refused(world: World, run: Any) -> None:
    run("--out", "taken")
    code, _, err = run("--out", "taken")
    assert code == ExitCode.USAGE
    assert "a bisect was started here" in err


def test_options_are_passed_on(world: World, run: Any) -> None:
    run(
        "--package", "accelerate", "--bad", "1.7", "--good", "1.2", "--window", "--pre", "--yanked",
        "--hold", "transformers=5.12.1", "--python", "3.12", "--match", "any", "--variant", "u",
        "--calibrate", "5", "--cpu", "4", "--oldest", "1.1", "--launcher", "torchrun",
        "--timeout", "30",
    )  # fmt: skip
    from moediag.lab.campaign.bisect.signature_match import Match

    assert world.asked == Asked(
        name="expert-starvation", package="accelerate", bad="1.7", good="1.2", oldest="1.1",
        window=True, pre=True, yanked=True, hold={"transformers": "5.12.1"}, python="3.12",
        match=Match.ANY, variant="u", world_size=4, device="cpu", launcher="torchrun",
        timeout=30.0, calibrate=5,
    )  # fmt: skip


# ------------------------------------------------------------------------ dry run


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(request: dict[str, str]) -> object:
        return object() if request["transformers"] in ("1.3", "1.4") else None

    monkeypatch.setattr(session.environment, "ready", ready)


def test_dry_run_probes_nothing_and_prints_an_estimate(
    world: World, run: Any, nothing_built: None
) -> None:
    code, out, _ = run("--dry-run", "--window")
    assert code == ExitCode.OK
    assert not list(Path().iterdir())
    assert "a guess: no bisect was made here yet" in out
    assert "2 of 20 environments are built" in out
    code, out, _ = run("--dry-run", "--window", "--json")
    raw = json.loads(out)
    assert raw["measured_probes"] == 0
    building = raw["environments_to_build_at_most"]
    assert building == min(18, raw["probes_at_most"])
    assert (
        f"and at most {building} environments to build, 20 s each, a guess"
        in run("--dry-run", "--window")[1]
    )
    probing = raw["probes_at_most"] * session.GUESS
    assert raw["seconds_at_most"] == probing + building * session.BUILD
    run("--window")
    made = len(next(iter(states.read(f).probes for f in Path("moediag-runs").iterdir())))
    assert made <= raw["probes_at_most"]


def test_dry_run_uses_the_mean_of_earlier_probes(
    world: World, run: Any, nothing_built: None
) -> None:
    header = question(HISTORY, 7).header(["moediag"])
    with states.create(Path("moediag-runs/one"), header) as state:
        for number, seconds in enumerate((10.0, 20.0)):
            verdict = (GOOD, BAD)[number]
            state.finished(ProbeRecord(f"1.{number}", verdict, 1, "", "", seconds, "probes/x"))
        state.finished(ProbeRecord("1.9", other("not launched"), 1, "", "", 0.1))
    Path("moediag-runs/broken").mkdir()
    Path("moediag-runs/broken/journal.jsonl").write_text("no", encoding="utf-8")
    _, out, _ = run("--dry-run", "--json")
    raw = json.loads(out)
    assert (raw["measured_probes"], raw["seconds_per_probe"]) == (2, 15.0)
    assert "mean of 2 probes made here" in run("--dry-run")[1]


# ------------------------------------------------------------------------ progress


def test_lines_describe_other_failures() -> None:
    target = Target("unfixed", ("hang",), (STARVED,), rate=Rate(2, 4))
    assert target_lines(target) == [
        f"looking for (exact): {STARVED}",
        "it showed in 2 of 4 trials, so 7 clean trials make a release good",
    ]
    bad = ProbeRecord("1.1", ProbeVerdict(Kind.BAD, STARVED), seconds=2.0)
    assert probe_line(bad, target.signatures) == Line("1.1  2.0 s  bad", seconds=2.0)
    again = ProbeRecord("1.2", other("crash:X"), attempt=2)
    assert probe_line(again).text == "1.2 (probe 2)  another failure (crash:X)"


def test_the_display_counts_probes_and_shows_the_timeline(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    live = Live(console)
    asked = question(HISTORY, 7)
    with opened(tmp_path, asked) as state:
        drive(asked, state, Maker(lambda: Fake(HISTORY, seconds=0.01)), live)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "expert-starvation: transformers, at most" in said
    assert "looking for (exact): " + STARVED in said
    assert "1.5  0.01 s  bad" in said
    with console.capture() as caught:
        console.print(live.view())
    assert "1.3 G  1.4 G  1.5 B" in caught.get()
    assert "at most" in caught.get()


def test_the_help_shows_the_default_of_every_option() -> None:
    result = CliRunner().invoke(app.whole(), ["bisect", "--help"])
    assert result.exit_code == 0
    for word in ("[default: the scenario's, else found]", "[default: exact]", "two years before"):
        assert word in " ".join(result.output.split())


def test_the_json_of_a_report_contains_versions(world: World, run: Any) -> None:
    run("--out", "found")
    stored = states.read(Path("found"))
    raw = json.loads(Path("found/result.json").read_text(encoding="utf-8"))
    assert raw["releases"] == {"count": len(HISTORY), "oldest": "1.0", "newest": "1.19"}
    assert {p["version"] for p in raw["probes"]} == {p.version for p in stored.probes}
    assert raw["schema_version"] == answer_page.SCHEMA_VERSION
