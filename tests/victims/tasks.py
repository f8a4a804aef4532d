"""The programs of ``jobs.py`` as Slurm tasks, which get their rank only from Slurm's variables."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

os.environ.update(
    RANK=os.environ["SLURM_PROCID"],
    WORLD_SIZE=os.environ["SLURM_NTASKS"],
    LOCAL_RANK=os.environ["SLURM_LOCALID"],
)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
runpy.run_path(str(Path(__file__).with_name("jobs.py")), run_name="__main__")
