"""The real Prometheus and Alertmanager with the files and flags of docker-compose.yml, scraping the real service.

What is not as in the containers: the releases (Debian's 2.42 and 0.25); that the mounted paths lie below a temporary
directory; where the servers listen; how soon an alert is sent again; and the addresses in prometheus.yml, as names of
Compose's services do not resolve here: `monitor:9560` and `alertmanager:9093` become ports of loopback, by the very
substitution that deploy/README.md tells who runs without containers.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import yaml

from tests.deploy import DEPLOY, address_of, compose, flags, get, mounts, program, running
from tests.helpers import LAB, REPOSITORY, free_port, wait_for

# One worker starts the servers, once.
pytestmark = pytest.mark.xdist_group("stack")

SERVICES = compose()["services"]
BINARIES = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager"}


def lay_out(root: Path, addresses: dict[str, str]) -> None:
    """Files where the containers of Prometheus and Alertmanager have them, below ``root``/SERVICE."""
    for name in BINARIES:
        for mount in mounts(SERVICES[name]):
            target = root / name / mount.target.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if mount.named:
                target.mkdir()
            else:
                shutil.copy(REPOSITORY / mount.source, target)
    config = root / "prometheus" / flags(SERVICES["prometheus"])["config.file"].lstrip("/")
    text = config.read_text()
    for name, address in substitutions().items():
        assert name in text
        text = text.replace(name, addresses.get(address, address))
    config.write_text(text)


def substitutions() -> dict[str, str]:
    """Compose's names and the addresses in their place, as the README's sed has them."""
    sed = re.search(r"sed (.*) deploy/prometheus\.yml", (DEPLOY / "README.md").read_text())
    assert sed
    found = dict(re.findall(r"-e s/([^/]+)/([^/]+)/", sed[1]))
    assert len(found) == 2
    return found


def command(root: Path, name: str, port: int) -> list[str]:
    """A service's command with its paths below ``root``."""
    given = []
    for flag, value in flags(SERVICES[name]).items():
        given.append(f"--{flag}={root / name / value.lstrip('/') if value.startswith('/') else value}")
    if name == "prometheus":
        # It knows its Alertmanagers 5 s after its start only. What it sent before would be sent again after a minute.
        given.append("--rules.alert.resend-delay=1s")
    return [program(BINARIES[name]), *given, f"--web.listen-address=127.0.0.1:{port}"]


@dataclass(frozen=True)
class Stack:
    """Addresses of the running servers."""

    root: Path
    monitor: str
    prometheus: str
    alertmanager: str

    def ask(self, path: str) -> Any:
        """What Prometheus' API answers."""
        status, body = get(f"{self.prometheus}/api/v1/{path}")
        return json.loads(body)["data"] if status == 200 else {}

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query."""
        found: list[dict[str, Any]] = self.ask(f"query?query={quote(expression)}").get("result", [])
        return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The three servers."""
    root = tmp_path_factory.mktemp("stack")
    (root / "logs").mkdir()
    shutil.copy(LAB / "ppo-kl-runaway.jsonl", root / "logs")
    with ExitStack() as servers:
        service = [sys.executable, "-m", "monitor.cli", "serve", "--listen", "127.0.0.1:0", str(root / "logs")]
        process = servers.enter_context(running(service, root / "monitor.out", directory=REPOSITORY))
        monitor = address_of(process, root / "monitor.out")
        ports = {name: free_port() for name in BINARIES}
        base = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        lay_out(root, {"127.0.0.1:9560": urlsplit(monitor).netloc,
                       "127.0.0.1:9093": urlsplit(base["alertmanager"]).netloc})
        for name, port in ports.items():
            output = root / f"{name}.out"
            process = servers.enter_context(running(command(root, name, port), output, directory=root))
            # The page that the container's health check asks for.
            health = urlsplit(SERVICES[name]["healthcheck"]["test"][-1]).path
            wait_for(lambda process=process, url=base[name] + health:  # type: ignore[misc]
                     process.poll() is not None or get(url)[0] == 200, 20, f"{name}'s health")
            assert process.poll() is None, output.read_text()
        yield Stack(root, monitor, base["prometheus"], base["alertmanager"])


def test_promtool_takes_configuration_and_rules_as_they_are_laid_out(tmp_path: Path) -> None:
    lay_out(tmp_path, {})
    config = tmp_path / "prometheus" / "etc" / "prometheus" / "prometheus.yml"
    done = subprocess.run([program("promtool"), "check", "config", str(config)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    rules = yaml.safe_load((REPOSITORY / "alerts" / "verl-monitor.rules.yml").read_text())
    count = sum(len(group["rules"]) for group in rules["groups"])
    assert f"SUCCESS: {count} rules found" in done.stdout


def test_amtool_takes_the_mounted_configuration() -> None:
    (config,) = (mount for mount in mounts(SERVICES["alertmanager"]) if not mount.named)
    done = subprocess.run([program("amtool"), "check-config", str(REPOSITORY / config.source)], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_prometheus_scrapes_the_service(stack: Stack) -> None:
    wait_for(lambda: stack.query('up{job="verl-monitor"}'), 20, "a scrape")
    (up,) = stack.query('up{job="verl-monitor"}')
    assert up["value"][1] == "1"
    assert up["metric"]["instance"] == urlsplit(stack.monitor).netloc
    wait_for(lambda: stack.query('verl_run_last_step{run="ppo-kl-runaway"}'), 20, "the run's series")
    (target,) = stack.ask("targets")["activeTargets"]
    assert target["lastError"] == ""
    assert target["scrapeInterval"] == "5s"


def test_prometheus_loads_and_evaluates_every_rule(stack: Stack) -> None:
    wanted = yaml.safe_load((REPOSITORY / "alerts" / "verl-monitor.rules.yml").read_text())["groups"]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in stack.ask("rules")["groups"] for rule in group["rules"]]

    assert [group["name"] for group in stack.ask("rules")["groups"]] == sorted(group["name"] for group in wanted)
    assert len(rules()) == sum(len(group["rules"]) for group in wanted)
    # Groups are evaluated at offsets within one interval, which is 15 s.
    wait_for(lambda: all(rule["health"] != "unknown" for rule in rules()), 30, "one evaluation")
    assert {rule["health"]: rule.get("lastError", "") for rule in rules()} == {"ok": ""}


def test_prometheus_sends_alerts_to_the_alertmanager(stack: Stack) -> None:
    expected = [{"url": f"{stack.alertmanager}/api/v2/alerts"}]
    wait_for(lambda: stack.ask("alertmanagers")["activeAlertmanagers"] == expected, 20, "the Alertmanager found")
    status, body = get(f"{stack.alertmanager}/api/v2/status")
    assert status == 200
    assert yaml.safe_load(json.loads(body)["config"]["original"])["route"]

    def alerts() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(get(f"{stack.alertmanager}/api/v2/alerts")[1] or "[]")
        return found

    wait_for(alerts, 30, "an alert at the Alertmanager")
    labels = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["global"]["external_labels"]
    for alert in alerts():
        assert labels.items() <= alert["labels"].items()
        # Opens in a browser, since the published address is known to be another than the container's.
        assert alert["generatorURL"].startswith(f"{flags(SERVICES['prometheus'])['web.external-url']}/graph?")


def test_servers_write_to_their_volumes_only(stack: Stack) -> None:
    for name, flag in (("prometheus", "storage.tsdb.path"), ("alertmanager", "storage.path")):
        volume = stack.root / name / flags(SERVICES[name])[flag].lstrip("/")
        written = {path for path in (stack.root / name).rglob("*") if path.is_file()}
        laid = {stack.root / name / mount.target.lstrip("/") for mount in mounts(SERVICES[name]) if not mount.named}
        assert all(path.is_relative_to(volume) for path in written - laid)
