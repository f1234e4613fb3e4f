"""Checks of how the run is laid out: strategies, parallelism, batch sizes."""

from __future__ import annotations

from monitor.preflight.check import Check, Result, error, good, skipped, warning
from monitor.preflight.model import model_of
from monitor.preflight.setup import Setup

_FSDP = ("fsdp", "fsdp2")


def _strategies(setup: Setup) -> Result:
    roles = {"actor": setup.text("actor_rollout_ref.actor.strategy")}
    if setup.critic:
        roles["critic"] = setup.text("critic.strategy")
    if setup.reference:
        roles["ref"] = setup.text("actor_rollout_ref.ref.strategy") or roles["actor"]
    kinds = {"fsdp" if strategy in _FSDP else strategy for strategy in roles.values() if strategy}
    told = ", ".join(f"{role} {strategy}" for role, strategy in roles.items())
    if len(kinds) > 1:
        return error(f"strategies differ: {told}", "one strategy for all: actor_rollout_ref.actor.strategy, "
                                                   "actor_rollout_ref.ref.strategy and critic.strategy")
    return good(f"one strategy: {told}")


def _parallel(setup: Setup) -> Result:
    per_node, size = setup.number("trainer.n_gpus_per_node"), setup.number(
        "actor_rollout_ref.rollout.tensor_model_parallel_size")
    if per_node is None or size is None:
        return skipped("trainer.n_gpus_per_node, rollout.tensor_model_parallel_size")
    if setup.gpus % size:
        return error(f"tensor_model_parallel_size is {size:.0f}, which does not divide {setup.gpus} GPUs",
                     f"actor_rollout_ref.rollout.tensor_model_parallel_size: a divisor of {setup.gpus}")
    if size > per_node:
        return warning(f"tensor_model_parallel_size is {size:.0f} and a node has {per_node:.0f} GPUs, so each layer "
                       "goes over the network",
                       f"actor_rollout_ref.rollout.tensor_model_parallel_size={per_node:.0f} at most")
    heads = model_of(setup).heads
    if heads and heads % size:
        return error(f"the model has {heads} attention heads, which {size:.0f} GPUs cannot share evenly",
                     "actor_rollout_ref.rollout.tensor_model_parallel_size: a divisor of the heads")
    return good(f"tensor_model_parallel_size {size:.0f} on {per_node:.0f} GPUs a node")


def _batches(setup: Setup) -> Result:
    train, mini = setup.number("data.train_batch_size"), setup.number("actor_rollout_ref.actor.ppo_mini_batch_size")
    answers, gpus = setup.number("actor_rollout_ref.rollout.n") or 1, setup.gpus
    if train is None or mini is None:
        return skipped("data.train_batch_size, actor.ppo_mini_batch_size")
    dynamic = setup.true("actor_rollout_ref.actor.use_dynamic_bsz")
    micro = setup.number("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    parallel = setup.number("actor_rollout_ref.actor.ulysses_sequence_parallel_size") or 1
    if not dynamic and train * answers % gpus:
        return error(f"train_batch_size * rollout.n is {train * answers:.0f}, which {gpus} GPUs cannot share evenly",
                     f"data.train_batch_size: so that with rollout.n={answers:.0f} it is a multiple of {gpus}")
    if train < mini:
        return error(f"train_batch_size is {train:.0f}, below ppo_mini_batch_size, {mini:.0f}",
                     f"actor_rollout_ref.actor.ppo_mini_batch_size={train:.0f} or less")
    if not dynamic and micro is None and setup.number("actor_rollout_ref.actor.ppo_micro_batch_size") is None and \
            len(setup.given) > 100:
        return error("use_dynamic_bsz is false and no micro batch size is set for the actor",
                     "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, or use_dynamic_bsz=True")
    share = mini * answers / (gpus / parallel)
    if share < 1:
        return error(f"ppo_mini_batch_size * rollout.n is {mini * answers:.0f}, fewer than the {gpus / parallel:.0f} "
                     "that share it", "actor_rollout_ref.actor.ppo_mini_batch_size: larger")
    if not dynamic and micro and share % micro:
        return error(f"each GPU gets {share:g} samples of a mini batch, no multiple of ppo_micro_batch_size_per_gpu, "
                     f"{micro:.0f}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: a divisor of that")
    if train % mini:
        return warning(f"train_batch_size {train:.0f} is no multiple of ppo_mini_batch_size {mini:.0f}: the last "
                       "update of a step is smaller",
                       "actor_rollout_ref.actor.ppo_mini_batch_size: a divisor of data.train_batch_size")
    critic = setup.number("critic.ppo_mini_batch_size")
    if setup.critic and critic is not None and train < critic:
        return error(f"train_batch_size is {train:.0f}, below critic.ppo_mini_batch_size, {critic:.0f}",
                     f"critic.ppo_mini_batch_size={train:.0f} or less")
    return good(f"{train:.0f} prompts of {answers:.0f} answers in mini batches of {mini:.0f} on {gpus} GPUs")


CHECKS = (
    Check(id="strategies", title="One training strategy for all roles", guide="1.3", run=_strategies,
          why="FSDP and Megatron roles in one job share processes and fail there.", applies="all",
          source="verl starts the critic and reference in the actor's worker group"),
    Check(id="tensor_parallel", title="Tensor parallelism against the GPUs", guide="5", run=_parallel,
          why="A rollout that spans nodes crawls, and one that does not divide the GPUs cannot be placed.",
          applies="all",
          source="verl's rollout world size is nnodes * n_gpus_per_node over the tensor parallel size"),
    Check(id="batches", title="Batch sizes that verl rejects later", guide="5", run=_batches,
          why="verl checks these after minutes of loading, some only in the first update.", applies="0.4 to 0.9.1",
          source="verl's validation of the configuration and of the actor's worker"),
)
