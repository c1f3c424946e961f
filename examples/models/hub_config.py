"""The `config.json` of the Hugging Face hub: sizes of a model from it, and back.

A field that says something which a model here does not do is refused, and so is every field that
is not known, unless it is off (null, false, 0 or empty).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from models import gemma3, gpt_oss, olmoe, qwen3
from models.layers import Yarn

Fields = dict[str, Any]


class Hub(NamedTuple):
    """What a model is called on the hub, and its sizes.

    Attributes:
      model_type: the field of that name.
      causal_lm: the class in transformers.
      published: sizes with all that `config.json` does not say, such as losses.
      names: field of the sizes here -> field there.
      only: fields there that have one value in all models here.
      read: takes the other fields out and returns what they mean for the sizes.
      write: the inverse of `read`.
      defaults: of fields there that are not written.
    """

    model_type: str
    causal_lm: str
    published: Any
    names: Mapping[str, str]
    only: Mapping[str, Any]
    read: Callable[[Fields, Fields], Fields]
    write: Callable[[Any], Fields]
    defaults: Mapping[str, Any]


# Of no account for the function that a model computes, or for its parameters.
_IGNORED = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Of the training, which transformers knows nothing of: kept in a field of our own.
_TRAINING = ("balance_coef", "z_coef", "experts")
# Kinds of rotary positions, with the settings of each beside the base.
_PLAIN = {"default": set()}
_YARN = {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def config_from_hugging_face(fields: Mapping[str, Any]) -> Any:
    """Return the sizes that a `config.json` describes: a `Qwen3Config`, `Gemma3Config` and so on.

    Raises:
      ValueError: for a field that is missing, or that asks for what the models here do not have.
    """
    hub = _HUBS.get(fields.get("model_type", ""))
    if hub is None:
        known = ", ".join(_HUBS)
        raise ValueError(f"model_type {fields.get('model_type')!r}: the models here are {known}.")
    rest = {k: v for k, v in {**hub.defaults, **fields}.items() if v is not None}
    if missing := sorted(set(hub.names.values()) - set(rest)):
        raise ValueError(f"config.json of {hub.model_type}: has no {', '.join(missing)}.")
    sizes = {ours: rest.pop(theirs) for ours, theirs in hub.names.items()}
    for name, value in hub.only.items():
        _expect(name, rest.pop(name, value), value)
    sizes |= hub.read(rest, sizes)
    training = rest.pop("symoptax", {})
    sizes |= {name: training[name] for name in _TRAINING if name in training}
    if unknown := {k: v for k, v in rest.items() if v and k not in _IGNORED}:
        listed = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise ValueError(f"config.json of {hub.model_type}: the model here does not have {listed}.")
    return dataclasses.replace(hub.published, **sizes)


def config_to_hugging_face(config: Any) -> Fields:
    """Return the `config.json` of these sizes: the inverse of `config_from_hugging_face`.

    Which tokens begin, end and pad a text is not known, and null.
    """
    (hub,) = (hub for hub in _HUBS.values() if type(hub.published) is type(config))
    training = {name: getattr(config, name) for name in _TRAINING if hasattr(config, name)}
    return {
        "architectures": [hub.causal_lm],
        "model_type": hub.model_type,
        **{theirs: getattr(config, ours) for ours, theirs in hub.names.items()},
        **hub.only,
        **hub.write(config),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **({"symoptax": training} if training else {}),
    }


def _expect(name: str, value: Any, only: Any) -> None:
    if value != only:
        raise ValueError(f"config.json: {name} is {value!r}; the model here has {only!r}.")


def _rope(fields: Fields) -> Fields:
    """Take out the settings of rotary positions, one dictionary since version 5 of transformers."""
    base, scaling = fields.pop("rope_theta"), fields.pop("rope_scaling", {})
    return {"rope_theta": base, **fields.pop("rope_parameters", scaling)}


def _scaling(rope: Fields, kinds: Mapping[str, set[str]]) -> Fields:
    """Check that a rotary scaling is of a known kind, and has the settings of this kind alone."""
    rope = {name: value for name, value in rope.items() if value is not None}
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    if rope.keys() != {"rope_theta", *kinds.get(kind, ())} or kind not in kinds:
        raise ValueError(
            f"config.json: rotary positions {kind!r} with {', '.join(sorted(rope))}; the model "
            f"here has {' or '.join(map(repr, kinds))} with rope_theta"
            + "".join(f", {name}" for name in sorted(set().union(*kinds.values())))
        )
    return rope


def _layer_types(fields: Fields, expected: Sequence[str]) -> None:
    types = fields.pop("layer_types", expected)
    if list(types) != list(expected):
        raise ValueError(f"config.json: layer_types {types}; the model here has {expected}.")


def _read_qwen3(fields: Fields, sizes: Fields) -> Fields:
    if not fields.get("use_sliding_window"):
        fields.pop("sliding_window", None)
    _layer_types(fields, [_FULL] * sizes["num_layers"])
    return {"rope_base": _scaling(_rope(fields), _PLAIN)["rope_theta"]}


def _write_qwen3(config: qwen3.Qwen3Config) -> Fields:
    return {"rope_theta": config.rope_base, "rope_scaling": None, "use_sliding_window": False}


def _gemma3_layers(num_layers: int, global_every: int) -> list[str]:
    return [_SLIDING if (i + 1) % global_every else _FULL for i in range(num_layers)]


def _read_gemma3(fields: Fields, sizes: Fields) -> Fields:
    every = fields.pop("_sliding_window_pattern", 6)
    every = fields.pop("sliding_window_pattern", every)
    if _FULL in (types := fields.get("layer_types", [])):
        every = types.index(_FULL) + 1
    _layer_types(fields, _gemma3_layers(sizes["num_layers"], every))
    rope, local = _rope(fields), {"rope_theta": fields.pop("rope_local_base_freq")}
    rope, local = rope.get(_FULL, rope), rope.get(_SLIDING, local)
    rope = _scaling(rope, _PLAIN | {"linear": {"factor"}})
    return {
        "global_every": every,
        "rope_base": rope["rope_theta"],
        "rope_factor": rope.get("factor", 1.0),
        "local_rope_base": _scaling(local, _PLAIN)["rope_theta"],
    }


def _write_gemma3(config: gemma3.Gemma3Config) -> Fields:
    scaling = {"rope_type": "linear", "factor": float(config.rope_factor)}
    return {
        "rope_theta": config.rope_base,
        "rope_local_base_freq": config.local_rope_base,
        "rope_scaling": scaling if config.rope_factor != 1 else None,
        "sliding_window_pattern": config.global_every,
        "layer_types": _gemma3_layers(config.num_layers, config.global_every),
    }


def _read_olmoe(fields: Fields, sizes: Fields) -> Fields:
    heads = sizes["num_heads"]
    _expect("num_key_value_heads", fields.pop("num_key_value_heads", heads), heads)
    return {"rope_base": _scaling(_rope(fields), _PLAIN)["rope_theta"]}


def _write_olmoe(config: olmoe.OlmoeConfig) -> Fields:
    return {
        "num_key_value_heads": config.num_heads,
        "rope_theta": config.rope_base,
        "rope_scaling": None,
    }


def _gpt_oss_layers(num_layers: int) -> list[str]:
    return [_FULL if i % 2 else _SLIDING for i in range(num_layers)]


def _read_gpt_oss(fields: Fields, sizes: Fields) -> Fields:
    quantization = fields.pop("quantization_config", {})
    _expect("quant_method", quantization.get("quant_method", "mxfp4"), "mxfp4")
    active = sizes["num_active"]
    _expect("experts_per_token", fields.pop("experts_per_token", active), active)
    _layer_types(fields, _gpt_oss_layers(sizes["num_layers"]))
    rope = _scaling({"beta_fast": 32.0, "beta_slow": 1.0, **_rope(fields)}, {"yarn": _YARN})
    _expect("truncate", rope["truncate"], False)
    length = rope["original_max_position_embeddings"]
    _expect("initial_context_length", fields.pop("initial_context_length", length), length)
    yarn = Yarn(rope["factor"], length, rope["beta_fast"], rope["beta_slow"])
    return {"rope_base": rope["rope_theta"], "yarn": yarn}


def _write_gpt_oss(config: gpt_oss.GptOssConfig) -> Fields:
    return {
        "rope_theta": config.rope_base,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": config.yarn.factor,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "original_max_position_embeddings": config.yarn.original_length,
            "truncate": False,
        },
        "max_position_embeddings": round(config.yarn.factor * config.yarn.original_length),
        "layer_types": _gpt_oss_layers(config.num_layers),
    }


_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
}
_GROUPS = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_TIED = {"tied": "tie_word_embeddings"}
_HUBS = {
    hub.model_type: hub
    for hub in (
        Hub(
            "qwen3",
            "Qwen3ForCausalLM",
            qwen3.QWEN3_0_6B,
            {**_SIZES, **_GROUPS, **_TIED},
            {"hidden_act": "silu", "attention_bias": False},
            _read_qwen3,
            _write_qwen3,
            {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        ),
        Hub(
            "gemma3_text",
            "Gemma3ForCausalLM",
            gemma3.GEMMA3_1B,
            {
                **_SIZES,
                **_GROUPS,
                **_TIED,
                "query_scalar": "query_pre_attn_scalar",
                "window": "sliding_window",
            },
            {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
            _read_gemma3,
            _write_gemma3,
            {
                "tie_word_embeddings": True,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
            },
        ),
        Hub(
            "olmoe",
            "OlmoeForCausalLM",
            olmoe.OLMOE_1B_7B,
            {**_SIZES, "num_experts": "num_experts", "num_active": "num_experts_per_tok"},
            {
                "hidden_act": "silu",
                "attention_bias": False,
                "norm_topk_prob": False,
                "tie_word_embeddings": False,
            },
            _read_olmoe,
            _write_olmoe,
            {"rms_norm_eps": 1e-5, "rope_theta": 1e4},
        ),
        Hub(
            "gpt_oss",
            "GptOssForCausalLM",
            gpt_oss.GPT_OSS_20B,
            {
                **_SIZES,
                **_GROUPS,
                "num_experts": "num_local_experts",
                "num_active": "num_experts_per_tok",
                "window": "sliding_window",
                "swiglu_limit": "swiglu_limit",
                "swiglu_alpha": "swiglu_alpha",
            },
            {"hidden_act": "silu", "attention_bias": True, "tie_word_embeddings": False},
            _read_gpt_oss,
            _write_gpt_oss,
            {
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
            },
        ),
    )
}
