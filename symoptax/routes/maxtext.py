"""MaxText (nnx and linen, scanned and not).

Read from src/maxtext/layers/{attentions,linears,moe,embeddings}.py and models/*.py, August 2026.
Scanned layers have their axis second, in norm scales too (`param_scan_axis=1`). `gate` is the
router. `wi` is a lone up projection in GPT-3, and gate and up stacked where MLPs are fused;
`qkv_proj` has an axis of three in GPT-3, and heads side by side where attention is fused. Routers
of DeepSeek and Llama 4 score by a sigmoid.
"""

from typing import Any

from symoptax._routing import ParamRule, RoutingError
from symoptax._view import MatrixView
from symoptax.routes._tree import Tree, Views, embedding_rules, others

_ATTENTION = "{self_attention,GptOssAttention,attention}"
_EXPERTS = "{MoeBlock_0,moe_block,GptOssMlp}"


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return the rules of a MaxText parameter tree.

    Args:
      params: the tree, or its shapes.
      softcap: whether the logits of an untied head are capped, or the loss has a z-loss.
    """
    tree = Tree(params)
    return [
        *embedding_rules(
            tree, "**/token_embedder/embedding", "**/logits_dense/kernel", softcap=softcap
        ),
        *_attention(tree),
        *_mlps(tree),
        ParamRule(
            f"**/{_EXPERTS}/wi_{{0,1}}",
            "expert_in",
            [
                "expert d neuron -> expert neuron d",
                "expert layer d neuron -> expert layer neuron d",
            ],
        ),
        ParamRule(
            f"**/{_EXPERTS}/wo",
            "expert_down",
            [
                "expert neuron d -> expert neuron d",
                "expert layer neuron d -> expert layer neuron d",
            ],
        ),
        *(ParamRule(path, role, _ROUTER) for path, role in _routers(tree).items()),
        *others(
            "**/{scale,bias,sinks}",
            "**/{wi_0,wi_1,wo}_bias",
            "**/position_embedder/embedding",
        ),
    ]


_ROUTER = ["d expert -> expert d", "d layer expert -> layer expert d"]


def _routers(tree: Tree) -> dict[str, str]:
    """Routers outside of the families that use a softmax are not centered."""
    softmax = [f"**/{layers}/{_EXPERTS}/gate/kernel" for layers in ("layers", "layers_*")]
    plain = {name for pattern in softmax for name in tree.find(pattern)}
    return {
        name: "router" if name in plain else "router_no_shift"
        for name in tree.find(f"**/{_EXPERTS}/gate/kernel")
    }


def _attention(tree: Tree) -> list[ParamRule]:
    result = [
        ParamRule(f"**/{_ATTENTION}/{name}/kernel", "attention", views)
        for name, views in {
            "{query,key,value}": [
                "d head k -> (head k) d",
                "d layer head k -> layer (head k) d",
            ],
            "out": ["head k d -> d (head k)", "head layer k d -> layer d (head k)"],
            "{wq_a,wq}": ["d rank -> rank d", "d layer rank -> layer rank d"],
            "wq_b": ["rank head k -> (head k) rank", "rank layer head k -> layer (head k) rank"],
        }.items()
    ]
    for name, shape in tree.find(f"**/{_ATTENTION}/qkv_proj/kernel").items():
        out = tree.beside(name, "out", "kernel")
        result.append(ParamRule(name, "attention", _fused_attention(shape, out)))
    for name, shape in tree.find(f"**/{_ATTENTION}/wkv_a/kernel").items():
        latent = tree.beside(name, "kv_norm", "scale")[0]
        parts = {"rank": (latent, shape[-1] - latent)}  # the latent, then the rotary key
        result.append(ParamRule(name, "attention", _layered("d | rank -> rank d", shape, 2, parts)))
    for name, shape in tree.find(f"**/{_ATTENTION}/wkv_b/kernel").items():
        latent, value = (
            tree.beside(name, "kv_norm", "scale")[0],
            tree.beside(name, "out", "kernel")[-2],
        )
        if shape[0] != latent:
            raise RoutingError(f"{name} {shape}: its first axis should be the latent of {latent}.")
        parts = {"k": (shape[-1] - value, value)}  # the keys without positions, then the values
        view = _layered("rank | head k -> (head k) rank", shape, 3, parts)
        result.append(ParamRule(name, "attention", view))
    return result


def _fused_attention(shape: tuple[int, ...], out: tuple[int, ...]) -> Views:
    scanned = len(out) == 4
    if len(shape) == 4 + scanned:  # an axis of three
        return [
            "d qkv head k -> qkv (head k) d",
            "d layer qkv head k -> layer qkv (head k) d",
        ]
    heads, queries = shape[-2], out[0]
    keys = (heads - queries) // 2
    return _layered("d | head k -> (head k) d", shape, 3, {"head": (queries, keys, keys)})


def _mlps(tree: Tree) -> list[ParamRule]:
    plain = ["d neuron -> neuron d", "d layer neuron -> layer neuron d"]
    result = [
        ParamRule("**/{mlp,shared_experts}/wi_{0,1}/kernel", "mlp_in", plain),
        ParamRule(
            "**/{mlp,shared_experts}/wo/kernel",
            "mlp_down",
            ["neuron d -> neuron d", "neuron layer d -> layer neuron d"],
        ),
    ]
    for name, shape in tree.find("**/{mlp,shared_experts}/wi/kernel").items():
        stacked = len(shape) > len(tree.beside(name, "wo", "kernel"))
        fused = [
            "d gate_up neuron -> gate_up neuron d",
            "d layer gate_up neuron -> layer gate_up neuron d",
        ]
        result.append(ParamRule(name, "mlp_in", fused if stacked else plain))
    return result


def _layered(
    pattern: str, shape: tuple[int, ...], axes: int, sections: dict[str, tuple[int, ...]]
) -> MatrixView:
    """Return a view whose layer axis, if the leaf has one, stands where the pattern has a bar."""
    left, right = pattern.split(" -> ")
    if len(shape) == axes:
        return MatrixView(f"{left.replace(' | ', ' ')} -> {right}", sections=sections)
    return MatrixView(f"{left.replace('|', 'layer')} -> layer {right}", sections=sections)
