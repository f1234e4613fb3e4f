"""Puts the monitor around verl's Tracking and around the context manager that times each stage.

The original's arguments, result and exceptions pass unchanged. Whatever fails of ours is told once and counted.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from monitor.attach.recorder import Recorder, begin, process
from monitor.attach.settings import fault

_ON_TRACKING = "_verl_monitor_recorder"
_WRAPPED = "_verl_monitor_wrapped"
_MAX_OPEN = 100


def wrap(module: ModuleType, tracking: bool) -> None:
    """Wrap what a module of verl defines, if it is not wrapped yet."""
    if tracking:
        wrap_tracking(module.__dict__.get("Tracking"))
        return
    for name in ("marked_timer", "_timer"):
        original = module.__dict__.get(name)
        # in verl 0.5 and later, _timer is a plain generator that marked_timer runs itself
        if callable(original) and not hasattr(original, _WRAPPED) and not inspect.isgeneratorfunction(original):
            _replace(module, name, original, timer(original))


def _replace(module: ModuleType, name: str, original: Any, wrapped: Any) -> None:
    """Also where it was imported from here by name before we came."""
    setattr(module, name, wrapped)
    for other, known in list(sys.modules.items()):
        if other.split(".")[0] == "verl" and getattr(known, "__dict__", {}).get(name) is original:
            setattr(known, name, wrapped)


# --- Tracking


def wrap_tracking(cls: Any) -> None:
    """Watch every Tracking from its construction on."""
    if not isinstance(cls, type) or _WRAPPED in cls.__dict__:
        return
    init, log, finish = cls.__init__, cls.log, getattr(cls, "finish", None)  # type: ignore[misc, attr-defined]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it becomes the class's own
        result = init(self, *args, **kwargs)
        try:
            _begin(self, init, args, kwargs, tells_its_end=finish is not None)
        except Exception as error:  # noqa: BLE001 - a trainer must not end for its monitor's sake
            fault("attaching", error)
        return result

    @functools.wraps(log)
    def wrapped_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            recorder = self.__dict__.get(_ON_TRACKING)
            if recorder is not None:  # before the backends, one of which may raise
                recorder.log(kwargs["data"] if "data" in kwargs else args[0],
                             kwargs["step"] if "step" in kwargs else args[1])
                phases.alive()
        except Exception as error:  # noqa: BLE001 - as above; wrong arguments are the original's to refuse
            fault("taking a row", error)
        return log(self, *args, **kwargs)

    cls.__init__, cls.log = __init__, wrapped_log  # type: ignore[misc, attr-defined]
    if finish is not None:
        cls.finish = _finish(finish)  # type: ignore[attr-defined]
    setattr(cls, _WRAPPED, True)


def _finish(finish: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finish)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = None
        try:
            recorder = self.__dict__.get(_ON_TRACKING)
            if recorder is not None:  # told first: a backend's end may take long, or never come
                recorder.finish(kwargs["exit_code"] if "exit_code" in kwargs else args[0] if args else 0, wait=False)
        except Exception as error:  # noqa: BLE001 - as above
            fault("finishing", error)
        try:
            return finish(self, *args, **kwargs)
        finally:
            if recorder is not None:
                recorder.settle()

    return wrapped


def _begin(tracking: Any, init: Any, args: Any, kwargs: Any, *, tells_its_end: bool) -> None:
    try:
        given = inspect.signature(init).bind(tracking, *args, **kwargs).arguments
    except (TypeError, ValueError):  # a wrapper of someone else's that hides the signature
        given = dict(zip(("project_name", "experiment_name", "default_backend", "config"), args, strict=False))
        given |= kwargs
    recorder = begin(given.get("project_name"), given.get("experiment_name"), given.get("config"))
    recorder.phase(phases.current)
    tracking.__dict__[_ON_TRACKING] = recorder
    if not tells_its_end:  # before 0.9: the trainer's loop holds it, so it goes when the loop is left
        weakref.finalize(tracking, _gone, recorder).atexit = False


def _gone(recorder: Recorder) -> None:
    recorder.finish(process.guess_exit_code(), wait=False)


# --- phases


class Phases:
    """The stages that are open now. One list for the process: stages of asynchronous trainers overlap, so leaving
    takes out the one that is left, wherever it stands."""

    def __init__(self) -> None:
        self._open: list[tuple[str, object]] = []
        self._raised = False

    @property
    def current(self) -> str | None:
        """The innermost open stage."""
        return self._open[-1][0] if self._open else None

    @property
    def ended_badly(self) -> bool:
        """Whether the last thing heard was a stage that was left by an exception, or never left."""
        return self._raised or bool(self._open)

    def alive(self) -> None:
        """Training goes on, so an exception that left a stage was caught."""
        self._raised = False

    def enter(self, name: object) -> tuple[str, object]:
        """A stage begins."""
        token = (name if isinstance(name, str) else "?", object())
        if len(self._open) >= _MAX_OPEN:
            del self._open[0]
        self._open.append(token)
        self._raised = False
        self._tell()
        return token

    def leave(self, token: tuple[str, object], *, raised: bool) -> None:
        """A stage ends."""
        self._open = [known for known in self._open if known is not token]
        self._raised = self._raised or raised
        self._tell()

    def _tell(self) -> None:
        current = self.current
        for recorder in process.recorders:
            if recorder.phase_now[0] != current and not recorder.over:
                recorder.phase(current)


phases = Phases()
process.ended_badly = lambda: phases.ended_badly


def timer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The context manager's function, with the live phase."""

    @functools.wraps(original)
    def marked_timer(*args: Any, **kwargs: Any) -> Any:
        manager = original(*args, **kwargs)
        if not hasattr(manager, "__enter__"):
            return manager
        return Timed(manager, args[0] if args else kwargs.get("name"))

    setattr(marked_timer, _WRAPPED, True)
    return marked_timer


class Timed:
    """The original's context manager, in which a stage is open."""

    def __init__(self, inner: Any, name: object) -> None:
        self._inner, self._name = inner, name
        self._token: tuple[str, object] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, function: Callable[..., Any]) -> Any:  # contextlib's managers are decorators, too
        @functools.wraps(function)
        def staged(*args: Any, **kwargs: Any) -> Any:
            with Timed(_Nothing(), self._name):
                return function(*args, **kwargs)

        return self._inner(staged)

    def __enter__(self) -> Any:
        result = self._inner.__enter__()
        try:
            self._token = phases.enter(self._name)
        except Exception as error:  # noqa: BLE001 - as above
            fault("noting a stage", error)
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> Any:
        try:
            if self._token is not None:
                phases.leave(self._token, raised=kind is not None)
        except Exception as mistake:  # noqa: BLE001 - as above
            fault("noting a stage", mistake)
        return self._inner.__exit__(kind, error, trace)


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
