"""Write tiny random models of transformers, with tokens and their logits, beside this file.

    uv venv /tmp/hugging_face
    uv pip install --python /tmp/hugging_face/bin/python torch "transformers==4.57.6"
    /tmp/hugging_face/bin/python tests/data/make_hugging_face_logits.py

Sizes differ from each other wherever they may, so that no axis passes for another, and the sequence
is longer than a window. Weights are larger than at initialisation: every norm, bias, sink and clamp
shows in the logits.
"""

from pathlib import Path

import numpy as np

SHARED = {"vocab_size": 64, "hidden_size": 16, "attn_implementation": "eager"}
MODELS = {
    "qwen3": (
        "Qwen3",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 3,
            "intermediate_size": 24,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "query_pre_attn_scalar": 5,
            "sliding_window": 5,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 12,
            "num_attention_heads": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
        },
    ),
}


def size_of(name: str, shape: tuple[int, ...]) -> float:
    """Return the standard deviation of a weight."""
    if len(shape) == 1 or name.endswith("bias"):
        return 0.5
    if "embed_tokens" in name:
        return 1.0
    if "gate_up_proj" in name:  # a quarter of its outputs is then clamped
        return 6 / 16**0.5
    return 1.5 / 16**0.5


def main() -> None:
    """Write one archive per model."""
    # The tests import this module where neither is installed.
    import torch
    import transformers

    torch.manual_seed(0)
    for file, (name, sizes) in MODELS.items():
        config = getattr(transformers, f"{name}Config")(**SHARED, **sizes)
        model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                centre = 1.0 if path.endswith("norm.weight") and name != "Gemma3Text" else 0.0
                noise = torch.randn(parameter.shape) * size_of(path, tuple(parameter.shape))
                parameter.copy_(centre + noise)
            tokens = torch.randint(0, 64, (2, 20))
            logits = model(tokens, use_cache=False).logits
        weights = model.state_dict()
        if config.tie_word_embeddings:
            del weights["lm_head.weight"]
        np.savez_compressed(
            Path(__file__).with_name(f"hugging_face_logits_{file}.npz"),
            tokens=tokens.numpy().astype(np.int32),
            logits=logits.numpy(),
            **{path: weight.numpy() for path, weight in weights.items()},
        )


if __name__ == "__main__":
    main()
