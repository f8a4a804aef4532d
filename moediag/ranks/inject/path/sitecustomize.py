"""Runs at the start of every Python process of a watched job, in any Python.

It removes itself from ``sys.path``, runs the ``sitecustomize`` that it hides, and installs one
import hook, and in a rank an exception hook. Nothing else happens before torch.distributed is
imported, and nothing here may break the job. So it only imports what the interpreter has already
imported, and its syntax works in any Python 3.
"""

import os
import sys

_RANK = "torch.distributed.distributed_c10d"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"


class _Finder(object):
    """Calls ``moediag.ranks.inject.rank`` right after modules of torch were executed."""

    def __init__(self):
        self.wanted = {_RANK: "distributed", _AGENT: "agent"}
        if "MOEDIAG_MEASURE" in os.environ:
            self.wanted["torch"] = "measure"
        if "MOEDIAG_SIMULATE" in os.environ:
            self.wanted["torch"] = "simulate"
        if "MOEDIAG_LAWS" in os.environ:
            self.wanted["torch.optim.optimizer"] = "optimizers"

    def find_spec(self, name, path=None, target=None):
        act = self.wanted.pop(name, None)
        if act is None:
            return None
        try:
            spec = self._found(name, path, target)
            loader = spec.loader
            original = loader.exec_module

            def exec_module(module):
                loader.__dict__.pop("exec_module", None)
                if not self.wanted and self in sys.meta_path:
                    sys.meta_path.remove(self)
                original(module)
                _act(act, module)

            loader.exec_module = exec_module
        except Exception as error:
            _note("%s cannot be followed: %r" % (name, error))
            return None
        return spec

    def _found(self, name, path, target):
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        raise ImportError(name)


def _act(what, module):
    try:
        _package()
        from moediag.ranks.inject import rank

        getattr(rank, what)(module)
    except Exception as error:
        _note("the recorder could not be started: %r" % (error,))


def _package():
    """Makes moediag importable without making its neighbours importable too."""
    if "moediag" in sys.modules:
        return
    import importlib.util

    folder = os.environ["MOEDIAG_PACKAGE"]
    spec = importlib.util.spec_from_file_location(
        "moediag", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["moediag"] = module
    spec.loader.exec_module(module)


def _note(text):
    """Writes a line to the run directory that says why something was not recorded."""
    try:
        who = "pid %d (%s)" % (os.getpid(), " ".join(getattr(sys, "argv", [])[:2]))
        with open(os.path.join(os.environ["MOEDIAG_WATCH"], "not-recorded.txt"), "a") as file:
            file.write("%s: %s\n" % (who, text))
    except Exception:
        pass


def _begin():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if p != here]
    if "MOEDIAG_WATCH" in os.environ and "MOEDIAG_PACKAGE" in os.environ:
        if sys.version_info >= (3, 9):
            finder = _Finder()
            sys.meta_path.insert(0, finder)
            _watch_for_early_errors(finder)
        else:
            _note("Python %d.%d is older than 3.9" % sys.version_info[:2])


def _watch_for_early_errors(finder):
    """Records an exception that ends a rank before it imports torch.distributed, such as that of a
    module that is not installed. A process that a rank started inherits RANK and is left alone."""
    try:
        with open("/proc/%d/environ" % os.getppid(), "rb") as file:
            inherited = any(word.startswith(b"RANK=") for word in file.read().split(b"\0"))
    except OSError:
        return
    if inherited or "RANK" not in os.environ:
        return
    previous = sys.excepthook

    def hook(kind, error, trace):
        if _RANK in finder.wanted:
            _act("ended_early", error)
        previous(kind, error, trace)

    sys.excepthook = hook


def _hidden():
    """Returns the sitecustomize that would have run without this one, or None."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


_begin()
_hidden()
