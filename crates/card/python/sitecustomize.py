"""Loaded by Python at its start, in a process that `cinch rehearse` started. Waits for PyTorch to be imported; a
sitecustomize of the user's own runs as it would have."""
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_users_own():
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec and spec.loader:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class AfterImport:
    """Finds a module as the others would, and does something once it is imported. Programs also look for modules that
    they do not import yet, so that it stays."""

    def __init__(self, name, then):
        self.name, self.then, self.is_looking = name, then, False

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self.is_looking:
            return None
        self.is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_looking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_then(module):
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then(module)

        spec.loader.exec_module = execute_and_then
        return spec


def _begin(_torch):
    import cinch_rehearsal

    cinch_rehearsal.begin(AfterImport)


if os.environ.get("CINCH_REHEARSAL"):
    sys.meta_path.insert(0, AfterImport("torch", _begin))
_run_users_own()
