"""The architectures by name, as `examples/pretrain.py --model` has them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from models import gemma3, gpt_oss, olmoe, qwen3
from symoptax import ParamRule


class Architecture(NamedTuple):
    """A model, its sizes by name, and the function from sizes to routing rules."""

    build: Callable[[Any, nnx.Rngs], nnx.Module]
    presets: Mapping[str, Any]
    rules_for: Callable[[Any], list[ParamRule]]


MODELS = {
    "qwen3": Architecture(qwen3.Qwen3, qwen3.PRESETS, qwen3.rules_for),
    "gemma3": Architecture(gemma3.Gemma3, gemma3.PRESETS, gemma3.rules_for),
    "olmoe": Architecture(olmoe.Olmoe, olmoe.PRESETS, olmoe.rules_for),
    "gpt_oss": Architecture(gpt_oss.GptOss, gpt_oss.PRESETS, gpt_oss.rules_for),
}
