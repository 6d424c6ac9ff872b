"""fedjax_sim: federated learning, one XLA program per round.

>>> import fedjax_sim as fs
>>> fed = fs.federate("digits", "dirichlet:0.3", clients=4)
>>> result = fs.run("fedavg", fed, model="mlp", participation=1, rounds=2, epochs=1)
>>> result.summary["rounds"]
2
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

# for editors and type checkers; classes of methods and transforms are found by `_classes`
if TYPE_CHECKING:
    from fedjax_sim.api import (
        Comparison,
        Result,
        Step,
        compare,
        register_agent,
        resume,
        rounds,
        run,
        sweep,
    )
    from fedjax_sim.data.federation import Federation
    from fedjax_sim.data.protocols import federate
    from fedjax_sim.data.sources import register_dataset
    from fedjax_sim.engine.simulation import simulate
    from fedjax_sim.errors import UserError
    from fedjax_sim.experiment import Experiment
    from fedjax_sim.fields import Real, field
    from fedjax_sim.hooks import Method
    from fedjax_sim.local.losses import register_loss
    from fedjax_sim.methods import make_method, register
    from fedjax_sim.methods.apfl import APFL as APFL
    from fedjax_sim.methods.ccvr import CCVR as CCVR
    from fedjax_sim.methods.ditto import Ditto as Ditto
    from fedjax_sim.methods.fedala import FedALA as FedALA
    from fedjax_sim.methods.fedamp import FedAMP as FedAMP
    from fedjax_sim.methods.fedas import FedAS as FedAS
    from fedjax_sim.methods.fedavg import FedAvg as FedAvg
    from fedjax_sim.methods.fedavg import FedAvgFT as FedAvgFT
    from fedjax_sim.methods.fedbabu import FedBABU as FedBABU
    from fedjax_sim.methods.fedca import FedCA as FedCA
    from fedjax_sim.methods.fedcp import FedCP as FedCP
    from fedjax_sim.methods.fedfa import FedFA as FedFA
    from fedjax_sim.methods.fedfa_freq import FedFAFreq as FedFAFreq
    from fedjax_sim.methods.fedfomo import FedFomo as FedFomo
    from fedjax_sim.methods.fedntd import FedNTD as FedNTD
    from fedjax_sim.methods.fedpac import FedPAC as FedPAC
    from fedjax_sim.methods.fedpam import FedPAM as FedPAM
    from fedjax_sim.methods.fedper import FedPer as FedPer
    from fedjax_sim.methods.fedphp import FedPHP as FedPHP
    from fedjax_sim.methods.fedpolicy import FedPolicy as FedPolicy
    from fedjax_sim.methods.fedprox import FedProx as FedProx
    from fedjax_sim.methods.fedrep import FedRep as FedRep
    from fedjax_sim.methods.fedrod import FedRoD as FedRoD
    from fedjax_sim.methods.fedsam import FedSAM as FedSAM
    from fedjax_sim.methods.local_only import LocalOnly as LocalOnly
    from fedjax_sim.methods.perfedavg import PerFedAvg as PerFedAvg
    from fedjax_sim.methods.pfedfda import PFedFDA as PFedFDA
    from fedjax_sim.methods.pfedme import PFedMe as PFedMe
    from fedjax_sim.methods.pfedrlla import PFedRLLA as PFedRLLA
    from fedjax_sim.methods.qbandit import QBandit as QBandit
    from fedjax_sim.methods.redistribute import Backbone as Backbone
    from fedjax_sim.methods.redistribute import Full as Full
    from fedjax_sim.methods.redistribute import Head as Head
    from fedjax_sim.methods.redistribute import Random as Random
    from fedjax_sim.methods.scaffold import Scaffold as Scaffold
    from fedjax_sim.metrics import register_metric
    from fedjax_sim.metrics.base import Metric
    from fedjax_sim.models import build, from_module, register_model
    from fedjax_sim.runner.export import Exported, export, load_model
    from fedjax_sim.runner.many import run_seeds, run_values
    from fedjax_sim.runner.prepare import prepare
    from fedjax_sim.runner.sinks import Segment, Sink
    from fedjax_sim.runner.weights import save_net
    from fedjax_sim.tasks import Task, register_task
    from fedjax_sim.transforms import register_transform
    from fedjax_sim.transforms.agent_selection import AgentSelection as AgentSelection
    from fedjax_sim.transforms.clip import Clip as Clip
    from fedjax_sim.transforms.power_of_choice import PowerOfChoice as PowerOfChoice
    from fedjax_sim.transforms.server_optimizer import FedAdagrad as FedAdagrad
    from fedjax_sim.transforms.server_optimizer import FedAdam as FedAdam
    from fedjax_sim.transforms.server_optimizer import FedAvgM as FedAvgM
    from fedjax_sim.transforms.server_optimizer import FedYogi as FedYogi
    from fedjax_sim.transforms.server_optimizer import ServerOptimizer as ServerOptimizer
    from fedjax_sim.transforms.topk import TopK as TopK

# module -> names imported from it on first use: the command line's help must not wait for JAX
_FROM = {
    "api": (
        "Comparison",
        "Result",
        "Step",
        "compare",
        "register_agent",
        "resume",
        "rounds",
        "run",
        "sweep",
    ),
    "data.federation": ("Federation",),
    "data.protocols": ("federate",),
    "data.sources": ("register_dataset",),
    "engine.simulation": ("simulate",),
    "errors": ("UserError",),
    "experiment": ("Experiment",),
    "fields": ("Real", "field"),
    "hooks": ("Method",),
    "local.losses": ("register_loss",),
    "methods": ("make_method", "register"),
    "metrics": ("register_metric",),
    "metrics.base": ("Metric",),
    "models": ("build", "from_module", "register_model"),
    "runner.export": ("Exported", "export", "load_model"),
    "runner.many": ("run_seeds", "run_values"),
    "runner.prepare": ("prepare",),
    "runner.sinks": ("Segment", "Sink"),
    "runner.weights": ("save_net",),
    "tasks": ("Task", "register_task"),
    "transforms": ("register_transform",),
}
_HOME = {name: module for module, names in _FROM.items() for name in names}
__all__ = ["Comparison", "Experiment", "Exported", "Federation", "Method", "Metric", "Real"]
__all__ += ["Result", "Segment", "Sink", "Step", "Task", "UserError", "build", "compare", "export"]
__all__ += ["federate", "field", "from_module", "load_model", "make_method", "prepare", "register"]
__all__ += ["register_agent", "register_dataset", "register_loss", "register_metric"]
__all__ += ["register_model", "register_task", "register_transform", "resume", "rounds", "run"]
__all__ += ["run_seeds", "run_values", "save_net", "simulate", "sweep"]


def _classes() -> dict[str, str]:
    """FedProx, Clip, … -> the module of each."""
    from fedjax_sim.methods import CLASSES as methods
    from fedjax_sim.transforms import CLASSES as transforms

    return {n: f"methods.{m}" for n, m in methods.items()} | {
        n: f"transforms.{m}" for n, m in transforms.items()
    }


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or (_classes().get(name) if name[:1].isupper() else None)
    if home is None:
        raise AttributeError(f"module 'fedjax_sim' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fedjax_sim.{home}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_classes(), "__version__"]
