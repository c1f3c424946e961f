"""The models of this repository's `examples/models`, in Flax NNX.

Read from examples/models/{qwen3,gemma3,olmoe,gpt_oss}.py, which have the same rules beside them.
Qwen3 packs heads in one axis and the others have an axis for them; experts are bare leaves, gate
and up of gpt-oss interleaved in one. Routers take a softmax over all experts or over the chosen
ones, which does not see their shift; a z-loss of the router would, and does not show in a tree.
"""

from typing import Any

from symoptax._routing import ParamRule
from symoptax._view import MatrixView
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
        ParamRule(f"{layer}/moe/gate_up", "expert_in", _INTERLEAVED),
        ParamRule(f"{layer}/moe/down", "expert_down", "expert neuron d -> expert neuron d"),
        *others(
            "**/scale",
            f"{layer}/{{attn,moe}}/*/bias",
            f"{layer}/attn/sinks",
            f"{layer}/moe/{{gate_up,down}}_bias",
        ),
    ]


_INTERLEAVED = MatrixView(
    "expert d (neuron gate_up) -> expert gate_up neuron d", sizes={"gate_up": 2}
)
