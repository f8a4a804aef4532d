"""`moediag hunt --pursue`: the smallest size, since when, one file, a draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moediag.cli import app
from moediag.errors import ExitCode, UsageError
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.hunt import pursuit, session, since
from moediag.lab.campaign.hunt.pursued import Pursued
from moediag.lab.campaign.hunt.pursuit import smallest
from moediag.lab.campaign.hunt.since import verdict
from moediag.lab.stacks.environment import Stack
from moediag.lab.stacks.releases import Release
from moediag.lab.upstream.export.relation_file import Shown, export
from moediag.protocol import (
    CONDITIONS,
    ListedFamily,
    RelationOutcome,
    ReleaseListing,
    Size,
    WayOutcome,
)

TRACE = Pursued("alpha", "packing", "left", "wrong", "logits")
WRONG = WayOutcome("left", False, "wrong", "logits", "it differs",
                   conditions=dict.fromkeys(CONDITIONS, True))  # fmt: skip
HOLDS = WayOutcome("left", True)
OTHER = WayOutcome("left", False, "crash", "KeyError in x")
LOST = WayOutcome("left", None, text="unstable")


# ------------------------------------------------------------------------ the smallest size


def test_the_smallest_size_that_shows_it_is_found() -> None:
    assert smallest(lambda size: size.experts >= 2 and size.heads >= 4, Size()) == Size(
        hidden=1, heads=4, kv_heads=1, head_dim=1, experts=2, top_k=1, width=1
    )
    assert smallest(lambda _: False, Size()) == Size(), "what shows at one size only keeps it"


def test_only_possible_sizes_are_tried() -> None:
    tried: list[Size] = []
    smallest(lambda size: bool(tried.append(size)), Size(top_k=2, kv_heads=4))
    assert all(s.top_k <= s.experts and s.heads % s.kv_heads == 0 for s in tried)


# ------------------------------------------------------------------------ since when


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (RelationOutcome("alpha", "packing", [WRONG]), Kind.BAD),
        (RelationOutcome("alpha", "packing", [HOLDS]), Kind.GOOD),
        (RelationOutcome("alpha", "packing", [OTHER]), Kind.OTHER),
        (RelationOutcome("alpha", "packing", [LOST]), Kind.SKIP),
        (RelationOutcome("alpha", "packing", applicable="it has none"), Kind.SKIP),
        (RelationOutcome("alpha", "packing", built=False, problem="KeyError"), Kind.SKIP),
        (RelationOutcome("alpha", "packing", problem="killed"), Kind.OTHER),
    ],
)
def test_only_the_same_difference_is_bad_and_only_a_relation_that_holds_is_good(
    outcome: RelationOutcome, kind: Kind
) -> None:
    assert verdict(TRACE, outcome).kind == kind


class World:
    """Replaces environments, the index and processes. Wrong since 5.2.0 with two experts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.probed: list[str] = []
        monkeypatch.setattr(session.environment, "ensure", self.ensure)
        monkeypatch.setattr(session.register, "read", tuple)
        monkeypatch.setattr(pursuit, "_ran", lambda *_: "")
        versions = [f"5.{minor}.0" for minor in range(6)]
        monkeypatch.setattr(since.index, "releases", lambda *_: [Release(v) for v in versions])
        for module in (session, since):
            monkeypatch.setattr(module, "Workers", lambda _w, stack, *_: Workers(self, stack))

    def ensure(self, request: dict[str, str], *_: object) -> Stack:
        return Stack(Path("python"), {**request, "python": "3.11"}, "key", 0.0, [])


class Workers:
    def __init__(self, world: World, stack: Stack) -> None:
        self.world = world
        self.version = str(stack.versions["transformers"])

    def listing(self) -> ReleaseListing:
        return ReleaseListing([ListedFamily("alpha", "moe")], {"packing": "documents stay apart"})

    def make(self, key: tuple[str, str]) -> session.HuntCell:
        return session.HuntCell(RelationOutcome(*key, [WRONG]), 0.1)

    def probe(self, key: tuple[str, str], way: str, size: Size) -> RelationOutcome:
        self.world.probed.append(self.version)
        wrong = self.version >= "5.2.0" and size.experts >= 2
        found = WRONG if wrong else HOLDS
        return RelationOutcome(*key, [found], model="AlphaForCausalLM", config={"n": size.experts})

    def stop(self) -> None: ...

    def close(self) -> None: ...


def test_a_new_finding_is_pursued_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(monkeypatch)
    words = ["hunt", "--release", "5.4.0", "--pursue", "--json", "--out", str(tmp_path / "out")]
    assert app.main(words) == ExitCode.FAILURE_FOUND
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    trace = found["trace"]
    assert (trace["size"]["experts"], trace["problem"]) == (2, "")
    assert "5.2.0 is the first bad release; 5.1.0 is the last good one" in trace["since"]
    assert "Still bad in transformers 5.5.0" in trace["since"], "later releases are asked too"
    program = (tmp_path / "out" / trace["program"]).read_text(encoding="utf-8")
    assert '"n": 2' in program
    assert "class Packing(Relation)" in program
    draft = (tmp_path / "out" / trace["draft"]).read_text(encoding="utf-8")
    assert "not filed" in draft
    assert "documents stay apart" in draft
    probes = len(world.probed)
    assert app.main([*words, "--resume"]) == ExitCode.FAILURE_FOUND
    assert len(world.probed) == probes, "nothing is repeated"


def test_without_a_new_finding_nothing_is_pursued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(
        Workers, "make", lambda _, key: session.HuntCell(RelationOutcome(*key, [HOLDS]), 0.1)
    )
    words = ["hunt", "--release", "5.4.0", "--pursue", "--out", str(tmp_path / "out")]
    assert app.main(words) == ExitCode.OK
    assert not world.probed


# ------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    "relation",
    [
        "save-and-load", "expert-implementations", "attention-implementations", "checkpointing",
        "padding", "packing", "batch", "causality", "use-cache", "accumulation", "gradient",
        "reached-parameters", "plans", "trainable-parameters",
    ],
)  # fmt: skip
def test_the_file_of_each_relation_needs_nothing_of_moediag(relation: str) -> None:
    shown = Shown("alpha", relation, "left", 'T """', "x", "5.0.0", "Alpha", {"n": None})
    text = export(shown)
    code = compile(text, relation, "exec")
    assert code.co_names
    assert "import moediag" not in text
    assert "from moediag" not in text
    assert '"n": None' in text


def test_a_relation_on_several_ranks_is_not_exported() -> None:
    with pytest.raises(UsageError, match="several ranks"):
        export(Shown("alpha", "layouts", "tp-size", "", "", "5.0.0", "Alpha"))
