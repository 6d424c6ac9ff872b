"""Local losses of ONE client on ONE mini-batch, and the soft confusion that some of them read.

Every loss is a pure function `(logits [B, C], labels [B], mask [B], counts [C], confusion) -> []`,
the mean over the examples the mask lets in (0 if it lets in none). Symbols: z logits, y the label,
p = softmax(z), C classes, n_c the client's number of training examples of class c.

| name  | per-example loss                                                                    |
|-------|-------------------------------------------------------------------------------------|
| ce    | −log p_y                                                                            |
| focal | (1 − p_y)^γ · (−log p_y)                                                            |
| fedlc | CE on z_c − τ · max(n_c, 1e-8)^(−1/4)                                               |
| cb    | w_y · CE, w_c ∝ (1 − β)/(1 − β^{n_c}) with Σ_c w_c = C and w_c = 0 where n_c = 0    |
| ls    | cross-entropy with target 1 − s on y and s/(C − 1) elsewhere                        |
| c3e   | λ_μ · L_log + λ_ν · L_conf, see `C3E`                                               |
| mse   | mean over outputs of (z − y)²                                          (regression) |
| huber | mean over outputs of ½e² for e = |z − y| ≤ δ, else δ(e − ½δ)           (regression) |
| bce   | mean over labels of −y log σ(z) − (1−y) log(1−σ(z)), y = 1 times w     (multilabel) |

Losses of classes are those of every place of a sequence too: logits [B, T, C] and labels [B, T], −1
where none counts.

>>> import jax.numpy as jnp
>>> loss = make_loss("focal", 3, gamma=0.0)      # γ = 0 is plain cross-entropy
>>> z, y = jnp.zeros((2, 3)), jnp.array([0, 2])
>>> round(float(loss.value(z, y, jnp.array([True, True]), jnp.ones(3), ())), 4)     # log 3
1.0986
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int, Num, Shaped

from fedjax_sim.errors import UserError, lookup, unknown
from fedjax_sim.fields import Node, Real, field
from fedjax_sim.options import shown
from fedjax_sim.tasks import CLASS, LABELS, REAL, TARGETS, TOKENS, Task
from fedjax_sim.types import Array, Scalar, Tree

# what a minibatch has, and what is left of it where places of sequences are examples
Outputs = Float[Array, " batch *outputs"]
Given = Num[Array, " batch *target"]
Mask = Shaped[Array, " batch"]
Logits = Float[Array, "examples classes"]
Targets = Num[Array, " examples *target"]
Counts = Float[Array, " classes"]
NumberOf = Num[Array, " classes"]
Each = Float[Array, " examples"]

LOSSES: dict[str, str] = {
    "ce": "cross-entropy",
    "focal": "focal loss: easy examples count less (gamma)",
    "fedlc": "logit calibration by the client's class counts (tau)",
    "cb": "class-balanced cross-entropy by effective numbers of examples (beta)",
    "ls": "label smoothing (smoothing)",
    "c3e": "confusion-calibrated cross-entropy, reads the client's running soft confusion",
    "mse": "mean squared error",
    "huber": "squared error near the target, absolute error beyond (delta)",
    "bce": "binary cross-entropy of every label (positive)",
}

SMOOTHING_FLOOR = 1e-3  # ε: added to every cell of a mini-batch's confusion and counts
PRIOR_FLOOR = 1e-8  # smallest class prior (C3E) and smallest class count (FedLC)


class Confusion(NamedTuple):
    """ONE client's running soft confusion."""

    conf: Float[Array, "classes classes"]  # row = true class, column = predicted mass
    count: Float[Array, " classes"]  # type: ignore[assignment]   # running class counts
    seen: Scalar  # warm-up counter of C3E: half the batch size per mini-batch


class Loss(Node):
    """A local loss: its constants as fields, arguments of the compiled program where they are
    annotated Real."""

    uses_confusion: ClassVar[bool] = False
    targets: ClassVar[tuple[str, ...]] = (CLASS, TOKENS)  # of tasks that it can be used for
    decay: Real = field(
        0.95,
        ge=0,
        help="momentum of the running confusion, used whenever it is tracked",
        kw_only=True,
    )

    def value(
        self, logits: Outputs, labels: Given, mask: Mask, counts: NumberOf, confusion: Tree = ()
    ) -> Scalar:
        """[] the mean over the examples that the mask [B] lets in; logits [B, C], labels [B],
        counts [C]."""
        if self.uses_confusion and not isinstance(confusion, Confusion):
            raise UserError(
                f"loss '{self.name}' needs the client's running confusion, and none is being"
                " tracked"
            )
        logits, labels, on = _masked(*places(logits, labels, mask))
        return _mean(
            self.per_example(logits, labels, jnp.asarray(counts, logits.dtype), confusion), on
        )

    def _read(self, one: dataclasses.Field, value: Any) -> Any:
        # a warm-up without end
        return (
            value if isinstance(value, float) and value == math.inf else super()._read(one, value)
        )

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        """[B] of clean rows."""
        raise NotImplementedError


# ---- the soft confusion --------------------------------------------------------------------------


def init_confusion(classes: int, dtype: Any = jnp.float32) -> Confusion:
    """All ones: before the first mini-batch every row is uniform.

    >>> init_confusion(2).conf.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return Confusion(
        jnp.ones((classes, classes), dtype), jnp.ones((classes,), dtype), jnp.zeros((), dtype)
    )


def update_confusion(
    confusion: Confusion,
    logits: Outputs,
    labels: Given,
    mask: Mask,
    decay: Scalar | float,
    *,
    batch_size: int,
) -> Confusion:
    """One mini-batch of ONE client: Conf ← μ Conf + (1−μ)(Yᵀ softmax(Z) + ε), Count ← μ Count +
    (1−μ)(c + ε).

    Y is one-hot, c the class counts of the batch, ε = 1e-3. Masked examples count nothing; a batch
    without any example leaves everything unchanged (padding steps are no-ops). No gradient flows
    through it. `seen` grows by `batch_size / 2`; C3E compares it with its warm-up threshold, beyond
    which it no longer matters.

    >>> logits, labels, mask = jnp.zeros((1, 2)), jnp.array([0]), jnp.array([True])
    >>> update = update_confusion(init_confusion(2), logits, labels, mask, 0.5, batch_size=4)
    >>> [round(float(v), 4) for v in update.conf.ravel()], float(update.seen)
    ([0.7505, 0.7505, 0.5005, 0.5005], 2.0)
    """
    logits, labels, on = _masked(*places(jax.lax.stop_gradient(logits), labels, mask))
    dtype = confusion.conf.dtype
    classes = confusion.conf.shape[0]
    onehot = jax.nn.one_hot(labels, classes, dtype=dtype) * on[:, None].astype(dtype)  # [B, C]
    mass = onehot.T @ jax.nn.softmax(logits.astype(dtype))  # [C, C]
    mix = lambda old, new: decay * old + (1 - decay) * (new + SMOOTHING_FLOOR)
    new = Confusion(
        mix(confusion.conf, mass),
        mix(confusion.count, onehot.sum(0)),
        confusion.seen + batch_size / 2,
    )
    any_example = on.any()
    return Confusion(*(jnp.where(any_example, a, b) for a, b in zip(new, confusion, strict=True)))


# ---- building blocks -----------------------------------------------------------------------------


def places(
    logits: Outputs, labels: Given, mask: Mask
) -> tuple[Logits, Num[Array, "examples ..."], Shaped[Array, " examples"]]:
    """Places of sequences, [B, T, C] and [B, T], as examples [B·T]; those without a label are
    masked. Else as they are."""
    if logits.ndim != 3:
        return logits, labels, mask
    on = (labels >= 0) & (mask > 0)[:, None]
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), on.reshape(-1)


def _masked(
    logits: Logits, labels: Int[Array, " examples"], mask: Shaped[Array, " examples"]
) -> tuple[Logits, Int[Array, " examples"], Bool[Array, " examples"]]:
    """Masked-out rows become harmless zeros, so that not even a NaN in the padding reaches a
    gradient."""
    on = mask > 0
    return jnp.where(on[:, None], logits, 0), jnp.where(on, labels, 0), on


def _mean(per_example: Each, on: Bool[Array, " examples"]) -> Scalar:
    """Mean over the examples that are on; 0 for none."""
    total = jnp.sum(jnp.where(on, per_example, 0))
    return total / jnp.maximum(on.sum(), 1).astype(per_example.dtype)


def _cross_entropy(logits: Logits, labels: Int[Array, " examples"]) -> Each:
    # the label's logit by comparison: the gradient of an indexed read is a scatter, many small
    # operations on CPU
    own = jnp.where(labels[:, None] == jnp.arange(logits.shape[-1]), logits, 0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - own  # [B]


def _unit_off_diagonal(matrix: Float[Array, "classes classes"]) -> Float[Array, "classes classes"]:
    """Zero diagonal, largest entry 1 (all zero if there is nothing off the diagonal)."""
    matrix = matrix * (1 - jnp.eye(matrix.shape[0], dtype=matrix.dtype))
    largest = matrix.max()
    return jnp.where(largest > 0, matrix / jnp.where(largest > 0, largest, 1), 0)


# ---- the losses: per-example values, given (logits, labels, counts, confusion) of clean rows
# --------------


class CE(Loss):
    """Cross-entropy."""

    name = "ce"

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        return _cross_entropy(logits, labels)


class Focal(Loss):
    """Easy examples count less."""

    name = "focal"
    gamma: Real = field(
        2.0, ge=0, off=True, help="how much less easy examples count; 0 is cross-entropy"
    )

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        ce = _cross_entropy(logits, labels)
        if isinstance(self.gamma, float) and self.gamma == 0:
            return ce
        # 1 − p_y without cancellation; the floor keeps the slope of x^γ finite at p_y = 1 when γ <
        # 1
        wrong = jnp.maximum(-jnp.expm1(-ce), jnp.finfo(ce.dtype).eps)
        return wrong**self.gamma * ce


class FedLC(Loss):
    """Logit calibration by the client's class counts."""

    name = "fedlc"
    tau: Real = field(0.5, ge=0, help="strength of the calibration")

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        # an absent class gets −100 τ: the client does not push classes down that it never sees
        shift = self.tau * jnp.maximum(counts, PRIOR_FLOOR) ** -0.25
        return _cross_entropy(logits - shift, labels)


def class_balanced_weights(
    counts: Float[Array, " classes"], beta: Scalar | float
) -> Float[Array, " classes"]:
    """w_c ∝ (1 − β)/(1 − β^{n_c}), Σ w = C, w_c = 0 for an absent class. counts [C] -> [C].

    >>> [round(float(w), 3) for w in class_balanced_weights(jnp.array([5.0, 5.0, 0.0]), 0.9)]
    [1.5, 1.5, 0.0]
    """
    present = counts > 0
    # 1 − β^n = −expm1(n log β) keeps its digits for β near 1
    log_beta = math.log(beta) if beta > 0 else -math.inf
    effective = -jnp.expm1(jnp.where(present, counts, 1) * log_beta)
    weights = jnp.where(present, (1 - beta) / effective, 0)
    total = weights.sum()
    return jnp.where(total > 0, weights * counts.shape[0] / jnp.where(total > 0, total, 1), 0)


class CB(Loss):
    """Class-balanced cross-entropy by effective numbers of examples."""

    name = "cb"
    # a constant: log β needs all digits
    beta: float = field(0.9999, ge=0, help="β of the effective number of examples")

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        return class_balanced_weights(counts, self.beta)[labels] * _cross_entropy(logits, labels)


class LS(Loss):
    """Label smoothing."""

    name = "ls"
    smoothing: Real = field(0.1, ge=0, help="probability that is spread over the other classes")

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        classes = logits.shape[-1]
        onehot = jax.nn.one_hot(labels, classes, dtype=logits.dtype)
        target = onehot * (1 - self.smoothing) + (1 - onehot) * (
            self.smoothing / max(classes - 1, 1)
        )
        return optax.softmax_cross_entropy(logits, target)


class C3E(Loss):
    """Confusion-calibrated cross-entropy.

    z'_j   = z_j + b · log π_j · exp(Conf_yj / ΣConf),  π = Count / ΣCount ≥ 1e-8
             (`prior`; else z' = z)
    Δ      = rows of A = ½(Conf + Confᵀ) normalised to sum 1 (`row_norm`), zero diagonal, over its
             maximum
    L_log  = −z'_y + log Σ_j exp(z'_j + Δ_yj)
    M      = row softmax of A, zero diagonal, over its maximum
    L_conf = CE(z − β_c M_y, y) on the raw logits
    L      = λ_μ L_log + λ_ν L_conf

    While `seen < warmup`, Δ is zero and so is L_conf. The statistics are those after this batch's
    update; no gradient flows through them.
    """

    name = "c3e"
    uses_confusion = True
    b: Real = field(0.95, ge=0, help="strength of the prior")
    beta_c: Real = field(0.5, ge=0, help="strength of the margin")
    lam_mu: Real = field(0.95, ge=0, help="weight of the calibrated part")
    lam_nu: Real = field(0.05, ge=0, help="weight of the confusing part")
    warmup: Real = field(1000.0, ge=0, help="examples before the confusion is used")
    prior: bool = field(True, help="class priors in the logits")
    row_norm: bool = field(True, help="rows of the confusion sum to 1")

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        confusion = jax.tree.map(lambda a: jax.lax.stop_gradient(a).astype(logits.dtype), confusion)
        conf, count, seen = confusion
        warm = (seen >= self.warmup).astype(logits.dtype)
        tiny = jnp.finfo(logits.dtype).tiny
        between = (conf + conf.T) / 2  # A [C, C]
        adjusted = logits
        if self.prior:
            # [C]
            log_prior = jnp.log(jnp.maximum(count / jnp.maximum(count.sum(), tiny), PRIOR_FLOOR))
            factor = jnp.exp(conf / jnp.maximum(conf.sum(), tiny))  # [C, C]
            adjusted = logits + self.b * log_prior * factor[labels]  # [B, C]
        rows = (
            between / jnp.maximum(between.sum(1, keepdims=True), tiny) if self.row_norm else between
        )
        cost = warm * _unit_off_diagonal(rows)  # Δ [C, C]
        margin = _unit_off_diagonal(jax.nn.softmax(between, axis=1))  # M [C, C]
        # Δ_yy = 0, so L_log is cross-entropy on the logits with the cost added
        calibrated = _cross_entropy(adjusted + cost[labels], labels)
        confusing = _cross_entropy(logits - self.beta_c * margin[labels], labels)
        return self.lam_mu * calibrated + self.lam_nu * warm * confusing


class OfNumbers(Loss):
    """A loss of targets [B, K] that are no classes."""

    targets = (REAL,)

    def value(
        self, logits: Outputs, labels: Given, mask: Mask, counts: NumberOf, confusion: Tree = ()
    ) -> Scalar:
        on = mask > 0
        clean = (
            jnp.where(on[:, None], logits, 0),
            jnp.where(on[:, None], labels, 0).astype(logits.dtype),
        )
        return _mean(self.per_example(*clean, counts, confusion), on)


class MSE(OfNumbers):
    """Mean squared error."""

    name = "mse"

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        return jnp.square(logits - labels).mean(-1)


class Huber(OfNumbers):
    """Squared error near the target, absolute error beyond."""

    name = "huber"
    delta: Real = field(1.0, gt=0, help="δ, the error beyond which the loss is linear")

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        far = jnp.abs(logits - labels)
        return jnp.where(
            far <= self.delta, 0.5 * jnp.square(far), self.delta * (far - 0.5 * self.delta)
        ).mean(-1)


class BCE(OfNumbers):
    """Binary cross-entropy of every label."""

    name = "bce"
    targets = (LABELS,)
    positive: Real = field(1.0, gt=0, help="weight of a label that is 1")

    def per_example(self, logits: Logits, labels: Targets, counts: Counts, confusion: Tree) -> Each:
        each = optax.sigmoid_binary_cross_entropy(logits, labels)
        return (each * jnp.where(labels > 0, self.positive, 1)).mean(-1)


class UserLoss(Loss):
    """A function of the user's: (outputs [B, …], targets [B, …]) -> [B]."""

    name = "own"
    targets = TARGETS
    function: Any = None

    def value(
        self, logits: Outputs, labels: Given, mask: Mask, counts: NumberOf, confusion: Tree = ()
    ) -> Scalar:
        on, own = mask > 0, self.function
        clear = lambda a: jnp.where(on.reshape(-1, *[1] * (a.ndim - 1)), a, 0)
        each = own(clear(logits), clear(labels))
        if getattr(each, "shape", None) != on.shape:
            raise UserError(
                f"loss '{getattr(own, '__name__', own)}' must return one value per example,"
                f" {on.shape}, not {getattr(each, 'shape', type(each).__name__)}"
            )
        return _mean(each, on)


# ---- the registry --------------------------------------------------------------------------------

CLASSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (CE, Focal, FedLC, CB, LS, C3E, MSE, Huber, BCE)
}
# Values that differ on one data set; everything not named here is as above.
_PER_DATASET: dict[str, dict[str, dict[str, Any]]] = {
    "cifar100": {"c3e": {"b": 0.85, "beta_c": 0.85, "lam_mu": 0.9, "lam_nu": 0.9, "warmup": 2000.0}}
}
_DECAY_PER_DATASET = {"cifar100": 0.85}

_RANGES: dict[str, tuple[float, float, bool]] = {  # option: (lowest, highest, highest allowed?)
    "gamma": (0, math.inf, False),
    "tau": (0, math.inf, False),
    "beta": (0, 1, False),
    "smoothing": (0, 1, False),
    "decay": (0, 1, False),
    "b": (0, math.inf, False),
    "beta_c": (0, math.inf, False),
    "lam_mu": (0, math.inf, False),
    "lam_nu": (0, math.inf, False),
    "warmup": (0, math.inf, True),
    "delta": (1e-30, math.inf, False),
    "positive": (1e-30, math.inf, False),
}


F = TypeVar("F", bound=Callable[..., Any])


def register_loss(name: str, help: str = "") -> Callable[[F], F]:
    """A decorator: this subclass of `Loss`, or this function (outputs [B, …], targets [B, …]) ->
    [B], is the loss `name`."""

    def known(given: F) -> F:
        if isinstance(given, type) and issubclass(given, Loss):
            kind: type[Loss] = given
            kind.name = name
        else:
            kind = type(
                name,
                (UserLoss,),
                {"function": given, "__annotations__": {"function": "Any"}, "name": name},
            )
        CLASSES[name] = kind
        LOSSES.setdefault(name, help or (given.__doc__ or "").strip().split("\n")[0])
        return given

    return known


def check_task(loss: Loss, task: Task) -> None:
    """Refuse a loss that is made for other targets."""
    if task.target not in loss.targets:
        what = "class labels" if CLASS in loss.targets else " or ".join(loss.targets)
        fit = [n for n, kind in CLASSES.items() if task.target in kind.targets]
        raise UserError(
            f"loss '{loss.name}' needs {what}, and task '{task.name}' has none; allowed there:"
            f" {', '.join(sorted(fit))}"
        )


def _dataset_key(dataset: str) -> str:
    """`CIFAR-100`, `cifar_100` and `cifar100` are the same data set."""
    return "".join(ch for ch in dataset.lower() if ch.isalnum())


def loss_defaults(name: str, dataset: str = "") -> dict[str, Any]:
    """The options of a loss and their values on a data set.

    >>> loss_defaults("focal")
    {'gamma': 2.0, 'decay': 0.95}
    >>> loss_defaults("c3e", "CIFAR-100")["warmup"], loss_defaults("c3e", "CIFAR-100")["decay"]
    (2000.0, 0.85)
    """
    lookup("loss", name, LOSSES)
    key = _dataset_key(dataset)
    found = {
        one.name: one.default
        for one in dataclasses.fields(CLASSES[name])
        if one.name not in ("decay", "function")
    }
    return {
        **found,
        **_PER_DATASET.get(key, {}).get(name, {}),
        "decay": _DECAY_PER_DATASET.get(key, Loss.decay),
    }


def _checked(loss: str, option: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise UserError(f"loss '{loss}': option {option}={value!r} must be true or false")
        return value
    if option not in _RANGES:  # of a user's loss: its fields say what is allowed
        return value
    low, high, closed = _RANGES[option]
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (low <= number < high or (closed and number == high)):
        raise UserError(
            f"loss '{loss}': option {option}={value!r} must be a number in [{low},"
            f" {high}{']' if closed else ')'}"
        )
    return float(number)


def make_loss(name: str, classes: int, dataset: str = "", /, **options: Any) -> Loss:
    """The loss called `name` with its per-data-set defaults, overridden by `options`.

    Options: focal `gamma`; fedlc `tau`; cb `beta`; ls `smoothing`; c3e `b`, `beta_c`, `lam_mu`,
    `lam_nu`, `warmup` and the switches `prior`, `row_norm`; and for every loss `decay`, the
    momentum of the confusion.

    >>> make_loss("c3e", 100, "cifar100").decay
    0.85
    >>> make_loss("focal", 10, tau=1.0)
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: unknown option of loss 'focal' 'tau'; allowed: decay, gamma
    """
    defaults: Mapping[str, Any] = loss_defaults(name, dataset)
    for option in options:
        if option not in defaults:
            raise unknown(f"option of loss '{name}'", shown(option), defaults)
    bound = {
        option: _checked(name, option, options.get(option, default), default)
        for option, default in defaults.items()
    }
    return CLASSES[name](**bound)
