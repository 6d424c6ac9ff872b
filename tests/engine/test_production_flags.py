"""A small part of the suite with the compiler as people run it.

`conftest.py` switches the expensive passes of XLA off for every other test. Here ONE process
without those flags, and without any cache of compiled programs, checks what optimisation could
break; every check becomes a test of its own. `python tests/engine/test_production_flags.py` is that
process.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
CHECKS = ("golden_fedavg", "golden_scaffold", "convolutions", "resume", "neutral_pfedfda")


# ---- in the process of its own -------------------------------------------------------------------
def golden(method: str, conv: str) -> None:
    """Three rounds of lenet5 against PyTorch's values."""
    import jax
    import jax.numpy as jnp
    from test_golden import assert_golden, three_rounds

    with jax.enable_x64(True):
        assert_golden(three_rounds("lenet5", method, conv, jnp.float64), "lenet5", 1e-9)


def golden_fedavg() -> None:
    golden("fedavg", "auto")


def golden_scaffold() -> None:
    golden("scaffold", "patches")


def convolutions() -> None:
    """Every form of convolution equals `lax` in float64, values and gradients, one layer each."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedjax_sim.models.layers import FORMS, conv_relu_pool, plain_conv

    rng = np.random.default_rng(0)
    pooled = lambda x, w, b, conv: conv_relu_pool(x, w, b, pad=1, conv=conv)
    plain = lambda x, w, b, conv: plain_conv(x, w, 1, 1, conv) + b

    def compare(layer, shape, forms) -> None:
        arrays = [jnp.asarray(rng.standard_normal(s)) for s in (shape, (3, 3, shape[3], 8), (8,))]
        # an uneven gradient from above
        weight = jnp.asarray(rng.standard_normal(layer(*arrays, "lax").shape))
        total = lambda *a, conv: (((y := layer(*a, conv)) * weight).sum(), y)
        run = lambda conv: jax.jit(
            jax.grad(lambda *a: total(*a, conv=conv), (0, 1, 2), has_aux=True)
        )(*arrays)
        wanted = jax.tree.leaves(run("lax"))
        for form in forms:
            for got, want in zip(jax.tree.leaves(run(form)), wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9, err_msg=form)

    with jax.enable_x64(True):
        forms = [form for form in FORMS if form != "lax"]
        compare(pooled, (2, 10, 10, 16), forms)
        compare(plain, (2, 4, 4, 16), [form for form in forms if form != "block"])


def resume() -> None:
    """Four rounds, and two, a checkpoint, two more: the same bits."""
    import jax.numpy as jnp
    from tiny import same_bits, simulation, start

    from fedjax_sim.runner import checkpoint

    sim = simulation("scaffold")
    state, data = start(sim)
    whole, *_ = sim.run(state, data, jnp.int32(4))
    half, *_ = sim.run(start(sim)[0], data, jnp.int32(2))
    with tempfile.TemporaryDirectory() as folder:
        back = checkpoint.load(checkpoint.save(pathlib.Path(folder), half, "h"), start(sim)[0], "h")
    assert not same_bits(whole.server, back.server)
    assert same_bits(whole, sim.run(back, data, jnp.int32(2))[0])


def neutral_pfedfda() -> None:
    """A transform that changes nothing gives the same bits; the one method for which the contract
    cannot ask for that."""
    import test_contract as contract
    from tiny import same_bits, simulation, start

    case = contract.ALL["pfedfda"]
    plain, inside = (
        simulation("pfedfda", model=case.model, **more, **case.options)
        for more in ({}, {"around": contract.Neutral})
    )
    (want, data), (got, same) = start(plain), start(inside)
    for _ in range(2):
        want, *scores = plain.examine(want, data)
        got, *other = inside.examine(got, same)
        assert same_bits(scores, other)
    assert same_bits(
        (want.server, want.clients),
        (got.server.inner, got.clients._replace(own=got.clients.own.inner)),
    )


def main() -> None:
    """One line of JSON per check: its name, the seconds it took, and what went wrong."""
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    assert not flags and not jax.config.jax_compilation_cache_dir, (
        f"these are not the flags of production: {flags}"
    )
    for name in CHECKS:
        started, problem = time.perf_counter(), ""
        try:
            globals()[name]()
        except Exception:
            problem = traceback.format_exc()
        print(
            json.dumps(
                {"check": name, "seconds": time.perf_counter() - started, "problem": problem}
            ),
            flush=True,
        )


# ---- here ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def answers() -> dict[str, dict]:
    unwanted = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_X64")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {
        "FEDJAX_SIM_CACHE": "off",
        "PYTHONPATH": os.pathsep.join(
            map(
                str,
                (ROOT, HERE, *(ROOT / "tests" / folder for folder in ("", "support", "methods"))),
            )
        ),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.xdist_group("production_flags")
@pytest.mark.parametrize("name", CHECKS)
def test_with_default_compiler_flags(name, answers):
    assert not answers[name]["problem"], answers[name]["problem"]


if __name__ == "__main__":
    main()
