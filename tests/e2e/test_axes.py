"""The step under test on every axis, alone and combined, each against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.pipeline import Command, need
from tests.e2e.test_scenarios import holds

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]

NEW = {"transformers": "5.23.0", "accelerate": "1.15.0"}
# Variant: what differs from FSDP2 over four ranks.
HEALTHY = {
    "hsdp": "layout: {dp_replicate: 2, dp_shard: world}",
    "hsdp-fsdp1": "layout: {dp_replicate: 2, dp_shard: world}, wrapper: {kind: fsdp1}",
    "pp": "layout: {pp: world}",
    "pp-and-shards": "layout: {pp: 2, dp_shard: world}, wrapper: {schedule: gpipe}",
    "pp-and-hsdp": "layout: {pp: 2, dp_replicate: 2, dp_shard: world}, "
    "wrapper: {schedule: interleaved}",
    "cp": "layout: {cp: world}",
    "cp-and-shards": "layout: {cp: 2, dp_shard: world}, wrapper: {rotate: alltoall}",
    "cp-and-hsdp": "layout: {cp: 2, dp_replicate: world}",
}
# By number of ranks. In each, experts, attention or both are divided.
BY_HAND = {
    4: (
        "dp_shard: 2, ep: 2", "dp_shard: 2, etp: 2", "ep: 2, etp: 2", "dp_shard: 2, tp: 2",
        "ep: 2, tp: 2", "pp: 2, ep: 2", "pp: 2, tp: 2", "cp: 2, ep: 2", "cp: 2, tp: 2",
    ),
    8: (
        "ep: 8", "dp_shard: 2, ep: 4", "dp_shard: 2, ep: 2, etp: 2", "dp_shard: 2, ep: 2, tp: 2",
        "ep: 2, etp: 2, tp: 2", "dp_replicate: 2, dp_shard: 2, ep: 2",
        "dp_replicate: 2, ep: 2, etp: 2", "pp: 2, dp_shard: 2, ep: 2", "pp: 2, ep: 2, etp: 2",
        "pp: 2, ep: 2, tp: 2", "pp: 2, dp_replicate: 2, ep: 2", "cp: 2, dp_shard: 2, ep: 2",
        "cp: 2, ep: 2, etp: 2", "cp: 2, ep: 2, tp: 2",
    ),
}  # fmt: skip
SCENARIO = """\
schema_version: 1
name: axes
title: every axis
stack: {transformers: "5.23.0", accelerate: "1.15.0"}
world: {default: 4}
model: {layers: 4}
step: {accumulate: 4}
variants:
  unfixed: {role: unfixed, expect: {verdict: clean}}
"""
BY_HAND_HEAD = """\
schema_version: 1
name: by-hand
title: axes by hand
stack: {{transformers: "5.23.0", accelerate: "1.15.0"}}
world: {{default: {}}}
layout: {{{}}}
model: {{layers: 4, experts_implementation: eager, config: {{initializer_range: 0.2}}}}
wrapper: {{kind: by-hand}}
step: {{accumulate: 4, clipping: per-mesh, parameter_groups: per-mesh}}
variants:
  unfixed: {{role: unfixed, expect: {{verdict: clean}}}}
"""
BY_HAND_ROW = "  v{}: {{role: control, expect: {{verdict: clean}}, layout: {{{}}}}}\n"


def test_every_axis_trains_as_one_process(command: Command, tmp_path: Path) -> None:
    need(NEW)
    rows = [
        f"  {v}: {{role: control, expect: {{verdict: clean}}, {t}}}" for v, t in HEALTHY.items()
    ]
    path = tmp_path / "axes.yaml"
    path.write_text(SCENARIO + "\n".join(rows) + "\n")
    ran = command.run(str(path), "--cpu", "4")
    holds(ran)
    # Stages hold different parameters; all of them are compared, each on its own rank.
    assert {t["parameters_compared"] for t in ran.result["trials"]} == {47}


@pytest.mark.parametrize("ranks", BY_HAND)
def test_axes_by_hand_train_as_one_process(command: Command, tmp_path: Path, ranks: int) -> None:
    need(NEW)
    path = tmp_path / "by-hand.yaml"
    rows = [BY_HAND_ROW.format(number, row) for number, row in enumerate(BY_HAND[ranks][1:])]
    path.write_text(BY_HAND_HEAD.format(ranks, BY_HAND[ranks][0]) + "".join(rows))
    ran = command.run(str(path), "--cpu", str(ranks))
    holds(ran)
    assert {t["parameters_compared"] for t in ran.result["trials"]} == {47}
