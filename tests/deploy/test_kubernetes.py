"""deploy/kubernetes.yaml, compared with the image and with what deploy/README.md tells Prometheus. No cluster here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitor import __version__, cli
from monitor.clock import steady_clock
from monitor.engine import Engine
from monitor.service import Service, create_app
from tests.deploy import DEPLOY, instructions, program

(JOB,) = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
TEMPLATE: dict[str, Any] = JOB["spec"]["template"]
POD: dict[str, Any] = TEMPLATE["spec"]
(MONITOR,), (TRAINER,) = POD["initContainers"], POD["containers"]
README = (DEPLOY / "README.md").read_text()


def yaml_of_readme(beginning: str) -> str:
    """The YAML block of the README that begins so."""
    (block,) = (text for text in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if text.startswith(beginning))
    return str(block)


def test_monitor_is_a_sidecar_that_ends_with_the_job() -> None:
    assert JOB["kind"] == "Job"
    assert MONITOR["restartPolicy"] == "Always"
    assert POD["restartPolicy"] == "Never"
    assert "startupProbe" not in MONITOR


def test_monitor_and_trainer_share_processes_and_user() -> None:
    assert POD["shareProcessNamespace"] is True
    security = POD["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == dict(instructions()[-1])["USER"]
    assert security["runAsNonRoot"] is True
    for container in (MONITOR, TRAINER):
        assert not {"runAsUser", "runAsGroup"} & set(container["securityContext"])
        # With more capabilities than the monitor has, the trainer would be hidden from it.
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_monitor_follows_what_the_trainer_writes() -> None:
    arguments = cli._parser().parse_args(MONITOR["args"])
    (logs,) = arguments.source
    mounted = {mount["mountPath"]: mount for mount in MONITOR["volumeMounts"]}
    assert mounted[str(logs)] == {"name": "logs", "mountPath": str(logs), "readOnly": True}
    (variable,) = TRAINER["env"]
    (shared,) = TRAINER["volumeMounts"]
    assert variable == {"name": "VERL_FILE_LOGGER_ROOT", "value": shared["mountPath"]}
    assert shared["name"] == "logs"
    assert "file" in TRAINER["args"][0]


def test_volumes_are_declared_and_used() -> None:
    used = {mount["name"] for container in (MONITOR, TRAINER) for mount in container["volumeMounts"]}
    assert used == {volume["name"] for volume in POD["volumes"]}


def test_monitor_may_write_to_tmp_only() -> None:
    assert MONITOR["securityContext"]["readOnlyRootFilesystem"] is True
    assert MONITOR["securityContext"]["allowPrivilegeEscalation"] is False
    writable = [mount["mountPath"] for mount in MONITOR["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/tmp"]


def test_probes_ask_for_pages_that_the_service_has() -> None:
    app = create_app(Service(engine=Engine(), sources=[], clock=steady_clock()))
    pages = {getattr(route, "path", "") for route in app.routes}
    (port,) = MONITOR["ports"]
    assert port["containerPort"] == cli._parser().parse_args(MONITOR["args"]).listen[1]
    for probe, path in (("readinessProbe", "/-/ready"), ("livenessProbe", "/-/healthy")):
        assert MONITOR[probe]["httpGet"] == {"path": path, "port": port["name"]}
        assert path in pages


@pytest.mark.parametrize("container", [MONITOR, TRAINER], ids=lambda container: str(container["name"]))
def test_images_are_pinned(container: dict[str, Any]) -> None:
    assert re.fullmatch(r"[\w-]+:\d+\.\d+\.\d+", container["image"])


def test_image_is_this_version() -> None:
    assert MONITOR["image"] == f"verl-monitor:{__version__}"


def test_prometheus_as_the_readme_has_it_finds_the_pod(tmp_path: Path) -> None:
    (job,) = yaml.safe_load(yaml_of_readme("scrape_configs:"))["scrape_configs"]
    (ours,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["job_name"] == ours["job_name"]
    rules = {rule["source_labels"][0]: (rule["action"], rule["regex"]) for rule in job["relabel_configs"]}
    ((label, value),) = TEMPLATE["metadata"]["labels"].items()
    meta = "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)
    assert rules == {meta: ("keep", value),
                     "__meta_kubernetes_pod_container_port_name": ("keep", MONITOR["ports"][0]["name"]),
                     "__meta_kubernetes_pod_phase": ("drop", "Succeeded|Failed")}
    # Debian builds its Prometheus without Kubernetes' discovery, so promtool sees another in its place.
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["static_configs"] = [{"targets": ["127.0.0.1:9560"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    done = subprocess.run([program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_override_for_a_root_trainer_gives_what_it_says() -> None:
    assert yaml.safe_load(yaml_of_readme("services:")) == {
        "services": {"monitor": {"user": "0:0", "cap_add": ["SYS_PTRACE"]}}}


def test_files_that_the_readme_names_exist() -> None:
    for path in re.findall(r"\b(?:deploy|alerts)/[\w.-]+\.\w+", README):
        assert (DEPLOY.parent / path).exists(), path
