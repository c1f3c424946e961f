"""Flax's own examples: Gemma (nnx) and the language model lm1b (linen).

Read from flax/examples/{gemma,lm1b_nnx,lm1b}, 2026. In lm1b the table is `Embed_0` and the head
`logitdense`, absent where `logits_via_embedding`; in Gemma attention is as in google-deepmind's,
its weights called `kernel`.
"""

from typing import Any

from symoptax._routing import ParamRule
from symoptax.routes._tree import Tree, embedding_rules, others
from symoptax.routes.gemma import attention_rules


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return the rules of a parameter tree of these examples.

    Args:
      params: the tree, or its shapes.
      softcap: whether the logits of an untied head are capped, or the loss has a z-loss.
    """
    attention = "**/MultiHeadDotProductAttention_*"
    return [
        *embedding_rules(
            Tree(params),
            "**/{embedder,Embed_0}/embedding",
            "**/logitdense/kernel",
            softcap=softcap,
        ),
        *attention_rules("kernel"),
        ParamRule(f"{attention}/{{query,key,value}}/kernel", "attention", "d head k -> (head k) d"),
        ParamRule(f"{attention}/out/kernel", "attention", "head k d -> d (head k)"),
        ParamRule("**/mlp/{gate,up}_proj/kernel", "mlp_in", "d neuron -> neuron d"),
        ParamRule("**/mlp/down_proj/kernel", "mlp_down", "neuron d -> neuron d"),
        ParamRule("**/MlpBlock_*/Dense_0/kernel", "mlp_in", "d neuron -> neuron d"),
        ParamRule("**/MlpBlock_*/Dense_1/kernel", "mlp_down", "neuron d -> neuron d"),
        *others("**/{scale,bias,pos_embedding}"),
    ]
