"""Checks of what the run learns from: advantages, value loss, value head, sequence limits."""

from __future__ import annotations

import math

from monitor.preflight.check import Check, Result, error, good, skipped, warning
from monitor.preflight.model import model_of
from monitor.preflight.setup import Setup

_LONG = 2048  # tokens; the guide's long context
_REACHES = 0.01


def _lambda(setup: Setup) -> Result:
    if setup.estimator != "gae":
        return good(f"adv_estimator is {setup.estimator or 'not set'}, which has no lambda")
    lam, gamma = setup.number("algorithm.lam"), setup.number("algorithm.gamma")
    length = setup.number("data.max_response_length")
    if lam is None or gamma is None or length is None:
        return skipped("algorithm.lam, algorithm.gamma, data.max_response_length")
    decay = gamma * lam
    if decay >= 1:
        return good(f"gamma * lam is {decay:g}: the reward at the end reaches every token of {length:.0f} undiminished")
    horizon, reach = 1 / (1 - decay), decay ** length
    found = (f"gamma * lam is {decay:g}: an advantage reaches some {horizon:.0f} tokens back, and {reach:.2g} of the "
             f"reward at the end the first of {length:.0f}")
    if length <= _LONG or reach >= _REACHES:
        return good(found)
    return warning(found, "algorithm.lam=1.0 (verl's default) lets the whole response see the reward; where the "
                          "variance of that is too much, the guide's 0.6 to 0.75 with a critic that is warmed up, and "
                          "watch vanishing_policy_gradient")


def _cliprange(setup: Setup) -> Result:
    if not setup.critic:
        return good("the run has no critic")
    value = setup.number("critic.cliprange_value")
    if value is None:
        return skipped("critic.cliprange_value")
    if value > 1.0 or value <= 0:
        what = "next to nothing is clipped" if value > 0 else "every change of the value is clipped"
        return warning(f"critic.cliprange_value is {value:g}, so {what}",
                       "critic.cliprange_value=0.2 (the guide's) to 0.5 (verl's default)")
    return good(f"critic.cliprange_value is {value:g}")


def _value_head(setup: Setup) -> Result:
    if not setup.critic:
        return good("the run has no critic")
    warmup = setup.number("trainer.critic_warmup")
    path = setup.text("critic.model.path")
    trained = any(word in path for word in ("reward", "-rm", "_rm", "critic", "value"))
    if trained:
        return good(f"the critic starts from {path}, which by its name has a trained head")
    if warmup:
        return good(f"the value head starts at random (normal, the model's initializer_range, 0.02 with most), and "
                    f"trainer.critic_warmup is {warmup:g} steps")
    return good("the value head starts at random (normal, the model's initializer_range, 0.02 with most) without "
                "trainer.critic_warmup: critic_divergence and critic_loss_oscillation watch its first steps")


def _sequences(setup: Setup) -> Result:
    prompt, response = setup.number("data.max_prompt_length"), setup.number("data.max_response_length")
    if prompt is None or response is None:
        return skipped("data.max_prompt_length, data.max_response_length")
    whole = prompt + response
    limit = setup.number("actor_rollout_ref.rollout.max_model_len")
    if limit is not None and limit < whole:
        return error(f"rollout.max_model_len is {limit:.0f}, and prompt and response may have {whole:.0f} tokens",
                     f"actor_rollout_ref.rollout.max_model_len={whole:.0f}")
    positions = model_of(setup).positions
    if positions and positions < whole:
        return error(f"the model was made for {positions} tokens, and prompt and response may have {whole:.0f}",
                     "data.max_response_length: lower, or a model for longer sequences (rope scaling)")
    for role, dynamic, tokens, parallel in (
        ("actor", "actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
         "actor_rollout_ref.actor.ulysses_sequence_parallel_size"),
        ("critic", "critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu",
         "critic.ulysses_sequence_parallel_size"),
    ):
        if role == "critic" and not setup.critic:
            continue
        room = setup.number(tokens)
        room = room * (setup.number(parallel) or 1) if room is not None else None
        if setup.true(dynamic) and room is not None and room < whole:
            return error(f"{tokens} allows {room:.0f} tokens, and a prompt with its response may have {whole:.0f}",
                         f"{tokens}={math.ceil(whole)} or more")
    return good(f"actor and critic take a whole sequence of {whole:.0f} tokens")


CHECKS = (
    Check(id="gae_lambda", title="GAE lambda against the length of responses", guide="3.1", run=_lambda,
          why="With lambda below 1 the reward fades on its way back: of a long response only the end learns, the "
              "policy loss stays near zero and the KL climbs.",
          applies="all; the guide's default of 0.95 is not verl's, which is 1.0",
          source="GAE: the weight of a reward n tokens later is (gamma lambda)^n; the guide's 2,048 tokens"),
    Check(id="value_clip", title="Clip range of the value loss", guide="3.1", run=_cliprange,
          why="An unclipped value loss follows every outlier of the returns.", applies="all",
          source="verl's default 0.5, the guide's 0.2"),
    Check(id="value_head", title="Initialisation of the value head", guide="3.2", run=_value_head,
          why="A random head on a large model gives values of large variance at first, which a warm-up of the critic "
              "or a trained head avoids.",
          applies="the guide's nn.Linear is a token-classification head of transformers since verl 0.2; no setting "
                  "changes its initialisation", source="verl 0.9.1 builds the critic with num_labels=1"),
    Check(id="sequence_limits", title="Sequence limits of rollout, actor and critic", guide="2.2", run=_sequences,
          why="verl pads and masks actor and critic alike today; a limit below a whole sequence fails in the first "
              "step that has one.",
          applies="all; the guide's differing lengths of actor and critic are no more",
          source="verl's assertion that max_token_len holds the longest sequence"),
)
