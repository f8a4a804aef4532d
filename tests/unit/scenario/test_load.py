"""Every mistake in a scenario is one message: file, line, column, field, nearest valid name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moediag.errors import ExitCode, ScenarioError
from moediag.lab.scenario.catalogue import find
from moediag.lab.scenario.load import load
from tests.depth import cases

GOOD = """\
schema_version: 1
name: mine
title: A failure of mine
stack: {transformers: "4.53.2"}
world: {default: 2}
model:
  experts: 8
  top_k: 2
skew:
  starve:
    - {rank: 1, layer: 1, expert: 3}
variants:
  unfixed:
    role: unfixed
    expect: {verdict: hang}
  zero-fill:
    role: fix
    fix: zero-fill
    expect: {verdict: clean}
  control:
    role: control
    skew: {starve: []}
    expect: {verdict: clean}
"""


def refused(tmp_path: Path, text: str | bytes, *overrides: str) -> str:
    """The message without the folder."""
    path = tmp_path / "s.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ScenarioError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value.message.replace(f"{tmp_path}/", "")


def test_a_correct_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert load(path).model.experts == 8
    assert load(path).overrides == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  experts: 8", "  expertz: 8",
         '7:3: model.expertz: unknown field; did you mean "experts"?'),
        ("title:", "titel:", '3:1: titel: unknown field; did you mean "title"?'),
        ("{rank: 1,", "{rnak: 1,",
         '11:8: skew.starve[0].rnak: unknown field; did you mean "rank"?'),
        ("{verdict: hang}", "{verdikt: hang}", "15:14: variants.unfixed.expect.verdikt: unknown"),
        ("  experts: 8", "  experts: eight",
         '7:12: model.experts: must be a whole number, not "eight"'),
        ("  experts: 8", "  experts: 8.5", "7:12: model.experts: must be a whole number, not 8.5"),
        ("  experts: 8", "  experts: true",
         "7:12: model.experts: must be a whole number, not true"),
        ("  experts: 8", "  experts: 1", "7:12: model.experts: must be at least 2, not 1"),
        ("  experts: 8", "  experts:", "7:3: model.experts: must be a whole number, not null"),
        ("  experts: 8", "  experts: [8]",
         "7:12: model.experts: must be a whole number, not a list"),
        ("  experts: 8", "  family: qwen4_moe", 'not "qwen4_moe"; did you mean "qwen3_moe"?'),
        ("  experts: 8", "  top_k: 2", '8:3: found duplicate key "top_k": give each field once'),
        ('"4.53.2"', "5.0", '4:23: stack.transformers: must be text, not 5.0; quote it: "5.0"'),
        ('"4.53.2"', '">=4"', '4:23: stack.transformers: must be one version, such as 4.53.2'),
        ("title: A failure of mine\n", "", "1:1: title: required field is missing"),
        ("    role: unfixed\n", "", "13:3: variants.unfixed.role: required field is missing"),
        ("{verdict: hang}", "{verdict: hnag}", 'expect.verdict: must be one of clean, hang'),
        ("{verdict: hang}", "{verdict: {gloo: hnag}}", 'did you mean "hang"?'),
        ("{verdict: hang}", "{verdict: {glo: hang}}",
         'verdict.glo: unknown name; did you mean "gloo"?'),
        ("{verdict: hang}", "{verdict: []}", "variants.unfixed.expect.verdict: must not be empty"),
        ("{default: 2}", "{default: 2}\nlayout: {dp_shrad: world}", 'did you mean "dp_shard"?'),
        ("{default: 2}", "{default: 2}\nlayout: {ep: all}",
         'must be a whole number or world, not "all"'),
        ("{default: 2}", "{default: 2}\nlayout: {ep: 4}",
         "6:9: layout: ep=4 = 4, but there are 2 ranks"),
        ("{default: 2}", "{default: 2, min: 4}", "5:18: world.default: 2 ranks, but"),
        ("  top_k: 2", "  top_k: 9", "8:10: model.top_k: 9 is more than the 8 experts"),
        ("  top_k: 2", "  heads: 3", "8:10: model.heads: 3 is not a multiple of kv_heads, 2"),
        ("  top_k: 2", "  head_dim: 7", "8:13: model.head_dim: must be a multiple of 2, not 7"),
        ("expert: 3", "expert: 8",
         "11:35: skew.starve[0].expert: 8 is above 7: model.experts is 8"),
        ("layer: 1,", "layer: 2,", "11:24: skew.starve[0].layer: 2 is above 1: model.layers is 2"),
        ("expert: 3", "expert: 3, from_step: 3", "from_step: 3 is above 2: step.steps is 2"),
        ("rank: 1,", "rank: 3, every: 2,", "skew.starve[0].rank: 3 is not below every, 2"),
        ("  top_k: 2", "  top_k: 8", "skew.starve: 7 of 8 experts are left on rank 1 for top_k 8"),
        ("role: unfixed", "role: control", "variants: one variant must have `role: unfixed`"),
        ("fix: zero-fill", "fix: zero-fil",
         'no fix is called "zero-fil"; did you mean "zero-fill"?'),
        ("    fix: zero-fill\n", "", "16:3: variants.zero-fill: a fix must change something"),
        ("  control:", "  cost:", "20:3: variants.cost: the run directory uses"),
        ("  control:", "  Control A:", "variants.Control A: a name here must be lower-case words"),
        ("  zero-fill:", "  stack-1:", "variants.stack-1: the run directory uses"),
        ("role: control", "role: control\n    fix: zero-fill",
         "a variant with role control cannot have a fix"),
        ("skew: {starve: []}\n    expect: {verdict: clean}", "expect: {verdict: hang}",
         "variants.control.expect.verdict: a control must expect clean"),
        ("fix: zero-fill\n    expect: {verdict: clean}",
         "fix: zero-fill\n    expect: {verdict: hang}",
         "variants.zero-fill.expect.verdict: a fix that does not expect clean is wrong"),
        ("fix: zero-fill\n    expect: {verdict: clean}",
         "fix: zero-fill\n    expect: {verdict: clean, judgement: wrong}",
         "judgement: a wrong fix cannot expect clean"),
        ("fix: zero-fill", "fix: zero-fill\n    repairs: unfix",
         'zero-fill.repairs: no unfixed variant is called "unfix"; did you mean "unfixed"'),
        ("role: control", "role: control\n    repairs: unfixed",
         "variants.control.repairs: a variant with role control cannot have repairs"),
        ("skew: {starve: []}", "model: {experts: 3}",
         "variants.control.model: skew.starve[0].expert: 3"),
        ("skew: {starve: []}", "skew: {starve: [{expert: 9}]}",
         "variants.control.skew.starve[0].expert"),
        ("skew:\n", "resume: {after: 2}\nskew:\n",
         "9:17: resume.after: saving after 2 of 2 steps leaves no step to compare"),
        ("role: control", "role: control\n    wrapper: {kind: zero2}\n    resume: {after: 1}",
         "variants.control.resume.through: wrapper.kind zero2 cannot be saved by resume"),
        ("role: control", "role: control\n    resume: {through: accelerate, after: 1}",
         "control.resume.through: accelerate needs wrapper.kind accelerate: fsdp2 has no"),
        ("title: A", "title: 2025-01-31 #", "3:8: title: not text, a number, true or false"),
        ("title: A", "title: *nowhere #", "3:8: not valid YAML"),
        ("title: A", "1: 2\ntitle: A", "1: a field name is text"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_position(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    said = refused(tmp_path, GOOD.replace(old, new, 1))
    assert said.startswith("s.yaml:")
    assert message in said


def test_all_mistakes_are_reported_in_the_order_of_lines(tmp_path: Path) -> None:
    text = GOOD.replace("title:", "titel:").replace("  top_k: 2", "  top_k: x")
    text = text.replace("{verdict: hang}", "{verdict: hnag}")
    lines = refused(tmp_path, text).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "titel", "model.top_k", "variants.unfixed.expect.verdict", "title",
    ]  # fmt: skip
    numbers = [int(line.split(":")[1]) for line in lines[:-1]]
    assert numbers == sorted(numbers)
    many = GOOD.replace("  top_k: 2", "\n".join(f"  x{i}: 1" for i in range(30)))
    assert refused(tmp_path, many).splitlines()[-1] == "and 10 more"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "s.yaml:1:1: the file is empty"),
        (b"# only a comment\n", "s.yaml:1:1: the file is empty"),
        (b"- a\n- b\n", "s.yaml:1:1: a scenario is a mapping"),
        (b"just text", "s.yaml:1:1: a scenario is a mapping"),
        (b"name: x\n\xff\xfe\x00binary", "s.yaml:2:1: not a text file"),
        (b"name: a\0b", "s.yaml:1:1: not a text file"),
        (b"name: a\nmodel: {a: 1\n", "not valid YAML"),
        (b"name: 'a\n", "not valid YAML"),
        (b"a: 1\n\tb: 2\n", "s.yaml:2:"),
        (b"---\na: 1\n---\nb: 2\n", "not valid YAML"),
        (b"a: " + b"[" * 3000, "s.yaml:1:"),
        (b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 10))
            for i in range(8)), "too many aliases"),
        (b"x" * 1_000_001, "too large"),
        (b"!!set x", "s.yaml:1:1: not valid YAML"),
        (b"a: !!python/object:os.system x", "s.yaml:1:"),
    ],
)  # fmt: skip
def test_another_file_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(ScenarioError, match="No such file"):
        load(tmp_path / "none.yaml")


def test_mistakes_between_fields_are_told_beside_those_of_fields(tmp_path: Path) -> None:
    text = GOOD.replace("top_k: 2", "top_k: 9").replace("verdict: hang", "verdict: hung")
    lines = refused(tmp_path, text).splitlines()
    assert [line.split(" ")[:2] for line in lines] == [
        ["s.yaml:8:10:", "model.top_k:"],
        ["s.yaml:11:5:", "skew.starve:"],
        ["s.yaml:15:23:", "variants.unfixed.expect.verdict:"],
    ]


def test_a_rule_does_not_judge_the_default_of_a_wrong_field(tmp_path: Path) -> None:
    text = GOOD.replace("experts: 8", "experts: many").replace("expert: 3", "expert: 12")
    (only,) = refused(tmp_path, text).splitlines()
    assert only.startswith("s.yaml:7:12: model.experts: ")
    text = GOOD.replace("model:", "modle:").replace("expert: 3", "expert: 12")
    assert "12" not in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.expertz=16", 'model.expertz: unknown field; did you mean "experts"?'),
        ("modle.experts=16", 'modle: unknown field; did you mean "model"?'),
        ("model.experts=few", 'model.experts: must be a whole number, not "few"'),
        ("model.experts", "not of the form FIELD=VALUE"),
        ("=3", "not of the form FIELD=VALUE"),
        ("model..experts=3", "not of the form FIELD=VALUE"),
        ("model.config=!!set x", "model.config: '!!set x' is not YAML"),
        ("model.experts=[", "model.experts: '[' is not YAML"),
        ("variants.unfixd.role=fix", 'variants.unfixd: no such variant; did you mean "unfixed"?'),
        ("skew.starve[5].rank=0", "skew.starve[5]: the list has 1 entries"),
        ("skew.starve[1].rank=0", "skew.starve[1].expert: required field is missing"),
        ("model.experts.x=3", "model.experts is not a section"),
        ("model[0]=3", "model is not a list"),
        # The rule mentions top_k, but the override violated it.
        ("model.experts=2", "skew.starve[0].expert: 3 is above 1: model.experts is 2"),
        ("model.kv_heads=3", "model.heads: 4 is not a multiple of kv_heads, 3"),
        ("variants.zero-fill.fix=zerofill",
         'no fix is called "zerofill"; did you mean "zero-fill"?'),
        ("stack.transformers=newest", 'stack.transformers: must be one version'),
        ("layout.ep=world", "set model.source to checkpoint"),
        ("wrapper.native_fsdp=true", "from_pretrained and fsdp2 would both shard"),
        ("skew.routing=one-hot", "routing already fixes which experts get no token"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_reported_instead_of_the_file(
    tmp_path: Path, override: str, message: str
) -> None:
    said = refused(tmp_path, GOOD, override)
    assert said.startswith(f"--set {override}: ")
    assert message in said


def test_contradictions_in_sharding_are_reported_where_they_are_set(tmp_path: Path) -> None:
    """An ep axis needs a checkpoint; a variant is reported only for its own fields."""
    head = 'schema_version: 1\nname: mine\ntitle: t\nstack: {transformers: "5.12.1"}\n'
    head += "layout: {ep: world}\nmodel: {source: checkpoint}\n"
    path = tmp_path / "s.yaml"
    head += "variants:\n  unfixed:\n    role: unfixed\n"
    good = head + "    expect: {verdict: crash}\n"
    path.write_text(good, encoding="utf-8")
    assert load(path).merged("unfixed").layout == {"ep": "world"}
    for line, at in (
        ("    model: {source: config}\n", "variants.unfixed.model"),
        ("    wrapper: {kind: accelerate, native_fsdp: true}\n", "variants.unfixed.wrapper.native"),
        (
            "    wrapper: {kind: accelerate, param_dtype: bfloat16}\n",
            "variants.unfixed.wrapper.param_dtype",
        ),
    ):
        assert at in refused(tmp_path, good + line)
    # Expert parallelism of another library is not checked.
    path.write_text(good + "    wrapper: {kind: trl, native_fsdp: true}\n", encoding="utf-8")
    assert load(path)


def test_overrides_reach_every_depth(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD, encoding="utf-8")
    given = [
        "model.experts=16",
        "wrapper.reduce_dtype=bfloat16",
        "skew.starve[0].rank=0",
        "skew.starve[1]={expert: 5, rank: 1}",
        "variants.unfixed.skew.starve[0].expert=7",
        "stack.transformers=5.0",
        "cost.rounds=3",
        "step.clip=null",
    ]
    scenario = load(path, given)
    assert scenario.model.experts == 16
    assert scenario.wrapper.reduce_dtype == "bfloat16"
    assert [(s.rank, s.expert) for s in scenario.skew.starve] == [(0, 3), (1, 5)]
    # A variant's list item starts from the inherited one.
    assert [(s.rank, s.expert) for s in scenario.merged("unfixed").skew.starve] == [(0, 7), (1, 5)]
    assert scenario.stack == {"transformers": "5.0"}
    assert scenario.cost is not None
    assert scenario.cost.rounds == 3
    assert scenario.step.clip is None
    assert scenario.overrides == tuple(f"--set {text}" for text in given)


def test_the_catalogue_finds_names_and_paths(tmp_path: Path) -> None:
    assert find("expert-starvation").name == "expert-starvation.yaml"
    path = tmp_path / "own.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert find(str(path)) == path
    for word, hint in [
        ("expert-starvaton", "did you mean expert-starvation"),
        ("nothing-like-it", "moediag list"),
        ("missing.yaml", "no such file"),
        ("a/b", "no such file"),
        ("x" * 5000 + "/y", "no such file"),
        ("", "no scenario"),
    ]:
        with pytest.raises(ScenarioError) as caught:
            find(word)
        assert hint in caught.value.message + caught.value.help_text


@settings(
    max_examples=cases(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_damaged_file_is_loaded_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Damage leads to a scenario or to a message with a line for each mistake, nothing else."""
    junk = st.sampled_from(
        ["{", "}", "[", ": ", "- ", "&a ", "*a", "!!set ", "null", "-1", "1e999", ".nan", "\t", "'",
         "? ", "<<: ", "|", "0x1F", "2001-01-01", "\u00e9", "world", "\n", "#"]
    )  # fmt: skip
    at = data.draw(st.integers(0, len(GOOD)))
    length = data.draw(st.integers(0, 30))
    path = tmp_path / "s.yaml"
    path.write_text(GOOD[:at] + data.draw(junk) + GOOD[at + length :], encoding="utf-8")
    try:
        load(path)
    except ScenarioError as error:
        for line in error.message.split("\n"):
            assert line.startswith((f"{path}:", "and "))
