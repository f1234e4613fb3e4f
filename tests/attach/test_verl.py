"""Inside a process that imports verl: a small package of that name with verl's ways, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.attach.stub import Stub, wait_for
from tests.helpers import REPOSITORY

TRACKING = '''
class Tracking:
    """As verl 0.9 has it."""
    def __init__(self, project_name, experiment_name, default_backend="console", config=None):
        if default_backend == "bad": raise AssertionError("bad is not supported")
        self.rows = []
    def log(self, data, step, backend=None):
        if data == "raise": raise KeyError("backend")
        self.rows.append((step, data)); return len(self.rows)
    def finish(self, exit_code: int = 0):
        self.code = exit_code; return "finished"
'''
OLD_TRACKING = TRACKING.split("    def finish")[0]
PERFORMANCE = '''
from contextlib import contextmanager
def _timer(name, timing_raw):
    yield
    timing_raw[name] = timing_raw.get(name, 0) + 1
@contextmanager
def marked_timer(name, timing_raw, color=None):
    """Times."""
    yield from _timer(name, timing_raw)
'''
EARLY = "import sys; sys.path.insert(0, {repo!r})\nimport monitor.attach\n"


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """A directory with the package."""
    root = tmp_path / "site"
    for folder in ("utils/debug", "utils/profiler"):
        (root / "verl" / folder).mkdir(parents=True)
    files = {"__init__.py": "", "utils/__init__.py": "", "utils/tracking.py": TRACKING,
             "utils/profiler/performance.py": PERFORMANCE,
             "utils/profiler/__init__.py": "from .performance import marked_timer\n__all__ = ['marked_timer']\n",
             "utils/debug/__init__.py": "from ..profiler import *\n",
             "utils/debug/performance.py": "from verl.utils.profiler.performance import marked_timer\n"}
    for name, text in files.items():
        (root / "verl" / name).write_text(text)
    return root


def run(verl: Path, script: str, *, url: str = "", hook: bool = False, code: int = 0, early: str = EARLY,
        lines: int = 2, env: dict[str, str] | None = None) -> str:
    """Standard output of a script in which verl can be imported; its errors must be the monitor's two lines at most."""
    hooks = f"{REPOSITORY}/monitor/attach/hook{os.pathsep}" if hook else ""
    early = "" if hook else early.format(repo=str(REPOSITORY))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning:__main__", "-c",
         early + textwrap.dedent(script)], text=True, capture_output=True, timeout=60, check=False, cwd=verl,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("VERL")}, "VERL_MONITOR_URL": url,
             "PYTHONPATH": f"{hooks}{verl}", **(env or {})})
    assert done.returncode == code, done.stderr
    print(done.stderr, file=sys.stderr)  # noqa: T201 - for whom a test fails
    assert done.stderr.count("verl-monitor:") <= lines
    return done.stdout


TRAIN = """
    from verl.utils.debug import marked_timer
    from verl.utils.tracking import Tracking
    import time
    t = Tracking("proj", experiment_name="exp", config={"a": {"b": 1}})
    timing = {}
    for step in (1, 2, 3):
        with marked_timer("step", timing):
            with marked_timer("gen", timing, color="red"):
                if step == 3: time.sleep(1.5)
        assert t.log(data={"actor/pg_loss": 0.5}, step=step) == step
    assert timing == {"step": 3, "gen": 3}, timing
    assert t.finish(exit_code=0) == "finished" and t.code == 0
    print("ok", Tracking.log.__name__, marked_timer.__doc__)
"""


@pytest.mark.parametrize("hook", [False, True], ids=["imported", "sitecustomize"])
def test_a_run_is_sent(verl: Path, stub: Stub, hook: bool) -> None:
    assert run(verl, TRAIN, url=stub.url, hook=hook) == "ok log Times.\n"
    assert stub.steps() == [1, 2, 3]
    assert stub.bodies("config")[0]["config"]["a"] == {"b": 1}
    assert stub.bodies("steps")[0]["project"] == "proj"
    assert "gen" in [body["phase"] for body in stub.bodies("phase")]
    assert stub.bodies("finish")[0]["exit_code"] == 0
    assert {name for name, _, _ in stub.received} == {"exp"}


def test_verl_that_is_imported_already_is_wrapped_too(verl: Path, stub: Stub) -> None:
    script = """
        import sys
        from verl.utils.tracking import Tracking
        from verl.utils.debug import marked_timer
        import verl.utils.debug as debug, verl.utils.profiler as profiler
        before = marked_timer
        import monitor.attach
        monitor.attach.register(); monitor.attach.register()
        assert debug.marked_timer is not before and profiler.marked_timer is debug.marked_timer
        assert sum(type(f).__module__ == "monitor.attach.importhook" for f in sys.meta_path) == 1
        Tracking("p", "exp").log({"a": 1.0}, 1)
    """
    run(verl, script, url=stub.url, early="",
        env={"PYTHONPATH": f"{verl}{os.pathsep}{REPOSITORY}"})
    assert stub.steps() == [1]
    assert sum(len(body["steps"]) for body in stub.bodies("steps")) == 1


def test_original_results_and_exceptions_pass(verl: Path, stub: Stub) -> None:
    script = """
        import copy, inspect, pickle, threading
        from verl.utils.tracking import Tracking
        from verl.utils.debug import marked_timer
        assert threading.active_count() == 1
        try: Tracking("p", "e", "bad")
        except AssertionError as e: assert "not supported" in str(e)
        else: raise SystemExit(9)
        try: Tracking()
        except TypeError as e: pass
        assert threading.active_count() == 1
        assert str(inspect.signature(Tracking)).startswith("(project_name, experiment_name")
        t = Tracking("p", "e", "console", {"x": object()})
        for bad in (("raise", 1), ("raise", object())):
            try: t.log(*bad)
            except KeyError: pass
            else: raise SystemExit(8)
        try: t.log()
        except TypeError: pass
        try:
            with marked_timer("gen", {}): raise ValueError(1)
        except ValueError: pass
        @marked_timer("deco", {})
        def f(x): return x + 1
        assert f(1) == 2 and f(2) == 3
        assert pickle.loads(pickle.dumps(copy.deepcopy(t))).rows == t.rows
        t.log({"a": 1}, 7)
        t.finish(1)
        t.finish()
    """
    run(verl, script, url=stub.url, lines=3)
    assert stub.steps() == [7]
    assert [body["exit_code"] for body in stub.bodies("finish")] == [1]


@pytest.mark.parametrize(("end", "code", "process"), [
    ("del t", 0, 0), ("pass", 0, 0), ("raise ValueError", 1, 1),
    ("with marked_timer('gen', {}): raise SystemExit(3)", 1, 3),
    ("""
try:
    with marked_timer('gen', {}): raise ValueError
except ValueError: pass
del t""", 1, 0)])
def test_versions_that_do_not_say_how_they_ended(verl: Path, stub: Stub, end: str, code: int, process: int) -> None:
    (verl / "verl/utils/tracking.py").write_text(OLD_TRACKING)
    script = ("from verl.utils.tracking import Tracking\nfrom verl.utils.debug import marked_timer\n"
              f"t = Tracking('p', 'e')\nt.log({{'a': 1.0}}, 1)\n{end}\n")
    run(verl, script, url=stub.url, code=process)
    assert [body["exit_code"] for body in stub.bodies("finish")] == [code]


def test_timers_of_the_oldest_trainers(verl: Path, stub: Stub) -> None:
    folder = verl / "verl/trainer/ppo"
    folder.mkdir(parents=True)
    (folder / "ray_trainer.py").write_text(PERFORMANCE.replace("def marked", "def other").replace(
        "def _timer", "@contextmanager\ndef _timer")
        + "def fit():\n    with _timer('gen', {}): return monitor_phase()\n")
    script = """
        import verl.trainer.ppo.ray_trainer as trainer
        from monitor.attach.recorder import process
        from verl.utils.tracking import Tracking
        t = Tracking("p", "e")
        trainer.monitor_phase = lambda: process.recorders[0].phase_now[0]
        print(trainer.fit())
    """
    assert run(verl, script, url=stub.url) == "gen\n"


@pytest.mark.parametrize("env", [{}, {"VERL_MONITOR_DISABLE": "1", "VERL_MONITOR_URL": "http://127.0.0.1:9"}])
@pytest.mark.parametrize("hook", [False, True])
def test_nothing_is_done_that_was_not_asked_for(verl: Path, hook: bool, env: dict[str, str]) -> None:
    script = """
        import sys
        from verl.utils.tracking import Tracking
        t = Tracking("p", "e"); t.log({}, 1)
        names = [n for n in sys.modules if n.startswith("monitor.") or n.startswith("http.")]
        print(not hasattr(Tracking.log, "__wrapped__"), sorted(names))
    """
    expected = [] if hook else ["monitor.attach", "monitor.attach.importhook"]
    assert run(verl, script, hook=hook, env=env) == f"True {expected}\n"


def test_only_the_import_hook_is_loaded_before_verl_is(verl: Path) -> None:
    script = """
        import sys
        assert not [n for n in sys.modules if n == "monitor" or n.startswith("http.")]
        import json, email
        from verl.utils import profiler
        loader = type(profiler.__spec__.loader).__name__, type(profiler.__loader__).__name__
        print(*loader, "monitor.attach.wrap" in sys.modules, "http.client" in sys.modules)
    """
    assert run(verl, script, hook=True, url="http://127.0.0.1:9") == "SourceFileLoader SourceFileLoader True False\n"


def test_an_import_that_fails_fails_as_before(verl: Path) -> None:
    (verl / "verl/utils/tracking.py").write_text("1 / 0")
    script = """
        for _ in range(2):
            try: import verl.utils.tracking
            except ZeroDivisionError: print("zero")
        import verl.utils.debug, importlib.util
        print(importlib.util.find_spec("verl.utils.debug.nothing"))
    """
    assert run(verl, script, url="http://127.0.0.1:9") == "zero\nzero\nNone\n"


def test_unlike_classes_cost_nothing_but_a_line(verl: Path) -> None:
    (verl / "verl/utils/tracking.py").write_text("class Tracking:\n    __slots__ = ()\n")
    assert run(verl, "from verl.utils.tracking import Tracking; Tracking(); print('ok')", url="http://x:1") == "ok\n"


def test_another_package_named_monitor_keeps_its_name(verl: Path) -> None:
    (verl / "monitor.py").write_text("mine = True")
    script = "import verl.utils.tracking, monitor; print(monitor.mine, monitor.__file__)"
    assert run(verl, script, hook=True, url="http://127.0.0.1:9").startswith("True ")


def test_the_next_sitecustomize_runs_too(verl: Path, stub: Stub) -> None:
    (verl / "sitecustomize.py").write_text("import builtins; builtins.other = __name__")
    assert run(verl, "import sitecustomize; print(other, sitecustomize.__file__)", url=stub.url, hook=True) == (
        f"sitecustomize {verl}/sitecustomize.py\n")
    assert run(verl, "print(other)", hook=True) == "sitecustomize\n"
    (verl / "verl/fails.py").touch()
    assert run(verl, TRAIN, url=stub.url, hook=True).startswith("ok")


def test_hook_path() -> None:
    done = subprocess.run([sys.executable, "-m", "monitor.attach", "--hook-path"], text=True, capture_output=True,
                          check=True, cwd=REPOSITORY)
    assert (Path(done.stdout.strip()) / "sitecustomize.py").is_file()


def test_a_forked_child_is_silent_and_may_begin_its_own(verl: Path, stub: Stub) -> None:
    script = """
        import os, threading, time
        from verl.utils.tracking import Tracking
        t = Tracking("p", "parent")
        for step in range(50): t.log({"a": 1.0}, step)
        pids = []
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                t.log({"a": 2.0}, 99); t.finish(7)
                own = Tracking("p", "child"); own.log({"a": 3.0}, 1); own.finish(0)
                os._exit(threading.active_count() - 2)
            pids.append(pid)
        print([os.waitpid(pid, 0)[1] for pid in pids])
        t.log({"a": 1.0}, 50)
        t.finish(0)
    """
    assert run(verl, script, url=stub.url, lines=6).endswith("[0, 0, 0, 0, 0]\n")
    parent = [s["step"] for name, kind, body in stub.received if (name, kind) == ("parent", "steps")
              for s in body["steps"]]
    assert parent == list(range(51))
    assert [body["exit_code"] for name, kind, body in stub.received if (name, kind) == ("parent", "finish")] == [0]
    assert len({b["incarnation"] for name, kind, b in stub.received if (name, kind) == ("child", "finish")}) == 5


@pytest.mark.parametrize("spool", [False, True])
def test_the_end_takes_two_seconds_at_most(verl: Path, stub: Stub, tmp_path: Path, spool: bool) -> None:
    stub.hang_seconds = 20
    script = """
        import time, atexit
        start = time.monotonic()
        atexit.register(lambda: print(time.monotonic() - start))
        from verl.utils.tracking import Tracking
        t = Tracking("p", "e")
        for step in range(600): t.log({"a": 1.0}, step)
    """
    env = {"VERL_MONITOR_SPOOL": str(tmp_path / "spool")} if spool else {}
    assert float(run(verl, script, url=stub.url, env=env)) < 2.7
    if spool:
        lines = [json.loads(line) for path in sorted((tmp_path / "spool").glob("*.jsonl"))
                 for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "steps"] == list(range(600))
        assert wait_for(lambda: lines[-1]["kind"] == "finish")


def test_what_a_killed_trainer_left_on_disk_is_sent_by_the_next(verl: Path, stub: Stub, absent_port: int,
                                                               tmp_path: Path) -> None:
    script = """
        import os, time
        from verl.utils.tracking import Tracking
        t = Tracking("p", "killed")
        for step in range(100):
            t.log({"a": 1.0}, step)
            time.sleep(0.01)
        time.sleep(1.5)
        os.kill(os.getpid(), 9)
    """
    env = {"VERL_MONITOR_SPOOL": str(tmp_path / "spool")}
    run(verl, script, url=f"http://127.0.0.1:{absent_port}", code=-9, env=env)
    run(verl, TRAIN, url=stub.url, env=env)
    killed = [s["step"] for name, kind, body in stub.received if (name, kind) == ("killed", "steps")
              for s in body["steps"]]
    assert killed == list(range(100))
    assert stub.bodies("finish")[-1]["exit_code"] == 0
    assert not list((tmp_path / "spool").iterdir())
