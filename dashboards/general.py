"""The last row: the curves that one looks at in any run, whatever the detectors say."""

from __future__ import annotations

from dashboards.layout import Placed
from dashboards.panels import Override, graph_panel
from dashboards.queries import Query, metric_named, one_of, select, series_query
from dashboards.sdk import model
from monitor.catalog import metric_of

WIDTH, HEIGHT = 6, 8

# The parts that a step is made of. All other stages are measured inside one of these (generate_sequences inside gen,
# update_policy inside update_actor), so stacking them too would count their time twice. What a version adds beside
# them shows as a gap below the line of the whole step.
STAGES = ("start_profile", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
          "update_weights", "save_checkpoint", "testing", "stop_profile")
_WHOLE_STEP: Override = ("/^whole step/", {
    "custom.stacking": {"mode": "none", "group": "A"}, "custom.fillOpacity": 0, "custom.lineWidth": 2})


def general() -> list[Placed]:
    """Panels of the last row."""
    panels = [
        _series("Score and reward", "Good: rises, or holds where it has arrived. A reward that leaves the score is "
                "the KL penalty's doing.", "score/mean", "score/max", "reward/mean"),
        _series("Policy loss", "Good: scatters around a level near zero. Its height says little, a change of its "
                "habit says much.", "policy_loss"),
        _series("KL by kind", "Good: the KL to the reference rises slowly and together with the reward, the KL of an "
                "update stays below 0.1.", "kl_divergence"),
        _series("Entropy", "Good: falls slowly and levels off. Near zero there is nothing left to explore.",
                "entropy_nats"),
        _series("Gradient norm", "Good: scatters around a level of its own. Exactly 0: nothing is learned. A gap: not "
                "finite, and the update was skipped.", "gradient_norm"),
        _series("Response length", "Good: moves slowly, and its maximum is not always the limit.",
                "response_length_tokens"),
        _stages(),
        _series("Throughput", "Good: level. It falls when responses grow, or when something is in the way.",
                "throughput_tokens_per_second"),
    ]
    return [Placed(panel, WIDTH, HEIGHT) for panel in panels]


def _series(title: str, good: str, *series: str) -> model.Panel:
    """A panel of catalogue series; a bare name of a labelled metric stands for all of its series."""
    metrics = {metric_of(name).name: metric_of(name) for name in series}
    helps = " ".join(metric.help for metric in metrics.values())
    first = metric_of(series[0])
    return graph_panel(title, f"{helps}\n\n{good}", [series_query(name, name=len(metrics) > 1) for name in series],
                       unit=first.unit, log=first.log, no_value="not logged by this run")


def _stages() -> model.Panel:
    whole = metric_of("stage_duration_seconds/step")
    return graph_panel(
        "Stages of a step",
        f"{whole.help}\n\nGood: the same height and the same layers from step to step; validation and checkpoints "
        "stand out at their interval.",
        [
            Query(expr=select(metric_named(whole.name), stage=one_of(STAGES)), legend="{{stage}}"),
            Query(expr=select(metric_named(whole.name), stage="step"), legend="whole step, without testing"),
        ],
        unit=whole.unit, stacked=True, overrides=[_WHOLE_STEP])
