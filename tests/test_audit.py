"""The audit: what it says of true rules on many models, and every planted fault found, alone."""

import dataclasses
import functools
import importlib
import json
import math
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import symoptax
import symoptax._audit.audit as audit_module
from symoptax import MatrixView, ParamRule
from symoptax._audit.permutations import _moving
from symoptax._audit.probe import Probe
from symoptax._audit.report import AuditReport, AuditRow

# Every leaf of a layer: its role, its axes as stored, and as they form matrices.
ATTENTION = {
    "attn/q/kernel": ("attention", "d head k", "(head k) d"),
    "attn/k/kernel": ("attention", "d kv_head k", "(kv_head k) d"),
    "attn/v/kernel": ("attention", "d kv_head k", "(kv_head k) d"),
    "attn/o/kernel": ("attention", "head k d", "d (head k)"),
}
LAYER = {
    "attn/norm/scale": ("other", "d", ""),
    **ATTENTION,
    "mlp/norm/scale": ("other", "d", ""),
    "mlp/gate/kernel": ("mlp_in", "d neuron", "neuron d"),
    "mlp/up/kernel": ("mlp_in", "d neuron", "neuron d"),
    "mlp/down/kernel": ("mlp_down", "neuron d", "neuron d"),
    "moe/norm/scale": ("other", "d", ""),
    "moe/router/kernel": ("router", "d expert", "expert d"),
    "moe/gate/kernel": ("expert_in", "expert d inner", "expert inner d"),
    "moe/up/kernel": ("expert_in", "expert d inner", "expert inner d"),
    "moe/down/kernel": ("expert_down", "expert inner d", "expert inner d"),
}
BIASES = {
    "attn/q": "head k",
    "attn/k": "kv_head k",
    "attn/v": "kv_head k",
    "mlp/gate": "neuron",
    "mlp/up": "neuron",
    "mlp/down": "d",
    "moe/router": "expert",
    "moe/gate": "expert inner",
    "moe/up": "expert inner",
    "moe/down": "expert d",
}
SHARED = {
    "moe/shared/gate/kernel": ("mlp_in", "d inner", "inner d"),
    "moe/shared/up/kernel": ("mlp_in", "d inner", "inner d"),
    "moe/shared/down/kernel": ("mlp_down", "inner d", "inner d"),
}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A small decoder, with what makes claims of rules false as options."""

    vocab: int = 24
    d: int = 16
    neuron: int = 20
    expert: int = 4
    inner: int = 10  # neurons of an expert
    layer: int = 1
    head: int = 4
    kv_head: int = 2
    k: int = 6
    gate_up: int = 2
    tied: bool = False
    cap: float = 0.0
    z_loss: float = 0.0
    router: str = "softmax"  # "top_k": then softmax; "sigmoid"; "biased": a bias selects
    router_z: float = 0.0
    balance: float = 0.0
    groups: int = 1  # all experts are chosen from one of these
    always: int = 0  # so many experts, the last ones, are always chosen
    valid: int = 0  # so many rows of the vocabulary are no padding
    texts: bool = False  # positions and segments in the batch
    shared: bool = False
    bias: bool = False
    scan: int | None = None  # where the layer axis is
    fused: bool = False  # gate and up in one kernel
    packed: bool = False  # heads and k in one stored axis
    interleaved: bool = False  # the query heads of one key head are not side by side

    def leaves(self):
        """Return role, stored axes and matrix axes of every leaf."""
        layer = LAYER | (SHARED if self.shared else {})
        if self.fused:
            layer = {
                n: x for n, x in layer.items() if n not in ("mlp/gate/kernel", "mlp/up/kernel")
            }
            layer["mlp/gate_up/kernel"] = ("mlp_in", "d (gate_up neuron)", "gate_up neuron d")
        if self.bias:
            layer |= {f"{name}/bias": ("other", axes, "") for name, axes in BIASES.items()}
        if self.router == "biased":
            layer |= {"moe/router/selection": ("other", "expert", "")}
        if self.router == "sigmoid" or self.router_z:
            layer |= {"moe/router/kernel": ("router_no_shift", *LAYER["moe/router/kernel"][1:])}
        head = "lm_head_no_shift" if self.cap or self.z_loss else "lm_head"
        leaves = {
            "embed": ("tied_embedding" if self.tied else "embedding", "vocab d", "vocab d"),
            "final/scale": ("other", "d", ""),
            **({} if self.tied else {"lm_head": (head, "d vocab", "vocab d")}),
        }
        for name, (role, stored, matrix) in layer.items():
            if self.packed and name.startswith("attn"):
                stored = re.sub(r"(kv_head|head) k", r"(\1 k)", stored)
            axes = re.findall(r"\(.*?\)|\w+", stored)
            if self.scan is None:
                leaves |= {f"layers/{i}/{name}": (role, stored, matrix) for i in range(self.layer)}
            else:
                axes.insert(self.scan, "layer")
                leaves[f"layers/{name}"] = (role, " ".join(axes), matrix and f"layer {matrix}")
        return leaves

    def sizes(self, axes):
        return [math.prod(getattr(self, name) for name in re.findall(r"\w+", a)) for a in axes]

    def params(self):
        rng, params = np.random.default_rng(0), {}
        for name, (role, stored, _) in self.leaves().items():
            shape = self.sizes(re.findall(r"\(.*?\)|\w+", stored))
            scale = 1.0 if role == "other" or "embed" in role else 0.4
            value = scale * rng.normal(size=shape) + name.endswith("scale")
            params[name] = jnp.asarray(value, jnp.float32)
        return params

    def rules(self, changes=None, valid_rows=True):
        """Return the true rules, or with some leaves' (role, stored axes, matrix axes) changed."""
        sizes = {name: getattr(self, name) for name in ("k", "gate_up")}
        rules = []
        for name, true in self.leaves().items():
            role, stored, matrix = (changes or {}).get(re.sub(r"layers/(\d+/)?", "", name), true)
            packed = re.findall(r"\w+", "".join(re.findall(r"\(.*?\)", stored)))
            view = MatrixView(
                f"{stored} -> {matrix}" if matrix else "a b -> a b",
                {axis: size for axis, size in sizes.items() if axis in packed},
                valid_rows=self.valid if valid_rows and self.valid and name == "lm_head" else None,
            )
            rules.append(ParamRule(name, role, view if matrix else None))
        return rules

    def batch(self):
        shape = (2, 9)
        tokens = np.random.default_rng(1).integers(1, min(self.vocab, 20), shape)
        batch = {"tokens": jnp.asarray(tokens)}
        if self.texts:
            places = np.arange(8) % 5
            batch["positions"] = jnp.asarray(np.stack([places, places]))
            batch["segments"] = jnp.asarray(np.stack([np.arange(8) // 5] * 2))
        return batch

    def loss(self, params, batch):
        """Return the loss of the next tokens, with what the options add."""
        tokens = batch["tokens"]
        x, extra = params["embed"][tokens[:, :-1]], 0.0
        places = batch.get("positions", jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2]))
        mask = places[:, :, None] >= places[:, None, :]
        if "segments" in batch:
            texts = batch["segments"]
            mask &= texts[:, :, None] == texts[:, None, :]

        def layer(x, w):
            x = x + self.attention(w, norm(x, w["attn/norm/scale"]), mask)
            x = x + gated(w, "mlp", norm(x, w["mlp/norm/scale"]), "d,dn->n", "n,nd->d")
            y, more = self.mixture(w, norm(x, w["moe/norm/scale"]))
            return x + y, more

        if self.scan is None:
            for index in range(self.layer):
                x, more = layer(x, self.weights(params, f"layers/{index}/"))
                extra += more
        else:
            x, more = jax.lax.scan(layer, x, self.weights(params, "layers/"))
            extra = jnp.sum(more)
        head = params["embed"].T if self.tied else params["lm_head"]
        logits = jnp.einsum("btd,dv->btv", norm(x, params["final/scale"]), head)
        if self.cap:
            logits = self.cap * jnp.tanh(logits / self.cap)
        if self.valid:
            exists = jnp.arange(self.vocab)[None, None] < self.valid
            logits = jnp.where(exists, logits, -jnp.inf)
        z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(z - picked) + self.z_loss * jnp.mean(z**2) + extra

    def weights(self, params, prefix):
        """Return the leaves of one layer, or of all, with one axis for each name."""
        found = {}
        for name, (_, stored, _) in self.leaves().items():
            if name.startswith(prefix):
                leaf, names = params[name], re.findall(r"\w+", stored)
                if self.scan is not None:
                    leaf = jnp.moveaxis(leaf, self.scan, 0)
                    names.sort(key=lambda axis: axis != "layer")
                found[name.removeprefix(prefix)] = leaf.reshape(self.sizes(names))
        return found

    def attention(self, w, x, mask):
        q, k, v = (affine(w, f"attn/{name}", x, "d,dhk->hk") for name in "qkv")
        each = self.head // self.kv_head
        if self.interleaved:
            k, v = (jnp.tile(y, (1, 1, each, 1)) for y in (k, v))
        else:
            k, v = (jnp.repeat(y, each, axis=2) for y in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / self.k**0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9))
        return affine(w, "attn/o", jnp.einsum("bhts,bshk->bthk", weights, v), "hk,hkd->d")

    def mixture(self, w, x):
        logits = affine(w, "moe/router", x, "d,de->e")
        soft = jax.nn.softmax(logits)
        score = soft + wide(w["moe/router/selection"], soft) if self.router == "biased" else logits
        if self.groups > 1:
            split = score.reshape(*score.shape[:-1], self.groups, -1)
            best = jnp.argmax(jnp.max(split, axis=-1), axis=-1)
            kept = jax.nn.one_hot(best, self.groups, dtype=bool)[..., None]
            split = jnp.where(jnp.broadcast_to(kept, split.shape), split, -jnp.inf)
            score = split.reshape(score.shape)
        if self.always:
            routed = wide(jnp.arange(self.expert) < self.expert - self.always, score)
            score = jnp.where(routed, score, jnp.inf)
        # By number: a score that is computed again for a comparison may be rounded otherwise.
        ids = jax.lax.top_k(score, 2)[1]
        chosen = jnp.any(jax.nn.one_hot(ids, self.expert, dtype=bool), axis=-2)
        match self.router:
            case "top_k":
                gates = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))
            case "sigmoid":
                gates = jax.nn.sigmoid(logits) * chosen
            case _:
                gates = soft * chosen
        y = gated(w, "moe", x, "d,edn->en", "en,end->ed")
        y = jnp.einsum("bte,bted->btd", gates, y)
        if self.shared:
            y = y + gated(w, "moe/shared", x, "d,dn->n", "n,nd->d")
        extra = 0.0
        if self.balance:
            load = jnp.mean(soft, (0, 1)) * jnp.mean(chosen, (0, 1), jnp.float32)
            extra += self.balance * jnp.sum(load)
        if self.router_z:
            extra += self.router_z * jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        return y, extra


def wide(x, like):
    return jnp.broadcast_to(x.reshape((1,) * (like.ndim - x.ndim) + x.shape), like.shape)


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * wide(scale, x)


def affine(w, name, x, axes):
    left, right = axes.split("->")
    first, second = left.split(",")
    y = jnp.einsum(f"bt{first},{second}->bt{right}", x, w[f"{name}/kernel"])
    return y + wide(w[f"{name}/bias"], y) if f"{name}/bias" in w else y


def gated(w, name, x, inwards, outwards):
    if f"{name}/gate_up/kernel" in w:
        kernel = w[f"{name}/gate_up/kernel"]
        w = w | {f"{name}/gate/kernel": kernel[:, 0], f"{name}/up/kernel": kernel[:, 1]}
    hidden = jax.nn.silu(affine(w, f"{name}/gate", x, inwards))
    return affine(w, f"{name}/down", hidden * affine(w, f"{name}/up", x, inwards), outwards)


@functools.cache
def probe_of(model):
    return Probe(model.loss, model.params(), model.batch(), jax.random.key(0))


def audited(model, changes=None, valid_rows=True, key=None):
    """Audit a model; its loss is compiled once, whatever the rules are."""
    rules = model.rules(changes, valid_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "Probe", lambda *_: probe_of(model))
        return symoptax.audit(model.loss, model.params(), model.batch(), rules, key=key)


SOFTMAX = Decoder(layer=2)
TIED = Decoder(tied=True)
CAPPED = Decoder(cap=5.0, router="sigmoid", head=8, interleaved=True)
Z_LOSS = Decoder(z_loss=1e-3, router_z=1e-3)
SCANNED = Decoder(layer=4, scan=0, fused=True, balance=0.1)
PACKED = Decoder(packed=True, head=8, router="biased", shared=True)
PADDED = Decoder(layer=2, scan=1, bias=True, router="top_k", texts=True, valid=21)
EQUAL = Decoder(vocab=8, d=8, neuron=8, expert=8, inner=8, head=2, kv_head=2, k=8, bias=True)
MODELS = {
    "softmax": SOFTMAX,
    "tied": TIED,
    "capped, sigmoid": CAPPED,
    "z-loss": Z_LOSS,
    "scanned, fused, balanced": SCANNED,
    "scanned second, biases, padded": PADDED,
    "packed, selection bias, shared": PACKED,
    "equal sizes, biases": EQUAL,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_true_rules_hold(model):
    report = audited(model)
    assert {row.verdict for row in report.rows} == {"holds", "note"}, str(report)
    assert report.ok
    assert not report.failures
    held = {(row.role, row.block) for row in report.rows if row.verdict == "holds"}
    layers = ["layers"] if model.scan is not None else [f"layers/{i}" for i in range(model.layer)]
    expected = {("token", "token tables")} | {
        (x.role, x.pattern) for x in model.rules() if "embed" in x.pattern or "head" in x.pattern
    }
    for layer in layers:
        expected |= {
            ("head", f"{layer}/attn"),
            ("neuron", f"{layer}/mlp"),
            ("neuron", f"{layer}/moe"),
            ("expert", f"{layer}/moe"),
        }
    assert expected <= held, str(report)


SHIFTS = {
    "tied": (TIED, "embed", "lm_head", "tied_embedding", "tied with the embedding"),
    "soft cap": (CAPPED, "lm_head", "lm_head", "lm_head_no_shift", "soft-capped"),
    "sigmoid": (CAPPED, "moe/router/kernel", "router", "router_no_shift", "sigmoid"),
    "z-loss": (Z_LOSS, "lm_head", "lm_head", "lm_head_no_shift", "z-loss"),
    "router z-loss": (Z_LOSS, "moe/router/kernel", "router", "router_no_shift", "z-loss"),
}


def blocks(rows):
    """Return the blocks of rows without the numbers of layers."""
    return {re.sub(r"layers/(\d+/)?", "", row.block) for row in rows}


@pytest.mark.parametrize(("model", "leaf", "claimed", "role", "cause"), SHIFTS.values(), ids=SHIFTS)
def test_a_shift_that_is_none(model, leaf, claimed, role, cause):
    report = audited(model, {leaf: (claimed, *stored_and_matrix(model, leaf))})
    assert blocks(report.failures) == {leaf}, str(report)
    (row,) = (row for row in report.failures if row.claim == "shift")
    assert f"role {role!r}" in row.advice
    assert row.advice.startswith(cause) or cause in row.advice.partition(":")[0]


def stored_and_matrix(model, leaf):
    """Return how a leaf is stored, and how it forms matrices."""
    return next(
        (stored, matrix)
        for name, (_, stored, matrix) in model.leaves().items()
        if re.sub(r"layers/(\d+/)?", "", name) == leaf
    )


@pytest.mark.parametrize("leaf", ["lm_head", "moe/router/kernel"])
def test_a_shift_that_is_not_claimed(leaf):
    role = "lm_head" if leaf == "lm_head" else "router"
    report = audited(SOFTMAX, {leaf: (f"{role}_no_shift", *stored_and_matrix(SOFTMAX, leaf))})
    notes = [row for row in report.rows if row.verdict == "note" and row.claim == "no shift"]
    assert blocks(notes) == {leaf}
    assert all(f"role {role!r}" in row.advice for row in notes)
    assert report.ok


@pytest.mark.parametrize(
    ("model", "claimed", "right"),
    [(SOFTMAX, "tied_embedding", "embedding"), (TIED, "embedding", "tied_embedding")],
    ids=["untied", "tied"],
)
def test_tied_or_not(model, claimed, right):
    report = audited(model, {"embed": (claimed, "vocab d", "vocab d")})
    (row,) = report.failures
    assert row.block == "embed"
    assert f"role {right!r}" in row.advice


SMALLER = {
    "padded": (PADDED, "token tables", "valid_rows=21"),
    "groups": (Decoder(groups=2), "moe", "2 groups of 2"),
    "always": (Decoder(always=1), "moe", "the last 1 of the stack"),
}


@pytest.mark.parametrize(("model", "block", "words"), SMALLER.values(), ids=SMALLER.keys())
def test_a_smaller_group_acts(model, block, words):
    report = audited(model, valid_rows=False)
    (row,) = report.failures
    assert row.verdict == "partly"
    assert blocks([row]) == {block}
    assert words in row.advice


def swapped(model, leaf):
    """Return a change of rules that has rows for columns."""
    role, stored, matrix = next(x for n, x in model.leaves().items() if n.endswith(leaf))
    rows, cols = matrix.split()[-2:]
    names = {rows: cols, cols: rows}
    return {leaf: (role, re.sub(r"\w+", lambda m: names.get(m[0], m[0]), stored), matrix)}


@pytest.mark.parametrize("model", [SOFTMAX, EQUAL], ids=["", "equal sizes"])
@pytest.mark.parametrize(
    "leaf",
    ["embed", "lm_head", *(name for name in LAYER if re.match("m.*kernel", name))],
)
def test_rows_for_columns(model, leaf):
    report = audited(model, swapped(model, leaf))
    assert blocks(report.failures) == {leaf}, str(report)
    kinds = {row.role for row in report.failures}
    assert kinds & {"token", "neuron", "expert"}
    assert any("the view says axis" in row.advice for row in report.failures)


def test_all_rows_of_an_mlp_for_columns():
    changes = {}
    for name in ("gate", "up", "down"):
        changes |= swapped(SOFTMAX, f"mlp/{name}/kernel")
    report = audited(SOFTMAX, changes)
    assert blocks(report.failures) == changes.keys()
    assert all("the view says axis" in row.advice for row in report.failures)


# Changes of rules, and the leaves that must be named.
FAULTS = {
    "layer axis for rows": (
        SCANNED,
        {"mlp/down/kernel": ("mlp_down", "neuron layer d", "layer neuron d")},
        {"mlp/down/kernel"},
    ),
    "layer axis for features": (
        SCANNED,
        {"attn/q/kernel": ("attention", "d layer head k", "layer (head k) d")},
        {"attn/q/kernel"},
    ),
    "experts for layers": (
        SCANNED,
        {"moe/up/kernel": ("expert_in", "expert layer d inner", "layer expert inner d")},
        {"moe/up/kernel"},
    ),
    "experts for features": (
        SOFTMAX,
        {"moe/down/kernel": ("expert_down", "d inner expert", "expert inner d")},
        {"moe/down/kernel"},
    ),
    "gate for router": (
        SOFTMAX,
        {
            "mlp/gate/kernel": ("router", "d expert", "expert d"),
            "moe/router/kernel": ("mlp_in", "d neuron", "neuron d"),
        },
        {"mlp/gate/kernel", "mlp/up/kernel", "mlp/down/kernel"}
        | {f"moe/{name}/kernel" for name in ("router", "gate", "up", "down")},
    ),
    "embedding for head": (
        SOFTMAX,
        {
            "embed": ("lm_head", "vocab d", "vocab d"),
            "lm_head": ("embedding", "d vocab", "vocab d"),
        },
        {"embed", "lm_head"},
    ),
    "down without gate and up": (
        SOFTMAX,
        {f"mlp/{x}/kernel": ("attention", "d neuron", "neuron d") for x in ("gate", "up")},
        {"mlp/down/kernel"},
    ),
    "gate and up without down": (
        SOFTMAX,
        {"mlp/down/kernel": ("attention", "neuron d", "d neuron")},
        {"mlp/gate/kernel", "mlp/up/kernel"},
    ),
    "experts without router": (
        SOFTMAX,
        {"moe/router/kernel": ("attention", "d expert", "expert d")},
        {f"moe/{x}/kernel" for x in ("gate", "up", "down")},
    ),
    "heads of q along k": (
        SOFTMAX,
        {"attn/q/kernel": ("attention", "d k head", "(head k) d")},
        {"attn/q/kernel"},
    ),
    "heads of k along d": (
        SOFTMAX,
        {"attn/k/kernel": ("attention", "kv_head d k", "(kv_head k) d")},
        {"attn/k/kernel"},
    ),
    "heads of q inside of k": (
        PACKED,
        {"attn/q/kernel": ("attention", "d (k head)", "(head k) d")},
        {"attn/q/kernel"},
    ),
    "heads of o inside of k": (
        PACKED,
        {"attn/o/kernel": ("attention", "(k head) d", "d (head k)")},
        {"attn/o/kernel"},
    ),
}


@pytest.mark.parametrize(("model", "changes", "named"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_fault(model, changes, named):
    report = audited(model, changes)
    assert blocks(report.failures) == named, str(report)
    assert {row.verdict for row in report.failures} == {"fails"}
    assert all(row.advice for row in report.failures)


# Other rules that are true as well.
ALSO_TRUE = {
    "down to AdamW": (SOFTMAX, {"mlp/down/kernel": ("other", "", "")}),
    "gate and up to AdamW": (
        SOFTMAX,
        {f"mlp/{x}/kernel": ("other", "", "") for x in ("gate", "up")},
    ),
    "router to AdamW": (SOFTMAX, {"moe/router/kernel": ("other", "", "")}),
    "heads of o not named": (SOFTMAX, {"attn/o/kernel": ("attention", "a b d", "d (a b)")}),
    "packed heads of o not named": (PACKED, {"attn/o/kernel": ("attention", "out d", "d out")}),
    "gate and up as one matrix": (
        SCANNED,
        {"mlp/gate_up/kernel": ("mlp_in", "layer d (gate_up neuron)", "layer (gate_up neuron) d")},
    ),
    "head by head": (SOFTMAX, {"attn/q/kernel": ("attention", "d head k", "head k d")}),
}


@pytest.mark.parametrize(("model", "changes"), ALSO_TRUE.values(), ids=ALSO_TRUE.keys())
def test_also_true(model, changes):
    report, usual = audited(model, changes), audited(model)
    assert report.ok, str(report)
    permuted = [sum(row.claim.startswith("P(") for row in x.rows) for x in (report, usual)]
    assert permuted[0] == permuted[1]


@pytest.mark.parametrize("size", [2, 3, 4, 6, 12])
def test_no_permutation_keeps_groups_by_chance(size):
    for seed in range(20):
        order = _moving(size, np.random.default_rng(seed))
        assert sorted(order) == list(range(size))
        assert order[0] != 0  # a special first id
        assert order[-1] != size - 1
        for each in (n for n in range(2, size) if size % n == 0):
            assert any(len(set(group)) > 1 for group in order.reshape(-1, each) // each)


def test_report_in_print():
    report = audited(SOFTMAX, swapped(SOFTMAX, "mlp/up/kernel"))
    lines = str(report).splitlines()
    columns = [lines[0].index(word) for word in ("verdict", "block", "claim", "loss", "control")]
    for line in lines[2:-1]:
        if line.split()[0] != "->":
            assert all(line[i - 2 : i].strip() == "" for i in columns[1:])
            assert all(line[i : i + 1] != " " for i in columns[:3])
    (wrong,) = (line for line in lines if line.startswith("fails"))
    assert "layers/*/mlp/up/kernel" in wrong
    assert "(2 times)" in wrong
    advice = lines[lines.index(wrong) + 1]
    assert advice.split(maxsplit=1)[0] == "->"
    assert "axis 1 of (16, 20), and the view says axis 0" in advice
    assert lines[-1] == f"{sum(row.verdict != 'note' for row in report.rows)} claims; 2 not true"
    assert str(audited(SOFTMAX)).endswith("claims; none false")


def test_report_for_programs():
    report = audited(SOFTMAX, swapped(SOFTMAX, "mlp/up/kernel"))
    found = json.loads(report.to_json())
    assert found["ok"] is report.ok is False
    assert [row["block"] for row in found["rows"]] == [row.block for row in report.rows]
    assert len(report.failures) == 2
    infinite = AuditRow("a", "router", "shift", "fails", math.inf, math.nan)
    (row,) = json.loads(AuditReport((infinite,)).to_json(), parse_constant=pytest.fail)["rows"]
    assert row["change"] is row["control"] is None


def small_loss(params, batch, mask=None):
    """Return the loss of predicting each token from itself."""
    logits = params["embed"][batch] @ params["lm_head"]
    z = jax.nn.logsumexp(logits, axis=-1)
    losses = z - jnp.take_along_axis(logits, batch[..., None], axis=-1)[..., 0]
    return jnp.mean(losses if mask is None else losses * mask)


SMALL = {
    "embed": jax.random.normal(jax.random.key(0), (24, 8)),
    "lm_head": jax.random.normal(jax.random.key(1), (8, 24)),
}
SMALL_RULES = [
    ParamRule("embed", "embedding", "vocab d -> vocab d"),
    ParamRule("lm_head", "lm_head", "d vocab -> vocab d"),
]
TOKENS = jnp.asarray([[0, 3, 5, 7, 3, 9], [1, 0, 2, 0, 20, 23]])


def audited_small(loss, params=SMALL, batch=TOKENS, **options):
    return symoptax.audit(loss, params, batch, SMALL_RULES, **options)


def test_special_ids():
    (row,) = audited_small(lambda p, t: small_loss(p, t, mask=t != 0)).failures
    assert row.verdict == "partly"
    assert row.advice == "the first 1 ids are special: harmless"


def _ragged(params, batch):
    logits, labels = params["embed"][batch["x"]] @ params["lm_head"], batch["y"]
    logs = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.abs(labels)[..., None], axis=-1)
    return -jnp.mean(logs[..., 0] * (labels >= 0)), {"aux": logits}


BATCHES = {
    "one sequence": (small_loss, TOKENS[0]),
    "ignored labels, and more than a loss": (
        _ragged,
        {"x": np.asarray(TOKENS), "y": np.where(np.arange(6) < 2, -1, TOKENS), "weight": 2.0},
    ),
}


@pytest.mark.parametrize(("loss", "batch"), BATCHES.values(), ids=BATCHES.keys())
def test_batches(loss, batch):
    report = audited_small(loss, batch=batch)
    assert {row.verdict for row in report.rows} == {"holds", "note"}, str(report)
    assert len(report.rows) == 5


def test_no_integers_in_the_batch():
    def loss(params, one_hot):
        return jnp.mean(jnp.tanh(one_hot @ params["embed"] @ params["lm_head"]))

    report = audited_small(loss, batch=jax.nn.one_hot(TOKENS, 24))
    token, sides = (row for row in report.rows if row.verdict == "unclear")
    assert token.advice == "the batch has no integers to renumber"
    assert "3 tokens" in sides.advice


def test_leaves_of_equal_numbers():
    zeros = jax.tree.map(jnp.zeros_like, SMALL)
    report = audited_small(small_loss, zeros)
    assert report.ok
    assert "holds" in {row.verdict for row in report.rows}
    assert not audited_small(lambda p, t: small_loss({**p, "lm_head": p["embed"].T}, t), zeros).ok


@pytest.mark.parametrize("loss", [small_loss, lambda p, t: small_loss(p, t).astype(jnp.bfloat16)])
def test_bfloat16_is_no_false_alarm(loss):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), SMALL)
    report = audited_small(loss, params)
    assert report.ok, str(report)
    assert "unclear" in {row.verdict for row in report.rows}
    assert not any(row.verdict == "note" for row in report.rows)


def _random(params, batch):
    return small_loss(params, batch, mask=np.random.default_rng().integers(2, size=batch.shape))


ERRORS = {
    "no scalar": (lambda p, t: p["embed"][t].sum(0), r"a real scalar.*got float32\[6, 8\]"),
    "integer": (lambda p, t: t.sum(), "a real scalar.*got int32"),
    "complex": (lambda p, t: small_loss(p, t) * 1j, "a real scalar.*got complex64"),
    "not finite": (lambda p, t: small_loss(p, t) * jnp.nan, "The loss is nan"),
    "random": (_random, "Two calls of loss_fn differ"),
}


@pytest.mark.parametrize(("loss", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_losses_that_cannot_be_audited(loss, message):
    with pytest.raises(ValueError, match=message):
        audited_small(loss)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_qwen3(tied, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "examples"))
    qwen3 = importlib.import_module("models.qwen3")
    config = dataclasses.replace(qwen3.SMALL, tied=tied)
    graphdef, params = nnx.split(qwen3.Qwen3(config, nnx.Rngs(0)), nnx.Param)

    def loss(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, config.vocab_size)
    start = time.perf_counter()
    report = symoptax.audit(loss, params, tokens, qwen3.rules_for(config))
    assert time.perf_counter() - start < 60
    assert {row.verdict for row in report.rows} == {"holds", "note"}, str(report)
    assert len(report.rows) > 30
