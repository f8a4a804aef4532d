"""What a check says after an exception: the same on real ranks is a failure, else undecided."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moediag.lab.check import checking, configured, real_ranks, simulated_step  # noqa: E402
from moediag.lab.check.simulated_group import Raised, in_children  # noqa: E402
from moediag.protocol import FAILS, CheckTask, Trial, WrapperSpec  # noqa: E402
from moediag.recorder.not_applicable import NotApplicable  # noqa: E402
from tests.unit.worker.checked_model import SMALL  # noqa: E402

PLACE = "transformers/distributed/tensor_parallel.py:654"
WHY = Raised("KeyError", "'layers.2'", PLACE)
OWN: Any = SimpleNamespace(
    model=transformers.LlamaForCausalLM, config=SimpleNamespace(model_type="llama"),
    experts=0, top_k=0,
)  # fmt: skip
TRIAL = Trial("c", "c", "c", task=CheckTask("m"), layout={"pp": 2, "tp": 2}, world_size=4)


def really(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    def first_raised(*_: Any, step: bool = False) -> Any:
        if isinstance(found, NotApplicable):
            raise found
        return 4 if step else 2, found

    monkeypatch.setattr(real_ranks, "first_raised", first_raised)


@pytest.mark.parametrize(
    ("again", "fails", "told"),
    [
        (Raised("KeyError", "'layers.1'", PLACE), True, "raises KeyError: 'layers.1', on 2"),
        (Raised("RuntimeError", "closed", PLACE), False, f"KeyError: 'layers.2' at {PLACE}"),
        (Raised("KeyError", "'layers.1'", "torch/other.py:1"), False, f"at {PLACE}"),
        (None, False, f"KeyError: 'layers.2' at {PLACE}"),
        (NotApplicable("8 ranks"), False, "(not tried on real ranks: 8 ranks)"),
    ],
)  # fmt: skip
def test_an_exception_of_sharding_fails_only_if_real_ranks_raise_it(
    again: Any, fails: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really(monkeypatch, again)
    found = checking._refused(WHY, OWN, "asked", TRIAL, tmp_path)
    assert [one.level for one in found.findings] == [FAILS] * fails
    assert told in (found.findings[0].text if fails else found.problem)
    assert bool(found.problem) is not fails and found.asked == "asked"


@pytest.mark.parametrize(
    ("again", "fails", "told"),
    [
        (Raised("RuntimeError", "no grad", ""), True, "step raises RuntimeError: no grad"),
        (None, False, "a step on 4 real ranks ran"),
        (NotApplicable("8 ranks"), False, "not tried on real ranks: 8 ranks"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_simulated_is_run(
    again: Any, fails: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really(monkeypatch, again)
    found = checking._unsimulated(WHY, OWN, TRIAL, tmp_path)
    assert told in (found.findings[0].text if fails else found.not_seen[0])
    assert (len(found.findings), len(found.not_seen)) == (fails, not fails)
    assert fails or found.not_seen[0].startswith("the schedule: the simulated step ended with")


def test_stages_that_send_no_gradients_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really(monkeypatch, Raised("RuntimeError", "element 0 does not require grad", ""))
    (found,) = checking._unsimulated(WHY, OWN, TRIAL, tmp_path).findings
    assert "torchtitan and Megatron-LM" in found.text


def step_of_two(folder: Path) -> tuple[int, Raised | None]:
    own = configured.of_config(transformers.Qwen3MoeConfig(**SMALL))
    trial = Trial("c", "c", "c", task=CheckTask("m"), layout={"dp_shard": 8}, world_size=8,
                  wrapper=WrapperSpec(kind="fsdp2"))  # fmt: skip
    return real_ranks.first_raised(own, trial, folder, step=True)


@pytest.mark.parametrize("broken", [False, True])
def test_two_real_ranks_run_a_step(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:  # tokens that the vocabulary lacks
        monkeypatch.setattr(simulated_step, "batch", lambda _: torch.full((2, 8), 10**6))
    ranks, found = step_of_two(tmp_path)
    assert ranks == 2
    assert (found is not None and found.kind == "IndexError") if broken else found is None


@pytest.mark.parametrize(
    "text", ["ProcessGroupGloo does not support alltoall", "grouped_mm is not implemented for CPU"]
)
def test_what_gloo_or_a_cpu_lacks_is_no_failure(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(_: int) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(simulated_step, "batch", raises)
    with pytest.raises(NotApplicable, match="2 ranks on gloo ended with RuntimeError"):
        step_of_two(tmp_path)


def test_the_first_exception_counts_if_all_ranks_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = [(2.0, Raised("OSError", "gone", "")), (1.0, WHY)]
    monkeypatch.setattr(real_ranks, "in_children", lambda *_: ended)
    assert step_of_two(tmp_path) == (2, WHY)
    ended[0] = WHY  # that of a process, not of its rank
    with pytest.raises(NotApplicable, match="the real ranks did not meet"):
        step_of_two(tmp_path)


def test_more_than_four_real_ranks_are_not_tried(tmp_path: Path) -> None:
    trial = Trial("c", "c", "c", task=CheckTask("m"), world_size=8,
                  layout={"dp_shard": 2, "ep": 2, "tp": 2})  # fmt: skip
    with pytest.raises(NotApplicable, match="8 ranks would be needed, more than 4"):
        real_ranks.first_raised(OWN, trial, tmp_path)


def test_each_child_answers_for_itself(tmp_path: Path) -> None:
    one, other, gone = in_children([lambda: 1, lambda: {}["x"], lambda: lambda: 0], tmp_path)  # type: ignore[misc]
    assert one == 1 and other.kind == "KeyError" and gone.text == "the process left no answer"
    assert list(tmp_path.iterdir()) == []
