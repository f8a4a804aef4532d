"""A second, independent list of the fields of result.json (schema_version 1).

`problems` compares a parsed file with it: every field here must exist, with its type. A trial and
the result itself may carry more; the parts with ``EXACT`` may not.
"""

from __future__ import annotations

from typing import Any

NULL = type(None)
EXACT = "exact"
TEXT_MAP = {"*": (str, NULL)}
VERDICTS = {
    "clean", "hang", "collective-mismatch", "wrong-gradients", "wrong-weights",
    "replica-divergence", "nonfinite", "wrong-metrics", "resume-drift", "crash",
    "not-applicable", "inconclusive",
}  # fmt: skip
SIDE = {EXACT: True, "op": str, "numel": int, "dtype": str, "parameters_missing": [str]}
TRIAL = {
    "variant": str,
    "role": {"unfixed", "fix", "control"},
    # transformers and accelerate are null where the stack has another library: torchtitan.
    "stack": {
        **TEXT_MAP,
        "torch": str,
        "transformers": (str, NULL),
        "accelerate": (str, NULL),
        "python": str,
    },
    "launcher": {"fork", "torchrun"},
    "backend": {"gloo", "nccl"},
    "world_size": int,
    "verdict": VERDICTS,
    "expected": str,
    "met": bool,
    "signature": str,
    "confidence": {"high", "medium", "low"},
    "culprits": [int],
    "victims": [int],
    "cause": str,
    "not_seen": [str],
    "first_divergence": (
        {
            EXACT: True,
            "index": int,
            "axis": str,
            "phase": str,
            "module": str,
            "ranks": {"*": SIDE},
        },
        NULL,
    ),
    "gradient_error": (float, str, NULL),  # nan and inf are text
    "worst_parameter": (str, NULL),
    "step_time_ratio": (float, NULL),
    "seconds": {
        EXACT: True,
        "environment": (float, NULL),
        "launch": (float, NULL),
        "stall_to_verdict": (float, NULL),
        "total": (float, NULL),
        "reference": (float, NULL),
    },
    "evidence": str,
    "what": str,
    "source": str,
}
RESULT = {
    "schema_version": int,
    "scenario": str,
    "started": str,
    "moediag_version": str,
    "machine": {"*": object},
    "trials": [TRIAL],
    "conclusion": {
        EXACT: True,
        "reproduced": (bool, NULL),
        "fixes": [
            {
                EXACT: True,
                "variant": str,
                "correct": bool,
                "step_time_ratio": (float, NULL),
                "effect": str,
                "why": str,
            }
        ],
        "cheapest_correct_fix": (str, NULL),
        "claims": [{EXACT: True, "variant": str, "reproduced": (bool, NULL), "what": str}],
    },
}


def problems(value: Any, shape: Any = RESULT, where: str = "result") -> list[str]:
    """Returns each problem with its position; empty if ``value`` has the shape."""
    if isinstance(shape, tuple):
        tried = [problems(value, one, where) for one in shape]
        return min(tried, key=len)
    if isinstance(shape, set):
        return [] if value in shape else [f"{where}: {value!r} is none of {sorted(shape)}"]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [
            p for i, item in enumerate(value) for p in problems(item, shape[0], f"{where}[{i}]")
        ]
    if isinstance(shape, dict):
        return _of_mapping(value, shape, where)
    right = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
    return [] if right or shape is object else [f"{where}: {value!r} is no {shape.__name__}"]


def _of_mapping(value: Any, shape: dict[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no object"]
    named = {k: v for k, v in shape.items() if k not in (EXACT, "*")}
    found = [f"{where}.{name} is not there" for name in named if name not in value]
    for name, item in value.items():
        if name in named:
            found += problems(item, named[name], f"{where}.{name}")
        elif "*" in shape:
            found += problems(item, shape["*"], f"{where}.{name}")
        elif EXACT in shape:
            found.append(f"{where}.{name} is not part of it")
    return found
