"""Words by which programs name ranks: variables, attributes, functions and the environment."""

from __future__ import annotations

import ast
import re

from moediag.evidence.definitions import last_name

_AXIS = "dp|ddp|fsdp|tp|pp|cp|ep|sp|mp|etp|pipe|pipeline|stage|dp_shard|dp_replicate"
# Names that hold a rank's number. `lora_rank`, `matrix_rank`, `rank_loss` are something else.
_NUMBER = re.compile(
    r"(?:(?:my|this|cur|current|self|process|proc|worker|world|global|local|node|group|mpi|dist"
    rf"|{_AXIS}|(?:{_AXIS})_(?:local|global|world|group))_)?rank|\w*parallel_(?:\w+_)?rank"
    r"|(?:local_)?process_index|(?:local|global|node)rank|rank_id"
)
_LONGEST = 100  # characters of such a name
# Names that are true on some ranks only.
_BOOLEAN = re.compile(
    r"(?:is|am|on|not)_?(?:the_)?(?:(?:global|local|world|node)_)?"
    r"(?:main|master|chief|primary|coordinator)(?:_?(?:process|rank|node|worker|proc))?"
    r"|(?:main|master|chief)_(?:process|rank|proc)|(?:is_)?rank_?(?:zero|0)"
    r"|is_(?:(?:world|local|global)_(?:process_|rank_)?|process_|rank_)zero|is_(?:last|first|root|leader)_"
    r"(?:rank|process|stage|node)|is_pipeline_(?:first|last)_stage|should_save",
    re.IGNORECASE,
)
# Names of a device's number, which is a rank's where it is compared with a number.
DEVICE = frozenset(("gpu", "gpu_id", "device_id", "device_index", "local_gpu"))
_VARIABLES = frozenset(
    ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "GLOBAL_RANK", "PMI_RANK", "SLURM_PROCID",
     "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK")
)  # fmt: skip


def named(name: str) -> bool:
    bare = name.lstrip("_").lower()
    if len(bare) > _LONGEST:
        return False
    return _NUMBER.fullmatch(bare) is not None or _BOOLEAN.fullmatch(bare) is not None


def variable(node: ast.expr) -> str:
    """``RANK`` of ``os.environ["RANK"]``, ``os.environ.get("RANK", …)`` and ``os.getenv("RANK")``;
    "" for others."""
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript) and last_name(node.value) == "environ":
        key = node.slice
    elif isinstance(node, ast.Call) and node.args:
        called = node.func
        of = last_name(called.value) if isinstance(called, ast.Attribute) else ""
        if last_name(called) == "getenv" or (last_name(called) == "get" and of == "environ"):
            key = node.args[0]
    return str(key.value) if isinstance(key, ast.Constant) else ""


def is_variable(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in _VARIABLES


def is_same_everywhere(test: ast.Compare) -> bool:
    """``local_rank != -1``, ``rank is not None``, ``rank >= 0``: true on every rank of a job that
    is distributed."""
    if len(test.ops) != 1:
        return False
    op, (right,) = test.ops[0], test.comparators
    if isinstance(right, ast.Constant) and right.value is None:
        return True
    negative = isinstance(right, ast.UnaryOp) and isinstance(right.op, ast.USub)
    zero = isinstance(right, ast.Constant) and right.value == 0
    return negative or (zero and isinstance(op, ast.GtE | ast.Lt))


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)
