"""jax-ml/jax-llm-examples: dataclasses of arrays, without modules.

Read from jax-llm-examples/qwen3/qwen3_jax/model.py, 2026. Names are `layers[i].attn.q`,
`layers[i].ffw.w_gate`; `lm_head` is None in tied models.
"""

from typing import Any

from symoptax._routing import ParamRule
from symoptax.routes._tree import Tree, embedding_rules, others


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return the rules of a dense Qwen3 of jax-llm-examples.

    Args:
      params: the tree, or its shapes.
      softcap: whether the logits of an untied head are capped, or the loss has a z-loss.
    """
    return [
        *embedding_rules(Tree(params), "embedding", "lm_head", softcap=softcap),
        ParamRule("layers/*/attn/{q,k,v}", "attention", "d head k -> (head k) d"),
        ParamRule("layers/*/attn/o", "attention", "head k d -> d (head k)"),
        ParamRule("layers/*/ffw/w_{gate,up}", "mlp_in", "d neuron -> neuron d"),
        ParamRule("layers/*/ffw/w_down", "mlp_down", "neuron d -> neuron d"),
        *others("layers/*/attn/{q,k}_gamma", "layers/*/attn_{pre,post}_gamma", "gamma_final"),
    ]
