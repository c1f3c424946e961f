"""Models of real libraries: routed by their own tree, audited, and trained.

`pip install -e ".[dev,libraries]"` brings the libraries, and TensorFlow with them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import symoptax

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

VOCAB, LENGTH = 101, 12
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)


def gemma_2():
    """Google's gemma: linen, tied, logits capped, local and global attention."""
    gm = pytest.importorskip("gemma.gm")
    modules = pytest.importorskip("gemma.gm.nn._modules")
    config = pytest.importorskip("gemma.gm.nn._config").TransformerConfig(
        num_embed=VOCAB,
        embed_dim=24,
        hidden_dim=40,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(modules.AttentionType.LOCAL_SLIDING, modules.AttentionType.GLOBAL),
        sliding_window_size=8,
        transpose_gating_einsum=True,
    )
    model = gm.nn.Transformer(config=config, dtype=jnp.float32)
    params = model.init(jax.random.key(0), jnp.asarray(TOKENS))["params"]
    return params, lambda params, tokens: model.apply({"params": params}, tokens).logits


def tunix_qwen3(num_experts=None):
    """Tunix's Qwen3: nnx, untied, dense or a mixture of experts."""
    qwen3 = pytest.importorskip("tunix.models.qwen3.model")
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB,
        embed_dim=24,
        hidden_dim=40,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        num_experts=num_experts,
        num_experts_per_tok=num_experts and 2,
    )
    graphdef, params, rest = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def apply(params, tokens):
        length = tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.broadcast_to(
            jnp.tril(jnp.ones((length, length), bool)), (len(tokens), length, length)
        )
        logits, _ = nnx.merge(graphdef, params, rest)(tokens, positions, None, mask)
        return logits

    return params, apply


@pytest.fixture(autouse=True)
def as_users_have_it():
    """The libraries broadcast in silence, which is forbidden in the other tests."""
    with jax.numpy_rank_promotion("allow"):
        yield


MODELS = {
    "gemma": (gemma_2, "gemma"),
    "tunix": (tunix_qwen3, "Tunix"),
    "tunix, experts": (lambda: tunix_qwen3(num_experts=6), "Tunix"),
}


@pytest.mark.parametrize(("build", "library"), MODELS.values(), ids=MODELS.keys())
def test_routed_audited_and_trained(build, library):
    params, apply = build()
    report = symoptax.routing_report(params, "auto")
    assert report.library == library

    def loss(params, tokens):
        losses = optax.softmax_cross_entropy_with_integer_labels
        logits = apply(params, tokens).astype(jnp.float32)
        return losses(logits[:, :-1], tokens[:, 1:]).mean()

    audit = symoptax.audit(loss, params, TOKENS, "auto")
    assert audit.ok, str(audit)
    assert sum(row.verdict == "holds" for row in audit.rows) > 10
    tx = symoptax.layerwise(4e-3, "auto")

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params, TOKENS)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = tx.init(params), []
    for _ in range(20):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < values[0] - 0.5
    assert np.all(np.isfinite(values))
