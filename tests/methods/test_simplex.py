"""Quadratic programs over the simplex and the projection onto it, against SLSQP and by
definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from fedjax_sim.methods.simplex import project, simplex_qp


def slsqp(matrix: np.ndarray) -> np.ndarray:
    size = len(matrix)
    scale = np.abs(matrix).max()
    found = minimize(
        lambda a: a @ matrix @ a / scale,
        np.full(size, 1 / size),
        jac=lambda a: 2 * matrix @ a / scale,
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(size)},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return found.x


def programs() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    matrices = []
    for size, rank, spread in (
        (2, 2, 1.0),
        (5, 3, 0.1),
        (10, 4, 1e-3),
        (10, 30, 1e-6),
        (20, 8, 0.05),
    ):
        points = rng.normal(size=(size, rank))
        apart = points[0] - points
        matrices.append(np.diag(spread * rng.uniform(0.5, 2, size)) + apart @ apart.T)
    return [*matrices, 1e6 * matrices[1], 1e-7 * matrices[2]]


@pytest.mark.parametrize("which", range(7))
def test_simplex_program_against_slsqp(which):
    matrix = programs()[which]
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(simplex_qp)(matrix, np.ones(len(matrix), bool)))
    want = slsqp(matrix)
    assert got.min() >= 0 and abs(got.sum() - 1) < 1e-12
    assert got @ matrix @ got <= want @ matrix @ want * (1 + 1e-9)
    np.testing.assert_allclose(got, want, atol=2e-4)  # as far as SLSQP goes
    slope = matrix @ got  # optimality: equal slopes where there is weight, none lower elsewhere
    assert np.all(slope >= got @ slope - 1e-9 * np.abs(matrix).max())


def test_simplex_program_in_degenerate_cases():
    everybody, solve = np.ones(3, bool), jax.jit(simplex_qp)
    # no preference
    np.testing.assert_allclose(solve(np.zeros((3, 3), np.float32), everybody), 1 / 3)
    np.testing.assert_allclose(
        solve(np.eye(3, dtype=np.float32), np.array([False, True, False])), [0, 1, 0]
    )
    # two columns are the same
    twins = np.array([[2.0, 2.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 2.0]], np.float32)
    got = np.asarray(solve(twins, everybody))
    np.testing.assert_allclose([got[0] + got[1], got[2]], [0.5, 0.5], atol=1e-6)
    # one costs nothing
    free = np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.5, 1.0]], np.float32)
    np.testing.assert_allclose(solve(free, everybody), [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(solve(np.ones((1, 1), np.float32), np.ones(1, bool)), [1])


def test_projection_is_the_nearest_point():
    rng = np.random.default_rng(0)
    for _ in range(20):
        point, allowed = rng.normal(size=6), rng.random(6) < 0.7
        allowed[0] = True
        got = np.asarray(project(jnp.asarray(point), jnp.asarray(allowed)))
        assert got.min() >= 0 and np.isclose(got.sum(), 1, atol=1e-6) and not got[~allowed].any()
        for corner in np.eye(6)[allowed]:  # no corner is in a direction that comes nearer
            assert (point - got) @ (corner - got) <= 1e-5
