"""Any other model: rules for what both its name and its shape make certain, and for nothing else.

The names are those that most models share. Which axis is which is read from the sizes: the token
table and the norm scales show how wide the residual stream is, and a kernel is taken where exactly
one of its two axes is that wide, so stored (in, out) or (out, in) alike. Routers are not centered.
"""

from typing import Any

from symoptax._routing import ParamRule
from symoptax.routes._tree import Tree

_TABLES = "**/{embed,embedder,embedding,embed_tokens,token_embedder,tok_embeddings,wte}"
_LEAF = "{kernel,w,weight,embedding}"

# What a kernel is, and the names of its wide axis and of the other in the view: rows, columns.
_KERNELS = {
    "**/{gate_proj,up_proj}": ("mlp_in", "neuron", "neuron d"),
    "**/down_proj": ("mlp_down", "neuron", "neuron d"),
    "**/{q_proj,k_proj,v_proj}": ("attention", "out", "out d"),
    "**/o_proj": ("attention", "heads", "d heads"),
    "**/router": ("router_no_shift", "expert", "expert d"),
    "**/lm_head": ("lm_head", "vocab", "vocab d"),
}


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return rules for the leaves of a tree that are certain; other leaves have none.

    Args:
      params: the tree, or its shapes.
      softcap: whether the logits of an untied head are capped, or the loss has a z-loss.
    """
    tree = Tree(params)
    tables = {**tree.find(f"{_TABLES}/{_LEAF}"), **tree.find(_TABLES)}
    scales = {
        name: shape
        for name, shape in tree.find("**/{scale,weight,bias}").items()
        if len(shape) == 1
    }
    result = [ParamRule(name, "other") for name in scales]
    if len(tables) != 1:
        return result
    ((table, shape),) = tables.items()
    widths = {size for (size,) in scales.values()} & set(shape)
    if len(shape) != 2 or len(set(shape)) != 2 or len(widths) != 1:
        return result
    (d,) = widths
    (vocab,) = set(shape) - widths
    heads = {n: s for n, s in _kernels(tree, "**/lm_head").items() if sorted(s) == sorted(shape)}
    stored = "vocab d" if shape == (vocab, d) else "d vocab"
    result.append(
        ParamRule(table, "embedding" if heads else "tied_embedding", f"{stored} -> vocab d")
    )
    for pattern, (role, other, view) in _KERNELS.items():
        for name, kernel in _kernels(tree, pattern).items():
            if kernel.count(d) != 1 or (role == "lm_head" and name not in heads):
                continue
            stored = f"d {other}" if kernel[0] == d else f"{other} d"
            capped = role == "lm_head" and softcap
            result.append(
                ParamRule(name, "lm_head_no_shift" if capped else role, f"{stored} -> {view}")
            )
    return result


def _kernels(tree: Tree, pattern: str) -> dict[str, tuple[int, ...]]:
    found = {**tree.find(pattern), **tree.find(f"{pattern}/{_LEAF}")}
    return {name: shape for name, shape in found.items() if len(shape) == 2}
