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


class _AfterTorch:
    """Finds `torch` as the others would, and begins the rehearsal once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_begin(module):
            execute(module)
            import cinch_rehearsal

            cinch_rehearsal.begin()

        spec.loader.exec_module = execute_and_begin
        return spec


if os.environ.get("CINCH_REHEARSAL"):
    sys.meta_path.insert(0, _AfterTorch())
_run_users_own()
