"""The rank of each line of a log, whatever launchers, schedulers and terminals put before it."""

from __future__ import annotations

import pytest

from moediag.evidence.log_lines import by_rank, prefixed, read


def lines(text: str) -> list[tuple[int | None, str]]:
    return [(line.rank, line.text) for line in read(text)]


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank5]: boom", 5),
        ("[default2]: boom", None),  # of which node?
        ("[default0]:[rank5]: boom", 5),
        ("[rank5]:[default0]: boom", 5),
        ("[trainer21|5]: boom", 21),
        ("[trainers/13|5]:boom", 13),
        ("[worker_a5|13]: boom", 13),
        ("[epoch3|20]: boom", None),
        ("2031-05-06 07:08:09   [rank5]: boom", 5),
        ("[1,5]<stderr>: boom", 5),
        ("[ERROR] 2025-10-11-15:09:34 (PID:29, Device:0, RankID:5) boom", 5),
        ("[ERROR] 2025-10-11-15:09:34 (PID:29, Device:0, RankID:-1) boom", None),
        ("[RANK 5] boom", 5),
        ("[rank: 5] boom", 5),
        ("2031-05-06 07:08:09,123 [rank5]: boom", 5),
        ("2031-05-06T07:08:09.123456Z [rank5]: boom", 5),
        ("[2031-05-06 07:08:09] [rank5]: boom", 5),
        ("07:08:09 [rank5]: boom", 5),
        ("431.5s 17 [rank5]: boom", 5),
        ("[1203] [rank5]: boom", 5),
        ("[pod/moe-worker-1/pytorch] [rank5]: boom", 5),
        ("trainer_1  | [rank5]: boom", 5),
        ("job.node-7 [stderr] [rank5]: boom", 5),
        ("(Worker pid=77, ip=10.0.0.9) [rank5]: boom", 5),
        ("\x1b[36m(Worker pid=77)\x1b[0m [rank5]: boom", 5),
        ("> [rank5]: boom", 5),
        ("boom", None),
        ("5: boom", None),  # one line is no `srun -l`
    ],
)
def test_prefixes_are_removed(line: str, rank: int | None) -> None:
    ((found, text),) = lines(line)
    assert found == rank and text.endswith("boom") and (rank is None or text == "boom")


@pytest.mark.parametrize(
    ("sign", "rank"),
    [
        ("torchrun --standalone train.py", 1),
        ("torchrun --nnodes=1 train.py", 1),
        ("torchrun --nnodes=2 train.py", None),
        ("[default1]: [rank9]: boom", 9),
        ("  rank      : 5 (local_rank: 1)", 5),
    ],
)
def test_a_local_rank_is_a_rank_where_the_log_tells_which(sign: str, rank: int | None) -> None:
    assert read(f"[default1]: boom\n{sign}\n")[0].rank == rank


def test_the_numbers_of_srun_are_ranks_where_most_lines_have_them() -> None:
    text = "0: step 1\n1: step 1\n 1: boom\n"
    assert by_rank(read(text)) == {0: "step 1", 1: "step 1\nboom"}
    few = "epoch done\nstep\nstep\n1: not a task\nstep\n"
    assert by_rank(read(few)) == {None: few.strip()}


def test_the_numbers_of_srun_are_nodes_if_torch_contradicts_them() -> None:
    text = "0: [rank3]: a\n1: [rank9]: b\n1: c\n"
    assert {line.rank for line in read(text)} == {None} and "[rank9]" in read(text)[1].text


def test_one_line_tells_the_rank_of_a_process() -> None:
    text = "(W pid=7) Traceback\n(W pid=7) [rank2]: x\n(W pid=8) y\n(W pid=8) [rank1]: z\n"
    assert by_rank(read(text)) == {2: "Traceback\nx", 1: "y\nz"}
    both = "(W pid=7) [rank2]: x\n(W pid=7) [rank3]: y\n(W pid=7) of whom?\n"
    assert by_rank(read(both))[None] == "of whom?"


@pytest.mark.parametrize("width", [77, 80, 93, 116, 215])
def test_a_terminals_wraps_are_undone(width: int) -> None:
    """At 215 each line wraps once, where nothing else shows that it goes on; two lines show it."""
    whole = [
        f"[rank{rank}]:[E1121 09:10:11.{rank} ProcessGroupNCCL.cpp:1] [Rank {rank}] Watchdog "
        f"caught "
        "collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=123456, "
        f"NumelOut=123456, Timeout(ms)=600000) ran for 60000{rank} milliseconds before timing out."
        for rank in range(3 if width < 215 else 2)
    ]
    wrapped = "\n".join(
        line[at : at + width] for line in whole for at in range(0, len(line), width)
    )
    found = [line.text for line in read(wrapped)]
    assert found == [line.partition("]:")[2] for line in whole]


def test_ordinary_lines_are_not_joined() -> None:
    text = "ProcessGroupNCCL started\nstep 1\nstep 2\n"
    assert [text for _, text in lines(text)] == text.splitlines()


def test_a_progress_bar_shows_its_last_state() -> None:
    assert lines("1%\r 2%\r[rank1]: boom\n") == [(1, "boom")]
    assert lines("[rank1]: a\r\n[rank2]: b\r\n") == [(1, "a"), (2, "b")]


def test_a_line_without_end_is_read_in_linear_time() -> None:
    (line,) = read("x" * 2_000_000)
    assert len(line.text) < 20_000


@pytest.mark.parametrize(
    ("head", "log"),
    [
        ("[rank0]: x", True),
        ("[E1121 09:10:11 x.cpp:1] y", True),
        ("[2031-05-06 07:08:09] x", True),
        ('[{"frames": []}]', False),
        ("[\n {", False),
        ("[1, 2]", False),
    ],
)
def test_a_log_that_starts_with_a_bracket_is_not_json(head: str, log: bool) -> None:
    assert prefixed(head) is log


def test_the_error_of_cann_is_of_the_rank_of_its_process() -> None:
    text = (
        "[ERROR] 2025-10-11-15:09:34 (PID:29, Device:0, RankID:5) ERR00100 PTA call failed.\n"
        "EI0002: [PID: 29] 2025-10-11-15:09:34.713.335 x times out.\n"
        "EI0002: [PID: 30] 2025-10-11-15:09:34.713.335 y\n"
    )
    assert lines(text)[1:] == [(5, "x times out."), (None, "y")]


WRAPPED = """\
[rank2]:[E816 P.cpp:629] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=_ALLGATHER_BA[451/1919]
n=71552, NumelOut=572416, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.                                    \

"""  # noqa: E501


def test_what_tmux_hides_is_taken_from_the_message_of_another_rank() -> None:
    other = WRAPPED.replace("ank2", "ank0").replace("[451/1919]", "SE, NumelI")
    (one,) = read(WRAPPED)[:1]
    assert "_ALLGATHER_BA[451/1919]n=71552" in one.text
    both = [line.text for line in read(WRAPPED + other) if line.text]
    assert all("OpType=_ALLGATHER_BASE, NumelIn=71552, NumelOut=572416" in text for text in both)
    progress = "step [451/1919] loss 2.5\n" * 3
    assert [line.text for line in read(progress)] == ["step [451/1919] loss 2.5"] * 3


@pytest.mark.parametrize("mark", ["[rank0]: ", "[1,0]<stderr>: ", ""])
def test_a_message_of_the_group_of_all_ranks_outranks_the_mark(mark: str) -> None:
    (line,) = read(f"{mark}[PG ID 0 PG GUID 0(default_pg) Rank 4] Process group watchdog\n")
    assert line.rank == 4 and line.against == (0 if mark else None)
    (same,) = read("[rank4]: [PG ID 0 PG GUID 0(default_pg) Rank 4] Process group watchdog\n")
    assert (same.rank, same.against) == (4, None)
    (other,) = read(f"{mark}[PG ID 2 PG GUID 9(tp) Rank 1] Process group watchdog\n")
    assert other.rank == (0 if mark else None)  # its rank in that group


def test_sections_end_where_their_tool_says_so() -> None:
    """What Composer and Lightning write around the output of a rank is that rank's, and no more."""
    composer = "a\n----------Begin global rank 1 STDERR----------\nb\n[rank3]: c\n"
    composer += "----------End global rank 1 STDERR----------\nd"
    assert [(one.rank, one.text) for one in read(composer) if len(one.text) == 1] == [
        (None, "a"), (1, "b"), (3, "c"), (None, "d"),
    ]  # fmt: skip
    lightning = "X: DeadLock detected from rank: 2 \n Traceback (most recent call last):\n"
    lightning += '  File "m.py", line 1, in f\nKeyError: 1\nafter'
    assert [one.rank for one in read(lightning)] == [2, 2, 2, 2, None]
    assert read(lightning)[1].text.startswith("Traceback")
    assert [one.rank for one in read("only an End global rank 1 STDERR\nx")] == [None, None]
