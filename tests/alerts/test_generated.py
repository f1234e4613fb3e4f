"""The committed files are those that the specs give, and an installation can have its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from alerts.pictures import FOLDER, RECORDINGS, drawing
from alerts.render import Options, generated, main, render_rules
from monitor.detectors import DETECTORS
from monitor.model import DetectorSpec
from tests.alerts import ask, rules
from tests.helpers import REPOSITORY


def test_committed_files_are_those_of_the_specs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, f"run `make generate`:\n{capsys.readouterr().out}"


def test_check_tells_a_difference_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert main(["--out", str(tmp_path)]) == 0
    assert main(["--out", str(tmp_path), "--check"]) == 0
    capsys.readouterr()
    file = tmp_path / "alerts" / "alertmanager.yml"
    file.write_text("changed")
    assert main(["--out", str(tmp_path), "--check"]) == 1
    assert file.read_text() == "changed"
    assert capsys.readouterr().out == "differs: alerts/alertmanager.yml\n"


def test_files_of_an_alert_that_is_no_more_are_told_and_removed(tmp_path: Path) -> None:
    main(["--out", str(tmp_path)])
    runbooks = tmp_path / "docs" / "runbooks"
    old, own = runbooks / "VerlOld.md", runbooks / "our-notes.md"
    old.write_text((runbooks / "VerlWatchdog.md").read_text())
    own.write_text("written by hand\n")
    assert main(["--out", str(tmp_path), "--check"]) == 1
    assert main(["--out", str(tmp_path)]) == 0
    assert not old.exists()
    assert own.exists()


def test_an_installation_has_its_own_addresses_and_times(tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--monitor-url", "https://monitor.example/", "--webhook", "https://hook.example/",
          "--job", "rl", "--interval", "20s", "--keep-firing-for", "4m"])
    text = "".join(path.read_text() for path in (tmp_path / "alerts").rglob("*.yml"))
    for gone in ("127.0.0.1", 'job="verl-monitor"'):
        assert gone not in text
    for path, parts in {"verl-monitor.rules.yml": ["https://monitor.example/runbooks/VerlKlRunaway\n", "interval: 20s",
                                                   "https://monitor.example/runs/{{", "keep_firing_for: 4m"],
                        "alertmanager.yml": ["https://hook.example/page\n", "https://hook.example/notice\n"]}.items():
        assert [part for part in parts if part not in (tmp_path / "alerts" / path).read_text()] == []
    tests = [tmp_path / "alerts" / "tests" / f"{name}.test.yml" for name in ("VerlKlRunaway", "VerlMonitorNoData")]
    done = ask("promtool", "test", "rules", *tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_time_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--check", "--keep-firing-for", "soon"])
    assert "--keep-firing-for" in capsys.readouterr().err


def test_runbooks_can_lie_elsewhere() -> None:
    for rule in rules(render_rules(Options(runbook_base="https://wiki.example/rl/"))):
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example/rl/{rule['alert']}"


def test_generated_files_hold_no_path_of_this_machine_and_are_yaml() -> None:
    for path, text in generated().items():
        assert str(REPOSITORY) not in text
        assert text.endswith("\n")
        if path.suffix == ".yml":
            assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("spec", [d.spec for d in DETECTORS if d.spec.id in RECORDINGS], ids=lambda spec: spec.id)
def test_a_picture_shows_the_present_detector(spec: DetectorSpec) -> None:
    picture = (REPOSITORY / FOLDER / f"{spec.id}.png").read_bytes()
    assert drawing(spec).digest.encode() in picture, "run `make generate`"
    assert len(picture) < 40_000


def test_every_detector_that_can_be_drawn_is() -> None:
    without = {d.spec.id for d in DETECTORS} - RECORDINGS.keys()
    unseen = {"checkpoint_incomplete", "gpu_headroom", "rollout_stall", "rollout_mismatch", "throughput_regression"}
    assert without == unseen, "no recorded run has these"
    assert {path.stem for path in (REPOSITORY / FOLDER).glob("*.png")} == RECORDINGS.keys()
