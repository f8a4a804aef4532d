"""The command line's contract: exit codes, streams, errors with advice.

Fakes replace what the commands call; the real functions have their own tests.
"""

import errno
import importlib
import io
import json
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import moediag
from moediag import cli
from moediag.cli import app, main, option_texts, options
from moediag.errors import ExitCode, Interrupted, MachineError, ScenarioError, UsageError
from moediag.lab.campaign.engine import Header, Line
from moediag.lab.campaign.run import outcome
from moediag.lab.cli import options as lab_options
from moediag.lab.scenario import catalogue
from moediag.launch.attach.found_jobs import Job
from moediag.pipeline import attach as attaching
from moediag.pipeline import attach_follow
from moediag.report import notify
from moediag.result import RunResult, read_result

RESULTS = Path(__file__).parent.parent / "golden" / "results"
DUMPS = Path(__file__).parent.parent / "samples" / "flight-recorder"
Module = Callable[..., types.SimpleNamespace]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Replaces a module that a command imports."""

    def make(name: str, **attributes: Any) -> types.SimpleNamespace:
        fake = types.SimpleNamespace(**attributes)
        monkeypatch.setitem(sys.modules, name, fake)  # type: ignore[arg-type]
        parent, _, last = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(parent), last, fake, raising=False)
        return fake

    return make


class Pipeline:
    """Replaces scenario, plan and run, and records the calls."""

    def __init__(self) -> None:
        self.result: RunResult | Exception = read_result(RESULTS / "starvation.json")
        self.loaded: list[Any] = []
        self.planned: dict[str, Any] = {}
        self.options: Any = None
        self.gpus: tuple[int, str | None] | None = None

    def require_gpus(self, count: int, torch: str | None = None, shared: bool = False) -> None:
        self.gpus = (count, torch)

    def load(self, path: Path, overrides: list[str]) -> Any:
        self.loaded = [path, list(overrides)]
        world = types.SimpleNamespace(default=3)
        return types.SimpleNamespace(name="s", title="t", world=world, stack={"torch": "2.9.0"})

    def plan(self, scenario: Any, world_size: int, device: str, **named: Any) -> Any:
        self.planned = {"world_size": world_size, "device": device, **named}
        return types.SimpleNamespace(scenario=scenario, trials=[1, 2])

    def run(self, plan: Any, _: Any, run_options: Any, observer: Any) -> RunResult:
        self.options = run_options
        observer.begin("s: 2 trials", 2)
        if isinstance(self.result, Exception):
            raise self.result
        for trial in self.result.trials:
            observer.finished(trial.variant, Line(outcome(trial)))
        return self.result


@pytest.fixture
def pipeline(module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    made = Pipeline()
    monkeypatch.setattr("moediag.lab.machine_checks.require_gpus", made.require_gpus)
    module("moediag.lab.scenario.catalogue", find=Path, names=lambda: ["s"])
    module("moediag.lab.scenario.load", load=made.load)
    module("moediag.lab.scenario.plan", plan=made.plan)
    module("moediag.lab.campaign.run", run=made.run, header=lambda *_: Header("run", {}))
    monkeypatch.chdir(tmp_path)
    return made


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app.whole(), list(arguments))


def test_run_prints_the_page_on_stdout_and_progress_on_stderr(pipeline: Pipeline) -> None:
    result = invoke("run", "s.yaml")
    assert result.exit_code == ExitCode.OK
    assert "CULPRIT  rank 1" in result.stdout
    assert "<- cheapest correct" in result.stdout
    assert "s: 2 trials" in result.stderr
    assert "[1/2] unfixed: collective-mismatch, culprit rank 1" in result.stderr
    assert "2 trials" not in result.stdout


def test_run_json_is_one_object_on_stdout(pipeline: Pipeline) -> None:
    result = invoke("run", "s", "--json")
    assert json.loads(result.stdout)["conclusion"]["reproduced"] is True
    assert (
        result.stdout == json.dumps(json.loads(result.stdout), indent=1, ensure_ascii=False) + "\n"
    )


def test_run_passes_its_options_on(pipeline: Pipeline, tmp_path: Path) -> None:
    invoke(
        "run", "s.yaml", "--variant", "a", "--variant", "b", "--gpus", "8",
        "--set", "model.experts=16", "--set", "step.steps=3",
        "--stack", "transformers=4.53.2", "--launcher", "torchrun",
        "--nnodes", "2", "--rdzv-endpoint", "head:29500", "--node-rank", "1", "--repeat", "3",
        "--timeout", "60", "--quiescence", "5", "--out", str(tmp_path),
        "--shared", str(tmp_path / "s"), "--silence", "9",
    )  # fmt: skip
    assert pipeline.loaded == [Path("s.yaml"), ["model.experts=16", "step.steps=3"]]
    assert pipeline.planned == {
        "world_size": 8, "device": "gpu", "variants": ["a", "b"], "launcher": "torchrun",
        "repeat": 3, "timeout": 60.0, "stack_overrides": {"transformers": "4.53.2"}, "timed": True,
    }  # fmt: skip
    assert (tmp_path / "journal.jsonl").is_file()
    launch = pipeline.options.launch
    assert (launch.nnodes, launch.rdzv_endpoint, launch.node_rank) == (2, "head:29500", 1)
    assert (launch.shared, launch.silence) == (tmp_path / "s", 9.0)
    assert launch.quiescence == 5.0
    assert pipeline.gpus == (4, "2.9.0")  # on this one of two nodes


def test_missing_gpus_are_reported_before_anything_runs(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(count: int, torch: str | None, shared: bool = False) -> None:
        raise MachineError(f"{count} GPUs requested")

    monkeypatch.setattr("moediag.lab.machine_checks.require_gpus", refuse)
    assert app.main(["run", "s", "--gpus", "2"]) == ExitCode.CANNOT_RUN_HERE
    assert pipeline.options is None
    assert app.main(["run", "s", "--cpu", "2"]) == ExitCode.OK


def test_several_nodes_need_torchrun(pipeline: Pipeline) -> None:
    invoke(
        "run", "s", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "0", "--shared", "d"
    )
    assert pipeline.planned["launcher"] == "torchrun"
    invoke("run", "s")
    assert pipeline.planned["launcher"] == "auto"


@pytest.mark.parametrize(
    ("given", "size", "device"),
    [([], 3, "cpu"), (["--cpu", "4"], 4, "cpu"), (["--gpus", "2"], 2, "gpu")],
)
def test_world_size_is_set_by_the_options(
    pipeline: Pipeline, given: list[str], size: int, device: str
) -> None:
    invoke("run", "s", *given)
    assert (pipeline.planned["world_size"], pipeline.planned["device"]) == (size, device)


@pytest.mark.parametrize(
    ("sample", "code"),
    [
        ("starvation", ExitCode.OK),
        ("clean", ExitCode.OK),
        ("not-reproduced", ExitCode.FAILURE_FOUND),
        ("control-failed", ExitCode.INCONCLUSIVE),
    ],
)
def test_run_exit_code_comes_from_the_result(pipeline: Pipeline, sample: str, code: int) -> None:
    pipeline.result = read_result(RESULTS / f"{sample}.json")
    assert invoke("run", "s").exit_code == code
    assert invoke("run", "s", "--json").exit_code == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "2", "--cpu", "2"], "exclude each other"),
        (["--stack", "transformers"], "PACKAGE=VERSION"),
        (["--stack", "a=1", "--stack", "a=2"], "names a twice"),
        (["--nnodes", "2"], "together"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "2"], "below --nnodes"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "1"], "by its own ranks alone"),
        (["--shared", "d"], "together"),
        (["--nnodes", "2", "--launcher", "fork"], "one node"),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "1", "--resume"],
            "--resume is for runs on one node",
        ),
        (["--resume"], "--resume needs the folder of the run"),
        (["--resume", "--out", "nowhere"], "there is no"),
        (["--cpu", "0"], "--cpu"),
        (["--launcher", "slurm"], "slurm"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert app.main(["run", "s", *arguments]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert pipeline.options is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--redact"], "--redact needs --collect"),
        (["--notify", "https://h"], "--notify needs --follow"),
        (["--dump-anyway"], "--dump-anyway needs --dump"),
        (["--dump", "NONE"], "no such signal"),
        (["--dump", "USR1", "--follow"], "--dump and --follow exclude each other"),
        (["--dump", "USR1", "--hosts", "a"], "--dump and --hosts exclude each other"),
        (["1", "--hosts", "a"], "only one of them"),
    ],
)
def test_options_of_attach_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert app.main(["attach", *arguments]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sample", "ended", "clean", "code", "told"),
    [
        ("watched", False, 3, ExitCode.FAILURE_FOUND, 1),
        ("clean", True, 3, ExitCode.OK, 0),
        ("control-failed", True, 0, ExitCode.INCONCLUSIVE, 0),  # no look could decide
    ],
)
def test_a_followed_job(
    monkeypatch: pytest.MonkeyPatch, sample: str, ended: bool, clean: int, code: int, told: int
) -> None:
    sent: list[str] = []
    last = attaching.Attached(read_result(RESULTS / f"{sample}.json"), Path("run"))
    found = attach_follow.Followed(last, ended, clean)
    monkeypatch.setattr(attach_follow, "follow", lambda *_: found)
    monkeypatch.setattr(attaching, "choose", lambda _: Job((), root=7))
    monkeypatch.setattr(attaching, "described", lambda _: "7")
    monkeypatch.setattr(notify.Notifier, "send", lambda _, incident, __: sent.append(incident))
    result = invoke("attach", "7", "--follow", "--notify", "https://h", "--no-color")
    assert (result.exit_code, len(sent)) == (code, told), result.output
    assert ("its exit code is not known" in result.stderr) == ended
    assert bool(result.stdout) != (ended and clean > 0)  # a page only of what was found


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ScenarioError("s.yaml:3:1: modle: no such field"), ExitCode.USAGE),
        (MachineError("2 GPUs wanted, 0 found"), ExitCode.CANNOT_RUN_HERE),
        (Interrupted("interrupted after 1 of 2 trials", "again"), ExitCode.INTERRUPTED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), ExitCode.CANNOT_RUN_HERE),
        (OSError(errno.EPERM, "not foreseen"), ExitCode.BUG),
        (KeyError("x"), ExitCode.BUG),
    ],
)
def test_each_class_of_error_has_its_exit_code(
    pipeline: Pipeline,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def fail(*_: Any) -> RunResult:
        raise error

    monkeypatch.setattr(sys.modules["moediag.lab.campaign.run"], "run", fail)
    assert app.main(["run", "s"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    if isinstance(error, UsageError | ScenarioError | MachineError | Interrupted):
        assert f"error: {error.message}\n" in said.err
        assert error.help_text in said.err


def test_a_bug_is_reported_as_a_bug_and_debug_shows_the_traceback(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.result = ZeroDivisionError("by zero")
    assert app.main(["run", "s"]) == ExitCode.BUG
    said = capsys.readouterr().err
    assert "a bug in moediag: ZeroDivisionError: by zero" in said
    assert "moediag env" in said
    for arguments in (["run", "s", "--debug"], ["--debug", "run", "s"]):
        assert app.main(arguments) == ExitCode.BUG
        assert "Traceback" in capsys.readouterr().err


def test_list_names_every_scenario_and_every_fix() -> None:
    lines = invoke("list").stdout.splitlines()
    assert "fixes:" in lines and any(line.startswith("expert-starvation ") for line in lines)
    (touch,) = [line for line in lines if line.startswith("touch ")]
    assert "add 0 * p[0] of every expert parameter" in touch and touch.endswith("parallelism)")
    listed = json.loads(invoke("list", "--json").stdout)
    assert [one["name"] for one in listed["scenarios"]] == catalogue.names()
    assert {"name", "summary", "source"} == set(listed["fixes"][0])


def test_list_shows_what_has_all_words(capsys: pytest.CaptureFixture[str]) -> None:
    heading, line = invoke("list", "Tensor", "PARALLEL", "head").stdout.splitlines()
    assert heading == "wrong numbers without an error:"
    assert line.startswith("tp-head-norm ") and "(2 ranks, transformers 4.53.2, " in line
    assert "expert-starvation-hang " in invoke("list", "hang", "4.53.2").stdout
    assert app.main(["list", "nothing", "such"]) == ExitCode.USAGE
    assert "no scenario and no fix matches nothing such" in capsys.readouterr().err


def test_run_without_a_name_lists_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["run"]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == catalogue.names()
    assert "error: no scenario was named\nType: moediag run NAME." in said.err


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        (["run", "s", "--cpus", "2"], "no such option: --cpus", "moediag run"),
        (["diagnose"], "missing argument", "moediag diagnose"),
        (["bisect", "s", "--jobs", "0"], "invalid value for '--jobs'", "moediag bisect"),
        (["watch", "--patience"], "option '--patience' needs a value", "moediag watch"),
        (["attach", "x"], "invalid value for '[PID]': 'x' is not a whole number", "moediag attach"),
        (["rum"], "no such command 'rum'", "moediag"),
        (["stacks"], "missing command", "moediag stacks"),
    ],
)
def test_wrong_options_are_errors_like_any_other(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, command: str
) -> None:
    assert app.main(arguments) == ExitCode.USAGE
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {message}")
    assert said.err.endswith(f"\nType: {command} --help\n")


def test_streams_that_are_closed_or_ascii_only_take_every_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(taken, encoding="ascii"))
    cli._complete_streams()
    print("a · b")
    sys.stderr.write("a · b")
    sys.stderr.flush()
    assert taken.getvalue() == b"a ? b"
    sys.stdout.close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, "Read-only file system", "/cache/locks/a.lock")

    monkeypatch.setattr("moediag.lab.stacks.environment.ensure", refuse)
    assert app.main(["stacks", "build", "transformers=4.53.2"]) == ExitCode.CANNOT_RUN_HERE
    said = capsys.readouterr().err
    assert "error: Read-only file system: /cache/locks/a.lock\n" in said
    assert "MOEDIAG_CACHE" in said and "bug" not in said


def test_show_describes_the_fixes_of_a_scenario_in_comments(tmp_path: Path) -> None:
    shown = invoke("show", "expert-starvation").stdout
    assert shown.startswith("# An expert without tokens on one rank breaks FSDP2's gradient")
    assert "# touch (fix) " in shown and "\n# moediag run expert-starvation --cpu 2\n" in shown
    assert "# fix touch: add 0 * p[0] of every expert parameter" in shown
    assert "ep-router-gradient" not in shown, "no fix of this scenario"
    (tmp_path / "again.yaml").write_text(shown)
    again = invoke("show", str(tmp_path / "again.yaml")).stdout
    assert again == shown.replace("run expert-starvation", f"run {tmp_path / 'again.yaml'}")


def test_report_writes_every_format_and_lists_it_on_stderr(tmp_path: Path) -> None:
    names = {"html": "a.html", "markdown": "a.md", "junit": "deep/a.xml"}
    arguments = [
        text for kind, name in names.items() for text in (f"--{kind}", str(tmp_path / name))
    ]
    result = invoke("report", str(RESULTS / "hang.json"), str(RESULTS / "silent.json"), *arguments)
    assert result.exit_code == ExitCode.OK
    assert result.stdout == ""
    for name in names.values():
        assert "expert-starvation-silent" in (tmp_path / name).read_text()
        assert str(tmp_path / name) in result.stderr
    again = invoke("report", str(RESULTS / "hang.json"), "--html", str(tmp_path / "a.html"))
    assert f"replaced {tmp_path / 'a.html'}" in again.stderr


def test_report_without_a_format_prints_the_page() -> None:
    result = invoke("report", str(RESULTS / "hang.json"))
    assert result.exit_code == ExitCode.OK
    assert "VICTIMS  ranks 0, 2, 3" in result.stdout


def test_report_writes_to_stdout() -> None:
    result = invoke("report", str(RESULTS / "hang.json"), "--markdown", "-")
    assert result.stdout.startswith("## ")


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_a_path_that_is_not_a_run_is_bad_input(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dump.json").write_text("{}")
    assert app.main([command, str(tmp_path)]) == ExitCode.USAGE
    assert "moediag run" in capsys.readouterr().err
    assert app.main([command, str(tmp_path / "nowhere")]) == ExitCode.USAGE
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", None), ("timeout", 0.0), ("1700000000.5", 1700000000.5),
     ("2023-11-14T22:13:20Z", 1_700_000_000.0), ("2023-11-14T23:13:20+01:00", 1_700_000_000.0)],
)  # fmt: skip
def test_the_time_of_dumps_is_read(text: str, seconds: float | None) -> None:
    assert options.moment(text) == seconds


def test_a_time_that_is_none_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="yesterday"):
        options.moment("yesterday")


@pytest.mark.parametrize(
    "line",
    ["watch --every nan -- true", "run no-such --timeout inf", "run no-such --cpu 99999999999"],
)
def test_a_number_that_no_call_takes_is_wrong_usage(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(line.split()) == ExitCode.USAGE
    option = next(word for word in line.split() if word.startswith("--"))
    assert f"invalid value for '{option}'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1999-01-01", "5", "2999-01-01T00:00:00Z", "nan", "inf", "-1"])
def test_a_time_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--taken-at {text}: "):
        options.moment(text)


@pytest.mark.parametrize(("status", "code"), [("warn", 0), ("fail", ExitCode.CANNOT_RUN_HERE)])
def test_doctor_exit_code_depends_on_the_checks(module: Module, status: str, code: int) -> None:
    from moediag.doctor import Check

    checks = [Check("python", "ok", "3.11"), Check("uv", status, "missing", "Type: install uv")]  # type: ignore[arg-type]
    module("moediag.doctor", checks=lambda: checks)
    result = invoke("doctor")
    assert result.exit_code == code
    assert "Type: install uv" in result.stdout
    assert ("moediag cannot run here: uv" in result.stdout) == bool(code)
    assert json.loads(invoke("doctor", "--json").stdout)["checks"][1]["status"] == status


def test_names_are_split_at_commas() -> None:
    assert lab_options.names(["a, b", "c", "b,"]) == ("a", "b", "c")
    assert lab_options.names([]) == ()


def test_pairs_accept_pip_spelling() -> None:
    assert options.pairs(["transformers==4.53.2", "accelerate = 1.9.0"], "--stack") == {
        "transformers": "4.53.2",
        "accelerate": "1.9.0",
    }


def test_no_command_prints_one_screen_with_a_usage_error() -> None:
    result = invoke()
    assert result.exit_code == ExitCode.USAGE
    lines = result.stdout.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert "moediag watch -- torchrun" in result.stdout and "moediag --help" in lines[-2]
    assert "Example: moediag watch -- torchrun" in invoke("--help").stdout


def test_version_is_printed() -> None:
    assert invoke("--version").stdout.strip() == moediag.__version__


# pydantic is not in the list: typer itself checks numbers with it.
HEAVY = ("torch", "transformers", "rich", "moediag.lab.scenario", "jinja2", "ruamel", "psutil")


# What a job of dumps does not need: its readers of trials, its views for people.
OF_TRIALS = ("moediag.protocol.outcome", "moediag.evidence.trial_folder")


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["run", "--help"], HEAVY),
        (["--version"], (*HEAVY, "moediag.protocol")),
        (["diagnose", "--json", str(DUMPS)], (*HEAVY, *OF_TRIALS)),
    ],
)
def test_a_command_imports_what_it_uses(arguments: list[str], unwanted: tuple[str, ...]) -> None:
    program = (
        f"import sys\nfrom moediag.cli.app import main\ncode = main({arguments})\n"
        f"print(code in (0, 1, 3), [name for name in {unwanted} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "True []"


def test_a_wrong_command_is_told_and_the_help_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["lisst"]) == ExitCode.USAGE
    assert "no such command 'lisst'" in capsys.readouterr().err
    assert app.main(["--help"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert all(name in told for name in ("run", "stacks", "nightly"))


def test_a_closed_pipe_is_not_an_error() -> None:
    program = [sys.executable, "-m", "moediag", "report", *[str(RESULTS / "hang.json")] * 150]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        said = child.stderr.read()
        child.wait(timeout=60)
    assert b"Traceback" not in said
    assert b"Exception ignored" not in said
    assert child.returncode == ExitCode.OK


def test_colour_is_off_on_request(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;31m" in invoke("run", "s").stdout
    assert "\x1b[1;31m" not in invoke("run", "s", "--no-color").stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in invoke("run", "s").stdout


def test_repeats_are_separate(pipeline: Pipeline) -> None:
    assert isinstance(pipeline.result, RunResult)
    first = pipeline.result.trials[0]
    pipeline.result = replace(pipeline.result, trials=(first, replace(first, repeat=1)))
    assert "2 of 2 repeats" in invoke("run", "s").stdout


def test_options_of_any_command_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["explain", "on-hang"]) == ExitCode.OK
    assert "--on-hang (option)" in capsys.readouterr().out


def wrapped(cause: BaseException) -> None:
    """As Python does before 3.12 with what is raised while a class is made."""
    raise RuntimeError("Error calling __set_name__") from cause


def test_an_interruption_while_a_class_is_made_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "moediag.lab.scenario.catalogue.names", lambda: wrapped(KeyboardInterrupt())
    )
    assert app.main(["list"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted\n"
    monkeypatch.setattr("moediag.lab.scenario.catalogue.names", lambda: wrapped(ValueError()))
    assert app.main(["list"]) == ExitCode.BUG


@pytest.mark.parametrize(
    "how", ["raise KeyboardInterrupt", "raise RuntimeError from KeyboardInterrupt()"]
)
def test_an_interruption_while_modules_are_imported_has_no_traceback(how: str) -> None:
    program = """
import signal, sys
class Interrupted:
    @staticmethod
    def find_spec(name, *_):
        if name == "typer":
            HOW
sys.meta_path.insert(0, Interrupted)
from moediag.cli import main
sys.argv[1:] = ["list"]
code = main()
signal.raise_signal(signal.SIGINT)  # a second Ctrl-C
sys.exit(code)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program.replace("HOW", how)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (ExitCode.INTERRUPTED, "error: interrupted\n")


def test_an_interruption_before_the_command_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(given: list[str]) -> tuple[list[str], bool]:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_without_debug", interrupted)
    assert main(["list"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted\n"


def test_options_of_a_command_are_described_in_its_docstring() -> None:
    def command(jobs: int = 1, from_: str = "", fast: bool = False) -> None:
        """Do it.

        Options:
        --jobs, -j N: Run N at once,
            and wait.
        --from A|B: Begin: here.
        --fast: Skip it.
        """

    options.with_options(command)
    found = {name: of.__metadata__[0] for name, of in list(command.__annotations__.items())[:3]}
    told = {name: (of.param_decls, of.metavar, of.help) for name, of in found.items()}
    assert told == {
        "jobs": (["--jobs", "-j"], "N", "Run N at once, and wait."),
        "from_": (["--from"], "A|B", "Begin: here."),
        "fast": (["--fast"], None, "Skip it."),
    }
    assert command.__doc__ == "Do it."
    command.__doc__ = "Do it.\n\nOptions:\n--slow: No parameter has it."
    with pytest.raises(KeyError, match="slow"):
        options.with_options(command)
    with pytest.raises(ValueError, match="no option: 'fast: Without"):
        option_texts.options("fast: Without its dashes.")
