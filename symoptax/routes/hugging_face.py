"""Hugging Face Flax (GPT-2, Llama, Gemma, Mistral, BERT, T5), and EasyDeL, which took its names.

Read from transformers/models/*/modeling_flax_*.py (4.x) and easydel/modules, 2026. Heads are packed
in one axis, outermost. GPT-2's Conv1D kernels are stored (out, in). `w1, w2, w3` of Mixtral are
gate, down and up. Phi 3 fuses gate | up and q | k | v as halves and parts side by side. Routers of
Mixtral and Qwen MoE take a softmax over all experts.
"""

from typing import Any

from symoptax._routing import ParamRule
from symoptax._view import MatrixView
from symoptax.routes._tree import Tree, embedding_rules, others


def rules(params: Any, *, softcap: bool = False) -> list[ParamRule]:
    """Return the rules of a parameter tree of Hugging Face Flax or EasyDeL.

    Args:
      params: the tree, or its shapes.
      softcap: whether the logits of an untied head are capped, or the loss has a z-loss.
    """
    tree = Tree(params)
    table = "**/{embed_tokens,wte,word_embeddings,shared}/embedding"
    return [
        *embedding_rules(tree, table, "**/lm_head/kernel", softcap=softcap),
        *_llama(tree),
        *_gpt2(),
        *_bert(),
        *_t5(),
        *others(
            "**/{bias,weight,scale}",
            "**/{input_layernorm,post_attention_layernorm,norm,q_norm,k_norm}/kernel",
        ),
    ]


def _llama(tree: Tree) -> list[ParamRule]:
    fused = []
    for name, shape in tree.find("**/self_attn/qkv_proj/kernel").items():
        queries = tree.beside(name, "o_proj", "kernel")[0]
        keys = (shape[1] - queries) // 2
        view = MatrixView("d out -> out d", sections={"out": (queries, keys, keys)})
        fused.append(ParamRule(name, "attention", view))
    halves = MatrixView("d (gate_up neuron) -> gate_up neuron d", sizes={"gate_up": 2})
    experts = "**/block_sparse_moe/experts"
    return [
        ParamRule("**/self_attn/{q,k,v}_proj/kernel", "attention", "d out -> out d"),
        ParamRule("**/self_attn/o_proj/kernel", "attention", "heads d -> d heads"),
        *fused,
        ParamRule("**/mlp/{gate,up}_proj/kernel", "mlp_in", "d neuron -> neuron d"),
        ParamRule("**/mlp/gate_up_proj/kernel", "mlp_in", halves),
        ParamRule("**/mlp/down_proj/kernel", "mlp_down", "neuron d -> neuron d"),
        ParamRule(f"{experts}/w{{1,3}}/kernel", "expert_in", "expert d neuron -> expert neuron d"),
        ParamRule(f"{experts}/w2/kernel", "expert_down", "expert neuron d -> expert neuron d"),
        ParamRule("**/block_sparse_moe/gate/kernel", "router", "d expert -> expert d"),
    ]


def _gpt2() -> list[ParamRule]:
    qkv = MatrixView("(qkv out) d -> qkv out d", sizes={"qkv": 3})
    return [
        ParamRule("**/h/*/attn/c_attn/kernel", "attention", qkv),
        ParamRule("**/h/*/attn/c_proj/kernel", "attention", "d heads -> d heads"),
        ParamRule("**/h/*/mlp/c_fc/kernel", "mlp_in", "neuron d -> neuron d"),
        ParamRule("**/h/*/mlp/c_proj/kernel", "mlp_down", "d neuron -> neuron d"),
        *others("**/wpe/embedding"),
    ]


def _bert() -> list[ParamRule]:
    layer = "**/encoder/layer/*"
    return [
        ParamRule(
            f"{layer}/attention/self/{{query,key,value}}/kernel", "attention", "d out -> out d"
        ),
        ParamRule(f"{layer}/attention/output/dense/kernel", "attention", "heads d -> d heads"),
        ParamRule(f"{layer}/intermediate/dense/kernel", "mlp_in", "d neuron -> neuron d"),
        ParamRule(f"{layer}/output/dense/kernel", "mlp_down", "neuron d -> neuron d"),
        *others("**/{position_embeddings,token_type_embeddings}/embedding"),
        *others("**/{transform,pooler}/dense/kernel"),
    ]


def _t5() -> list[ParamRule]:
    layer = "**/block/*/layer/*"
    attention = f"{layer}/{{SelfAttention,EncDecAttention}}"
    return [
        ParamRule(f"{attention}/{{q,k,v}}/kernel", "attention", "d out -> out d"),
        ParamRule(f"{attention}/o/kernel", "attention", "heads d -> d heads"),
        ParamRule(
            f"{layer}/DenseReluDense/{{wi,wi_0,wi_1}}/kernel", "mlp_in", "d neuron -> neuron d"
        ),
        ParamRule(f"{layer}/DenseReluDense/wo/kernel", "mlp_down", "neuron d -> neuron d"),
        *others("**/relative_attention_bias/embedding"),
    ]
