"""Google's gemma (`gm.nn`, Gemma 1 to 4), with LoRA and vision; and big_vision's scanned PaliGemma.

Read from gemma/gm/nn/{_layers,_modules,_transformer}.py and peft/_lora.py, 2026. Einsum weights
have heads first; keys and values are stacked. `gating_einsum` is (2, d, ff) or, with
`transpose_gating_einsum`, (2, ff, d): the `linear` beside it tells. Logits are always tied. Layers
of big_vision's models are scanned along axis 0.
"""

from typing import Any

from symoptax._routing import ParamRule, RoutingError
from symoptax.routes._tree import Tree, Views, embedding_rules, others
from symoptax.routes.big_vision import encoder_rules


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return the rules of a parameter tree of gemma.

    Args:
      params: the tree, or its shapes.
      softcap: no matter here, as heads are tied.
    """
    tree = Tree(params)
    return [
        *embedding_rules(tree, "**/embedder/input_embedding", "**/lm_head/w", softcap=softcap),
        ParamRule(
            "**/embedder/per_layer_embeddings", "embedding", "vocab layer p -> layer vocab p"
        ),
        *attention_rules("w"),
        *(
            ParamRule(name, "mlp_in", _gating(name, shape, tree.beside(name, "linear")))
            for name, shape in tree.find("**/mlp/gating_einsum").items()
        ),
        ParamRule(
            "**/mlp/linear",
            "mlp_down",
            ["neuron d -> neuron d", "layer neuron d -> layer neuron d"],
        ),
        *encoder_rules("**/vision_encoder/siglip_encoder/"),
        *others(
            "**/{scale,skip_scale,bias}",
            "**/lora/{a,b}",
            "**/embedder/{mm_input_projection,per_layer_model_projection}/w",
            "**/{per_layer_input_gate,per_layer_projection}/w",
        ),
    ]


def attention_rules(leaf: str) -> list[ParamRule]:
    """Return the rules of attention in einsums, whose weights are called `leaf`."""
    heads_first = ["head d k -> (head k) d", "layer head d k -> layer (head k) d"]
    stacked = ["part head d k -> part (head k) d", "layer part head d k -> layer part (head k) d"]
    return [
        ParamRule(f"**/{{q,k,v}}_einsum/{leaf}", "attention", heads_first),
        ParamRule(f"**/{{kv,qkv}}_einsum/{leaf}", "attention", stacked),
        ParamRule(
            f"**/attn_vec_einsum/{leaf}",
            "attention",
            ["head k d -> d (head k)", "layer head k d -> layer d (head k)"],
        ),
    ]


def _gating(name: str, shape: tuple[int, ...], linear: tuple[int, ...]) -> Views:
    straight = ["part d neuron -> part neuron d", "layer part d neuron -> layer part neuron d"]
    transposed = ["part neuron d -> part neuron d", "layer part neuron d -> layer part neuron d"]
    neurons, d = linear[-2], linear[-1]
    if neurons == d:
        raise RoutingError(
            f"{name} {shape}: (2, d, ff) and (2, ff, d) look alike beside a `linear` of shape "
            f"{linear}; write a rule for it yourself."
        )
    return transposed if shape[-2:] == (neurons, d) else straight
