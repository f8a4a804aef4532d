"""The laboratory: reproduces failures on released libraries, judges fixes, bisects, checks layouts.

The rest of the package, the job tool, never imports it. What it adds to the job tool, commands and
words among them, is in `moediag.lab.registered`.
"""

__all__ = ["api", "registered"]
