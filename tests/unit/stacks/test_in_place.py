"""Running with the installed libraries: nothing is built, and missing releases are refused."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import pytest

from moediag.errors import StackError
from moediag.lab.stacks import environment, in_place
from moediag.lab.stacks.base import ENV_CACHE


@pytest.fixture(autouse=True)
def _only_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(environment.ENV_INSTALLED, "1")
    monkeypatch.setenv(ENV_CACHE, str(tmp_path))
    monkeypatch.delenv("MOEDIAG_BASE_PYTHON", raising=False)


def test_the_python_in_use_is_the_stack(tmp_path: Path) -> None:
    here = importlib.metadata.version("transformers")
    stack = environment.ensure({"transformers": here})
    assert str(stack.python) == sys.executable
    assert stack.versions["transformers"] == here
    assert stack.versions["torch"] == importlib.metadata.version("torch")
    assert stack.versions["python"] == platform.python_version()
    assert environment.ENV_INSTALLED in stack.notes[0]
    assert f"transformers=={here}" in stack.resolution
    assert not (tmp_path / "stacks" / "envs").exists()
    ready = environment.ready({"transformers": ""})
    assert ready is not None and ready.versions["transformers"] == here


def test_another_release_is_refused_and_not_built() -> None:
    here = importlib.metadata.version("transformers")
    with pytest.raises(
        StackError, match=rf"transformers 1\.2\.3 is wanted and {here} is installed"
    ):
        environment.ensure({"transformers": "1.2.3"})
    with pytest.raises(StackError, match=r"torchtitan 0\.2\.2 is wanted and none is installed"):
        environment.ensure({"torchtitan": "0.2.2"})
    assert environment.ready({"transformers": "1.2.3"}) is None


def test_first_mode_builds_missing_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.ENV_INSTALLED, "first")
    here = importlib.metadata.version("transformers")
    assert environment.ensure({"transformers": here}).kind == "installed"
    monkeypatch.setattr(environment.construct, "stamp", lambda *_: None)
    monkeypatch.setattr(environment, "replace", lambda stack, **_: stack)

    class Built(str):
        key = "k"

    monkeypatch.setattr(environment, "_cold", lambda *_: Built("built"))
    assert environment.ensure({"transformers": "1.2.3"}) == "built"


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"torch": "2.13.0"}, True),
        ({"torch": "2.13.0+cu130"}, True),
        ({"torch": "2.13"}, False),
        ({"python": "3.12"}, True),
        ({"python": "3.1"}, False),
        ({"trl": ""}, False),
        ({"torch": ""}, True),
    ],
)
def test_installed_versions_must_match(wanted: dict[str, str], fits: bool) -> None:
    have = {"python": "3.12.3", "torch": "2.13.0+cu130"}
    if fits:
        in_place.check(wanted, have, "X")
    else:
        with pytest.raises(StackError):
            in_place.check(wanted, have, "X")


def test_of_two_installed_releases_the_first_on_the_path_counts(tmp_path: Path) -> None:
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        info = tmp_path / folder / f"twice-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: twice\nVersion: {version}\n")
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("first", "second"))
    found = in_place.distributions(Path(sys.executable), {**os.environ, "PYTHONPATH": path})
    assert found["twice"] == "2.0"
