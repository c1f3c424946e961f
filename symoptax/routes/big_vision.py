"""big_vision's ViT, and the SigLIP encoder that others took from it.

Read from big_vision/models/vit.py, 2026. Two dense layers by number, GELU between them; the first
`kernel` under `embedding` is the convolution that cuts patches; the head classifies through a
softmax over its rows.
"""

from typing import Any

from symoptax._routing import ParamRule
from symoptax.routes._tree import Tree, others


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return the rules of a ViT.

    Args:
      params: the tree, or its shapes.
      softcap: whether the loss sees the shift of the head: a sigmoid loss, or a z-loss.
    """
    role = "lm_head_no_shift" if softcap else "lm_head"
    head = [ParamRule("**/head/kernel", role, "width vocab -> vocab width")]
    return [
        *encoder_rules("**/"),
        *(head if Tree(params).has("**/head/kernel") else []),
        *others("**/{scale,bias}"),
    ]


def encoder_rules(prefix: str) -> list[ParamRule]:
    """Return the rules of an encoder below a path, without those of scales and biases."""
    return [
        ParamRule(
            f"{prefix}**/MultiHeadDotProductAttention_*/{{query,key,value}}/kernel",
            "attention",
            "width head k -> (head k) width",
        ),
        ParamRule(
            f"{prefix}**/MultiHeadDotProductAttention_*/out/kernel",
            "attention",
            "head k width -> width (head k)",
        ),
        ParamRule(
            f"{prefix}**/MlpBlock_*/Dense_0/kernel", "mlp_in", "width neuron -> neuron width"
        ),
        ParamRule(
            f"{prefix}**/MlpBlock_*/Dense_1/kernel", "mlp_down", "neuron width -> neuron width"
        ),
        *others(
            f"{prefix}embedding/kernel",
            f"{prefix}{{pos_embedding,cls}}",
            f"{prefix}MAPHead_*/probe",
        ),
    ]
