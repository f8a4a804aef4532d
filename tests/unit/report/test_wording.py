"""How names, ranks and numbers are written."""

import re

from hypothesis import given
from hypothesis import strategies as st

from moediag.result import wording


def expand(text: str) -> list[str]:
    """The names that a compacted name stands for."""
    found = re.search(r"\{([^}]*)\}", text)
    if not found:
        return [text]
    values: list[str] = []
    for piece in found[1].split(","):
        if ".." in piece:
            first, last = piece.split("..")
            values += [str(n) for n in range(int(first), int(last) + 1)]
        else:
            values.append(piece)
    head, tail = text[: found.start()], text[found.end() :]
    return [name for value in values for name in expand(head + value + tail)]


def test_projections_of_one_expert_become_one_line() -> None:
    expert = "model.layers.1.mlp.experts.3."
    assert wording.compact([expert + f"{p}_proj.weight" for p in ("gate", "up", "down")]) == [
        expert + "{gate,up,down}_proj.weight"
    ]


def test_consecutive_numbers_become_a_range() -> None:
    assert wording.compact(f"layers.{n}.gate" for n in (0, 1, 2, 5)) == ["layers.{0..2,5}.gate"]


def test_unrelated_names_are_kept() -> None:
    assert wording.compact(["a.b", "c", "a.b"]) == ["a.b", "c"]


parts = st.sampled_from(["layers", "gate_proj", "up_proj", "weight", "0", "1", "2", "3", "07"])


@given(st.lists(st.lists(parts, min_size=1, max_size=4).map(".".join), max_size=12))
def test_expanding_gives_back_every_name_and_no_other(listed: list[str]) -> None:
    expanded = [name for text in wording.compact(listed) for name in expand(text)]
    assert sorted(expanded) == sorted(set(listed))


def test_ranks_are_listed_as_ranges() -> None:
    assert wording.ranks([]) == "none"
    assert wording.ranks([1]) == "rank 1"
    assert wording.ranks([7, 0, 2, 3, 4]) == "ranks 0, 2..4, 7"


def test_numbers_are_formatted() -> None:
    assert wording.plural(15696, "element") == "15,696 elements"
    assert wording.plural(1, "element") == "1 element"
    assert [wording.seconds(s) for s in (0.416, 1.44, 125)] == ["0.42 s", "1.4 s", "2 min 5 s"]
    assert wording.error_size(None) == "not compared"
    assert [wording.error_size(e) for e in (0.0, 0.0031, float("nan"))] == ["0", "3.1e-03", "nan"]
    assert wording.ratio(1.02, (0.99, 1.04)) == "1.02x [0.99-1.04]"
    assert wording.ratio(None) == ""


def test_stack_starts_with_the_main_packages_without_build_tags() -> None:
    versions = {
        "python": "3.11",
        "torch": "2.13.0+cpu",
        "transformers": "4.53.2",
        "accelerate": None,
    }
    assert wording.stack(versions) == ["transformers 4.53.2", "torch 2.13.0"]


def test_names_in_markdown_are_readable_and_emphasise_nothing() -> None:
    assert wording.inline("all_gather of model.q_proj") == "all_gather of model.q_proj"
    assert wording.inline("__init__ _x") == r"\_\_init\_\_ \_x"
    assert wording.inline("a|b *c* <d>") == r"a\|b \*c\* &lt;d&gt;"
