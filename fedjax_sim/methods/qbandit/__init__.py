"""Q-bandit: an agent decides how many layers each client shares and how long it trains, within soft
budgets."""

from fedjax_sim.methods.qbandit.actions import MENU, Actions
from fedjax_sim.methods.qbandit.budgets import TABLE_1, Budgets, budgets_now, read_budgets
from fedjax_sim.methods.qbandit.distance import divergence, pairwise_distance
from fedjax_sim.methods.qbandit.method import QBandit, Report, Server

__all__ = [
    "MENU",
    "TABLE_1",
    "Actions",
    "Budgets",
    "QBandit",
    "Report",
    "Server",
    "budgets_now",
    "divergence",
    "pairwise_distance",
    "read_budgets",
]
