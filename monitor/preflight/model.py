"""What can be known of a model before it is loaded: its size and shape, from its directory or its name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from monitor.preflight.setup import Setup

_NAME = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z])")


@dataclass(frozen=True, slots=True)
class Model:
    """``parameters``: how many, 0 where that is not known; ``how``: where that comes from. ``heads`` of attention and
    ``positions`` at most: 0 where not known. ``kv_bytes``: of the cache for a token in 16 bits."""

    parameters: float = 0.0
    how: str = ""
    heads: int = 0
    positions: int = 0
    kv_bytes: int = 0


def model_of(setup: Setup, key: str = "actor_rollout_ref.model.path") -> Model:
    """The model of a key, as far as its directory or its name tells."""
    path = setup.get(key)
    if not isinstance(path, str) or not path:
        return Model()
    return _from_directory(path) or _from_name(path)


def _from_name(path: str) -> Model:
    """A size such as 7b in the last part of a path; of mixtures of experts (30B-A3B) the whole."""
    found = _NAME.findall(path.rstrip("/").rpartition("/")[2].lower())
    return Model(float(found[0]) * 1e9, "its name") if found else Model()


@lru_cache(64)
def _from_directory(path: str) -> Model | None:
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    number = {name: int(config.get(name) or 0) for name in (
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_size", "num_hidden_layers",
        "head_dim", "intermediate_size", "vocab_size")}
    heads, layers, hidden = number["num_attention_heads"], number["num_hidden_layers"], number["hidden_size"]
    kv = (number["num_key_value_heads"] or heads) * (number["head_dim"] or hidden // (heads or 1))
    bits = {"float32": 4, "float16": 2, "bfloat16": 2}.get(str(config.get("torch_dtype") or config.get("dtype")), 2)
    # Attention (q, k, v, o), a gated feed-forward layer, and the embeddings on both sides.
    shape = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * number["intermediate_size"])
    shape += (1 if config.get("tie_word_embeddings") else 2) * number["vocab_size"] * hidden
    parameters, how = (size / bits, "its files") if size else (float(shape), "its config.json")
    return Model(parameters, how, heads, number["max_position_embeddings"], 2 * layers * kv * 2)
