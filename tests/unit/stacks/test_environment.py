"""Environments built by the real uv from a fake index, with a fake torch."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from moediag.errors import NoSuchRelease, StackError, UsageError
from moediag.lab.stacks import built as store
from moediag.lab.stacks import construct, environment, offline, overlay, uv
from moediag.lab.stacks.base import Part, cache_root, current_base
from moediag.lab.stacks.indexes import IndexConfig
from moediag.lab.stacks.resolve import Target
from tests.unit.stacks.loopback import Loopback

# name -> version -> (day of upload, requirements)
Releases = Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]]

INDEX: Releases = {
    "transformers": {
        "1.0": ("2024-01-10", ("hub>=0.1", "torch>=2.0")),
        "1.1": ("2024-06-10", ("hub>=0.1",)),
        "1.2": ("2024-09-10", ("hub>=9",)),
        "2.0": ("2025-01-10", ("hub>=2",)),
        "2.1rc1": ("2025-02-10", ("hub>=2",)),
    },
    "accelerate": {"0.9": ("2024-01-01", ()), "1.5": ("2025-01-01", ("torch>=2",))},
    "hub": {"0.5": ("2024-01-10", ()), "2.5": ("2025-01-09", ())},
    "onlytorch": {"3.0": ("2020-01-01", ())},
}


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{name}/__init__.py": f"version = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{inside},,\n" for inside in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(inside, text)
    return path


class Index(Loopback):
    """Serves JSON; without ``dates`` no upload times."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dates = folder, True
        super().__init__()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        last = path.strip("/").rpartition("/")[2]
        if last.endswith(".whl.metadata"):
            with zipfile.ZipFile(self.folder / last.removesuffix(".metadata")) as archive:
                name = "-".join(last.split("-")[:2]) + ".dist-info/METADATA"
                return 200, "text/plain", archive.read(name)
        if last.endswith(".whl"):
            return 200, "application/octet-stream", (self.folder / last).read_bytes()
        if last not in INDEX:
            return 404, "text/plain", b"no"
        files = []
        for version, (day, _) in INDEX[last].items():
            name = f"{last}-{version}-py3-none-any.whl"
            file: dict[str, object] = {"filename": name, "url": f"/files/{name}", "hashes": {}}
            file["core-metadata"] = True
            if self.dates:
                file["upload-time"] = f"{day}T12:00:00Z"
            files.append(file)
        page = {"meta": {"api-version": "1.1"}, "name": last, "versions": [], "files": files}
        return 200, "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, versions in INDEX.items():
        for version, (_, requires) in versions.items():
            wheel(folder, name, version, requires)
    return folder


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Path:
    """A virtual environment with a fake torch, its dependencies and an unrelated package."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    binary = str(uv.find_uv())
    subprocess.run(
        [binary, "venv", "-q", "--no-project", "--python", sys.executable, folder], check=True
    )
    site = overlay.site_packages(folder)
    own = tmp_path_factory.mktemp("own")
    needs = ("onlytorch>=3", "hub>=0.1", 'triton; extra == "gpu"', "absent; sys_platform=='x'")
    for path in (
        wheel(own, "torch", "2.9.0+cpu", needs),
        wheel(own, "leak", "1.0"),
        files / "onlytorch-3.0-py3-none-any.whl",
        files / "hub-2.5-py3-none-any.whl",
    ):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    return folder / "bin" / "python"


@pytest.fixture
def index(
    files: Path, base_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Index]:
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "MOEDIAG_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    running = Index(files)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", running.url)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("MOEDIAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MOEDIAG_BASE_PYTHON", str(base_python))
    yield running
    running.stop()


def imported(stack: environment.Stack, program: str) -> str:
    done = subprocess.run(
        [stack.python, "-c", program],
        env=stack.environ(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def no_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise AssertionError("uv was started")

    monkeypatch.setattr(uv, "find_uv", refuse)


def test_overlay_contains_only_torch_and_its_dependencies(index: Index) -> None:
    told: list[tuple[str, float | None]] = []
    stack = environment.ensure({"transformers": "1.0"}, lambda *t: told.append(t))
    assert stack.kind == "overlay"
    assert stack.versions["torch"] == "2.9.0+cpu"
    assert (stack.versions["transformers"], stack.versions["accelerate"]) == ("1.0", "0.9")
    program = (
        "import importlib.util as u, torch, transformers, onlytorch, hub, moediag\n"
        "print(torch.version, transformers.version, onlytorch.version, hub.version)\n"
        "print([n for n in ('leak', 'typer', 'pytest', 'pip') if u.find_spec(n)])"
    )
    versions, leaked = imported(stack, program).splitlines()
    assert versions == "2.9.0+cpu 1.0 3.0 0.5"  # the overlay's own hub, not the base's
    assert leaked == "[]"
    assert told[-1][1] == 1.0 and any("transformers" in text for text, _ in told)


def test_companions_follow_the_release_date(index: Index) -> None:
    old = environment.ensure({"transformers": "1.0"})
    assert set(old.resolution) == {"transformers==1.0", "accelerate==0.9", "hub==0.5"}
    assert old.cutoff is not None and old.cutoff.isoformat() == "2024-01-11T00:00:00+00:00"
    new = environment.ensure({"transformers": "1.0", "accelerate": "1.5"})
    assert "hub==0.5" in new.resolution  # hub 2.5 was uploaded after accelerate 1.5
    assert "hub==2.5" in environment.ensure({"transformers": "2.0"}).resolution


def test_without_dates_there_is_a_note_and_no_cutoff(index: Index) -> None:
    index.dates = False
    stack = environment.ensure({"transformers": "1.0"})
    assert stack.cutoff is None and "hub==2.5" in stack.resolution
    assert any("no index says when transformers 1.0" in note for note in stack.notes)


def test_default_version_is_the_newest_final_release(index: Index) -> None:
    stack = environment.ensure({"transformers": "newest"})
    assert stack.versions["transformers"] == "2.0"
    assert environment.ensure({}).key == stack.key


def test_a_second_run_uses_neither_uv_nor_the_index(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = environment.ensure({"transformers": "1.0"})
    asked = len(index.asked)
    no_uv(monkeypatch)
    again = environment.ensure({"Transformers": "==1.0"})
    assert (again.python, again.versions, again.notes) == (
        first.python, first.versions, first.notes,
    )  # fmt: skip
    assert len(index.asked) == asked


def test_requests_with_one_resolution_share_one_environment(index: Index) -> None:
    one = environment.ensure({"transformers": "1.0"})
    two = environment.ensure({"transformers": "1.0", "accelerate": "0.9"})
    same = environment.ensure({"transformers": "1.0", "torch": "2.9.0"})
    assert one.key == two.key == same.key
    assert len(store.list_environments()) == 1


def test_two_parallel_runs_build_once(index: Index) -> None:
    program = (
        "import sys; from moediag.lab.stacks.environment import ensure\n"
        "s = ensure({'transformers': '1.0'}, lambda t, f: print(t))\n"
        "print('KEY', s.key)"
    )
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len({line for text in outputs for line in text.splitlines() if "KEY" in line}) == 1
    assert sum("finishing" in text for text in outputs) == 1


@pytest.mark.parametrize("damage", ["metadata", "interpreter", "torch", "record"])
def test_a_broken_environment_is_rebuilt(index: Index, damage: str) -> None:
    stack = environment.ensure({"transformers": "1.0"})
    folder = stack.python.parent.parent
    victim = {
        "metadata": overlay.site_packages(folder) / "hub-0.5.dist-info",
        "interpreter": stack.python,
        "torch": folder / overlay.FOLDER / "torch",
        "record": folder / construct.RECORD,
    }[damage]
    victim.rename(victim.with_name("gone"))
    (broken,) = store.list_environments()
    assert broken.broken
    again = environment.ensure({"transformers": "1.0"})
    assert again.key == stack.key and not store.list_environments()[0].broken
    assert imported(again, "import torch, hub; print(hub.version)") == "0.5"


def test_another_torch_in_the_base_makes_another_environment(index: Index, tmp_path: Path) -> None:
    before = environment.ensure({"transformers": "1.0"})
    site = overlay.site_packages(Path(os.environ["MOEDIAG_BASE_PYTHON"]).parent.parent)
    info = site / "torch-2.9.0+cpu.dist-info"
    upgraded = wheel(tmp_path, "torch", "2.9.1+cpu")
    info.rename(site / "hidden")
    try:
        with zipfile.ZipFile(upgraded) as archive:
            archive.extractall(site)
        after = environment.ensure({"transformers": "1.0"})
        assert {i.key: i.broken for i in store.list_environments()} == {
            before.key: True, after.key: False,
        }  # fmt: skip
    finally:
        shutil.rmtree(site / "torch-2.9.1+cpu.dist-info", ignore_errors=True)
        (site / "hidden").rename(info)
    assert after.versions["torch"] == "2.9.1+cpu"
    assert after.key != before.key


def test_leftovers_of_a_killed_build_are_not_used(index: Index) -> None:
    key = environment.ensure({"transformers": "1.0"}).key
    store.clean(everything=True)
    half = cache_root() / "envs" / f".building-{key}"
    (half / "lib" / "python3.99" / "site-packages").mkdir(parents=True)
    stack = environment.ensure({"transformers": "1.0"})
    assert stack.key == key and not half.exists()
    assert not (stack.python.parent.parent / "lib" / "python3.99").exists()


def test_a_full_disk_leaves_nothing_behind(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> list[str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(overlay, "link_torch", full)
        with pytest.raises(StackError, match="disk is full") as caught:
            environment.ensure({"transformers": "1.0"})
    assert "moediag stacks clean" in caught.value.help_text
    assert list((cache_root() / "envs").iterdir()) == []
    assert environment.ensure({"transformers": "1.0"}).versions["transformers"] == "1.0"


def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    script = tmp_path / "uv"
    script.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 2\n")
    script.chmod(0o755)
    monkeypatch.setattr(uv, "find_uv", lambda: script)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("error: failed to write: No space left on device (os error 28)", "disk is full"),
        ("error: Request failed after 3 retries", "no network"),
        ("error: No interpreter found for Python 3.99", "no such Python"),
        (
            "Failed to build `tokenizers==0.12`: Request failed after",
            "tokenizers==0.12 has no wheel",
        ),
        ("error: something new", "uv failed"),
    ],
)
def test_uv_errors_become_messages(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, expected: str
) -> None:
    fake_uv(tmp_path, monkeypatch, message)
    with pytest.raises(StackError, match=expected) as caught:
        environment.ensure({"transformers": "1.0"})
    assert caught.value.help_text


def test_without_a_network_the_progress_is_left_out_and_the_help_is_for_this_python(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_uv(tmp_path, monkeypatch, "Downloading numpy (16.1MiB)\nerror: Request failed after 3")
    with pytest.raises(StackError) as caught:
        environment.ensure({"transformers": "1.0"})
    assert str(caught.value).splitlines()[1:] == ["error: Request failed after 3"]
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"build --python-version {python} --out" in caught.value.help_text


def test_without_a_solution_the_cutoff_is_dropped_and_noted(index: Index) -> None:
    # accelerate 1.5 is a year younger than the cut-off of transformers 1.1 would be; hub 2.5 too
    with pytest.raises(StackError, match="no set of releases fits"):
        environment.ensure({"transformers": "1.2"})  # needs hub 9, which does not exist
    INDEX["hub"]["9.0"] = ("2025-06-01", ())  # type: ignore[index]
    wheel(index.folder, "hub", "9.0")
    try:
        stack = environment.ensure({"transformers": "1.2"})
    finally:
        del INDEX["hub"]["9.0"]  # type: ignore[attr-defined]
    assert "hub==9.0" in stack.resolution and stack.cutoff is None
    assert any("uploaded before 2024-09-11" in note for note in stack.notes)


def test_missing_and_invalid_versions_are_refused(index: Index) -> None:
    with pytest.raises(NoSuchRelease, match=r"nearest releases are 1\.0, 1\.1"):
        environment.ensure({"transformers": "1.0.5"})
    with pytest.raises(NoSuchRelease, match="is not a version"):
        environment.ensure({"transformers": ">=1.0"})


def test_without_a_network_cached_environments_are_used(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = environment.ensure({"transformers": "newest"})
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(StackError, match="cannot ask for the releases of transformers"):
        environment.ensure({"transformers": "1.1"})
    # An older "newest" is still used, with a note.
    for record in (cache_root() / "requests").glob("*.json"):
        raw = json.loads(record.read_text())
        raw["made"] = time.time() - 3 * 86400
        record.write_text(json.dumps(raw))
    stale = environment.ensure({"transformers": "newest"})
    assert stale.key == built.key
    assert any("no index could be asked" in note for note in stale.notes)


def test_a_base_without_torch_is_refused_with_advice(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    subprocess.run(
        [uv.find_uv(), "venv", "-q", "--no-project", "--python", sys.executable, bare], check=True
    )
    monkeypatch.setenv("MOEDIAG_BASE_PYTHON", str(bare / "bin" / "python"))
    with pytest.raises(StackError, match="no torch") as caught:
        environment.ensure({"transformers": "1.0"})
    assert "pip install torch" in caught.value.help_text
    monkeypatch.setenv("MOEDIAG_BASE_PYTHON", str(tmp_path / "absent"))
    with pytest.raises(StackError, match="cannot be used"):
        environment.ensure({"transformers": "1.0"})


def test_another_torch_makes_a_full_environment(index: Index, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    wheel(links, "torch", "2.8.0+cpu")  # like CPU wheels: a local version, no date
    os.environ["PIP_FIND_LINKS"] = str(links)
    try:
        stack = environment.ensure({"transformers": "1.1", "torch": "2.8.0"})
    finally:
        del os.environ["PIP_FIND_LINKS"]
    assert stack.kind == "full" and stack.versions["torch"] == "2.8.0+cpu"
    program = "import importlib.util as u, torch; print(torch.version, u.find_spec('onlytorch'))"
    assert imported(stack, program) == "2.8.0+cpu None"


def test_ranks_write_bytecode_and_see_no_other_packages(index: Index) -> None:
    stack = environment.ensure({"transformers": "1.0"})
    child = stack.environ({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "/x", "A": "b"})
    assert "PYTHONDONTWRITEBYTECODE" not in child and child["A"] == "b"
    assert child["PYTHONPATH"] == str(stack.pythonpath[0])
    assert [p.name for p in stack.pythonpath[0].iterdir()] == ["moediag"]


def test_links_of_a_shared_namespace_are_merged(tmp_path: Path) -> None:
    for root, child in (("a", "cublas"), ("b", "nccl")):
        (tmp_path / root / "nvidia" / child).mkdir(parents=True)
        (tmp_path / root / "nvidia" / child / "lib.so").touch()
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    parts = [
        Part("nvidia-cublas", "1", {"nvidia": str(tmp_path / "a" / "nvidia")}),
        Part("nvidia-nccl", "1", {"nvidia": str(tmp_path / "b" / "nvidia")}),
        Part("numpy", "1", {"numpy": str(tmp_path / "a")}),
    ]
    linked = overlay.link_torch(tmp_path / "env", parts, {"numpy"})
    assert linked == ["nvidia-cublas", "nvidia-nccl"]
    folder = tmp_path / "env" / overlay.FOLDER
    assert sorted(p.name for p in (folder / "nvidia").iterdir()) == ["cublas", "nccl"]
    assert not (folder / "numpy").exists()
    pth = (site / overlay.PTH).read_text().strip()
    assert (site / pth).resolve() == folder.resolve() and not Path(pth).is_absolute()


# --- the store -------------------------------------------------------------------------


def test_environments_are_listed_and_cleaned(index: Index) -> None:
    one = environment.ensure({"transformers": "1.0"})
    two = environment.ensure({"transformers": "1.1"})
    stamp = one.python.parent.parent / construct.LAST_USED
    old = time.time() - 40 * 86400
    os.utime(stamp, (old, old))
    listed = store.list_environments()
    assert [info.key for info in listed] == [two.key, one.key]
    assert listed[0].versions["transformers"] == "1.1" and listed[0].size > 0
    with pytest.raises(UsageError, match="nothing to clean"):
        store.clean()
    with pytest.raises(UsageError, match="no such environment: nope"):
        store.clean(["nope"])
    assert [r.key for r in store.clean(older_than_days=30)] == [one.key]
    assert [r.key for r in store.clean([two.key])] == [two.key]
    assert store.list_environments() == []


def test_an_environment_in_use_is_kept(index: Index) -> None:
    stack = environment.ensure({"transformers": "1.0"})
    program = "print('ready', flush=True); input()"
    with subprocess.Popen(
        [stack.python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (kept,) = store.clean(everything=True)
        process.communicate("\n")
    assert kept.reason == "in use" and stack.python.exists()
    (gone,) = store.clean(everything=True)
    assert gone.reason == "" and not stack.python.exists()


def test_a_request_gives_the_same_releases_after_cleaning(index: Index) -> None:
    first = environment.ensure({"transformers": "1.0"})
    store.clean([first.key])
    INDEX["hub"]["0.6"] = ("2024-01-10", ())  # type: ignore[index]
    wheel(index.folder, "hub", "0.6")
    try:
        assert environment.ensure({"transformers": "1.0"}).resolution == first.resolution
    finally:
        del INDEX["hub"]["0.6"]  # type: ignore[attr-defined]


# --- without a network -----------------------------------------------------------------


def test_bundle_builds_without_any_index(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "_own_requirements", lambda *_: ("onlytorch==3.0",))

    def own_wheel(wheels: Path, _: object) -> None:
        offline.repack(importlib.metadata.distribution("filelock"), wheels)

    monkeypatch.setattr(offline, "_own_wheel", own_wheel)
    version = ".".join(map(str, sys.version_info[:2]))
    out = tmp_path / "bundle"
    requests = [{"transformers": "1.0"}, {"transformers": "2.0"}]
    bundle = offline.make_bundle(requests, version, out)
    names = {name.rsplit("-py3", 1)[0] for name in bundle.wheels}
    assert {"transformers-1.0", "accelerate-0.9", "hub-0.5", "hub-2.5", "onlytorch-3.0"} <= names
    assert not any(name.startswith("torch") for name in names)
    index.stop()
    index.thread = threading.Thread(target=lambda: None)  # already stopped
    index.thread.start()
    monkeypatch.setattr(index, "stop", lambda: None)
    monkeypatch.setenv("MOEDIAG_WHEELS", str(out))
    stack = environment.ensure({"transformers": "1.0"})
    assert "hub==0.5" in stack.resolution  # the locked one, although the folder has a newer one
    assert stack.cutoff is not None
    with pytest.raises(NoSuchRelease, match=r"nearest releases are 1\.0, 2\.0"):
        environment.ensure({"transformers": "1.1"})
    manifest = json.loads((out / offline.MANIFEST).read_text())
    manifest["python"] = "3.99"
    (out / offline.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(StackError, match=r"are for Python 3\.99"):
        environment.ensure({"transformers": "1.1"})


def test_bundle_refuses_another_torch_or_python(index: Index, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="that machine's torch"):
        offline.make_bundle([{"torch": "2.8.0", "transformers": "1.0"}], "3.12", tmp_path)
    with pytest.raises(UsageError, match=r"write it like 3\.12"):
        offline.make_bundle([{"transformers": "1.0"}], "312", tmp_path)


def test_platform_tags_of_another_machine_are_listed() -> None:
    found = offline.platforms("x86_64")
    assert found[0] == "manylinux_2_28_x86_64" and found[-1] == "linux_x86_64"
    assert found.index("manylinux_2_17_x86_64") < found.index("manylinux2014_x86_64")
    assert "manylinux_2_39_x86_64" not in found


def test_a_wheel_for_the_other_machine_is_selected_or_refused(index: Index, tmp_path: Path) -> None:
    for tag in ("cp312-cp312-manylinux2014_x86_64", "cp311-cp311-manylinux2014_x86_64",
                "cp312-cp312-manylinux_2_39_x86_64"):  # fmt: skip
        made = wheel(tmp_path, "fast", "1.0")
        made.rename(tmp_path / f"fast-1.0-{tag}.whl")
    config = IndexConfig(indexes=(), find_links=(str(tmp_path),))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    offline._download(["fast==1.0"], Target("3.12", "x86_64-manylinux_2_28"), wheels, config)
    assert [path.name for path in wheels.iterdir()] == [
        "fast-1.0-cp312-cp312-manylinux2014_x86_64.whl"
    ]
    with pytest.raises(StackError, match=r"(?s)cannot download.*fast==1\.0"):
        offline._download(["fast==1.0"], Target("3.13", "x86_64-manylinux_2_28"), wheels, config)


def test_a_repacked_wheel_can_be_installed(tmp_path: Path) -> None:
    path = offline.repack(importlib.metadata.distribution("filelock"), tmp_path)
    subprocess.run(
        [uv.find_uv(), "pip", "install", "-q", "--offline", "--no-deps", "--no-index",
         "--python", sys.executable, "--target", tmp_path / "t", path],
        check=True,
    )  # fmt: skip
    assert (tmp_path / "t" / "filelock" / "__init__.py").is_file()


# --- requests --------------------------------------------------------------------------


def test_requests_are_normalised() -> None:
    assert construct.normalise({"Hugging_Face.hub": "1.0", "torch": "v2.9.0+CPU"}) == {
        "hugging-face-hub": "1.0", "torch": "2.9.0+cpu",
    }  # fmt: skip
    assert construct.normalise({"torch": "2.9.0"}) == {"torch": "2.9.0", "transformers": ""}


def test_the_running_interpreter_is_the_default_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MOEDIAG_BASE_PYTHON", raising=False)
    base = current_base(tmp_path)
    assert base.executable == Path(sys.executable)
    assert base.torch == importlib.metadata.version("torch")
    parts, lines = base.torch_parts()
    assert parts[0].name == "torch" and "torch" in parts[0].links
    assert {"sympy", "networkx"} <= {part.name for part in parts}
    assert any(line.startswith("sympy") for line in lines)
