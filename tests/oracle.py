"""Float64 oracles in NumPy, written from the definitions: loops over matrices, SVDs, rank cutoffs.

Nothing here shares a line with the library. An inverse square root is never formed: the polar
factor is the sum of `u_k v_k^T` over the singular values that count.
"""

import numpy as np

# Singular values below this part of the largest are zero. Test matrices have their smallest true
# singular value at 1e-8 or above and float64 leaves 1e-15, so nothing lies near it.
RANK_CUTOFF = 1e-11


def each_matrix(function):
    """Lift a function of one float64 matrix to stacks, by a Python loop."""

    def lifted(stack, *args, **kwargs):
        stack = np.asarray(stack, np.float64)
        result = np.empty_like(stack)
        for index in np.ndindex(stack.shape[:-2]):
            result[index] = function(stack[index], *args, **kwargs)
        return result

    return lifted


@each_matrix
def row_norm(d):
    norms = [np.linalg.norm(row) for row in d]
    return np.array([row / norm if norm else 0 * row for row, norm in zip(d, norms, strict=True)])


def column_norm(d):
    return np.swapaxes(row_norm(np.swapaxes(d, -1, -2)), -1, -2)


@each_matrix
def center(d):
    return (np.eye(len(d)) - np.full((len(d), len(d)), 1 / len(d))) @ d


@each_matrix
def polar(d, alpha=0.0):
    """The partial isometry of D, times its nuclear norm to the power alpha."""
    u, s, vt = np.linalg.svd(d, full_matrices=False)
    rank = np.count_nonzero(s > RANK_CUTOFF * s[0])
    isometry = sum((np.outer(u[:, k], vt[k]) for k in range(rank)), np.zeros_like(d))
    isometry[~d.any(axis=1)] = 0  # exactly: row normalisation would blow the rounding up
    return s.sum() ** alpha * isometry


def hybrid(d, alpha=0.0, order="row_then_polar"):
    return polar(row_norm(d), alpha) if order == "row_then_polar" else row_norm(polar(d))


def centered(function):
    return lambda d, *args: center(function(center(d), *args))


def centered_hybrid(d, alpha=0.0, order="row_then_polar"):
    """Each step seen by itself modulo the shared shift."""
    if order == "row_then_polar":
        return centered(polar)(centered(row_norm)(d), alpha)
    return centered(row_norm)(centered(polar)(d))


def trajectory(w, gradients, update, *, lr, beta, weight_decay=0.0):
    """The parameter after each step of momentum, update and decoupled decay."""
    w, mean, steps = np.asarray(w, np.float64), 0.0, []
    for g in np.asarray(gradients, np.float64):
        mean = beta * mean + (1 - beta) * g
        w = w - lr * weight_decay * w - lr * update(mean)
        steps.append(w)
    return np.array(steps)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def with_spectrum(singular_values, m, n, seed=0):
    """A random m x n matrix with these singular values."""
    k = len(singular_values)
    u, _ = np.linalg.qr(normal(m, k, seed=seed))
    v, _ = np.linalg.qr(normal(n, k, seed=seed + 1))
    return (u * np.asarray(singular_values)) @ v.T


def conditioned(condition, m, n, seed=0):
    """A random matrix with singular values spread evenly in logarithm over [1/condition, 1]."""
    return with_spectrum(np.geomspace(1, 1 / condition, min(m, n)), m, n, seed)
