"""The injection into ranks of other jobs: it starts with the interpreter and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moediag import protocol
from moediag.launch import watched
from moediag.ranks import inject

C10D = """
def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1):
    return "joined"
def get_rank():
    return 0
def get_world_size():
    return 1
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class Job:
    """A Python process in the environment of a watched job, with an empty torch."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.run.mkdir()
        self.lib = folder / "lib"
        package = self.lib / "torch" / "distributed"
        package.mkdir(parents=True)
        (self.lib / "torch" / "__init__.py").write_text("")
        (package / "__init__.py").write_text(
            "from torch.distributed.distributed_c10d import init_process_group\n"
        )
        (package / "distributed_c10d.py").write_text(C10D)

    def python(
        self, code: str, *flags: str, measure: protocol.MeasureRequest | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        base = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        base["PYTHONPATH"] = str(self.lib)
        env = watched.environment(self.run, "token", watched.JobOptions(measure=measure), base)
        return subprocess.run(
            [sys.executable, *flags, "-c", code], env={**env, **variables}, check=False,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def notes(self) -> str:
        path = self.run / protocol.NOT_RECORDED_FILE
        return path.read_text() if path.exists() else ""

    def file(self, name: str, attempt: int = 0) -> Path:
        return self.run / protocol.attempt_folder(attempt) / name


def test_a_process_without_torch_is_not_affected(job: Job) -> None:
    done = job.python("import sys; print([p for p in sys.path if 'inject' in p], 'moediag' in "
                      "sys.modules, 'json' in sys.modules)")  # fmt: skip
    assert done.stdout.strip() == "[] False False"
    assert list(job.run.iterdir()) == []


@pytest.mark.parametrize(("end", "told"), [("os.abort", "-6"), ("os.getpid", None)])
def test_a_parent_notes_how_its_children_ended(job: Job, end: str, told: str | None) -> None:
    job.file("").mkdir()
    done = job.python("import os, torch.distributed, multiprocessing as m\n"
                      f"p = m.get_context('fork').Process(target={end})\n"
                      "p.start(), p.join(); print(p.pid)")  # fmt: skip
    note = job.file(protocol.child_end_file(done.stdout.strip()))
    assert (note.read_text() if note.exists() else None) == told


def test_a_hidden_sitecustomize_still_runs(job: Job) -> None:
    (job.lib / "sitecustomize.py").write_text("print('theirs')\nvalue = 3\n")
    done = job.python("import sitecustomize; print(sitecustomize.value, sitecustomize.__file__)")
    assert done.stdout.split() == ["theirs", "3", str(job.lib / "sitecustomize.py")]


def test_a_failing_sitecustomize_fails_as_without_moediag(job: Job) -> None:
    (job.lib / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    done = job.python("print('on')")
    assert done.stdout.strip() == "on"
    assert "ValueError: theirs" in done.stderr


def test_a_rank_reports_its_identity_and_failure(job: Job) -> None:
    done = job.python(
        "import torch.distributed\ndef f():\n    raise ValueError('no batch')\nf()",
        RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2",
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: no batch" in done.stderr
    me = json.loads(job.file(protocol.pid_file(1)).read_text())
    assert (me["world_size"], me["local_ranks"]) == (4, 2)
    error = json.loads(job.file(protocol.error_file(1)).read_text())["message"]
    assert error["message"] == "ValueError: no batch"


def test_an_exception_before_torch_is_recorded_but_not_that_of_a_child(job: Job) -> None:
    done = job.python("raise KeyError('x')", RANK="1")
    assert done.returncode == 1 and done.stderr.endswith("KeyError: 'x'\n")
    said = json.loads(job.file("rank-1.error.json").read_text())["message"]
    assert said["message"] == "KeyError: 'x'" and "<string>" in said["extraInfo"]["py_callstack"]
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', '1 / 0'])"
    assert "ZeroDivisionError" in job.python(child, RANK="2").stderr
    assert not job.file("rank-2.error.json").exists()


def test_an_exception_hook_that_replaces_ours_hides_no_exception(job: Job) -> None:
    code = (
        "import sys, torch.distributed\nsys.excepthook = lambda *a: print('theirs')\n"
        "raise ValueError('seen')"
    )
    assert job.python(code, RANK="0").stdout.strip() == "theirs"
    assert "ValueError: seen" in job.file(protocol.error_file(0)).read_text()


@pytest.mark.parametrize(("code", "recorded"), [("1", True), ("'no data'", True), ("0", False)])
def test_an_exception_that_becomes_an_exit_code_is_recorded(
    job: Job, code: str, recorded: bool
) -> None:
    """Hydra does so."""
    program = (
        "import sys, torch.distributed\n"
        "try:\n    raise ValueError('bad row')\n"
        f"except ValueError:\n    sys.exit({code})"
    )
    assert bool(job.python(program, RANK="1").returncode) == recorded
    path = job.file(protocol.error_file(1))
    assert path.exists() == recorded
    assert not recorded or "ValueError: bad row" in path.read_text()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_caught_exit_is_an_error_unless_training_goes_on(job: Job, steps: int) -> None:
    program = (
        "import sys, types, torch.distributed\n"
        "from moediag.ranks.inject import rank\n"
        "told = lambda error, where: print('told', error)\n"
        "recorder = types.SimpleNamespace(current_step=1, error=told, finish=print)\n"
        "rank._this.recorder = recorder\n"
        "rank._user_frame = str\n"  # it needs the real torch
        "try:\n"
        "    try:\n        raise ValueError('bad row')\n"
        "    except ValueError:\n        sys.exit(2)\n"
        "except SystemExit:\n"
        f"    recorder.current_step += {steps}\n"
    )
    done = job.python(program, RANK="0")
    assert done.returncode == 0
    assert job.file(protocol.error_file(0)).exists() == (steps == 0)
    assert ("told bad row" in done.stdout) == (steps == 0)


def test_an_exception_that_ray_catches_is_recorded(job: Job) -> None:
    """A stand-in for Ray Train's thread runner; tests/victims/trainers.py has the real one."""
    code = (
        "import sys, types\n"
        "name = 'ray.train.v2._internal.execution.worker_group.thread_runner'\n"
        "runner = sys.modules[name] = types.ModuleType(name)\n"
        "runner.construct_user_exception_with_traceback = lambda error, exclude_frames: 'theirs'\n"
        "import os, torch.distributed\n"
        "try:\n    raise ValueError('bad row')\n"
        "except ValueError as error:\n"
        "    print(runner.construct_user_exception_with_traceback(error, exclude_frames=3))\n"
        "    sys.stdout.flush()\n"
        "os._exit(0)"
    )
    assert job.python(code, RANK="1").stdout.strip() == "theirs"
    assert "ValueError: bad row" in job.file(protocol.error_file(1)).read_text()


def test_a_child_of_a_rank_is_not_a_rank(job: Job) -> None:
    code = (
        "import subprocess, sys, torch.distributed\n"
        "subprocess.run([sys.executable, '-c', 'import torch.distributed; 1 / 0'])"
    )
    done = job.python(code, RANK="0")
    assert "ZeroDivisionError" in done.stderr
    assert not job.file(protocol.error_file(0)).exists()


def test_a_process_without_a_rank_number_is_not_a_rank(job: Job) -> None:
    job.python("import torch.distributed; 1 / 0")
    assert not job.file("").exists()


def test_each_start_of_the_ranks_has_a_separate_folder(job: Job) -> None:
    job.python("import torch.distributed", RANK="0", TORCHELASTIC_RESTART_COUNT="2")
    assert job.file(protocol.pid_file(0), 2).exists()
    job.python("import torch.distributed", RANK="0", MOEDIAG_ATTEMPT="1")
    assert job.file(protocol.pid_file(0), 1).exists()


@pytest.mark.parametrize(
    ("call", "variables"),
    [
        ("rank=1, world_size=2", {}),
        ("None, None, None, 2, 1", {}),
        ("init_method='tcp://127.0.0.1:1?rank=1&world_size=2'", {}),
        ("", {"RANK": "1", "WORLD_SIZE": "2"}),
    ],
)
def test_a_recorder_that_cannot_start_is_noted_and_the_job_continues(
    job: Job, call: str, variables: dict[str, str]
) -> None:
    code = f"import torch.distributed as d; print(d.init_process_group({call}))"
    done = job.python(code, **variables)
    assert (done.returncode, done.stdout.strip()) == (0, "joined"), done.stderr
    assert job.file(protocol.pid_file(1)).exists()
    # The empty torch has nothing to record.
    assert "torch" in job.notes()


@pytest.mark.parametrize(
    ("call", "address"),
    [
        ("'gloo', rank=1, world_size=2", "127.0.0.1:29500"),
        ("'gloo', 'env://', None, 2, 1", "127.0.0.1:29500"),
        ("'gloo', 'tcp://a:1?rank=1&world_size=2'", "tcp://a:1"),
        ("'gloo', rank=1, world_size=2, store=object()", ""),
    ],
)
def test_what_a_rank_passes_to_the_rendezvous_is_recorded(
    job: Job, call: str, address: str
) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    job.python(f"import torch.distributed as d; d.init_process_group({call})", **variables)
    told = protocol.read_json(job.file(protocol.meeting_file(1)))
    assert told == {"backend": "gloo", "address": address, "world_size": 2}


def test_a_rank_known_only_to_the_backend_is_recorded(job: Job) -> None:
    done = job.python("import torch.distributed as d; print(d.init_process_group('mpi'))")
    assert done.stdout.strip() == "joined"
    assert job.file(protocol.pid_file(0)).exists()


def test_a_read_only_folder_does_not_affect_the_job(job: Job) -> None:
    code = "import torch.distributed as d; print(d.init_process_group(rank=0, world_size=1))"
    done = job.python(code, MOEDIAG_WATCH="/proc/none", RANK="0")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "joined", "")


def test_an_isolated_python_is_not_affected(job: Job) -> None:
    done = job.python("import sys; print(sys.meta_path[0])", "-I")
    assert "_Finder" not in done.stdout
    assert "_Finder" in job.python("import sys; print(sys.meta_path[0])").stdout


def test_environment_variables_are_kept_and_extended() -> None:
    options = watched.JobOptions(guard=True)
    base = {"PYTHONPATH": "/a", "X": "1", "MOEDIAG_ATTEMPT": "3"}
    env = watched.environment(Path("/run"), "t", options, base)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(watched.INJECTED), "/a"]
    assert (env["X"], env["MOEDIAG_GUARD"]) == ("1", "1")
    assert "MOEDIAG_ATTEMPT" not in env
    alone = watched.environment(Path("/run"), "t", watched.JobOptions(), {})
    assert alone["PYTHONPATH"] == str(watched.INJECTED)
    assert "MOEDIAG_GUARD" not in alone


def test_sitecustomize_uses_protocol_names() -> None:
    """It imports nothing from moediag, so it has its own copies."""
    text = (Path(inject.__file__).parent / "path" / "sitecustomize.py").read_text()
    for name in (protocol.ENV_WATCH, protocol.ENV_PACKAGE, protocol.NOT_RECORDED_FILE):
        assert f'"{name}"' in text


def test_a_job_is_measured_once_torch_is_complete(job: Job) -> None:
    (job.lib / "torch" / "__init__.py").write_text("import torch.distributed\nlast = 1\n")
    code = """
import sys, types
module = types.ModuleType("moediag.ranks.verify.measuring")
class Measuring:
    def __init__(self, request, at_end):
        self.request = request
    def install(self):
        print(self.request.steps, hasattr(sys.modules["torch"], "last"))
module.Measuring = Measuring
sys.modules["moediag.ranks.verify.measuring"] = module
import torch
"""
    asked = protocol.MeasureRequest(str(job.run / "measured"), 3)
    assert job.python(code, measure=asked).stdout.split() == ["3", "True"]
    assert job.notes() == ""
    assert job.python(code).stdout == ""


@pytest.mark.parametrize(("raised", "kept"), [("Lost", True), ("SystemExit", False)])
def test_the_exception_of_a_child_that_is_no_plain_one(job: Job, raised: str, kept: bool) -> None:
    """As torch's CheckpointException: multiprocessing prints it and ends the child with 1."""
    code = f"""
        import multiprocessing, os
        class Lost(BaseException):
            pass
        def rank():
            os.environ.update(RANK="0", WORLD_SIZE="1")
            import torch.distributed as dist
            dist.init_process_group("gloo")
            raise {raised}("no space")
        child = multiprocessing.get_context("fork").Process(target=rank)
        child.start()
        child.join()
    """
    job.python(textwrap.dedent(code))
    found = job.file(protocol.error_file(0)).exists()
    assert found == kept
