"""Conditions around lines of a program: which name a rank, and on which side a line is."""

from __future__ import annotations

import textwrap

import pytest

from moediag.evidence.line_conditions import Sources
from moediag.evidence.model import Condition, Frame
from moediag.evidence.program_source import ProgramFile
from moediag.evidence.source_conditions import Source


def around(
    body: str, function: str = "f", size: int = 4, *, one_node: bool = False, rank: int = -1
) -> list[Condition]:
    """The conditions of the line that contains ``HERE``."""
    text = textwrap.dedent(body)
    line = next(n for n, t in enumerate(text.splitlines(), 1) if "HERE" in t)
    file = ProgramFile.parse("train.py", text, one_node)
    assert file is not None
    found = Source(file).conditions(line, function, size, rank)
    assert found is not None
    return list(found)


def naming(test: str, before: str = "") -> bool:
    """Whether ``if test:`` names a rank."""
    body = f"{before}\ndef f(self, args, rank, x):\n    if {test}:\n        x()  # HERE\n"
    return any(condition.names_rank for condition in around(body))


class TestNamesRank:
    @pytest.mark.parametrize(
        "test",
        [
            "rank == 0", "args.rank == 0", "not rank", "local_rank == 0", "self.global_rank == 0",
            "dist.get_rank() == 0", "torch.distributed.get_rank() == 0", "is_main_process()",
            "accelerator.is_main_process", "accelerator.is_local_main_process",
            "trainer.is_global_zero", "master_process", "is_last_rank", "misc.is_main_process()",
            "wandb_log and master_process", "x > 3 or rank == 1", "state.process_index % 2 == 0",
            "int(os.environ['RANK']) == 0", "os.environ.get('LOCAL_RANK', '0') == '0'",
            "mpu.get_data_parallel_rank() == 0", "self.gpu_id == 0 and x % 5 == 0",
            "rank in (0, 1)",
            "is_rank_zero", "xm.is_master_ordinal() or is_master", "x % world_size == rank",
        ],
    )  # fmt: skip
    def test_conditions_that_depend_on_the_rank(self, test: str) -> None:
        assert naming(test)

    @pytest.mark.parametrize(
        "test",
        [
            "x == 0", "args.local_rank != -1", "rank is not None", "rank >= 0", "lora_rank > 0",
            "matrix_rank(x) < 3", "self.q_lora_rank == 0", "rank_loss > 1", "loss.is_zero()",
            "args.main_process_port == 0", "'RANK' in os.environ", "x.is_root", "world_size > 1",
            "range(rank)",
        ],
    )  # fmt: skip
    def test_conditions_that_do_not(self, test: str) -> None:
        assert not naming(test)

    def test_a_variable_defined_by_a_comparison_with_the_rank(self) -> None:
        assert naming("chosen", before="chosen = dist.get_rank() == 0")
        assert naming("self.chosen", before="class A:\n  def g(self): self.chosen = not rank")
        assert naming("chosen()", before="def chosen(): return get_rank() == 0")

    def test_a_variable_that_only_mentions_the_rank(self) -> None:
        assert not naming("device != 'cpu'", before="device = f'cuda:{local_rank}'")
        assert not naming("chosen", before="chosen = 3")


class TestSides:
    def test_the_body_and_the_else_branch(self) -> None:
        body = "def f(rank):\n  if rank == 0:\n    {}\n  else:\n    {}\n"
        (under,) = around(body.format("a()  # HERE", "b()"))
        (other,) = around(body.format("a()", "b()  # HERE"))
        assert (under.text, under.line, under.side) == ("if rank == 0", 2, "under")
        assert (other.text, other.line, other.side) == ("if rank == 0", 2, "else")
        assert (under.keeps_out, other.keeps_out) == ({1, 2, 3}, {0})

    @pytest.mark.parametrize("way", ["return", "continue", "break", "raise", "exit"])
    def test_ranks_that_left_before_the_line(self, way: str) -> None:
        leave = "sys.exit(0)" if way == "exit" else "raise ValueError" if way == "raise" else way
        body = f"def f(rank):\n  for _ in x:\n    if rank != 0:\n      {leave}\n    a()  # HERE\n"
        one, _ = around(body)
        assert (one.side, one.leaves, one.text) == ("after", way, "if rank != 0")
        assert one.keeps_out == {1, 2, 3}

    def test_a_branch_that_continues_below_is_no_exit(self) -> None:
        body = "def f(rank):\n  if rank != 0:\n    log()\n  a()  # HERE\n"
        assert around(body) == []

    def test_an_exit_after_the_line_or_in_another_function_is_none(self) -> None:
        body = """
            def f(rank):
                def g():
                    if rank: return
                a()  # HERE
                if rank: return
        """
        assert around(body) == []

    def test_a_loop_whose_length_depends_on_the_rank(self) -> None:
        (one,) = around("def f(rank):\n  for i in range(3 + rank):\n    a()  # HERE\n")
        assert (one.side, one.text, one.names_rank) == ("loop", "for i in range(3 + rank)", True)

    def test_other_loops_around_the_line(self) -> None:
        body = "def f(x):\n  while x.more():\n    for i in range(3):\n      a()  # HERE\n"
        assert [(c.side, c.text, c.line, c.names_rank) for c in around(body)] == [
            ("loop", "while x.more()", 2, False),
            ("loop", "for i in range(3)", 3, False),
        ]

    def test_loops_leave_room_for_the_condition_outside_them(self) -> None:
        body = "def f(rank, x):\n  if rank == 0:\n"
        for depth in range(2, 12):
            body += f"{'  ' * depth}for _ in x:\n"
        found = around(f"{body}{'  ' * 12}a()  # HERE\n")
        assert found[0].text == "if rank == 0" and found[0].keeps_out == {1, 2, 3}

    @pytest.mark.parametrize("test", ["local_rank == 0", "acc.is_local_main_process"])
    def test_local_ranks_are_global_ranks_on_one_node(self, test: str) -> None:
        body = f"def f(local_rank, acc):\n  if {test}:\n    a()  # HERE\n"
        (one,) = around(body, one_node=True)
        assert (one.keeps_out, one.singles) == ({1, 2, 3}, 0)
        (several,) = around(body)
        assert (several.keeps_out, several.singles) == (frozenset(), None)
        assert several.names_rank

    def test_names_that_are_assigned_together(self) -> None:
        before = "r, n = dist.get_rank(), len(x)\nfor a, b in (dist.get_rank(), 1):\n  pass"
        assert [naming(f"{name} == 0", before) for name in "rnb"] == [True, False, False]

    def test_an_expression_of_the_line_itself(self) -> None:
        (one,) = around("def f(rank):\n  x = a() if rank == 0 else b()  # HERE\n")
        assert (one.side, one.text) == ("inline", "a() if rank == 0 else b()")
        (two,) = around("def f(rank):\n  rank == 0 and a()  # HERE\n")
        assert two.side == "inline"

    def test_a_decorator_and_a_context_manager(self) -> None:
        (one,) = around("@rank_zero_only\ndef f(x):\n  a()  # HERE\n")
        assert (one.side, one.text) == ("decorator", "@rank_zero_only")
        (two,) = around("def f(x):\n  with acc.main_process_first():\n    a()  # HERE\n")
        assert (two.side, two.text) == ("with", "with acc.main_process_first()")

    def test_the_handler_of_an_exception(self) -> None:
        (one,) = around("def f(x):\n  try:\n    b()\n  except ValueError:\n    a()  # HERE\n")
        assert (one.side, one.text, one.line) == ("handler", "except ValueError", 4)

    def test_conditions_that_do_not_name_a_rank_say_so(self) -> None:
        (one,) = around("def f(x):\n  if x:\n    a()  # HERE\n")
        assert not one.names_rank

    def test_conditions_are_outermost_first(self) -> None:
        body = "def f(rank):\n  if rank:\n    if rank < 2:\n      a()  # HERE\n"
        assert [c.line for c in around(body)] == [2, 3]

    def test_main_guard_of_a_script_is_left_out(self) -> None:
        assert around("if __name__ == '__main__':\n  a()  # HERE\n", "<module>") == []


class TestWhoIsKeptOut:
    @pytest.mark.parametrize(
        ("test", "out"),
        [
            ("rank == 0", {1, 2, 3}),
            ("rank == 0 and log", {1, 2, 3}),
            ("rank == 0 or log", set()),
            ("not is_main_process()", {0}),
            ("rank % 2 == 0", {1, 3}),
            ("rank == world_size - 1", {0, 1, 2}),
            ("tp_rank == 0", set()),  # not a global rank
            ("dist.get_rank(group) == 0", set()),
            ("rank % 0 == 0", set()),
        ],
    )
    def test_ranks_for_which_it_is_certainly_false(self, test: str, out: set[int]) -> None:
        assert around(f"def f(rank):\n  if {test}:\n    a()  # HERE\n")[0].keeps_out == out


class TestTheRankThatIsTreatedApart:
    @pytest.mark.parametrize(
        ("test", "rank"),
        [
            ("rank == 0", 0),
            ("rank != 1", 1),
            ("not is_main_process()", 0),
            ("step % 5 == 0 and rank == 2", 2),
            ("rank == 0 or rank == 1", None),
            ("rank == 0 and rank == 1", None),
            ("rank < 1", None),
            ("tp_rank == 0", None),
            ("step == 0", None),
        ],
    )
    def test_a_comparison_with_one_number(self, test: str, rank: int | None) -> None:
        assert around(f"def f(rank):\n  if {test}:\n    a()  # HERE\n")[0].singles == rank

    def test_two_branches_that_may_meet_each_other(self) -> None:
        body = "def f(rank):\n  if rank == 0:\n    dist.{}(x)  # HERE\n  else:\n    {}(x)\n"
        assert around(body.format("broadcast", "dist.broadcast"))[0].singles is None
        assert around(body.format("send", "dist.recv"))[0].singles is None
        assert around(body.format("broadcast", "log"))[0].singles == 0

    @pytest.mark.parametrize(
        "other", ["rank != 0", "rank > 0", "rank not in (-1, 0)", "not is_main_process()"]
    )
    def test_two_conditions_whose_calls_meet_single_out_nobody(self, other: str) -> None:
        """Rank 0 first: the others wait for it in a barrier that it reaches later."""
        body = f"""
            def f(rank):
                if {other}:
                    dist.barrier()
                load()
                if rank == 0:
                    dist.barrier()  # HERE
        """
        assert around(body)[0].singles is None
        assert around(body.replace("dist.barrier()\n", "log()\n", 1))[0].singles == 0

    @pytest.mark.parametrize(
        ("lines", "single"),
        [
            (("if rank != 0: barrier()", "if rank == 0: barrier()", "HERE"), 0),
            (("if rank == 0: barrier()", "if rank != 0: barrier()", "HERE"), 0),
            (("if rank != 0: barrier()", "HERE", "if rank == 0: barrier()"), None),
            (("HERE", "if rank != 0: barrier()", "if rank == 0: barrier()"), None),
            (("if rank == 0: barrier()", "HERE", "if rank != 0: barrier()"), 0),
            (("if rank != 0: barrier()", "if rank != 0: barrier()", "HERE"), None),
            (("if rank != 0 and x: barrier()", "if rank == 0: barrier()", "HERE"), 0),
        ],
    )
    def test_a_pair_of_conditions_is_met_by_itself(
        self, lines: tuple[str, ...], single: int | None
    ) -> None:
        made = {"HERE": "if rank == 0:\n    dist.barrier()  # HERE"}
        body = "\n".join(made.get(one, one.replace("barrier", "dist.barrier")) for one in lines)
        found = around("def f(rank):\n" + textwrap.indent(body, "  "))
        assert found[0].singles == single

    def test_two_conditions_for_the_same_rank_single_it_out(self) -> None:
        body = """
            def f(rank):
                if rank == 0:
                    dist.barrier()
                load()
                if rank == 0:
                    dist.barrier()  # HERE
        """
        assert around(body)[0].singles == 0

    def test_a_call_before_an_exit_may_meet_the_one_after_it(self) -> None:
        body = "def f(rank):\n  if rank == 0:\n    {}()\n    return\n  dist.barrier()  # HERE\n"
        assert around(body.format("dist.barrier"))[0].singles is None
        assert around(body.format("log"))[0].singles == 0


class TestDefinitionsThatAreFollowed:
    """A condition of rank behind a call, an assignment, an argument, an enclosing function."""

    @pytest.mark.parametrize(
        "before",
        [
            "def chosen(args): return args.rank == 0",
            "def chosen(x):\n  if not is_initialized(): return True\n  return get_rank() == 0",
            "def chosen(args): return first(dist.get_rank())\ndef first(r): return r == 0",
        ],
    )
    def test_a_function(self, before: str) -> None:
        body = f"{before}\ndef f(args):\n  if chosen(args) and step % 8 == 0:\n    a()  # HERE\n"
        (one,) = around(body)
        assert (one.names_rank, set(one.keeps_out), one.singles) == (True, {1, 2, 3}, 0)

    @pytest.mark.parametrize(
        "value",
        [
            "int(os.environ['{}'])", "int(os.environ.get('{}', 0))", "int(os.getenv('{}', '0'))",
            "int(environ['{}'])",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize(("name", "on_nodes"), [("RANK", 1), ("LOCAL_RANK", 0)])
    def test_a_name_for_a_rank_of_the_environment(
        self, value: str, name: str, on_nodes: int
    ) -> None:
        """As `self.gpu_id` of PyTorch's tutorials; on several nodes a local rank is no rank."""
        body = f"""
            class A:
                def __init__(self): self.gpu_id = {value.format(name)}
                def f(self, epoch):
                    if self.gpu_id == 0 and epoch % 2 == 0:
                        a()  # HERE
        """
        (one,), (several,) = around(body, one_node=True), around(body)
        assert (set(one.keeps_out), one.singles) == ({1, 2, 3}, 0)
        assert (len(several.keeps_out), several.names_rank) == (3 * on_nodes, True)

    def test_text_of_the_environment_and_its_size(self) -> None:
        body = "def f(x):\n  if {}:\n    a()  # HERE\n"
        (one,) = around(body.format("os.environ['RANK'] == '1'"))
        assert (set(one.keeps_out), one.singles) == ({0, 2, 3}, 1)
        (last,) = around(
            body.format("int(os.environ['RANK']) == int(os.environ['WORLD_SIZE']) - 1")
        )
        assert (set(last.keeps_out), last.singles) == ({0, 1, 2}, 3)
        (other,) = around(body.format("int(config['RANK']) == 0"))
        assert (other.keeps_out, other.singles) == (frozenset(), None)

    def test_the_rank_in_a_group_that_is_passed_to_a_function(self) -> None:
        body = """
            def first(rank): return rank == 0
            def f(x):
                if first(dist.get_rank(group)):
                    a()  # HERE
        """
        (one,) = around(body)
        assert (one.names_rank, one.keeps_out, one.singles) == (True, frozenset(), None)

    def test_an_attribute(self) -> None:
        body = """
            def main(args):
                args.save_logs = args.logs != "none" and is_master(args)
            def is_master(args): return args.rank == 0
            def f(args):
                if args.save_logs:
                    a()  # HERE
        """
        assert around(body)[0].singles == 0
        twice = f"{textwrap.dedent(body)}\ndef g(args): args.save_logs = x\n"
        assert around(twice)[0].singles is None

    def test_a_variable_of_the_enclosing_function(self) -> None:
        body = """
            def make(r):
                chief = r == 0
                def f(step):
                    if chief:
                        a()  # HERE
                return f
            make(dist.get_rank())
        """
        assert around(body)[0].keeps_out == {1, 2, 3}

    def test_the_last_rank(self) -> None:
        body = "def f(x):\n  if get_rank() == get_world_size() - 1:\n    a()  # HERE\n"
        assert (around(body)[0].singles, set(around(body)[0].keeps_out)) == (3, {0, 1, 2})

    @pytest.mark.parametrize("choice", ["ACTIONS[rank == 0]()", "ACTIONS.get(rank == 0)()"])
    def test_a_table_of_functions(self, choice: str) -> None:
        body = f"ACTIONS = {{True: full, False: quick}}\ndef f(rank):\n  {choice}  # HERE\n"
        body += "def full(): dist.barrier()\ndef quick(): pass\n"
        (one,) = around(body, rank=0)
        assert (one.side, set(one.keeps_out), one.singles) == ("inline", {1, 2, 3}, 0)
        assert around(body.replace("pass", "dist.barrier()"), rank=0)[0].singles is None

    @pytest.mark.parametrize(
        ("test", "single"),
        [
            ("step % 8 == 0 and (rank == 0 or step < 16)", 0),
            ("rank == 0 or args.all", 0),
            ("rank == 0 or loss > 3", None),  # the loss may differ
        ],
    )
    def test_an_alternative(self, test: str, single: int | None) -> None:
        body = f"def f(rank):\n  for step in range(9):\n    if {test}:\n      a()  # HERE\n"
        one = around(body)[-1]
        assert (one.singles, len(one.keeps_out)) == (single, 0)
        assert one.unless == (single is not None)

    def test_other_files(self) -> None:
        files = {
            "/me/train.py": "from helpers import first\ndef f(args):\n  if first(args):\n    a()\n",
            "/me/helpers.py": "def first(args):\n  return args.rank == 0\n",
        }
        frame = Frame("/me/train.py", 4, "f")
        (one,) = Sources(files, 2).conditions([frame])[0][frame.place]
        assert (one.names_rank, one.singles) == (True, 0)
        alone = {"/me/train.py": files["/me/train.py"]}
        (one,) = Sources(alone, 2).conditions([frame])[0][frame.place]
        assert not one.names_rank


class TestTexts:
    def test_the_clause_that_names_the_rank_is_never_cut(self) -> None:
        long = (
            "args.evaluation_enabled and args.warmup_finished is not None and step % interval == 0"
        )
        (one,) = around(f"def f(args):\n  if {long} and args.rank == 0:\n    a()  # HERE\n")
        assert one.text.endswith("and args.rank == 0") and len(one.text) <= 100
        (other,) = around(f"def f(args):\n  if {long} and {long}:\n    a()  # HERE\n")
        assert len(other.text) <= 100


class TestSourceThatDoesNotMatch:
    SOURCE = "def f(rank):\n  if rank == 0:\n    a()\n"

    def found(self, *frames: Frame, text: str = SOURCE) -> tuple[object, object]:
        return Sources({"/me/train.py": text}, 2).conditions(frames)

    def test_a_frame_of_the_source(self) -> None:
        found, unusable = self.found(Frame("/me/train.py", 3, "f"))
        assert list(found) == ["train.py:3 f"] and unusable == ()

    def test_a_line_of_another_function(self) -> None:
        assert self.found(Frame("/me/train.py", 3, "g")) == ({}, ("train.py",))

    def test_text_that_is_not_python(self) -> None:
        assert self.found(Frame("/me/train.py", 3, "f"), text="def f(:") == ({}, ("train.py",))

    def test_a_file_that_was_not_kept(self) -> None:
        assert self.found(Frame("/me/other.py", 3, "f")) == ({}, ())

    def test_a_line_beyond_the_end(self) -> None:
        assert self.found(Frame("/me/train.py", 99, "f")) == ({}, ("train.py",))

    def test_two_files_of_one_name_with_different_conditions(self) -> None:
        files = {"/a/train.py": self.SOURCE, "/b/train.py": self.SOURCE.replace("rank", "x")}
        frames = [Frame(path, 3, "f") for path in files]
        assert Sources(files, 2).conditions(frames) == ({}, ())

    def test_a_lambda_may_have_been_called_from_anywhere(self) -> None:
        text = "if rank == 0:\n  x = lambda: a()\n"
        found, _ = self.found(Frame("/me/train.py", 2, "<lambda>"), text=text)
        assert found == {"train.py:2 <lambda>": ()}

    def test_a_comprehension_belongs_to_its_function(self) -> None:
        text = "def f(rank):\n  if rank == 0:\n    x = [a() for _ in y]\n"
        found, _ = self.found(Frame("/me/train.py", 3, "<listcomp>"), text=text)
        assert [c.text for c in found["train.py:3 <listcomp>"]] == ["if rank == 0"]


class TestLinesOfRecordedCalls:
    FILES = {"/me/train.py": "def f(rank):\n  if rank == 0:\n    a()\n"}  # noqa: RUF012

    def test_a_line_of_a_recorded_file(self) -> None:
        found = Sources(self.FILES, 2).of_lines(["train.py:3 f", ""], ["/me/train.py"])
        assert [c.text for c in found["train.py:3 f"]] == ["if rank == 0"]

    def test_two_recorded_files_of_one_name(self) -> None:
        paths = ["/me/train.py", "/you/train.py"]
        assert Sources(self.FILES, 2).of_lines(["train.py:3 f"], paths) == {}

    def test_a_file_that_was_not_recorded(self) -> None:
        assert Sources(self.FILES, 2).of_lines(["train.py:3 f"], []) == {}
