"""The page of the public functions and classes, from their signatures and docstrings. Modules are
read, not imported: some need torch or a training library."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from docs.generate.result_fields import node_fields

# Name in a program -> the module that defines it.
PUBLIC = {
    "moediag.diagnose": "moediag.api",
    "moediag.laws.recording": "moediag.laws",
    "moediag.laws.record": "moediag.laws",
    "moediag.laws.allow": "moediag.laws",
    "moediag.laws.finish": "moediag.laws",
    "moediag.laws.records": "moediag.laws",
    "moediag.laws.place": "moediag.laws",
    "moediag.verify.step": "moediag.verify",
    "moediag.verify.Checked": "moediag.verify",
    "moediag.verify.jobs": "moediag.verify",
    "moediag.run": "moediag.lab.api",
    "moediag.check": "moediag.lab.api",
    "moediag.callbacks.trainer_callback.TrainerLaws": "moediag.callbacks.trainer_callback",
    "moediag.callbacks.lightning_callback.LightningLaws": "moediag.callbacks.lightning_callback",
    "moediag.callbacks.sinks.JsonLines": "moediag.callbacks.sinks",
    "moediag.callbacks.sinks.TensorBoard": "moediag.callbacks.sinks",
    "moediag.callbacks.sinks.WandB": "moediag.callbacks.sinks",
    "moediag.callbacks.sinks.Sink": "moediag.callbacks.sinks",
    "moediag.callbacks.sinks.send": "moediag.callbacks.sinks",
    "moediag.errors.MoediagError": "moediag.errors",
}
_INTRODUCTION = (
    "The commands as functions. They return the object that `--json` prints, with "
    "[the same fields](result.md), and print nothing. `import moediag` imports nothing else until "
    "a function is used. A mistake of the caller is a `moediag.errors.MoediagError` that begins "
    "with the name and value of the argument, and whose `help_text` says what to do.",
    "See also [laws in a program](../howto/laws.md#in-a-program), "
    "[one step of a program](../howto/verify.md#inside-a-program), "
    "[callbacks and sinks](../howto/callbacks.md), [run](../howto/run.md), "
    "[check](../howto/check.md) and [diagnose](../howto/diagnose.md).",
)


def lines() -> Iterator[str]:
    """Yields the page without its title."""
    for paragraph in _INTRODUCTION:
        yield from (paragraph, "")
    for name, module in PUBLIC.items():
        node = _definition(module, name.rpartition(".")[2])
        yield from (f"## {name}", "", "```text", _signature(name, node), "```", "")
        yield from _text(ast.get_docstring(node) or "")


def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    return next(
        node for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    )  # fmt: skip


def _signature(name: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """Returns ``moediag.laws.record(folder: str, every: int = 0) -> bool``, one argument a line if
    it is long; of a class that is not called, its fields and methods."""
    if isinstance(node, ast.ClassDef):
        methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        if "__init__" in methods:
            return _called(name, methods["__init__"], "")
        rows = [f"{f.name}: {f.type}" + f"  # {f.meaning}" * bool(f.meaning)
                for f in node_fields(node)]  # fmt: skip
        rows += map(_method, methods.values())
        return f"{name}\n" + textwrap.indent("\n".join(rows), "    ")
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return _called(name, node, returns)


def _method(node: ast.FunctionDef) -> str:
    if not node.decorator_list:
        return _called(node.name, node, "")
    assert node.returns is not None  # a property
    return f"{node.name}: {ast.unparse(node.returns)}  # {ast.get_docstring(node)}"


def _called(name: str, node: ast.FunctionDef, returns: str) -> str:
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    arguments = re.sub(r"(?<=[\w\]])=(?=\S)", " = ", arguments)
    whole = f"{name}({arguments}){returns}"
    if len(whole) <= 90:
        return whole
    split = re.sub(r", (?=\*?\w+(?::|$)|\*(?:,|$))", ",\n    ", arguments)
    return f"{name}(\n    {split},\n){returns}"


def _text(docstring: str) -> Iterator[str]:
    """Yields paragraphs as markdown; what is indented is an example."""
    paragraphs = docstring.split("\n\n")
    for is_code, group in itertools.groupby(paragraphs, lambda text: text.startswith("    ")):
        if is_code:
            yield from ("```python", textwrap.dedent("\n\n".join(group)), "```", "")
            continue
        for paragraph in group:
            plain = re.sub(r":\w+:`([^`]+)`|``([^`]+)``", r"`\1\2`", " ".join(paragraph.split()))
            yield from (plain, "")
