"""Tunix (nnx): Llama 3, Qwen2, Qwen3 and its mixture of experts, Gemma 3.

Read from tunix/models/{llama3,qwen2,qwen3,gemma3}/model.py, 2026. Attention weights are einsums
called `w`, as norm scales are; expert stacks are bare leaves with the names of dense kernels. Only
the absence of `lm_head` tells a tied model. Qwen3's routers take a softmax over all experts.
"""

from typing import Any

from symoptax._routing import ParamRule
from symoptax.routes._tree import Tree, embedding_rules, others
from symoptax.routes.gemma import attention_rules


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return the rules of a parameter tree of Tunix.

    Args:
      params: the tree, or its shapes.
      softcap: whether the logits of an untied head are capped, or the loss has a z-loss.
    """
    return [
        *embedding_rules(
            Tree(params), "**/embedder/input_embedding", "**/lm_head/w", softcap=softcap
        ),
        ParamRule("**/attn/{q,k,v}_proj/w", "attention", "d head k -> (head k) d"),
        ParamRule("**/attn/o_proj/w", "attention", "head k d -> d (head k)"),
        *attention_rules("w"),
        ParamRule("**/mlp/{gate,up}_proj/kernel", "mlp_in", "d neuron -> neuron d"),
        ParamRule("**/mlp/down_proj/kernel", "mlp_down", "neuron d -> neuron d"),
        ParamRule("**/mlp/{gate,up}_proj", "expert_in", "expert d neuron -> expert neuron d"),
        ParamRule("**/mlp/down_proj", "expert_down", "expert neuron d -> expert neuron d"),
        ParamRule("**/mlp/router/kernel", "router", "d expert -> expert d"),
        *others(
            "**/{input_layernorm,post_attention_layernorm,final_norm,q_norm,k_norm}/w",
            "**/scale",
            "**/attn/{q,k,v}_bias",
        ),
    ]
