"""Attaches the monitor to any version of verl: ``PYTHONPATH=$(python -m monitor.attach --hook-path) python -m ...``.

Python imports this file at every start. It watches for verl's modules when a variable asks for it, and then runs the
``sitecustomize`` that would have been found without it.
"""

import os
import sys
from importlib import machinery

_HERE = os.path.dirname(os.path.abspath(__file__))


def _watch() -> None:
    name, path = "_verl_monitor_importhook", os.path.join(os.path.dirname(_HERE), "importhook.py")
    hook = type(sys)(name)
    hook.__file__ = path
    machinery.SourceFileLoader(name, path).exec_module(hook)
    if hook.wanted():
        hook.install()


def _chain() -> None:
    """Run the next sitecustomize on the path, under its own name, as Python itself would have."""
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    import importlib.util

    module = importlib.util.module_from_spec(spec)
    ours, sys.modules["sitecustomize"] = sys.modules.get("sitecustomize"), module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        raise


def _asked() -> bool:
    return bool(os.environ.get("VERL_MONITOR_URL") or os.environ.get("VERL_MONITOR_LISTEN"))


try:
    if _asked():
        _watch()
except Exception as _error:  # noqa: BLE001 - no interpreter may fail to start because of us
    sys.stderr.write(f"verl-monitor: not attached: {_error!r}\n")
_chain()  # what the other one raises, Python tells as it always does
