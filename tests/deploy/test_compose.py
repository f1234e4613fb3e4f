"""docker-compose.yml: every path, port, name, flag and variable in it, compared with what it refers to."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from monitor import cli
from tests.deploy import (
    COMPOSE,
    DEPLOY,
    compose,
    flags,
    instructions,
    mounts,
    variables,
)
from tests.helpers import REPOSITORY

STACK = compose()
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
IMAGE = dict(instructions()[-1])
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
LISTENS = {"monitor": 9560, "prometheus": 9090, "alertmanager": 9093, "grafana": 3000}

each_service = pytest.mark.parametrize("name", sorted(SERVICES))


def source_of(service: str, target: str) -> Path:
    """The path of the repository that is mounted over ``target`` or a directory above it."""
    for mount in mounts(SERVICES[service]):
        inside = PurePosixPath(target)
        if not mount.named and inside.is_relative_to(mount.target):
            return REPOSITORY / mount.source / inside.relative_to(mount.target)
    raise AssertionError(f"nothing is mounted at {target} of {service}")


def provisioned(kind: str) -> Any:
    """Grafana's provisioning of one kind, where Grafana looks for it."""
    (file,) = source_of("grafana", f"/etc/grafana/provisioning/{kind}").glob("*.yml")
    return yaml.safe_load(file.read_text())


def test_services_are_those_that_listen() -> None:
    assert set(SERVICES) == set(LISTENS)


@each_service
def test_ports_are_the_services_own_and_on_loopback_only(name: str) -> None:
    assert SERVICES[name]["ports"] == [f"127.0.0.1:{LISTENS[name]}:{LISTENS[name]}"]
    assert "network_mode" not in SERVICES[name]


@each_service
def test_images_are_pinned_to_a_release(name: str) -> None:
    image = SERVICES[name]["image"]
    if "build" in SERVICES[name]:
        assert (REPOSITORY / SERVICES[name]["build"] / "Dockerfile").is_file()
        assert image == "verl-monitor:local", "a tag that no registry has, so nothing else is ever pulled in its place"
    else:
        assert re.fullmatch(r"(prom|grafana)/\w+:v?\d+\.\d+\.\d+", image)


@each_service
def test_services_have_no_privilege_and_come_back(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["restart"] == "unless-stopped"
    assert not {"privileged", "cap_add", "devices", "userns_mode"} & set(service)
    assert service["read_only"] or name == "grafana"


@each_service
def test_health_check_asks_the_service_itself(name: str) -> None:
    if "healthcheck" not in SERVICES[name]:
        assert "build" in SERVICES[name]
        assert "HEALTHCHECK" in IMAGE
        return
    test = SERVICES[name]["healthcheck"]["test"]
    # Busybox's wget is what these images have; without -Y it would use the proxy that Docker hands to containers.
    assert test[:-1] == ["CMD", "wget", "-q", "-Y", "off", "-O", "/dev/null"]
    assert urlsplit(test[-1]).netloc == f"127.0.0.1:{LISTENS[name]}"


@each_service
def test_mounted_paths_exist_and_are_read_only(name: str) -> None:
    for mount in mounts(SERVICES[name]):
        if not mount.named:
            assert mount.read_only, mount
            assert (REPOSITORY / mount.source).exists() or mount.source == "./logs", mount


def test_named_volumes_are_declared_and_used() -> None:
    used = [mount.source for service in SERVICES.values() for mount in mounts(service) if mount.named]
    assert sorted(used) == sorted(STACK["volumes"])


def test_who_waits_for_health_waits_for_a_health_check() -> None:
    for name, service in SERVICES.items():
        for other, rule in service.get("depends_on", {}).items():
            assert other in SERVICES
            assert rule["condition"] in ("service_started", "service_healthy")
            if rule["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], f"{name} waits for {other}"


def test_prometheus_does_not_wait_for_what_it_watches() -> None:
    conditions = {rule["condition"] for rule in SERVICES["prometheus"]["depends_on"].values()}
    assert conditions == {"service_started"}


def test_monitor_reads_the_logs_that_its_command_names() -> None:
    (logs,) = mounts(SERVICES["monitor"])
    assert logs.target == json.loads(IMAGE["CMD"])[-1]
    assert "command" not in SERVICES["monitor"]
    assert mounts(compose({"VERL_LOGS": "/data/logs"})["services"]["monitor"])[0].source == "/data/logs"


def test_monitor_sees_processes_as_the_trainers_user() -> None:
    monitor = SERVICES["monitor"]
    assert monitor["pid"] == "host"
    assert monitor["user"] == IMAGE["USER"]
    assert "apparmor:unconfined" in monitor["security_opt"]
    assert compose({"VERL_UID": "7", "VERL_GID": "8"})["services"]["monitor"]["user"] == "7:8"


def test_prometheus_reads_the_mounted_configuration_and_rules() -> None:
    config = flags(SERVICES["prometheus"])["config.file"]
    assert source_of("prometheus", config) == DEPLOY / "prometheus.yml"
    (rules,) = PROMETHEUS["rule_files"]  # relative to the configuration
    target = str(PurePosixPath(config).parent / rules)
    assert source_of("prometheus", target) == REPOSITORY / "alerts" / "verl-monitor.rules.yml"


def test_prometheus_scrapes_and_alerts_the_services_by_their_names() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"monitor:{LISTENS['monitor']}"]}]
    (managers,) = PROMETHEUS["alerting"]["alertmanagers"]
    assert managers["static_configs"] == [{"targets": [f"alertmanager:{LISTENS['alertmanager']}"]}]


def test_rules_ask_for_the_job_that_prometheus_scrapes() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    asked = set(re.findall(r'\bjob="([^"]*)"', (REPOSITORY / "alerts" / "verl-monitor.rules.yml").read_text()))
    assert asked == {job["job_name"]}


@pytest.mark.parametrize(("name", "flag"), [("prometheus", "storage.tsdb.path"), ("alertmanager", "storage.path")])
def test_data_goes_to_the_named_volume(name: str, flag: str) -> None:
    (volume,) = (mount for mount in mounts(SERVICES[name]) if mount.named)
    assert flags(SERVICES[name])[flag] == volume.target


@pytest.mark.parametrize("name", ["prometheus", "alertmanager"])
def test_links_of_alerts_open_in_a_browser_of_this_host(name: str) -> None:
    published = SERVICES[name]["ports"][0].rpartition(":")[0]
    assert flags(SERVICES[name])["web.external-url"] == f"http://{published}"


def test_rules_link_to_the_published_monitor() -> None:
    rules = (REPOSITORY / "alerts" / "verl-monitor.rules.yml").read_text()
    linked = {urlsplit(url).netloc for url in re.findall(r"https?://[^\s\"']+", rules)}
    assert linked == {SERVICES["monitor"]["ports"][0].rpartition(":")[0]}


def test_flags_are_in_the_releases_of_the_images() -> None:
    """The tests' servers are Debian's, which also have flags that Prometheus 3 dropped; these are they (its migration
    guide). That the flags exist in 2.42 and 0.25 is seen when test_stack.py starts the servers with them."""
    dropped = {"storage.tsdb.retention", "storage.tsdb.allow-overlapping-blocks", "alertmanager.timeout",
               "web.console.templates", "web.console.libraries", "enable-feature", "log.level"}
    assert not dropped & set(flags(SERVICES["prometheus"]))
    assert set(flags(SERVICES["alertmanager"])) == {"config.file", "storage.path", "web.external-url",
                                                    "cluster.listen-address"}


def test_grafana_asks_the_prometheus_of_the_stack() -> None:
    (source,) = provisioned("datasources")["datasources"]
    assert source["url"] == f"http://prometheus:{LISTENS['prometheus']}"
    # Less than the scrape interval would make windows without two samples, and panels without data.
    seconds = [int(text.removesuffix("s")) for text in (source["jsonData"]["timeInterval"],
                                                        PROMETHEUS["global"]["scrape_interval"])]
    assert seconds[0] >= seconds[1]


def test_grafana_finds_every_dashboard() -> None:
    (provider,) = provisioned("dashboards")["providers"]
    folder = source_of("grafana", provider["options"]["path"])
    assert set(folder.glob("*.json")) == set((REPOSITORY / "dashboards").glob("*.json"))
    assert (folder / "run-health.json").is_file()


def test_grafana_has_no_default_password_and_lets_viewers_in() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert variables(COMPOSE.read_text())["GRAFANA_ADMIN_PASSWORD"][0] == ":?"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert all(re.fullmatch(r"GF_[A-Z_]+", name) and isinstance(value, str) for name, value in environment.items())


def test_variables_are_those_of_the_example() -> None:
    example = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (DEPLOY / "env.example").read_text(), re.MULTILINE))
    used = variables(COMPOSE.read_text())
    assert example == {name: default if kind == ":-" else "" for name, (kind, default) in used.items()}


def test_demo_file_changes_the_command_only() -> None:
    demo = yaml.safe_load((DEPLOY / "compose.demo.yml").read_text())
    assert list(demo) == ["services"]
    assert list(demo["services"]) == ["monitor"]
    (key, command), = demo["services"]["monitor"].items()
    assert key == "command"
    assert cli._parser().parse_args(command).listen == ("0.0.0.0", LISTENS["monitor"])


def test_own_alerts_are_mounted_in_place_of_the_repositorys(tmp_path: Path) -> None:
    """What deploy/README.md says about a receiver, done."""
    text = (DEPLOY / "README.md").read_text()
    command = re.search(r"python -m (alerts\.render --webhook (\S+) --out) (\S+)\n +VERL_ALERTS=\3(\S+) docker", text)
    assert command
    done = subprocess.run([sys.executable, "-m", *command[1].split(), str(tmp_path)], cwd=REPOSITORY, check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    services = compose({"VERL_ALERTS": f"{tmp_path}{command[4]}"})["services"]
    wanted = {mount.source for name in ("prometheus", "alertmanager") for mount in mounts(services[name])}
    files = {path for path in wanted if path.startswith(str(tmp_path))}
    assert len(files) == 2
    assert all(Path(path).is_file() for path in files)
    assert command[2] in (tmp_path / command[4].strip("/") / "alertmanager.yml").read_text()


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory that every user may enter, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="verl-monitor-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def runs_for_others(setpriv: str | None, interpreter: str) -> bool:
    """Whether an interpreter can be used as another user: one below root's home cannot."""
    try:
        done = subprocess.run([str(setpriv), "--reuid=1000", "--clear-groups", interpreter, "-I", "-c",
                               "import sys; sys.exit(sys.version_info < (3, 10))"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


@pytest.mark.parametrize(("trainer", "monitor", "seen"), [
    (["--reuid=1000"], ["--reuid=1000", "--bounding-set=-all"], True),
    (["--reuid=1000"], ["--reuid=1001", "--bounding-set=-all"], False),
    (["--reuid=0"], ["--reuid=0", "--bounding-set=-all"], False),
    (["--reuid=0"], ["--reuid=0", "--bounding-set=-all,+sys_ptrace"], True),
], ids=["one-user", "another-user", "root-trainer", "root-trainer-and-ptrace"])
def test_who_may_see_the_trainer_hold_its_log(common: Path, trainer: list[str], monitor: list[str], seen: bool) -> None:
    """What the Compose file and deploy/README.md say about uids and capabilities, tried on this kernel."""
    setpriv = shutil.which("setpriv")
    interpreter = next((path for path in (sys.executable, "/usr/bin/python3") if runs_for_others(setpriv, path)), None)
    if setpriv is None or interpreter is None:
        pytest.skip("needs root, setpriv (apt-get install util-linux) and a Python 3.10 that other users may run")
    log = common / "run.jsonl"
    code = (REPOSITORY / "monitor" / "sources" / "writer.py").read_text() + f"""
watch = WriterWatch(scan_seconds=0, confirm_seconds=0)
file = os.stat({str(log)!r})
for now in (0, 1):
    watch.check({{(file.st_dev, file.st_ino): {log.name!r}}}, now)
print(watch.state((file.st_dev, file.st_ino)).value)
"""
    held = ["sh", "-c", f"exec >> {log}; echo; exec sleep 60"]
    with subprocess.Popen([setpriv, *trainer, "--clear-groups", *held]) as writer:
        try:
            while not log.exists() or not log.stat().st_size:
                assert writer.poll() is None
            answer = subprocess.run(
                [setpriv, *monitor, "--clear-groups", "--inh-caps=-all", "--no-new-privs", interpreter, "-I", "-"],
                input=code, capture_output=True, text=True, check=True)
        finally:
            writer.terminate()
    assert answer.stdout.strip() == ("held" if seen else "unknown")
