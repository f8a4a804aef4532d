"""``python bounded_groups.py SECONDS SCRIPT ARGS…``: runs SCRIPT with a timeout of SECONDS for its
process groups instead of 30 minutes. Run by torchrun."""

import datetime
import functools
import runpy
import sys

import torch.distributed as dist

timeout = datetime.timedelta(seconds=float(sys.argv[1]))
dist.init_process_group = functools.partial(dist.init_process_group, timeout=timeout)
dist.new_group = functools.partial(dist.new_group, timeout=timeout)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
