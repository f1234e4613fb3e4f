"""Preflight: a whole configuration as Hydra wrote it is clean, each trap is caught by the check that is for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitor.preflight import environment as surroundings
from monitor.preflight.check import Outcome
from monitor.preflight.checks import CHECKS
from monitor.preflight.command import perform
from monitor.preflight.memory import GPU_MEMORY, estimate
from monitor.preflight.model import model_of
from monitor.preflight.saving import CHECKPOINT_DIR
from monitor.preflight.setup import ConfigurationError, read
from tests.helpers import REPOSITORY
from tests.probes.test_checkpoints import save

DATA = Path(__file__).parent / "data"
HEALTHY = DATA / "healthy.yaml"
TRAPS = sorted((DATA / "traps").glob("*.yaml"))
GPU = f"{GPU_MEMORY}={80 * 2**30}"
EVERY = (*CHECKS, *surroundings.CHECKS)


def outcomes(*overrides: str, config: str | None = str(HEALTHY), version: str = "") -> dict[str, tuple[str, str]]:
    """Outcome and finding of each check."""
    setup = read(config, [GPU, *overrides], {}, version)
    return {check.id: (result.outcome.value, result.found) for check in CHECKS for result in [check.run(setup)]}


def test_a_healthy_configuration_is_clean() -> None:
    found = outcomes()
    assert {id_: outcome for id_, (outcome, _) in found.items() if outcome != "pass"} == {"disk": "skipped"}


@pytest.mark.parametrize("file", TRAPS, ids=lambda path: path.stem)
def test_each_trap_is_caught_by_the_check_that_is_for_it(file: Path) -> None:
    trap: dict[str, Any] = yaml.safe_load(file.read_text())
    found = outcomes(*trap["overrides"])
    caught = {id_: outcome for id_, (outcome, _) in found.items() if outcome in ("warning", "error")}
    assert caught == {trap["caught_by"]: trap["status"]}
    assert trap["says"] in found[trap["caught_by"]][1]


def test_every_check_of_a_configuration_has_a_trap_or_a_test_here() -> None:
    trapped = {yaml.safe_load(file.read_text())["caught_by"] for file in TRAPS}
    assert {check.id for check in CHECKS} - trapped == {"value_head", "checkpoint_directory", "disk"}


def test_every_check_says_why_and_where_from() -> None:
    assert len({check.id for check in EVERY}) == len(EVERY)
    for check in EVERY:
        assert all((check.title, check.why.endswith("."), check.applies, check.source, check.guide))


def test_overrides_alone_stand_on_verls_defaults() -> None:
    found = outcomes("actor_rollout_ref.model.path=org/Model-7B", "trainer.save_freq=20", config=None)
    assert {id_ for id_, (outcome, _) in found.items() if outcome in ("warning", "error")} == {"resume"}
    assert found["batches"][1] == "1024 prompts of 1 answers in mini batches of 256 on 8 GPUs"
    assert "no reference model" in found["reference_offload"][1]


def test_interpolations(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("""
a: {b: 3, c: "${.b}", d: "${..x.y}", e: "${oc.select:no.such,${a.b}}"}
x: {y: "${oc.env:HOME_OF_TESTS}", z: "p/${a.b}/${oc.env:NOT_SET,q}", u: "${oc.env:NOT_SET}", v: "${mine:a}"}
trainer: {logger: "${oc.select:x.none,[file]}", save_freq: 1e2}
loop: "${loop2}"
loop2: "${loop}"
""")
    setup = read(str(tmp_path / "a.yaml"), [], {"HOME_OF_TESTS": "h"})
    assert [setup.get(key) for key in ("a.c", "a.d", "a.e", "x.y", "x.z", "x.u", "x.v", "loop")] == [
        3, "h", 3, "h", "p/3/q", None, None, None]
    assert setup.get("trainer.logger") == ["file"]
    assert setup.number("trainer.save_freq") == 100


@pytest.mark.parametrize(("text", "said"), [
    ("a: [1\nb: 2\n", r"c\.yaml:2: expected YAML"), ("- a\n", r"c\.yaml:1: expected a mapping of verl's settings"),
    ("", r"c\.yaml:1: expected a mapping")])
def test_a_file_that_is_none_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read(str(tmp_path / "c.yaml"), [], {})


def test_what_is_not_there_and_what_is_no_override(tmp_path: Path) -> None:
    for config, overrides, said in (
        (str(tmp_path / "no.yaml"), [], "No such file"), (str(tmp_path), [], "got neither"),
        (None, ["trainer.save_freq"], "expected an override such as")):
        with pytest.raises(ConfigurationError, match=said):
            read(config, overrides, {})


def test_versions() -> None:
    assert read(str(HEALTHY), [], {}).version == (0, 9)
    assert read(None, ["a=1"], {}).version == ()
    assert read(None, ["a=1"], {}, "0.5").version == (0, 5)
    old = outcomes(config=None, version="0.5")
    assert old["blind_detectors"][0] == "warning"  # log-probabilities of the rollout are off by default before 0.9


def test_a_way_in_by_environment() -> None:
    setup = read(str(HEALTHY), ["trainer.logger=[mlflow]"], {"VERL_MONITOR_URL": "http://h"})
    [result] = [check.run(setup) for check in CHECKS if check.id == "way_in"]
    assert result.outcome is Outcome.PASS


def test_the_value_head() -> None:
    assert "starts at random" in outcomes()["value_head"][1]
    assert "trained head" in outcomes("critic.model.path=/data/reward-model")["value_head"][1]
    assert "no critic" in outcomes("algorithm.adv_estimator=grpo")["value_head"][1]


def test_the_checkpoint_directory(tmp_path: Path) -> None:
    given = f"{CHECKPOINT_DIR}={tmp_path}"
    assert outcomes(given)["checkpoint_directory"] == ("pass", f"{tmp_path} is empty: the run begins from scratch")
    folder = save(tmp_path, 20)
    assert outcomes(given)["checkpoint_directory"] == ("pass", "it goes on from step 20, which is complete")
    (folder / "data.pt").unlink()
    assert outcomes(given)["checkpoint_directory"][0] == "error"
    assert outcomes(given, "trainer.resume_mode=disable")["checkpoint_directory"][0] == "pass"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    assert "there is no global_step_40" in outcomes(given)["checkpoint_directory"][1]


def test_room_for_checkpoints(tmp_path: Path) -> None:
    given = f"{CHECKPOINT_DIR}={tmp_path}"
    huge = "actor_rollout_ref.model.path=/data/model-90000b"
    assert outcomes(given, huge)["disk"][0] == "error"
    small = "actor_rollout_ref.model.path=/data/model-0.001b"
    assert outcomes(given, small)["disk"][0] == "pass"


def test_a_models_size_from_its_files_its_shape_and_its_name(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "num_hidden_layers": 28,
             "intermediate_size": 18944, "vocab_size": 152064, "torch_dtype": "bfloat16",
             "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = model_of(read(None, [f"actor_rollout_ref.model.path={tmp_path}"], {}))
    assert model.parameters == pytest.approx(7.6e9, rel=0.02)  # what such a shape is sold as
    assert (model.heads, model.positions, model.kv_bytes) == (28, 32768, 2 * 28 * 512 * 2)
    long = outcomes(f"actor_rollout_ref.model.path={tmp_path}", "data.max_response_length=40000")
    assert long["sequence_limits"][0] == "error"
    assert "made for 32768 tokens" in long["sequence_limits"][1]
    for name, size in (("org/Model-7B-Instruct", 7e9), ("/x/qwen2.5-0.5b", 0.5e9), ("org/Model-30B-A3B", 30e9),
                       ("org/model", 0.0)):
        assert model_of(read(None, [f"actor_rollout_ref.model.path={name}"], {})).parameters == size


def test_the_memory_estimate_counts_sixteen_bytes_a_trained_parameter() -> None:
    setup = read(None, ["actor_rollout_ref.model.path=m-8b", "algorithm.adv_estimator=grpo", GPU], {})
    parts = estimate(setup)
    assert parts is not None
    assert parts["actor weights and gradients"] + parts["actor optimizer"] == 16 * 8e9 / 8
    assert parts["rollout weights"] == 2 * 8e9 / 2
    offloaded = estimate(read(None, ["actor_rollout_ref.model.path=m-8b", "algorithm.adv_estimator=grpo", GPU,
                                     "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"], {}))
    assert offloaded is not None
    assert offloaded["actor optimizer"] == 0


def test_a_check_that_fails_costs_itself() -> None:
    odd = ["data.train_batch_size=many", "trainer.nnodes=[1]", "algorithm.adv_estimator={a: 1}"]
    setup = read(str(HEALTHY), odd, {})
    assert {perform(check, setup).outcome for check in CHECKS} <= set(Outcome)


def preflight(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "monitor.cli", "preflight", *arguments], cwd=REPOSITORY, text=True,
                          capture_output=True, check=False, timeout=200)


def test_the_command() -> None:
    clean = preflight(str(HEALTHY), "--gpu-memory", "80", "--no-environment")
    assert (clean.returncode, clean.stderr) == (0, "")
    assert "16 pass, 1 skipped" in clean.stdout
    bad = preflight(str(HEALTHY), "critic.strategy=megatron", "trainer.save_freq=-1", "--gpu-memory", "80",
                    "--no-environment")
    assert bad.returncode == 2
    assert "ERROR   strategies [guide 1.3]: strategies differ" in bad.stdout
    assert "set: one strategy for all" in bad.stdout
    told = json.loads(preflight("trainer.save_freq=-1", "--format", "json", "--no-environment").stdout)
    assert (told["verdict"], told["config"]) == ("warning", "the command line")
    assert {"id", "status", "found", "why", "set", "guide", "applies"} <= set(told["checks"][0])
    assert preflight("no-such.yaml").returncode == 3
    assert preflight().returncode == 3


def test_the_environment_is_tried_for_real() -> None:
    pytest.importorskip("ray", reason="the package ray is not installed")
    told = json.loads(preflight(str(HEALTHY), "--environment", "--format", "json").stdout)
    found = {check["id"]: check for check in told["checks"]}
    assert found["placement_group"]["status"] == "pass", found["placement_group"]
    assert "a placement group was placed on a Ray of its own" in found["placement_group"]["found"]
    assert found["ray_version"]["status"] == "pass"
    assert found["stale_groups"]["status"] == "pass"
    dead = json.loads(preflight(str(HEALTHY), "--environment", "--ray-address", "http://127.0.0.1:1", "--format",
                                "json").stdout)
    stale = next(check for check in dead["checks"] if check["id"] == "stale_groups")
    assert (stale["status"], "does not answer" in stale["found"]) == ("skipped", True)
