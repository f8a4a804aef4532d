"""In every Python process of a case: notes each rank's newest optimizer step, tells the rank of the
fault that it is that one (``bad_shard``), and sends a signal to a rank after a certain step. It
reads ABROAD_STEPS (a folder), ABROAD_RANK and ABROAD_SIGNAL (``STOP:RANK:STEP``)."""

import builtins
import importlib.util
import os
import subprocess
import sys

STEPS = os.environ.get("ABROAD_STEPS", "")
count = 0


def rank():
    """Of launchers that start one node's ranks by themselves (Lightning), the local rank."""
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK")


def stepped(*_):
    global count
    count += 1
    path = os.path.join(STEPS, "rank-" + (rank() or "0"))
    with open(path, "w"):
        pass
    os.utime(path)
    name, _, rest = os.environ.get("ABROAD_SIGNAL", "").partition(":")
    if rest == "%s:%d" % (rank() or "0", count):
        # From another process and a little later: the signal arrives anywhere in the next step.
        subprocess.Popen(["/bin/sh", "-c", "sleep 0.02; kill -%s %d" % (name, os.getpid())])


class AfterOptimizer:
    """Registers ``stepped`` once torch.optim.optimizer is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.register_optimizer_step_post_hook(stepped)

        spec.loader.exec_module = exec_module
        return spec


builtins.bad_shard = rank() == os.environ.get("ABROAD_RANK")
if STEPS:
    sys.meta_path.insert(0, AfterOptimizer())
