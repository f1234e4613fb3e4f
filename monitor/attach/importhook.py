"""Wraps verl's modules right after they are executed.

Complete in itself: ``hook/sitecustomize.py`` loads this file by its path into every interpreter, and the rest of the
package is imported only once a module of verl is. Until then the cost is one set lookup for each import.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing, pathlib and importlib.util would double the time that an interpreter takes to start
    from types import ModuleType
    from typing import Any

TRACKING = "verl.utils.tracking"
TIMERS = ("verl.utils.profiler.performance", "verl.utils.profiler.nvtx_profile", "verl.utils.profiler.mstx_profile",
          "verl.utils.profiler", "verl.utils.debug.performance", "verl.utils.debug", "verl.trainer.ppo.ray_trainer")
"""Modules that define or hand on the context manager around each stage; the oldest trainers define their own."""

_WATCHED = frozenset((TRACKING, *TIMERS))
_MARK = "_verl_monitor_finder"


def wanted() -> bool:
    """Whether the environment asks for monitoring."""
    return not disabled() and bool(
        os.environ.get("VERL_MONITOR_URL", "").strip() or os.environ.get("VERL_MONITOR_LISTEN", "").strip())


def disabled() -> bool:
    """Whether VERL_MONITOR_DISABLE=1 is set."""
    return os.environ.get("VERL_MONITOR_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def install() -> None:
    """Wrap what is imported already and watch for the rest. More than once is as good as once."""
    if not any(hasattr(finder, _MARK) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    for name in (TRACKING, *TIMERS):
        module = sys.modules.get(name)
        # one that is being executed right now is not complete; its own loader will come back to us
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            loaded(module, name)


def loaded(module: ModuleType, name: str) -> None:
    """A watched module was executed. Whatever goes wrong here stays here."""
    try:
        _wrapper().wrap(module, name == TRACKING)
    except Exception as error:  # noqa: BLE001 - the import of verl must go on
        _say_once(f"{name} is not watched: {error!r}")


def _wrapper() -> Any:
    """The module that wraps; found by its place when the package is not installed in this environment. Another package
    by the name of ``monitor`` is never executed, and keeps its name."""
    import importlib.util

    spec = importlib.util.find_spec("monitor")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    if any(os.path.isfile(os.path.join(place, "attach", "wrap.py")) for place in places):
        return importlib.import_module("monitor.attach.wrap")
    if spec is not None:
        raise ImportError(f"another package is named monitor: {spec.origin}")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location("monitor", os.path.join(root, "__init__.py"),
                                                  submodule_search_locations=[root])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {root}")
    package = sys.modules["monitor"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module("monitor.attach.wrap")


_said = False


def _say_once(text: str) -> None:
    global _said
    if not _said:
        _said = True
        try:
            sys.stderr.write(f"verl-monitor: {text}\n")
        except Exception:  # noqa: BLE001 - a closed stderr is no reason to fail
            return


class Finder:
    """First on ``sys.meta_path``: lets the others find a watched module, then puts itself around its loader."""

    def __init__(self) -> None:
        setattr(self, _MARK, True)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A spec of a watched module; None for all others, and whenever something is unusual."""
        if name not in _WATCHED:
            return None
        try:
            for finder in sys.meta_path:
                if hasattr(finder, _MARK) or not hasattr(finder, "find_spec"):
                    continue
                spec: Any = finder.find_spec(name, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = Loader(spec.loader)
                    return spec
        except Exception as error:  # noqa: BLE001 - the import system asks the others again and meets it itself
            _say_once(f"{name} is not watched: {error!r}")
        return None


class Loader:
    """Executes a module by its own loader and has it wrapped. Afterwards nothing of it is left on the module."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: Any) -> Any:
        """As the module's own loader does it."""
        create = getattr(self._inner, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module: ModuleType) -> None:
        """Execute, then wrap. What the module raises passes."""
        try:
            module.__loader__ = self._inner
            if module.__spec__ is not None:
                module.__spec__.loader = self._inner
        except Exception:  # noqa: BLE001 - only cosmetics
            pass
        self._inner.exec_module(module)
        loaded(sys.modules.get(module.__name__, module), module.__name__)
