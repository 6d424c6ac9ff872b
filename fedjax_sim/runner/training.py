"""The run's optimiser and loss: from the words of a Config, or objects of the user's, to records of
`local`."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from fedjax_sim.data.federation import Federation
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.local import losses, optim, optimizers
from fedjax_sim.options import convert, real, shown
from fedjax_sim.runner.config import UNSAID, Config, Unsaid
from fedjax_sim.tasks import CLASS, task_called
from fedjax_sim.types import Env

SGD = "sgd"
OWN_RATE = 1.0  # of an object that has its learning rate inside


def with_optimizer(config: Config, method: Method, given: Any = None) -> Config:
    """`config` with the numbers of its optimiser where they belong: what nobody said is the
    method's, or the rule's own."""
    if given is not None:
        return with_own(config, given)
    name, options = optimizers.parse(config.optimizer)
    said = {k: v for k in UNSAID if not isinstance(v := getattr(config, k), Unsaid)}
    inside = {
        k: convert(f"optimizer {name}.{k}", v, real)
        for k, v in options.items()
        if k == "lr" or name == SGD
    }
    for option, value in inside.items():
        if option not in UNSAID:
            optimizers.options_of(SGD, {option: value})
        if said.get(option, value) != value:
            raise UserError(
                f"{option} is given twice: optimizer '{shown(config.optimizer)}', and"
                f" {said[option]:g}; leave one out"
            )
    if name == SGD:
        unsaid = {
            k: float(dict(method.prefers).get(k, getattr(config, k)))
            for k in UNSAID
            if k not in said
        }
        return dataclasses.replace(config, optimizer=SGD, **{**unsaid, **inside})  # type: ignore[arg-type]
    optimizers.options_of(name, {k: v for k, v in options.items() if k != "lr"})
    refuse_numbers_of_sgd(config, name)
    rate = inside.get("lr", said.get("lr", optimizers.RATES.get(name, optimizers.RATE)))
    rest = ",".join(f"{k}={v}" for k, v in options.items() if k != "lr")
    text = f"{name}:{rest}" if rest else name
    return dataclasses.replace(
        config, optimizer=text, lr=float(rate), momentum=0.0, weight_decay=0.0
    )


def refuse_numbers_of_sgd(config: Config, name: str) -> None:
    for number in ("momentum", "weight_decay"):
        value = getattr(config, number)
        if value and not isinstance(value, Unsaid):
            raise UserError(
                f"{number.replace('_', '-')} {value:g} belongs to optimizer sgd, and this is"
                f" '{shown(name)}'; its own numbers stand behind its name, e.g."
                " adamw:weight_decay=0.01"
            )


def with_own(config: Config, given: Any) -> Config:
    """`config` of an optimiser given as an object."""
    rule = optimizers.own_optimizer(given)
    refuse_numbers_of_sgd(config, "an object of optax")
    if config.optimizer not in (Config.optimizer, "own"):
        raise UserError(
            f"optimizer '{shown(config.optimizer)}' and an optimizer as an object are two; leave"
            " one out"
        )
    rate = OWN_RATE if isinstance(config.lr, Unsaid) else config.lr
    text = optimizers.fingerprint(rule)
    mark = hashlib.sha256((text + repr(rule.values.items)).encode()).hexdigest()[:16]
    return dataclasses.replace(
        config, optimizer="own", own_optimizer=mark, lr=rate, momentum=0.0, weight_decay=0.0
    )


def make_optimizer(config: Config, groups: tuple[str, ...], given: Any = None) -> optim.Optimizer:
    """The record that the compiled program reads, of a Config from `with_optimizer`."""
    common: dict[str, Any] = dict(
        groups=optim.decay_groups(config.decay_groups, groups),
        clip_norm=config.clip_norm,
        within=optim.local_schedule(config.local_schedule),
    )
    if given is not None:
        refuse_groups(config, "an object of optax")
        return dataclasses.replace(optimizers.own_optimizer(given), **common)
    name, options = optimizers.parse(config.optimizer)
    if name == SGD:
        return optim.Sgd(momentum=config.momentum, weight_decay=config.weight_decay, **common)
    values = optimizers.options_of(name, options)
    if "weight_decay" not in values:
        refuse_groups(config, name)
    return optimizers.Rule(kind=name, values=optimizers.Values(tuple(values.items())), **common)


def refuse_groups(config: Config, name: str) -> None:
    if config.decay_groups != Config.decay_groups:
        raise UserError(
            f"decay-groups '{shown(config.decay_groups)}' do not go with optimizer {name}: no group"
            " decays there"
        )


def check_method(method: Method, config: Config, rule: optim.Optimizer) -> None:
    """Refuse an optimiser with which a method's own equations do not hold."""
    if method.needs_sgd and not rule.plain:
        what = (
            f"optimizer {config.optimizer}"
            if not isinstance(rule, optim.Sgd)
            else (
                f"clip-norm {config.clip_norm:g}"
                if config.clip_norm
                else f"local-schedule {config.local_schedule}"
            )
        )
        raise UserError(
            f"method '{method.name}' does not go with {what}: {method.needs_sgd}; use plain sgd"
        )


# ---- the loss and the task -----------------------------------------------------------------------
def with_loss(config: Config, method: Method, fed: Federation, given: Any = None) -> Config:
    """`config` with its loss: the method's own unless it names one, or the task's where that is of
    no use there."""
    task = task_called(fed.task)
    if given is not None:
        if config.loss not in ("auto", "own"):
            raise UserError(
                f"loss '{shown(config.loss)}' and a loss as an object are two; leave one out"
            )
        if not callable(given) and not isinstance(given, losses.Loss):
            raise UserError(
                f"loss= is {shown(repr(given))}, neither a name nor a function (outputs, targets)"
                " -> [B]"
            )
        return dataclasses.replace(
            config, loss="own", own_loss=getattr(given, "__name__", repr(given))
        )
    if config.loss != "auto":
        return config
    usable = task.target in losses.CLASSES[method.loss].targets and (
        task.name == "classification" or method.loss != "ce"
    )
    return dataclasses.replace(config, loss=method.loss if usable else task.loss)


def make_loss(config: Config, fed: Federation, given: Any = None) -> losses.Loss:
    """The local loss, made for the task of the data."""
    if given is None:
        loss = losses.make_loss(config.loss, fed.classes, fed.name, **config.loss_options)
    else:
        loss = given if isinstance(given, losses.Loss) else losses.OwnLoss(function=given)
    losses.check_task(loss, task_called(fed.task))
    return loss


def check_task(method: Method, fed: Federation, env: Env) -> None:
    """Refuse a method whose equations are about classes where the task has none."""
    task = task_called(fed.task)
    why = method.needs_classes if task.target != CLASS else ""
    if env.track_confusion and not task.has_classes:
        why = why or "it reads the confusion of classes"
    if why:
        raise UserError(
            f"method '{method.name}' is for classification with one class and one vector of logits"
            f" per example, and the task of '{shown(fed.name)}' is {task.name}: {why}"
        )
