"""Follows docs/extending/add-a-*.md word for word in a copy of the package.

Writes the files that a page shows, makes its edits and runs its commands.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moediag.lab.stacks.base import cache_root
from tests.e2e.pipeline import Command, need

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

ROOT = Path(__file__).parents[2]
BLOCK = r"\n+( *)```\w+\n(.*?)\n *```"


@dataclass(frozen=True)
class Page:
    text: str

    @classmethod
    def read(cls, name: str) -> Page:
        return cls((ROOT / "docs" / "extending" / name).read_text(encoding="utf-8"))

    def files(self) -> dict[str, str]:
        """``File `PATH`:`` and the block after it."""
        return {
            path: textwrap.dedent(body) + "\n"
            for path, _, body in re.findall(rf"^ *File `(.+?)`:{BLOCK}", self.text, re.M | re.S)
        }

    def edits(self) -> list[tuple[str, str, str, str]]:
        """``In `PATH`, before the line `TEXT`:`` and the block: (path, where, text, block)."""
        found: list[tuple[str, str, str, str]] = []
        pattern = rf"^ *In (?:`(.+?)`|the same file), (before|after) the line `(.+?)`:{BLOCK}"
        for path, where, line, indent, body in re.findall(pattern, self.text, re.M | re.S):
            body = "\n".join(text.removeprefix(indent) for text in body.splitlines())
            found.append((path or found[-1][0], where, line, body + "\n"))
        return found

    def commands(self, of: str = "") -> list[str]:
        """Returns every `$ moediag …` line of the section that begins with ``of``."""
        text = self.text[self.text.index(of) :] if of else self.text
        text = text[: text.find("\n## ", 1)] if of else text
        return re.findall(r"^ *\$ (moediag .+)$", text, re.M)


@dataclass(frozen=True)
class Checkout:
    """A copy of the package. ``run`` runs a command line in it, with `moediag` from the copy."""

    folder: Path

    def follow(self, page: Page) -> None:
        for path, text in page.files().items():
            (self.folder / path).write_text(text, encoding="utf-8")
        for path, where, line, block in page.edits():
            file = self.folder / path
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            (at,) = [i for i, text in enumerate(lines) if text.startswith(line)]
            lines.insert(at if where == "before" else at + 1, block)
            file.write_text("".join(lines), encoding="utf-8")

    def run(self, line: str) -> tuple[int, str]:
        """Returns exit code and stdout of a command line of the page."""
        program = f"'{sys.executable}' -m moediag"
        done = subprocess.run(
            re.sub(r"^moediag", program, line), shell=True, cwd=self.folder, text=True,
            env={**os.environ, "PYTHONPATH": str(self.folder), "NO_COLOR": "1"},
            capture_output=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode <= 3, f"{line}\n{done.stderr}"
        return done.returncode, done.stdout


@dataclass(frozen=True)
class Here(Checkout):
    """An empty folder: these pages leave the package as it is, so `moediag` runs in this process,
    on the session's hosts."""

    command: Command

    def run(self, line: str) -> tuple[int, str]:
        code, out, errors = self.command.call(*line.split()[1:])
        assert code <= 3, f"{line}\n{errors}"
        return code, out + errors


@pytest.fixture
def here(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    need({"transformers": "4.53.2"})
    monkeypatch.chdir(tmp_path)
    return Here(tmp_path, command)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    need({"transformers": "4.53.2"})
    need({"transformers": "4.57.6"})
    folder = tmp_path / "checkout"
    shutil.copytree(
        ROOT / "moediag", folder / "moediag", ignore=shutil.ignore_patterns("__pycache__")
    )
    for part in ("schema", "scenarios"):
        shutil.copytree(ROOT / part, folder / part)
    shutil.copy(ROOT / "pyproject.toml", folder)
    yield Checkout(folder)
    # Ranks import the copy through a link in the cache; remove the links to this folder.
    for link in (cache_root() / "rank-path").glob("*/moediag"):
        if link.resolve().is_relative_to(tmp_path):
            shutil.rmtree(link.parent)


def test_the_page_on_your_own_scenario_works(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package does not change, so the command is run as in the other tests."""
    need({"transformers": "4.53.2"})
    monkeypatch.chdir(tmp_path)
    page = Page.read("add-a-scenario.md")
    ((name, text),) = page.files().items()
    Path(name).write_text(text)
    show, *runs = page.commands("## One of your own")
    code, shown, _ = command.call(*show.split()[1:])
    assert code == 0
    assert "checkpointing: non-reentrant" in shown
    assert "clip: 1.0" in shown and "family: qwen3_moe" in shown, "every default is filled in"

    expected = re.search(r"^ *(error: checkpointed.yaml.+)$", page.text, re.M)
    assert expected
    Path("mistaken").mkdir()
    monkeypatch.chdir(tmp_path / "mistaken")
    Path(name).write_text(text.replace("{checkpointing", "{chekpointing"))
    code, _, error = command.call(*show.split()[1:])
    assert code == 2
    assert error.splitlines()[0] == expected[1]
    monkeypatch.chdir(tmp_path)

    assert len(runs) == 3
    whole, four, other = [command.run(*line.split()[2:]) for line in runs]
    assert [ran.code for ran in (whole, four, other)] == [0, 0, 0]
    assert whole.verdicts == {
        "unfixed": "collective-mismatch", "unused-params-flag": "clean",
        "reentrant": "collective-mismatch", "natural-routing": "clean",
    }  # fmt: skip
    assert whole.fixes == {"unused-params-flag": True, "reentrant": False}
    assert four.verdicts == {"unfixed": "collective-mismatch"}
    assert four.trial("unfixed")["world_size"] == 4
    assert "expert 5 of layer 1" in other.trial("unfixed")["cause"]
    assert other.result["overrides"] == [
        "--set model.family=qwen2_moe", "--set skew.starve[0].expert=5",
    ]  # fmt: skip


def test_the_page_on_a_catalogue_scenario_works(checkout: Checkout) -> None:
    page = Page.read("add-a-scenario.md")
    ((name, text),) = page.files().items()
    first = re.search(r"becomes `(# yaml-language-server.+?)`", page.text)
    assert first
    text = "\n".join([first[1], *text.splitlines()[1:]])
    (checkout.folder / "scenarios" / name).write_text(text)
    schema = re.search(r"\$schema=(.+)", first[1])
    assert schema and (checkout.folder / "scenarios" / schema[1]).exists()
    code, listed = checkout.run("moediag list")
    assert code == 0
    assert "checkpointed" in [line.split()[0] for line in listed.splitlines() if line]
    code, shown = checkout.run("moediag run checkpointed --variant natural-routing --cpu 2")
    assert code == 0
    assert "natural-routing clean" in " ".join(shown.split())


def test_the_page_on_a_fix_works(here: Here) -> None:
    page = Page.read("add-a-fix.md")
    assert len(page.files()) == 2
    here.follow(page)
    (line,) = page.commands()
    code, shown = here.run(line)
    words = " ".join(shown.split())
    assert code == 0, shown
    assert "collective-mismatch" in words, "the unfixed variant fails"
    assert re.search(r"touch-layer correct", words)
    assert "2 of 2 expectations met" in words


def test_the_page_on_a_program_works(here: Here) -> None:
    page = Page.read("add-a-program.md")
    here.follow(page)
    (line,) = page.commands()
    code, shown = here.run(line)
    words = " ".join(shown.split())
    assert code == 0, shown
    assert "divided correct" in words and "3 of 3 expectations met" in words

    scenario = here.folder / "summed-gradient.yaml"
    text = scenario.read_text()
    scenario.write_text(text.replace("divide_by: nothing", "divide_by: rank"))
    expected = re.search(r"^ *(error: .+)$", page.text, re.M)
    assert expected
    code, shown = here.run(line)
    assert (code, shown.splitlines()[0]) == (2, expected[1])


@pytest.mark.wide
def test_a_program_of_the_catalogue_is_known_by_its_name(checkout: Checkout) -> None:
    checkout.follow(Page.read("add-a-program.md"))
    scenario = checkout.folder / "summed-gradient.yaml"
    text = scenario.read_text()
    content = checkout.folder / "scenarios"
    (checkout.folder / "summed_gradient.py").rename(content / "programs" / "summed_gradient.py")
    scenario.unlink()
    named = text.replace("./summed_gradient.py", "summed-gradient")
    (content / "summed-gradient.yaml").write_text(named)
    code, shown = checkout.run("moediag run summed-gradient --cpu 2 --variant divided")
    assert code == 0, shown


@pytest.mark.wide
def test_an_ineffective_fix_is_not_called_correct(here: Here) -> None:
    page = Page.read("add-a-fix.md")
    here.follow(page)
    module = here.folder / "touch_layer.py"
    text = module.read_text()
    assert "0.0 * sum(" in text
    # Detached parameters: the sum is in the graph, its gradients are not.
    module.write_text(text.replace("p.sum() for", "p.detach().sum() for"))
    (line,) = page.commands()
    code, shown = here.run(line)
    assert code == 1, shown
    assert "touch-layer no effect" in " ".join(shown.split())


def test_the_page_on_a_family_works(checkout: Checkout) -> None:
    page = Page.read("add-a-family.md")
    schema = checkout.folder / "schema" / "scenario.schema.json"
    before = schema.read_text()
    write_schema, *runs = page.commands()
    assert len(page.edits()) == 2 and len(runs) == 2
    # Without the page's edits there is no such family.
    assert checkout.run(runs[0]) == (2, "")
    checkout.follow(page)
    assert checkout.run(write_schema) == (0, "")
    after = schema.read_text()
    assert '"dots1"' in after and '"dots1"' not in before
    for line in runs:
        code, shown = checkout.run(line)
        words = " ".join(shown.split())
        assert code == 0, shown
        assert "collective-mismatch" in words
        assert "CULPRIT rank 1" in words
        assert "experts.3.{gate,up,down}_proj.weight" in words


@pytest.mark.wide
def test_a_family_that_samples_its_routing_is_not_judged(checkout: Checkout) -> None:
    """PhiMoE draws random numbers while it trains: healthy gradients would be called wrong."""
    page = Page(
        Page.read("add-a-family.md").text.replace("n_routed_experts", "num_local_experts")
        .replace("dots1", "phimoe").replace("Dots1", "Phimoe")
    )  # fmt: skip
    checkout.follow(page)
    code, shown = checkout.run(page.commands()[1])
    words = " ".join(shown.split())
    assert code == 3, shown
    assert "not-applicable" in words
    assert "phimoe draws random numbers while it trains" in words
