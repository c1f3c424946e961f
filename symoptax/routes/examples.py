"""The models of this repository's `examples/models`, in Flax NNX.

Read from examples/models/{qwen3,olmoe}.py, which have the same rules beside them. Qwen3 packs heads
in one axis and OLMoE has an axis for them; OLMoE's experts are bare leaves, its router takes a
softmax over all of them.
"""

from typing import Any

from symoptax._routing import ParamRule
from symoptax.routes._tree import Tree, embedding_rules, others


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return the rules of a model of the examples.

    Args:
      params: the tree, or its shapes.
      softcap: whether the logits of an untied head are capped, or the loss has a z-loss.
    """
    layer = "**/layers/*"
    return [
        *embedding_rules(Tree(params), "**/embed/embedding", "**/lm_head/kernel", softcap=softcap),
        ParamRule(
            f"{layer}/attn/{{q,k,v}}_proj/kernel",
            "attention",
            ["d out -> out d", "d head k -> (head k) d"],
        ),
        ParamRule(
            f"{layer}/attn/o_proj/kernel",
            "attention",
            ["heads d -> d heads", "head k d -> d (head k)"],
        ),
        ParamRule(f"{layer}/mlp/{{gate,up}}_proj/kernel", "mlp_in", "d neuron -> neuron d"),
        ParamRule(f"{layer}/mlp/down_proj/kernel", "mlp_down", "neuron d -> neuron d"),
        ParamRule(f"{layer}/moe/router/kernel", "router", "d expert -> expert d"),
        ParamRule(f"{layer}/moe/{{gate,up}}", "expert_in", "expert d neuron -> expert neuron d"),
        ParamRule(f"{layer}/moe/down", "expert_down", "expert neuron d -> expert neuron d"),
        *others("**/scale"),
    ]
