"""Gradient error by layer and part of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from moediag.protocol import natural
from moediag.report.charts import svg
from moediag.result import LayerError, wording

ROW = 20  # pixels
SMALLEST = 1e-9  # relative errors from here to 1 use the scale, which is logarithmic
MOST_NAMED = 6  # parts of layers that the label lists
SHORT = {"inputs of the MoE blocks": "inputs"}


def error_map(errors: Sequence[LayerError]) -> Markup:
    """Returns layers as rows and parts as columns. Each cell: wrong of compared tensors."""
    layers = sorted({e.layer for e in errors}, key=_number)
    parts = list(dict.fromkeys(e.part for e in sorted(errors, key=lambda e: e.part)))
    edges, width = svg.columns(len(parts))
    middle = dict(zip(parts, edges, strict=True))
    drawn = [svg.text(SHORT.get(part, part), middle[part] + width / 2, 13, "mid") for part in parts]
    drawn += [
        svg.text(layer or "others", 0, ROW * row + 14) for row, layer in enumerate(layers, start=1)
    ]
    for e in errors:
        x, y = middle[e.part], ROW * (layers.index(e.layer) + 1)
        kind, shade = ("bad", 0.15 + 0.5 * share(e)) if e.wrong else ("good", 0.15)
        named = (
            f"{e.layer or 'outside the layers'}, {e.part}: {e.wrong} of {e.compared} wrong, "
            f"largest error {wording.error_size(e.error)}"
        )
        cell = [
            svg.rect(kind, x, y + 1, width * 0.98, ROW - 2, shade),
            svg.text(f"{e.wrong} of {e.compared}", x + width / 2, y + 14, "mid"),
        ]
        drawn.append(svg.titled(named, cell))
    return svg.chart(label(errors), ROW * (len(layers) + 1), drawn)


def share(e: LayerError) -> float:
    """Returns the relative error on the scale, 0 to 1."""
    error, scale = float(e.error), float(e.scale)  # "nan" and "inf" may be text, as in JSON
    relative = error / scale if scale > 0 else math.inf
    if not math.isfinite(relative):
        return 1.0
    return min(max(1 - math.log10(max(relative, SMALLEST)) / math.log10(SMALLEST), 0.0), 1.0)


def label(errors: Sequence[LayerError]) -> str:
    """Returns where gradients are wrong."""
    wrong = [f"{e.part} of {e.layer}" if e.layer else e.part for e in errors if e.wrong]
    more = [f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
    return "Wrong gradients by layer and part: " + (", ".join(wrong[:MOST_NAMED] + more) or "none")


def _number(layer: str) -> tuple[bool, int, str]:
    """Layers by number, what is outside them last."""
    return layer == "", natural(layer.rpartition(" ")[2]) or 0, layer
