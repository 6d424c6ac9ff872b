"""The run's optimiser and loss: from settings or a user's objects to records of `local`."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from fedjax_sim.data.federation import Federation
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment, Found
from fedjax_sim.experiment.settings import GIVEN, Training
from fedjax_sim.experiment.tree import SETTINGS
from fedjax_sim.hooks import Method
from fedjax_sim.local import losses, optim, optimizers
from fedjax_sim.options import convert, real, shown
from fedjax_sim.tasks import CLASS, task_called
from fedjax_sim.types import Env

SGD = "sgd"
RATE_INSIDE = 1.0  # for an optax object, which has its own learning rate
# settings for which a method may have a better default
OF_SGD = {key: one.otherwise for key, (_, _, one, _) in SETTINGS.items() if one.otherwise}


def with_optimizer(
    experiment: Experiment, found: Found, method: Method, given: Any = None
) -> tuple[Experiment, Found]:
    """Resolve the numbers of the optimiser: those not given are the method's, or the rule's
    defaults."""
    if given is not None:
        return with_given_optimizer(experiment, found, given)
    train = experiment.training
    name, options = optimizers.parse(train.optimizer)
    given_numbers = {k: v for k in OF_SGD if (v := experiment.get(k)) is not None}
    own = {k: v for k, v in options.items() if k == "lr" or name == SGD}
    inside = {k: convert(f"optimizer {name}.{k}", v, real) for k, v in own.items()}
    for option, value in inside.items():
        if option not in OF_SGD:
            optimizers.options_of(SGD, {option: value})
        if given_numbers.get(option, value) != value:
            raise UserError(
                f"{option} is given twice: optimizer '{shown(train.optimizer)}', and"
                f" {given_numbers[option]:g}; leave one out"
            )
    if name == SGD:
        usual = OF_SGD | dict(method.prefers)
        values = usual | given_numbers | inside
        numbers = {k: float(v) for k, v in values.items() if k in OF_SGD}
        return experiment.replace(optimizer=SGD, **numbers), found
    optimizers.options_of(name, {k: v for k, v in options.items() if k != "lr"})
    refuse_numbers_of_sgd(experiment, name)
    usual_rate = optimizers.RATES.get(name, optimizers.RATE)
    rate = ({"lr": usual_rate} | given_numbers | inside)["lr"]
    rest = ",".join(f"{k}={v}" for k, v in options.items() if k != "lr")
    text = f"{name}:{rest}" if rest else name
    return experiment.replace(optimizer=text, lr=rate, momentum=0.0, weight_decay=0.0), found


def refuse_numbers_of_sgd(experiment: Experiment, name: str) -> None:
    for number in ("momentum", "weight_decay"):
        if value := experiment.get(number):
            raise UserError(
                f"{number.replace('_', '-')} {value:g} belongs to optimizer sgd, and this is"
                f" '{shown(name)}'; write its options after its name, e.g. adamw:weight_decay=0.01"
            )


def with_given_optimizer(
    experiment: Experiment, found: Found, given: Any
) -> tuple[Experiment, Found]:
    """An optimiser given as an object."""
    record = optimizers.user_optimizer(given)
    refuse_numbers_of_sgd(experiment, "an object of optax")
    if experiment.training.optimizer not in (SGD, GIVEN):
        raise UserError(
            f"optimizer '{shown(experiment.training.optimizer)}' is given, and an optimizer object"
            " too; leave one out"
        )
    rate = RATE_INSIDE if experiment.training.lr is None else experiment.training.lr
    text = optimizers.fingerprint(record)
    mark = hashlib.sha256((text + repr(record.values.items)).encode()).hexdigest()[:16]
    experiment = experiment.replace(optimizer=GIVEN, lr=rate, momentum=0.0, weight_decay=0.0)
    return experiment, dataclasses.replace(found, custom_optimizer=mark)


def make_optimizer(
    experiment: Experiment, groups: tuple[str, ...], given: Any = None
) -> optim.Optimizer:
    """The optimiser of a resolved experiment."""
    common: dict[str, Any] = dict(
        groups=optim.decay_groups(experiment.training.decay_groups, groups),
        clip_norm=experiment.training.clip_norm,
        within=optim.local_schedule(experiment.training.local_schedule),
    )
    if given is not None:
        refuse_groups(experiment, "an object of optax")
        return dataclasses.replace(optimizers.user_optimizer(given), **common)
    name, options = optimizers.parse(experiment.training.optimizer)
    if name == SGD:
        train = experiment.training
        assert train.momentum is not None and train.weight_decay is not None  # resolved
        return optim.Sgd(momentum=train.momentum, weight_decay=train.weight_decay, **common)
    values = optimizers.options_of(name, options)
    if "weight_decay" not in values:
        refuse_groups(experiment, name)
    return optimizers.Rule(kind=name, values=optimizers.Values(tuple(values.items())), **common)


def refuse_groups(experiment: Experiment, name: str) -> None:
    if experiment.training.decay_groups != Training().decay_groups:
        raise UserError(
            f"decay-groups '{shown(experiment.training.decay_groups)}' does not go with optimizer"
            f" {name}, which has no weight decay"
        )


def check_method(method: Method, experiment: Experiment, rule: optim.Optimizer) -> None:
    """Refuse an optimiser for which the method's equations do not hold."""
    if method.needs_sgd and not rule.plain:
        train = experiment.training
        if not isinstance(rule, optim.Sgd):
            what = f"optimizer {train.optimizer}"
        elif train.clip_norm:
            what = f"clip-norm {train.clip_norm:g}"
        else:
            what = f"local-schedule {train.local_schedule}"
        raise UserError(
            f"method '{method.name}' does not go with {what}: {method.needs_sgd}; use plain sgd"
        )


# ---- the loss and the task -----------------------------------------------------------------------
def with_loss(
    experiment: Experiment, found: Found, method: Method, fed: Federation, given: Any = None
) -> tuple[Experiment, Found]:
    """The loss: the one given, else the method's if it suits the task, else the task's."""
    task, name = task_called(fed.task), experiment.training.loss
    if given is not None:
        if name not in ("auto", GIVEN):
            raise UserError(f"loss '{shown(name)}' is given, and a loss object too; leave one out")
        if not callable(given) and not isinstance(given, losses.Loss):
            raise UserError(
                f"loss= is {shown(repr(given))}, neither a name nor a function (outputs, targets)"
                " -> [B]"
            )
        custom = getattr(given, "__name__", repr(given))
        return experiment.replace(loss=GIVEN), dataclasses.replace(found, custom_loss=custom)
    if name != "auto":
        return experiment, found
    usable = task.target in losses.CLASSES[method.loss].targets and (
        task.name == "classification" or method.loss != "ce"
    )
    return experiment.replace(loss=method.loss if usable else task.loss), found


def make_loss(experiment: Experiment, fed: Federation, given: Any = None) -> losses.Loss:
    """The local loss, checked against the task of the data."""
    train = experiment.training
    if given is None:
        record = losses.make_loss(train.loss, fed.classes, fed.name, **train.loss_options)
    else:
        record = given if isinstance(given, losses.Loss) else losses.UserLoss(function=given)
    losses.check_task(record, task_called(fed.task))
    return record


def check_task(method: Method, fed: Federation, env: Env) -> None:
    """Refuse a method for classification where the task has no classes."""
    task = task_called(fed.task)
    why = method.needs_classes if task.target != CLASS else ""
    if env.track_confusion and not task.has_classes:
        why = why or "it reads the confusion of classes"
    if why:
        raise UserError(
            f"method '{method.name}' is for classification with one class and one vector of logits"
            f" per example, and the task of '{shown(fed.name)}' is {task.name}: {why}"
        )
