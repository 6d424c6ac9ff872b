"""What the shared tests need to know of every method. One entry here gives a method every property
of the contract.

wire: floats on the wire per participant, as the method's docstring says: (w, phi, psi, classes,
width) -> (down, up), where w = |model|, psi = |head group|, phi = w - psi; or "decides", where the
block sent down differs from client to client; or "prefix", where each client sends the first groups
that it got. fedavg_when: options under which the global model is FedAvg's (the paper says so); None
where there are none. reference: the file with its comparison against an independent implementation
or a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Wire = Callable[[int, int, int, int, int], tuple[int, int]]


def whole(w: int, phi: int, psi: int, c: int, d: int) -> tuple[int, int]:
    return w, w


def backbone(w: int, phi: int, psi: int, c: int, d: int) -> tuple[int, int]:
    return phi, phi


class Case(NamedTuple):
    options: Mapping[str, Any] = MappingProxyType({})
    model: str = "mlp"
    wire: Wire | str = whole
    fedavg_when: dict[str, Any] | None = None
    reference: str = ""


CASES: dict[str, Case] = {
    "fedavg": Case(fedavg_when={}, reference="methods/test_numpy_loops.py"),
    "fedavg_ft": Case(fedavg_when={}, reference="methods/test_numpy_loops.py"),
    "fedprox": Case(fedavg_when={"mu": 0.0}, reference="methods/test_numpy_loops.py"),
    "scaffold": Case(
        wire=lambda w, phi, psi, c, d: (2 * w, 2 * w), reference="methods/test_numpy_loops.py"
    ),
    "local": Case(wire=lambda w, phi, psi, c, d: (0, 0), reference="methods/test_numpy_loops.py"),
    "ditto": Case(fedavg_when={}, reference="methods/test_numpy_loops.py"),
    "fedntd": Case(reference="methods/test_fedntd.py", fedavg_when={"beta": 0.0}),
    "ccvr": Case(
        reference="methods/test_ccvr.py", wire=lambda w, phi, psi, c, d: (w, w + c * (2 * d + 1))
    ),
    "fedsam": Case(reference="methods/test_fedsam.py", fedavg_when={"rho": 0.0}),
    # 32 + 32 + 64 + 64 channels of cnn6: a model with feature maps
    "fedfa": Case(
        reference="methods/test_fedfa.py",
        model="cnn6",
        wire=lambda w, phi, psi, c, d: (w + 2 * 192, w + 2 * 192),
    ),
    "fedfa_freq": Case(reference="methods/test_fedfa_freq.py", fedavg_when={"p": 0.0}),
    "fedca": Case(reference="methods/test_fedca.py", wire=lambda w, phi, psi, c, d: (w, w + c)),
    # a batch small enough that the agent learns within these few rounds
    "fedpolicy": Case(
        options={"agent.batch": 4}, wire="decides", reference="methods/test_fedpolicy.py"
    ),
    # as many layers up as down
    "qbandit": Case(
        options={"agent.batch": 4},
        wire="prefix",
        fedavg_when={"agent": "full"},
        reference="methods/test_qbandit.py",
    ),
    # small enough that agent and encoder learn within these few rounds
    "pfedrlla": Case(
        options={
            "side": 4,
            "embedding": 6,
            "random_rounds": 1,
            "every": 1,
            "agent.batch": 4,
            "agent.capacity": 32,
        },
        reference="methods/test_pfedrlla.py",
    ),
    "fedpam": Case(fedavg_when={"lam": 0.0}, reference="methods/test_fedpam.py"),
    "fedamp": Case(reference="methods/test_pytorch_loops.py"),
    "fedfomo": Case(
        wire=lambda w, phi, psi, c, d: (5 * w, w + 5), reference="methods/test_pytorch_loops.py"
    ),
    "fedpac": Case(
        wire=lambda w, phi, psi, c, d: (w + c * d, w + 2 * c * d + 1),
        reference="methods/test_pytorch_loops.py",
    ),
    "fedala": Case(fedavg_when={"lr_weights": 0.0}, reference="methods/test_pytorch_loops.py"),
    "fedas": Case(
        wire=lambda w, phi, psi, c, d: (w, w + 1), reference="methods/test_pytorch_loops.py"
    ),
    # the class Gaussians are a group: w has them already
    "pfedfda": Case(
        wire=lambda w, phi, psi, c, d: (phi, phi), reference="methods/test_pytorch_loops.py"
    ),
    "fedcp": Case(reference="methods/test_pytorch_loops.py"),  # so is the policy
    "fedper": Case(
        wire=backbone, fedavg_when={"layers": 0}, reference="methods/test_pytorch_loops.py"
    ),
    "fedrep": Case(wire=backbone, reference="methods/test_pytorch_loops.py"),
    "fedbabu": Case(wire=backbone, reference="methods/test_pytorch_loops.py"),
    "apfl": Case(fedavg_when={}, reference="methods/test_pytorch_loops.py"),
    "perfedavg": Case(
        fedavg_when={"alpha": 0.0, "plain": False}, reference="methods/test_pytorch_loops.py"
    ),
    "pfedme": Case(reference="methods/test_pytorch_loops.py"),
    "fedrod": Case(reference="methods/test_pytorch_loops.py"),
    "fedphp": Case(fedavg_when={"lam": 0.0}, reference="methods/test_pytorch_loops.py"),
    "full": Case(fedavg_when={"weights": "size"}, reference="methods/test_fedpolicy.py"),
    "backbone": Case(
        options={"first": "any"},
        wire=lambda w, phi, psi, c, d: (phi, w),
        reference="methods/test_fedpolicy.py",
    ),
    "head": Case(
        options={"first": "any"},
        wire=lambda w, phi, psi, c, d: (psi, w),
        reference="methods/test_fedpolicy.py",
    ),
    "random": Case(wire="decides", reference="methods/test_fedpolicy.py"),
}

# methods of the tests' own, for hooks that no registered method uses, and the skeleton that the
# docs show
DUMMY_CASES: dict[str, Case] = {
    "pfedrlla_similarity": Case(reference="support/dummies.py"),
    "pfedrlla_gradient": Case(reference="support/dummies.py"),
    "my_method": Case(fedavg_when={}, reference="support/dummies.py"),
    "neighbourhood": Case(reference="engine/test_layouts.py"),
    # its private group of one number per class never travels
    "private_scale": Case(
        wire=lambda w, phi, psi, c, d: (w - c, w - c), reference="methods/test_contract.py"
    ),
}
