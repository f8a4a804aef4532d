"""The first words of commands that start ranks; the number of ranks follows."""

from __future__ import annotations

import sys
from pathlib import Path

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# For tests that are not about the launcher.
PLAIN = (sys.executable, str(Path(__file__).parents[1] / "victims" / "plain_launcher.py"))
