"""A small C library with functions named like those of CUDA, for machines without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = """
volatile int go = 1;
__attribute__((noinline)) void spin(void) { while (go) {} }
int cudaStreamSynchronize(void *stream) { spin(); return 0; }
int compute(void *stream) { spin(); return 0; }
"""


def build(folder: Path) -> Path:
    """Skips where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "cudart.c").write_text(SOURCE)
    made = folder / "libcudart_stand_in.so"
    command = [compiler, "-g", "-O0", "-fPIC", "-shared", "-fno-omit-frame-pointer",
               str(folder / "cudart.c"), "-o", str(made)]  # fmt: skip
    subprocess.run(command, check=True)
    return made
