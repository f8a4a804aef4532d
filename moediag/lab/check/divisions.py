"""What must divide what on axes that no plan shows: arithmetic on the configuration."""

from __future__ import annotations

from collections import Counter
from typing import Any, Iterable, Iterator, Mapping, Tuple

from moediag.axes import CP, EP, ETP, PP, TP, Axis, Layout
from moediag.lab.check.tensor_places import listed
from moediag.lab.step.models import moe_configs
from moediag.protocol import FAILS, MAY_FAIL, NOTE, Checked, CheckFinding, PlannedParameter

LAYOUT = "layout"


def of_length(layout: Layout, length: int) -> Iterator[CheckFinding]:
    """The tokens of a sequence. ``length``: 0 if they were not given."""
    parts = 2 * layout.size(CP)
    if parts == 2:
        return
    why = f"{CP}={layout.size(CP)} cuts a sequence into {parts} equal parts, two for each rank"
    if not length:
        yield CheckFinding(
            LAYOUT, NOTE, f"{why}: a length that is not a multiple of {parts} fails (give --length)"
        )
    elif length % parts:
        yield CheckFinding(LAYOUT, FAILS, f"{why}: {length:,} tokens are not a multiple of {parts}")


def unplanned(config: Any, layout: Layout) -> Iterator[CheckFinding]:
    """Sizes that frameworks divide equally, for a layout that nothing here shards. A framework may
    divide unequally."""
    text = moe_configs.text_of(config)

    def value(name: str) -> Any:
        return moe_configs.value(text, name)

    width = value("moe_intermediate_size") or value("intermediate_size")
    experts = [value(name) for name in moe_configs.experts_named(text)]
    known: Tuple[Tuple[Axis, str, Any], ...] = (
        (EP, "experts", max([n for n in experts if type(n) is int], default=None)),
        (ETP, "columns of an expert", width if any(experts) else None),
        (TP, "attention heads", value("num_attention_heads")),
        (TP, "key/value heads", value("num_key_value_heads")),
        (PP, "layers", value("num_hidden_layers")),
    )
    for axis, name, count in known:
        size = layout.size(axis)
        if type(count) is int and count % size:
            yield CheckFinding(
                LAYOUT, MAY_FAIL,
                f"if your framework divides {name} equally: {count} cannot be divided by "
                f"{axis}={size}",
            )  # fmt: skip


def of_stages(plans: Mapping[int, Checked], most: int) -> Iterator[CheckFinding]:
    """What the stages of a pipeline hold. ``plans``: by stage, of some; ``most``: the one that
    holds most."""
    counts = plans[most].stages
    stages, last = len(counts), counts[-1] if counts else 0
    if stages < 2:
        return
    if 0 in counts:
        yield CheckFinding(
            LAYOUT, FAILS, f"{counts.count(0)} of {PP}={stages} stages hold no layer, the last one "
            f"{last}: more stages than layers, which are divided by their number",
        )  # fmt: skip
        return
    sizes = Counter(counts)
    told = " and ".join(
        f"{number} stage{'s' * (number > 1)} of {size}" for size, number in sizes.items()
    )
    told = f"{told} layers" if len(sizes) > 1 else f"the stages hold {last} layers each"
    more = held(plans[most].plan) / max(held(plans[0].plan), 1)
    yield CheckFinding(
        LAYOUT, NOTE, f"{PP}={stages}: {told}. The plan, the experts and the memory here are those "
        f"of stage {most}, which holds most"
        f"{f': {more:.2f} times what the first does' if most else ''}",
    )  # fmt: skip


def shared_by_stages(plans: Mapping[int, Checked]) -> Iterator[CheckFinding]:
    """Parameters outside the layers that both the first and the last stage hold."""
    first, last = min(plans), max(plans)
    other = {row.name for row in plans[last].plan} if last > first else set()
    both = [row.name for row in plans[first].plan if row.name in other and "*" not in row.name]
    if both:
        yield CheckFinding(
            LAYOUT, MAY_FAIL, f"stages {first} and {last} of {PP} each hold {listed(both)}: one "
            "parameter in two places. Its gradients must be summed between these stages, which "
            "from_pretrained does not do",
        )  # fmt: skip


def held(plan: Iterable[PlannedParameter]) -> int:
    """Returns the elements on the rank that holds most."""
    return sum(row.most * row.count for row in plan)
