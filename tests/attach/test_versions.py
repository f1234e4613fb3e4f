"""The import hook on releases of verl that have no entry point: their own Tracking and their own timers.

The wheels are installed alone (``pip install --no-deps``), so what they import of torch, ray and others is stood in
for: anything may be called and inherited from. verl's own modules are executed as they are. Up to 0.3 a trainer has a
timer of its own, later ones import ``marked_timer``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.attach.stub import Stub, wait_for
from tests.helpers import REPOSITORY

STAND_INS = '''
import importlib.machinery, importlib.metadata, sys
from unittest.mock import MagicMock

class Anything(MagicMock):
    """A module of which everything exists."""
    __path__ = []
    __spec__ = None
    def __iter__(self): return iter(())

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("verl", "monitor", "wandb"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = Anything(name=spec.name)
        module.__version__ = "2.0.0"
        return module
    def exec_module(self, module): pass

class Ray(Finder):
    """The real one may be there; it is not what these releases were made for."""
    def find_spec(self, name, path=None, target=None):
        return super().find_spec(name) if name.split(".")[0] == "ray" else None

sys.meta_path[:] = [Ray(), *sys.meta_path, Finder()]
sys.modules["pkg_resources"] = Anything()  # setuptools' own knows that torch is not there
importlib.metadata.version = lambda name: "4.52.4"
'''
TRAINER = STAND_INS + '''
try:
    from verl.utils.debug import marked_timer
except ImportError:
    from verl.trainer.ppo.ray_trainer import _timer as marked_timer
from verl.utils.tracking import Tracking
assert not isinstance(Tracking, MagicMock) and not isinstance(marked_timer, MagicMock)
print(sys.modules[Tracking.__module__].__file__)
tracking = Tracking("proj", "exp", default_backend=["console"], config={"algorithm": {"adv_estimator": "gae"}})
for step in (1, 2, 3):
    with marked_timer("gen", {}):
        pass
    tracking.log({"actor/pg_loss": 0.1 * step}, step=step)
import time
with marked_timer("update_actor", {}):
    time.sleep(0.5)
'''


def installed(version: str, tmp_path: Path) -> Path:
    """The directory that holds a release, kept from one test run to the next."""
    kept = Path(tempfile.gettempdir()) / f"verl-monitor-tests-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    if kept.stat().st_uid != os.getuid() or kept.is_symlink():  # what lies there is executed
        kept = tmp_path
    site = kept / version
    if not site.is_dir():
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "new"),
             f"verl=={version}"], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"verl {version} cannot be installed here: {done.stderr.strip()[-200:]}")
        try:
            (tmp_path / "new").rename(site)
        except OSError:  # another worker was faster, or it is another file system
            return tmp_path / "new"
    return site


@pytest.mark.parametrize("version", ["0.2.0.post2", "0.3.0.post1", "0.5.0", "0.7.0"])
def test_the_hook_on_a_real_release(version: str, tmp_path: Path, stub: Stub) -> None:
    site = installed(version, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL")}
    done = subprocess.run(
        [sys.executable, "-c", TRAINER], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={**environment, "VERL_MONITOR_URL": stub.url,
             "PYTHONPATH": f"{REPOSITORY}/monitor/attach/hook{os.pathsep}{site}"})
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout, "verl itself"
    assert "step:3 - actor/pg_loss:0.3" in done.stdout, "its own console backend"
    assert wait_for(lambda: [kind for _, kind, _ in stub.received][-1:] == ["finish"])
    sent = {kind: [body for _, known, body in stub.received if known == kind] for _, kind, _ in stub.received}
    rows = [row for body in sent["steps"] for row in body["steps"]]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["values"]["actor/pg_loss"] for row in rows] == pytest.approx([0.1, 0.2, 0.3])
    assert "update_actor" in [body["phase"] for body in sent["phase"]]
    assert [body["exit_code"] for body in sent["finish"]] == [0]
    assert [body["config"]["algorithm"] for body in sent["config"]] == [{"adv_estimator": "gae"}]
    assert {run for run, _, _ in stub.received} == {"exp"}
