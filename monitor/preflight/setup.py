"""A verl configuration as checks ask it: by verl's keys, with interpolations resolved as far as they can be.

Hydra writes ``.hydra/config.yaml`` unresolved. What cannot be resolved here (an environment variable that is not set, a
resolver of the user's own) is unknown, and a check that needs it is skipped; it is no error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20
_UNKNOWN = "\0unknown"

Value = str | int | float | bool | list[Any] | None

DEFAULTS: Mapping[str, Value] = {
    "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    "actor_rollout_ref.actor.strategy": "fsdp", "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.use_dynamic_bsz": False, "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "critic.strategy": "fsdp", "critic.cliprange_value": 0.5, "critic.ppo_max_token_len_per_gpu": 32768,
    "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "trainer.save_freq": -1, "trainer.test_freq": -1,
    "trainer.resume_mode": "auto", "trainer.logger": ["console", "wandb"], "trainer.val_before_train": True,
    "trainer.project_name": "verl_examples", "trainer.experiment_name": "gsm8k",
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
}
"""Defaults of verl 0.9.1, for what a configuration leaves out."""


class ConfigurationError(Exception):
    """The configuration could not be read; the message names file, line and what was expected."""


@dataclass(frozen=True)
class Setup:
    """A configuration. ``values``: by verl's keys with dots. ``version``: of verl, as far as it is known, such as
    (0, 9). ``given``: keys that the user set, and not a default."""

    values: Mapping[str, Value]
    source: str = ""
    version: tuple[int, ...] = ()
    given: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)

    def get(self, *keys: str) -> Value:
        """The first of these keys that has a value; None: none has, or it is unknown."""
        for key in keys:
            value = self.values.get(key)
            if value is not None and value != _UNKNOWN and not (isinstance(value, str) and _UNKNOWN in value):
                return value
        return None

    def number(self, *keys: str) -> float | None:
        """As ``get``, where that is a number."""
        value = self.get(*keys)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value)

    def text(self, *keys: str) -> str:
        """As ``get``, as text in lower case; empty where there is none."""
        value = self.get(*keys)
        return "" if value is None or isinstance(value, list) else str(value).lower()

    def true(self, *keys: str) -> bool:
        """Whether it is set to true."""
        return self.get(*keys) is True

    def has(self, prefix: str) -> bool:
        """Whether the configuration has anything below this key."""
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self.given)

    @property
    def estimator(self) -> str:
        """The advantage estimator's name."""
        return self.text("algorithm.adv_estimator").rpartition(".")[2]

    @property
    def critic(self) -> bool:
        """Whether the run has a critic."""
        enabled = self.get("critic.enable")
        return enabled if isinstance(enabled, bool) else self.estimator == "gae"

    @property
    def reference(self) -> bool:
        """Whether the run needs a reference model."""
        return self.true("actor_rollout_ref.actor.use_kl_loss") or self.true("algorithm.use_kl_in_reward")

    @property
    def gpus(self) -> int:
        """GPUs of the trainer in all."""
        return int((self.number("trainer.nnodes") or 1) * (self.number("trainer.n_gpus_per_node") or 8))


def read(config: str | None, overrides: Sequence[str], environment: Mapping[str, str],
         version: str = "") -> Setup:
    """The configuration of a file (a directory: the ``.hydra/config.yaml`` in it) with overrides ``a.b=c`` over it.

    Raises:
        ConfigurationError: with file, line and what was expected.
    """
    tree: dict[str, Any] = {}
    source = config or "the command line"
    if config is not None:
        path = _file(Path(config))
        source = str(path)
        tree = _load(path)
    values = flat(tree)
    for text in overrides:
        key, equals, value = text.lstrip("+~").partition("=")
        if not equals or not re.fullmatch(r"[\w.@/-]+", key):
            raise ConfigurationError(f"{text}: expected an override such as trainer.save_freq=20")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = value
        values |= flat({key: parsed}) if isinstance(parsed, Mapping) else {key: parsed}
    given = frozenset(values)
    known = _resolved({**DEFAULTS, **values}, environment)
    return Setup(known, source, _version(version) or guess_version(given), given, environment)


def _file(path: Path) -> Path:
    if path.is_dir():
        for name in (".hydra/config.yaml", "config.yaml"):
            if (path / name).is_file():
                return path / name
        raise ConfigurationError(f"{path}: expected .hydra/config.yaml or config.yaml in it, got neither")
    return path


def _load(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: expected UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{path}{line}: expected YAML, {getattr(error, 'problem', error)}") from None
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}:1: expected a mapping of verl's settings, got {type(tree).__name__}")
    return tree


def flat(tree: Mapping[str, Any]) -> dict[str, Value]:
    """A nested configuration by keys with dots."""
    out: dict[str, Value] = {}
    pending: list[tuple[str, Any]] = [("", tree)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
        elif path:
            # YAML takes 1e-6 for a text, which Hydra does not.
            out[path] = _float(value) if isinstance(value, str) else value
    return out


def _float(text: str) -> str | float:
    return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else text


def _resolved(values: Mapping[str, Value], environment: Mapping[str, str]) -> dict[str, Value]:
    return {key: _resolve(value, key, values, environment, 0) for key, value in values.items()}


def _resolve(value: Value, key: str, values: Mapping[str, Value], environment: Mapping[str, str], depth: int) -> Value:
    while isinstance(value, str) and (match := _INNERMOST.search(value)):
        if depth > _DEEPEST:
            return _UNKNOWN
        depth += 1
        found = _interpolation(match[1].strip(), key, values, environment, depth)
        whole = match.span() == (0, len(value))
        value = found if whole else value[:match.start()] + str(found) + value[match.end():]
    return value


def _interpolation(inner: str, key: str, values: Mapping[str, Value], environment: Mapping[str, str],
                   depth: int) -> Value:
    def of(name: str) -> Value:
        if name.startswith("."):  # one dot: beside this key; each further one a level up
            up = len(name) - len(name.lstrip("."))
            parts = key.split(".")[:-up]
            name = ".".join([*parts, name.lstrip(".")])
        return _resolve(values[name], name, values, environment, depth) if name in values else _UNKNOWN

    resolver, colon, rest = inner.partition(":")
    if not colon:
        return of(inner)
    first, comma, default = rest.partition(",")
    if resolver == "oc.select":
        found = of(first.strip())
        return yaml.safe_load(default) if found in (_UNKNOWN, None) and comma else found
    if resolver in ("oc.env", "env"):
        return environment.get(first.strip()) or (yaml.safe_load(default) if comma else _UNKNOWN)
    return _UNKNOWN


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def guess_version(given: frozenset[str]) -> tuple[int, ...]:
    """verl's version by the keys that a configuration has; empty where they do not tell. Only whole configurations do,
    as Hydra writes them; keys of 0.4, 0.6.1, 0.7 and 0.9 were compared."""
    if len(given) < 100:
        return ()
    if any(key.startswith("trainer.v1.") for key in given) or "trainer.use_v1" in given:
        return (0, 9)
    if any(key.startswith("critic.fsdp.") for key in given):
        return (0, 8)
    if any(key.startswith("reward.reward_model.") for key in given):
        return (0, 7)
    return (0, 6) if any(key.startswith("reward_model.") for key in given) else ()


def environment() -> Mapping[str, str]:
    """The process's own."""
    return dict(os.environ)
