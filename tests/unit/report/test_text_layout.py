"""No line is longer than the terminal, and no character of the text is lost."""

from hypothesis import given
from hypothesis import strategies as st

from moediag.report import text_layout

words = st.text(st.sampled_from("abcdefgh._/,0123"), min_size=1, max_size=60)


@given(st.lists(words, max_size=20).map(" ".join), st.integers(10, 120))
def test_wrapping_keeps_every_character_within_the_width(text: str, width: int) -> None:
    lines = text_layout.wrap(text, width)
    assert lines
    assert all(len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_long_name_breaks_after_a_dot() -> None:
    assert text_layout.wrap("model.layers.10.mlp.experts", 14) == [
        "model.layers.",
        "10.mlp.experts",
    ]


def test_text_is_indented_after_a_label() -> None:
    lines = [text_layout.plain(line) for line in text_layout.labelled("CAUSE", "one two three", 20)]
    assert lines == [" CAUSE    one two", "          three"]


def test_a_command_can_be_pasted() -> None:
    lines = [text_layout.plain(x) for x in text_layout.to_type("HTML", "moediag report run -x", 26)]
    assert lines == [" HTML     moediag report \\", "          run -x"]


def test_right_text_moves_to_the_next_line_if_it_does_not_fit() -> None:
    title = [((" a long title", "plain"),)]
    assert [text_layout.plain(x) for x in text_layout.at_right(title, "hang", "bad", 20)] == [
        " a long title   hang"
    ]
    assert [text_layout.plain(x) for x in text_layout.at_right(title, "hang", "bad", 17)] == [
        " a long title",
        "             hang",
    ]


@given(st.lists(words, max_size=8), st.integers(20, 100))
def test_flowing_pieces_stay_within_the_width(pieces: list[str], width: int) -> None:
    for line in text_layout.flow([(piece, "plain") for piece in pieces], width):
        assert len(text_layout.plain(line)) <= width


def test_definitions_fit_the_width() -> None:
    rows = {"a": "some words about it", "a-name-that-is-very-long-for-this": "words", "b": ""}
    lines = list(text_layout.definitions(rows, 40))
    assert max(map(len, lines)) <= 40
    assert lines == [
        "a                     some words about",
        "                      it",
        "a-name-that-is-very-long-for-this",
        "                      words",
        "b",
    ]
    assert len(list(text_layout.definitions(rows, 1000))) == 3
