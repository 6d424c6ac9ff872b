"""A controller trained across federations: the population of an evolution strategy, scored on many
federations in one compiled program.

    return of a policy   mean over federations of  goal(policy) − goal(`full`), same draws
    goal                 a declared mixture, e.g. global=0.5+own=0.5
    `full`               everything to every client, at the rate and schedule that suit it best:
                         both are tuned first, for the same goal, on other federations

The policies run at that rate and schedule too. Every generation draws new federations. The state of
the strategy is written after each; the same command resumes from there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.engine import episode as episodes
from fedjax_sim.engine.episode import Draw, Length, Scores
from fedjax_sim.engine.keys import seed_key
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.simulation import Simulation
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.experiment import Experiment
from fedjax_sim.hooks import Method
from fedjax_sim.methods import make_method
from fedjax_sim.options import shown
from fedjax_sim.runner import checkpoint
from fedjax_sim.runner.across.over import Facts, Over, draw_federation, parse_over
from fedjax_sim.runner.figures import half_width
from fedjax_sim.runner.files import npz_bytes, write_bytes, write_json
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.runner.sinks import Steps
from fedjax_sim.transforms import transformed
from fedjax_sim.types import Array, Client, State, Tree

GOALS = ("global", "own", "worst", "bytes")
TUNING, TRAINING, HELD_OUT = range(3)  # streams of federations


# ---- settings ------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Search:
    """Settings of the strategy; options of --over beside those of `Over`."""

    generations: int = 40
    population: int = 24
    federations: int = 16  # per generation
    tuning: int = 32  # federations on which `full` is tuned
    held_out: int = 64  # federations on which the result is scored
    last: int = 5  # a score is the mean over so many evaluations, two rounds apart
    sigma: float = 0.3
    goal: str = "global=0.5+own=0.5"
    rates: str = "0.05|0.1|0.2|0.4|0.8"
    schedules: str = "constant|cosine"

    @property
    def mixture(self) -> dict[str, float]:
        return parse_goal(self.goal)


def parse_goal(text: str) -> dict[str, float]:
    """{score: its weight in the goal}.

    >>> parse_goal("global=0.7+own=0.3")
    {'global': 0.7, 'own': 0.3}
    >>> parse_goal("global")
    {'global': 1.0}
    """
    found: dict[str, float] = {}
    for part in text.split("+"):
        name, equals, weight = (text.strip() for text in part.partition("="))
        if name not in GOALS:
            raise unknown("goal", shown(name), GOALS)
        try:
            found[name] = float(weight) if equals else 1.0
        except ValueError:
            raise UserError(f"goal {name} has the weight '{shown(weight)}'; use a number") from None
    return found


def value_of(scores: Scores, mixture: dict[str, float]) -> Array:
    """The goal; bytes count negatively, as the share of whole models that were sent."""
    parts = {
        "global": scores.common,
        "own": scores.clients,
        "worst": scores.worst,
        "bytes": -(scores.down + scores.up) / 2,
    }
    return jnp.stack([weight * parts[name] for name, weight in mixture.items()]).sum(0)


def parse(text: str) -> tuple[Over, Search]:
    """The options of --over, split into those of the federations and those of the search."""
    types = {one.name: one.type for one in dataclasses.fields(Search)}
    found: dict[str, Any] = {}
    rest = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (text.strip() for text in part.partition(":"))
        if name not in types:
            rest.append(part)
            continue
        try:
            found[name] = {"int": int, "float": float, "str": str}[str(types[name])](value)
        except ValueError:
            raise UserError(f"over: {name} '{shown(value)}' is not a number") from None
        if not isinstance(found[name], str) and not found[name] > 0:
            raise UserError(f"over: {name} {value} is too small; allowed: above 0")
    search = Search(**found)
    if search.population < 4:
        raise UserError(f"over: population {search.population} is too small; allowed: 4 or more")
    parse_goal(search.goal)
    for rate in search.rates.split("|"):
        try:
            float(rate)
        except ValueError:
            raise UserError(f"over: rates '{shown(search.rates)}' are not numbers") from None
    return parse_over(", ".join(rest)), search


# ---- federations and programs --------------------------------------------------------------------
class Drawn(NamedTuple):
    """Several federations: arrays for the program, keys, and their settings."""

    draw: Draw
    keys: np.ndarray  # [F, 2]
    facts: list[Facts]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A method on federations drawn at random, padded to one shape, so that it is compiled once."""

    over: Over
    config: Experiment  # of every run
    length: Length
    seed: int = 0
    data_dir: str | None = None
    shape: Over | None = None  # the largest sizes, for padding; None: those of `over`

    @property
    def sizes(self) -> Over:
        return self.shape or self.over

    def federations(self, stream: int, first: int, number: int) -> tuple[list, np.ndarray, list]:
        pairs = [
            draw_federation(self.over, self.seed * 8 + stream, first + i, self.data_dir)
            for i in range(number)
        ]
        most = self.sizes.most_examples
        feds, clients = episodes.padded(
            [fed for fed, _ in pairs],
            clients=self.sizes.most_clients,
            examples={"train": most, "val": most, "test": most},
        )
        return feds, clients, [facts for _, facts in pairs]

    def simulation(
        self, method: Method | None = None, layout: Layout | None = None, **changes: Any
    ) -> Simulation:
        """The simulation of a method, by default that of the configuration."""
        sizes: dict[str, Any] = dict(
            participation=f"{self.sizes.most_participants}/{self.sizes.most_clients}",
            rounds=self.length.rounds,
            chunk=1,
        )
        config = self.config.replace(**{**sizes, **changes})
        fed = self.federations(TUNING, 0, 1)[0][0]
        return prepare(config, fed=fed, method=method, layout=layout, measure=False).simulation

    def draws(self, simulation: Simulation, stream: int, first: int, number: int) -> Drawn:
        """Federations `first`, `first` + 1, … of a stream."""
        feds, clients, facts = self.federations(stream, first, number)
        draw = episodes.draws(simulation.stages, feds, clients, [one.participants for one in facts])
        keys = np.stack([seed_key(self.seed + (stream << 40) + first + i) for i in range(number)])
        return Drawn(draw, keys, facts)


def with_rate(draw: Draw, rate: Array) -> Draw:
    """The same draw at another learning rate."""
    numbers = draw.data.numbers
    schedule: Any = dataclasses.replace(numbers.lr, lr=rate)  # type: ignore[type-var]
    return draw._replace(data=draw.data._replace(numbers=numbers._replace(lr=schedule)))


def rated(episode: Callable) -> Callable:
    """An episode whose parameters are a learning rate."""
    return lambda rate, draw, key: episode(None, with_rate(draw, rate), key)


class Baseline(NamedTuple):
    """`full` at the tuned rate and schedule."""

    lr: float
    schedule: str
    value: float
    table: list[dict[str, Any]]  # every rate and schedule with its scores


def tune(
    problem: Problem,
    search: Search,
    method: Method | None = None,
    say: Callable[[str], None] = print,
) -> Baseline:
    """The best rate and schedule of a method for the goal; an agent keeps its initial
    parameters."""
    rates = [float(rate) for rate in search.rates.split("|")]
    table: list[dict[str, Any]] = []
    for schedule in search.schedules.split("|"):
        sim = problem.simulation(method, schedule=schedule)
        drawn = problem.draws(sim, TUNING, 0, search.tuning)
        episode = rated(episodes.make_episode(sim, problem.length))
        program = jax.jit(episodes.each(episode, population=True))
        scores = program(jnp.asarray(rates, sim.env.dtype), drawn.draw, drawn.keys)  # [F, R]
        for i, rate in enumerate(rates):
            means = {k: float(v[:, i].mean()) for k, v in scores._asdict().items()}
            value = float(np.mean(value_of(scores, search.mixture)[:, i]))
            table.append(dict(schedule=schedule, lr=rate, value=value, **means))
    best = max(table, key=lambda row: row["value"] if math.isfinite(row["value"]) else -math.inf)
    say(f"tuned: lr {best['lr']:g}, schedule {best['schedule']}, {search.goal} {best['value']:.4f}")
    return Baseline(best["lr"], best["schedule"], best["value"], table)


# ---- the strategy --------------------------------------------------------------------------------
def strategy(population: int, size: int, sigma: float) -> tuple[Any, Any]:
    """(CMA-ES of evosax, its parameters)."""
    try:
        from evosax.algorithms import CMA_ES
    except ImportError:
        raise UserError(
            "training across federations needs evosax; install it with pip install"
            " 'fedjax-sim[train]'"
        ) from None
    search = CMA_ES(population_size=population, solution=jnp.zeros(size))
    return search, search.default_params.replace(std_init=sigma)


class Found(NamedTuple):
    """The progress of a search."""

    generation: int
    state: Any  # of the strategy
    history: list[dict[str, float]]


def store(out: pathlib.Path, found: Found, settings: dict[str, Any]) -> None:
    """Write the state of the strategy as plain arrays; nothing is pickled."""
    leaves = dict(
        zip(checkpoint.leaf_names(found.state), jax.tree.leaves(found.state), strict=True)
    )
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    about = dict(generation=found.generation, history=found.history, settings=settings)
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    write_bytes(out / "search.npz", npz_bytes(arrays))


def restore(out: pathlib.Path, fresh: Any, settings: dict[str, Any]) -> Found:
    """The search that `store` wrote, or a new one."""
    path = out / "search.npz"
    if not path.is_file():
        return Found(0, fresh, [])
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(bytes(file["about"]).decode())
        differ = [k for k, v in settings.items() if about["settings"].get(k) != v]
        if differ:
            raise UserError(
                f"'{out}' was searched with {differ[0]}={about['settings'].get(differ[0])}, not"
                f" {settings[differ[0]]}; choose another --out"
            )
        names, leaves = checkpoint.leaf_names(fresh), jax.tree.leaves(fresh)
        values = [jnp.asarray(file[n], leaf.dtype) for n, leaf in zip(names, leaves, strict=True)]
    state = jax.tree.unflatten(jax.tree.structure(fresh), values)
    return Found(about["generation"], state, about["history"])


@dataclasses.dataclass(frozen=True)
class Trainer:
    """One search: a controller of `problem` for a goal, against the tuned baseline."""

    problem: Problem
    search: Search
    baseline: Baseline
    parts: str = "agent.parameters"  # where in a State the policy's parameters go
    mapped: bool = False  # whether policies choose the participants, which then differ per policy

    @functools.cached_property
    def simulation(self) -> Simulation:
        return self.problem.simulation(lr=self.baseline.lr, schedule=self.baseline.schedule)

    @functools.cached_property
    def zeros(self) -> np.ndarray:
        """[D] the parameters of the policy that equals `full`."""
        sim = self.simulation
        state = jax.eval_shape(
            lambda d: episodes.blank_state(
                sim.stages, sim.open(d), seed_key(0), sim.env.model.init(jax.random.key(0))
            ),
            sim.data,
        )
        return np.zeros(episodes.value_at(state, self.parts).shape, np.float32)

    @functools.cached_property
    def source(self) -> checkpoint.Parts | None:
        """The policy of --start-from."""
        given = self.problem.config.model.start_from
        return checkpoint.find_parts(given) if given else None

    @functools.cached_property
    def first(self) -> np.ndarray:
        """[D] where the search starts: `full`, or the policy of --start-from."""
        if self.source is None:
            return self.zeros
        loaded = checkpoint.load_parts(self.source, bare_state(self.parts, self.zeros))
        return np.asarray(jax.tree.leaves(getattr(loaded, self.parts.partition(".")[0]))[0])

    @functools.cached_property
    def program(self) -> Callable[[Array, Draw, Array], Scores]:
        names = (episodes.POLICIES,) if self.mapped else ()
        episode = episodes.make_episode(
            self.simulation, self.problem.length, parts=self.parts, mapped=names
        )
        return jax.jit(episodes.each(episode, population=True))

    def gains(self, policies: Array, stream: int, first: int, number: int) -> tuple[Any, list]:
        """(every score minus that of `full` [F, P], the settings of the federations)."""
        drawn = self.problem.draws(self.simulation, stream, first, number)
        with_full = jnp.concatenate([jnp.asarray(self.zeros)[None], policies])
        scores = self.program(with_full, drawn.draw, jnp.asarray(drawn.keys))
        return jax.tree.map(lambda a: np.asarray(a[:, 1:] - a[:, :1]), scores), drawn.facts

    def settings(self) -> dict[str, Any]:
        records: dict[str, Any] = {
            "over": self.problem.over,
            "search": self.search,
            "length": self.problem.length,
        }
        plain = {k: json.loads(json.dumps(dataclasses.asdict(v))) for k, v in records.items()}
        del plain["search"]["generations"]  # a search may be extended
        hashed = self.problem.config.hash()
        rest = dict(seed=self.problem.seed, config=hashed, lr=self.baseline.lr)
        return {**plain, **rest, "start_from": self.source and self.source.fingerprint()}

    def run(
        self, out: pathlib.Path, say: Callable[[str], None] = print, bar: bool = False
    ) -> np.ndarray:
        """[D] the mean of the last generation's distribution."""
        search, key = self.search, jax.random.key(self.problem.seed)
        evolution, numbers = strategy(search.population, len(self.zeros), search.sigma)
        fresh = evolution.init(key, jnp.asarray(self.first), numbers)
        found = restore(out, fresh, self.settings())
        steps = Steps("generation", found.generation, search.generations, say, bar)
        for g in range(found.generation, search.generations):
            began = time.perf_counter()
            ask_key, tell_key = jax.random.split(jax.random.fold_in(key, g))
            policies, state = evolution.ask(ask_key, found.state, numbers)
            gains, _ = self.gains(policies, TRAINING, g * search.federations, search.federations)
            value = np.nan_to_num(value_of(gains, search.mixture).mean(0), nan=-1.0)  # [P]
            state, _ = evolution.tell(tell_key, policies, -jnp.asarray(value), state, numbers)
            seconds = time.perf_counter() - began
            runs = search.federations * (search.population + 1) * self.problem.length.rounds
            progress = dict(
                mean=float(value.mean()), best=float(value.max()), sigma=float(state.std)
            )
            progress["federation_rounds_per_second"] = runs / seconds
            found = Found(g + 1, state, [*found.history, {"generation": g + 1, **progress}])
            store(out, found, self.settings())
            steps.step(
                f"mean {100 * progress['mean']:+.2f}, best {100 * progress['best']:+.2f} points of"
                f" the goal over the baseline, sigma {progress['sigma']:.3f},"
                f" {runs / seconds:.0f} federation-rounds/s",
                seconds,
            )
        steps.close()
        return np.asarray(found.state.mean, np.float32)


def interval(differences: np.ndarray) -> dict[str, float]:
    """Mean, half the width of its 95 % confidence interval, and how many are above 0."""
    better = int((differences > 0).sum())
    half = half_width(differences)
    return dict(mean=float(differences.mean()), half=half, better=better, of=len(differences))


def compared(gains: Scores, mixture: dict[str, float]) -> dict[str, dict[str, float]]:
    """Paired differences [F] of every score and of the goal, as intervals."""
    return {
        "goal": interval(np.asarray(value_of(gains, mixture))),
        **{name: interval(np.asarray(a)) for name, a in gains._asdict().items()},
    }


def bare_state(parts: str, parameters: np.ndarray) -> State:
    """A State that holds only a policy."""
    top, _, rest = parts.partition(".")
    tree: Tree = jnp.asarray(parameters)
    for name in reversed(rest.split(".")):
        tree = {name: tree}
    return State(jnp.int32(0), seed_key(0), (), Client(), ())._replace(**{top: tree})


def save_agent(out: pathlib.Path, parts: str, parameters: np.ndarray, config_hash: str) -> None:
    """Write the controller as a checkpoint, for --start-from OUT:agent."""
    checkpoint.save(out / "checkpoints", bare_state(parts, parameters), config_hash)


def where_it_evolves(config: Experiment) -> str:
    """The path of the policy's parameters in a State."""
    method = transformed(
        make_method(config.method.name, **config.method.options), config.method.transforms
    )
    if not method.evolves:
        raise UserError(
            f"method '{method.name}' has no policy to train across federations; allowed:"
            " fedpolicy.agent=evolved, or --transform agent_selection:agent=evolved"
        )
    return method.evolves


def train_over(
    text: str,
    config: Experiment,
    out: pathlib.Path,
    say: Callable[[str], None] = print,
    bar: bool = False,
) -> dict[str, Any]:
    """`fedjax-sim train METHOD --over TEXT`: tune `full`, search, score on held-out federations.

    bar: show a progress bar instead of a line per generation.
    """
    over, search = parse(text)
    parts = where_it_evolves(config)
    length = Length(config.training.rounds, last=search.last)
    problem = Problem(over, config, length, config.training.seed, config.data.data_dir)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "baseline.json"
    if file.is_file():
        baseline = Baseline(**json.loads(file.read_text()))
    else:
        baseline = tune(problem, search, say=say)
        write_json(file, baseline._asdict())
    trainer = Trainer(problem, search, baseline, parts, mapped=not parts.startswith("agent"))
    parameters = trainer.run(out, say, bar)
    gains, facts = trainer.gains(jnp.asarray(parameters)[None], HELD_OUT, 0, search.held_out)
    one = jax.tree.map(lambda a: a[:, 0], gains)
    result: dict[str, Any] = dict(
        over=text,
        parts=parts,
        parameters=[float(v) for v in parameters],
        baseline=baseline._asdict(),
        held_out=compared(one, search.mixture),
        federations=[fact._asdict() for fact in facts],
    )
    write_json(out / "result.json", result)
    save_agent(out, parts, parameters, config.hash())
    goal = result["held_out"]["goal"]
    say(
        f"on {search.held_out} unseen federations: {100 * goal['mean']:+.2f} ±"
        f" {100 * goal['half']:.2f} points of {search.goal} over the baseline"
        f" ({goal['better']} of {goal['of']} better)"
    )
    return result
