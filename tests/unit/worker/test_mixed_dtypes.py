"""The fixes of mixed-dtype-unit leave no FSDP2 unit with two dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from moediag.lab.check import fsdp_units, simulated_group  # noqa: E402
from moediag.lab.step import content  # noqa: E402
from moediag.lab.step.models.tiny import Anatomy  # noqa: E402
from moediag.protocol import WrapperSpec  # noqa: E402
from moediag.recorder.not_applicable import NotApplicable  # noqa: E402

NONE = Anatomy((), (), 0)


@pytest.mark.parametrize(
    ("fix", "units", "fails"), [("", 1, 1), ("one-dtype", 1, 0), ("own-dtype-unit", 2, 0)]
)
def test_a_unit_has_one_dtype_with_each_fix(
    fix: str, units: int, fails: int, tmp_path: Path
) -> None:
    from torch.distributed.fsdp import fully_shard

    def work() -> list[Any]:
        with simulated_group.joined(0, 2):
            model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
            if fix:
                content.fix(fix).before_wrap(model, NONE, WrapperSpec())
            fully_shard(model)
            return [fsdp_units.units(model), list(fsdp_units.mixed_dtypes(model, "plan"))]

    found, mixed = simulated_group.in_child(work, tmp_path)
    assert (len(found), len(mixed)) == (units, fails)


def test_own_units_are_those_of_fsdp2() -> None:
    with pytest.raises(NotApplicable, match="wrapper ddp shards otherwise"):
        content.fix("own-dtype-unit").before_wrap(nn.Linear(2, 2), NONE, WrapperSpec(kind="ddp"))
