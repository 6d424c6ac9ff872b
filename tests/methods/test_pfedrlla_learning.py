"""What pre-training teaches where the right answer is known: three groups that mean the same by a
label.

`pytest -m slow -s tests/methods/test_pfedrlla_learning.py` does it at the shipped defaults; the
seeds were fixed before they were run.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import pfedrlla_designed as designed
from fedjax_sim.methods.pfedrlla.encoder import BASES

GROUP = np.repeat(np.arange(3), 3)
# a smaller head's picture, half the random rounds, and twice the gradient steps in a round: the
# rest is as shipped
QUICK = {"side": 8, "embedding": 16, "random_rounds": 25, "agent.gradient_steps": 10}


def learned(rounds: int, rows: int = 200, **options) -> dict[str, float]:
    """The weights of a pre-trained agent, the embeddings it sees, and whether actor, critic and
    encoder are alive."""
    result = designed.trained(designed.grouped(3, 3, rows), rounds, **options)
    found = designed.heatmap_figures(designed.allocation(result), GROUP) | designed.run_silhouettes(
        result, GROUP
    )
    for name in ("agent_live_policy", "agent_live_critic", "agent_sensitivity", "encoder_live"):
        found[name] = float(np.mean([row[name] for row in result.rounds[-10:]]))
    print({k: round(v, 4) for k, v in found.items()})
    return found


def alive(found: dict[str, float]) -> bool:
    return min(found[k] for k in ("agent_live_policy", "agent_live_critic", "encoder_live")) > 0.3


@pytest.mark.parametrize("participation", ["1", "6/9"])
def test_weights_go_to_the_own_group(participation):
    """Cohorts are drawn anew in every round, and the order in them is by chance: no place stands
    for a client or a group."""
    found = learned(120, rows=100, participation=participation, **QUICK)
    assert found["same"] > 1.3 * found["other"]
    # the encoder tells them
    assert found["wanted_same"] > 1.3 * found["wanted_other"] and found["silhouette_mhae"] > 0.1
    assert alive(found) and found["agent_sensitivity"] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_go_to_the_own_group_as_shipped(seed):
    """All defaults of pFedRLLA, 300 rounds instead of 600."""
    found = learned(300, seed=seed)
    assert found["same"] > 1.3 * found["other"]
    assert alive(found) and found["agent_sensitivity"] > 0.05


@pytest.mark.slow
def test_similar_heads_improve_on_uniform_weights():
    """With r3 alone the agent learns V_k: it is nearer to it than uniform weights are."""
    found = learned(300, beta1=0.0, beta2=0.0)
    assert found["r3"] > found["r3_uniform"]
    assert found["same"] > found["other"]


@pytest.mark.slow
def test_embeddings_of_five_groups_separate():
    """Silhouettes of MHAE and of PCA of the same 30 heads; with the paper's own basis nothing is
    left to separate."""
    group = np.repeat(np.arange(5), 6)
    heads, layers = designed.trained_heads(designed.grouped(5, 6), 10.0)
    found = {
        basis: designed.embeddings(heads, layers, group, 20, 32, 128, basis) for basis in BASES
    }
    for basis, row in found.items():
        print(basis, row["silhouette"], "loss", row["losses"][0], row["losses"][-1])
    shared, own = (found[basis]["silhouette"] for basis in BASES)
    assert shared["mhae"] > shared["pca"] > own["mhae"]
    assert found["shared"]["losses"][-1] < 0.9 * found["shared"]["losses"][0]
