"""Flower's simulation engine (Ray), through its public API: ServerApp (FedAvg) and ClientApp
(NumPyClient).

One actor per core with one thread each. The server loop belongs to Flower, so the protocol is
spoken from the strategy: `configure_fit` waits for a request and starts the clock, `aggregate_fit`
stops it. Actors keep the data and the network between calls, which is faster than building them in
every client.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks import torch_models
from benchmarks.machine import cores
from benchmarks.models import init_weights
from benchmarks.peers.protocol import Line, save_weights, versions_of
from benchmarks.workloads import Workload, from_text, make_data, plan

PACKAGES = ("flwr", "ray", "torch", "numpy")


# ---- in the actors -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _prepared(workload_text: str) -> Any:
    torch.set_num_threads(1)
    workload = from_text(workload_text)
    data = make_data(workload)
    images, labels = torch_models.to_torch(data.images(), data.labels)
    model = torch_models.make_model(workload, init_weights(workload))
    planned = functools.lru_cache(maxsize=2)(
        lambda index: {w.client: w for w in plan(workload, data, index)}
    )
    return workload, images, labels, model, planned


class _Client(NumPyClient):
    def fit(self, parameters, config):
        workload, images, labels, model, planned = _prepared(config["workload"])
        work = planned(config["round"])[config["client"]]
        names = torch_models.tensors(model)
        torch_models.load(
            model, {n: torch.from_numpy(a) for n, a in zip(names, parameters, strict=True)}
        )
        torch_models.train_client(model, images, labels, work, workload)
        return [t.numpy() for t in torch_models.tensors(model).values()], work.examples, {}


def _client(context):
    return _Client().to_client()


# ---- in the server -------------------------------------------------------------------------------


class _Requests(FedAvg):
    """FedAvg that runs a round when the driver asks for one; the first round is the warm-up."""

    def __init__(self, line: Line, workload: Workload, began: float, **options: Any):
        super().__init__(**options)
        self.line, self.workload, self.data, self.began = line, workload, make_data(workload), began

    def configure_fit(self, server_round, parameters, client_manager):
        index = 0 if server_round == 1 else self.request(parameters)
        self.started = time.perf_counter()
        work = plan(self.workload, self.data, index)
        clients = client_manager.sample(len(work), min_num_clients=self.workload.clients)
        config = {"workload": self.workload.to_json(), "round": index}
        return [
            (client, FitIns(parameters, {**config, "client": one.client}))
            for client, one in zip(clients, work, strict=True)
        ]

    def request(self, parameters) -> int:
        while (asked := self.line.read())["cmd"] == "weights":
            names = torch_models.tensors(
                torch_models.make_model(self.workload, init_weights(self.workload))
            )
            values = zip(names, parameters_to_ndarrays(parameters), strict=True)
            save_weights(self.line, asked["file"], dict(values))
        if asked["cmd"] == "quit":
            ray.shutdown()
            os._exit(0)  # the simulation offers no way to end early
        return asked["index"]

    def aggregate_fit(self, server_round, results, failures):
        if failures:
            self.line.send(error=f"{len(failures)} clients failed: {failures[0]}".splitlines()[0])
        answer = super().aggregate_fit(server_round, results, failures)
        seconds = time.perf_counter() - self.started
        if server_round == 1:
            self.line.send(
                ready=True,
                setup_s=self.started - self.began,
                compile_s=seconds,
                versions=versions_of(PACKAGES),
            )
        else:
            self.line.send(seconds=seconds)
        return answer


def run(line: Line, workload: Workload) -> None:
    began = time.perf_counter()
    model = torch_models.make_model(workload, init_weights(workload))
    start = ndarrays_to_parameters([t.numpy() for t in torch_models.tensors(model).values()])

    def server(context):
        strategy = _Requests(
            line,
            workload,
            began,
            fraction_evaluate=0.0,
            initial_parameters=start,
            accept_failures=False,
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=10**6))

    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=_client),
        num_supernodes=workload.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores(), "include_dashboard": False},
        },
    )
