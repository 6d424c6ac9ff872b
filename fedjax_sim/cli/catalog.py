"""What there is, by name and one line each, for `fedjax-sim list`."""

from __future__ import annotations


def catalog(what: str) -> dict[str, str]:
    """One table: methods (with their options), datasets, models, partitions, protocols, losses, agents, evaluations."""
    if what == "methods":
        from fedjax_sim.methods import METHODS, options_of

        shown = lambda name: ", ".join(f"{k}={v}" for k, v in options_of(name).items())
        return {name: text + (f" [{shown(name)}]" if shown(name) else "") for name, text in METHODS.items()}
    if what == "datasets":
        from fedjax_sim.data.sources import DATASETS

        return {name: getattr(entry, "help", str(entry)) for name, entry in DATASETS.items()}
    if what == "partitions":
        from fedjax_sim.data.partition import PARTITIONS

        return {name: entry.help for name, entry in PARTITIONS.items()}
    if what == "protocols":
        from fedjax_sim.data.protocols import PROTOCOLS

        return {name: getattr(entry, "help", str(entry)) for name, entry in PROTOCOLS.items()}
    if what == "models":
        from fedjax_sim.models import MODELS

        return MODELS
    if what == "losses":
        from fedjax_sim.local.losses import LOSSES

        return LOSSES
    if what == "evaluations":
        from fedjax_sim.engine.evaluation import EVALUATIONS

        return EVALUATIONS
    import agents

    return dict(agents.DESCRIPTIONS)
