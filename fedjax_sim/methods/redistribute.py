"""Redistribution with a fixed policy: FedPolicy's static and random policies as methods.

    full       init = {Φ, Ψ}            FedAvg with uniform weights
    backbone   init = {Φ, ψ_k}          the client keeps its head
    head       init = {φ_k, Ψ}          the client keeps its backbone
    random     one of the three, uniformly, per client and round

φ_k and ψ_k are from client k's net after its last local training; at its first participation it
gets everything (`first`). Server: Θ ← (1/|K|) Σ_k trained_k. The code is that of `fedpolicy` with
agent=full, backbone, head or random, with the same default loss, C3E. Validation rows are not
needed; where there are any, they are used for the log.

Wire: |block| down, |w| up.  State: the resident model.
Evaluated: global; personal = resident.
"""

from __future__ import annotations

from fedjax_sim.methods import register
from fedjax_sim.methods.fedpolicy import Redistribution


@register("full")
class Full(Redistribution):
    """Every client gets the full aggregate back."""

    agent = "full"


@register("backbone")
class Backbone(Redistribution):
    """Clients keep their heads."""

    agent = "backbone"


@register("head")
class Head(Redistribution):
    """Clients keep their backbones."""

    agent = "head"


@register("random")
class Random(Redistribution):
    """Full, backbone or head at random."""

    agent = "random"
