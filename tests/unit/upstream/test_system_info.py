"""`moediag env`: information for a bug report, without private data."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moediag import installed_packages, system_info
from moediag.cli import app
from moediag.lab.stacks.environment import Stack
from moediag.lab.upstream import stack_information


def stack(python: Path, key: str = "transformers-4.53.2-abc") -> Stack:
    return Stack(python, {"python": "3.12.1", "transformers": "4.53.2"}, key, 0.0, [])


def test_versions_builds_and_machine_are_included() -> None:
    text = "\n".join(system_info.here().lines())
    for name in ("Python", "torch", "transformers", "accelerate", "OS", "kernel", "CPU", "memory",
                 "GPUs", "driver", "py-spy"):  # fmt: skip
        assert f"- {name}: " in text


def test_torchs_build_is_read_without_importing_it() -> None:
    code = (
        "import sys, json; from moediag import installed_packages\n"
        "a = installed_packages.answer()\n"
        "assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules)\n"
        "print(json.dumps(a))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    import torch

    assert told["packages"]["torch"] == torch.__version__
    assert told["torch_build"]["git_version"] == torch.version.git_version
    assert told["torch_build"]["cuda"] == (torch.version.cuda or "none")


def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(text)
    spec = type("Spec", (), {"origin": str(tmp_path / "torch" / "__init__.py")})()
    monkeypatch.setattr(installed_packages.importlib.util, "find_spec", lambda _: spec)
    found = system_info.Surroundings(
        {}, "3", {"torch": "2.11.0+cu130"}, installed_packages.torch_build()
    )
    return next(line for line in found.lines() if line.startswith("- torch"))


def test_a_cuda_build_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from typing import Optional\n__version__ = '2.11.0+cu130'\ndebug = False\n"
    text += "cuda: Optional[str] = '13.0'\ngit_version = 'abcdef0123456789'\nhip = None\n"
    line = build(tmp_path, monkeypatch, text)
    assert line == "- torch: 2.11.0+cu130 (CUDA 13.0, git abcdef0123)"


def test_a_broken_version_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(tmp_path, monkeypatch, "cuda = (") == "- torch: 2.11.0+cu130"


def test_relevant_variables_are_shown_and_secrets_are_not() -> None:
    told = system_info.variables({
        "NCCL_DEBUG": "INFO", "TORCH_NCCL_DESYNC_DEBUG": "1", "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "4", "PATH": "/x", "EDITOR": "vi", "HF_TOKEN": "hf_x",
        "TORCH_HUB_TOKEN": "sesame", "NCCL_SECRET": "sesame", "TORCH_AUTH": "sesame",
        "MOEDIAG_INDEX": "https://me:sesame@host/simple",
        "NCCL_TOPO_FILE": str(Path.home() / "t.xml"),
        "TORCH_LOGS": "a\nb" * 200,
    })  # fmt: skip
    assert "sesame" not in json.dumps(told) and str(Path.home()) not in json.dumps(told)
    assert told["NCCL_DEBUG"] == "INFO" and told["OMP_NUM_THREADS"] == "4"
    assert told["TORCH_HUB_TOKEN"] == "(set, left out)"
    assert told["MOEDIAG_INDEX"] == "https://host/simple"
    assert not {"PATH", "EDITOR", "HF_TOKEN"} & set(told)
    assert len(told["TORCH_LOGS"]) <= system_info.MOST_VALUE + 1 and "\n" not in told["TORCH_LOGS"]
    assert system_info.variables({"PATH": "/x"}) == {}


def test_the_report_can_be_pasted_in_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sesame-1234")
    text = "\n".join(system_info.here().lines())
    private = ["sesame-1234", str(Path.home()) + "/", socket.gethostname(), str(Path.cwd())]
    user = getpass.getuser()
    private += [] if user == "root" else [user]
    assert not [word for word in private if word in text]


def test_a_failing_part_does_not_break_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("odd machine")

    monkeypatch.setattr(system_info.hardware, "cores", broken)
    assert "- CPU: unknown (RuntimeError)" in system_info.here().lines()


def test_another_python_is_queried_and_may_fail(tmp_path: Path) -> None:
    found = stack_information.of_stack(stack(Path(sys.executable)))
    assert found.packages == installed_packages.packages() and found.problem == ""
    assert "- environment: transformers-4.53.2-abc, built by moediag" in found.lines()
    refused = stack_information.of_stack(stack(tmp_path / "gone"))
    assert refused.python == "3.12.1" and refused.packages == {"transformers": "4.53.2"}
    assert any(line.startswith("- unknown: how torch was built") for line in refused.lines())


# ------------------------------------------------------------------------ the command


def test_the_command_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["env"]) == 0
    assert capsys.readouterr().out.startswith("### moediag environment\n\n- moediag: ")
    assert app.main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["packages"]["torch"] and told["cores"] >= 1 and told["stack"] is None


def test_a_missing_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOEDIAG_CACHE", str(tmp_path))
    assert app.main(["env", "--stack", "transformers=4.53.2"]) == 4
    said = capsys.readouterr()
    assert said.out == "" and "no environment of transformers 4.53.2 is built" in said.err
    assert list(tmp_path.iterdir()) == []
