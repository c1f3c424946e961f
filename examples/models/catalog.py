"""The architectures by name, as `examples/pretrain.py --model` has them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx

from models import gemma3, gpt_oss, olmoe, qwen3
from models.hugging_face import Weight
from symoptax import ParamRule


class Architecture(NamedTuple):
    """A model by name.

    Attributes:
      build: the module of these sizes.
      presets: sizes by name.
      rules_for: routing rules by size.
      weights: where they are on the hub.
      multipliers_for: factors of the learning rate by role, where those of `layerwise` do not fit.
    """

    build: Callable[[Any, nnx.Rngs], nnx.Module]
    presets: Mapping[str, Any]
    rules_for: Callable[[Any], list[ParamRule]]
    weights: Sequence[Weight]
    multipliers_for: Callable[[Any], Mapping[str, float]] = lambda sizes: {}

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts, with a method `routing`."""
        return hasattr(self.build, "routing")


MODELS = {
    "qwen3": Architecture(qwen3.Qwen3, qwen3.PRESETS, qwen3.rules_for, qwen3.HUB),
    "gemma3": Architecture(
        gemma3.Gemma3, gemma3.PRESETS, gemma3.rules_for, gemma3.HUB, gemma3.multipliers_for
    ),
    "olmoe": Architecture(olmoe.Olmoe, olmoe.PRESETS, olmoe.rules_for, olmoe.HUB),
    "gpt_oss": Architecture(gpt_oss.GptOss, gpt_oss.PRESETS, gpt_oss.rules_for, gpt_oss.HUB),
}


def model_name(config: Any) -> str:
    """Return the name of the architecture that these are sizes of."""
    return next(k for k, v in MODELS.items() if isinstance(config, type(v.presets["tiny"])))
