"""Export a trained model from a run directory: the server's, or the one that a client predicts
with; as .npz or flax's .msgpack.

The file has every array by its path ('params/fc/kernel') and `about`, a JSON text: which model,
which method, how images are normalised. `load_model` makes a function of it; `--init` starts a run
from it if it is a plain net.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fedjax_sim import __version__, models
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine import predictor
from fedjax_sim.engine.evaluation import own_model
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Personal
from fedjax_sim.methods import make_method
from fedjax_sim.platform import floats, multiplying
from fedjax_sim.runner import checkpoint, provenance
from fedjax_sim.runner.compilation import start_jax
from fedjax_sim.runner.files import npz_bytes, write_bytes
from fedjax_sim.runner.prepare import Setup, prepare
from fedjax_sim.runner.run_directory import RunDirectory
from fedjax_sim.runner.weights import by_name, read_arrays
from fedjax_sim.tasks import TOKENS, task_called
from fedjax_sim.types import Env, State, Tree

FORMATS = (".npz", ".msgpack")


def stored_state(path: pathlib.Path, data_dir: str | None, **given: Any) -> tuple[Setup, State]:
    """The set-up and the newest State of a run directory, on one device. given: the objects that it
    was started with."""
    directory = RunDirectory(path)
    if not path.is_dir():
        raise UserError(f"there is no run directory '{path}'")
    stored = directory.read_config()
    config = stored.experiment
    provenance.check_given(path, stored, **given)
    simple: dict[str, Any] = dict(chunk=1, devices=1, backend="auto", state_on="device")
    config = config.replace(**simple, data_dir=data_dir or config.data.data_dir)
    start_jax(config)
    setup = prepare(config, **given, stored=stored.found, measure=False)
    found = checkpoint.latest(path / "checkpoints")
    with floats(config.compute.dtype):
        state = setup.simulation.init(config.training.seed, setup.net)
        return setup, checkpoint.load(found, state, setup.hash, setup.fed.num_clients)


def exported_tree(setup: Setup, state: State, client: int | None) -> Tree:
    """The global model, or the predictor of ONE client: its net (fine-tuned where the method does
    that), or whatever its `predict` takes."""
    sim, last = setup.simulation, setup.fed.num_clients - 1
    if client is None:
        if not sim.method.has_global_model:
            raise UserError(
                f"'{sim.method.name}' has no global model; name a client with --client 0 to {last}"
            )
        return predictor.global_net(sim, state)
    if not 0 <= client <= last:
        raise UserError(f"client {client} is not there; allowed: 0 to {last}")
    if own_model(sim.described) is None:
        raise UserError(
            f"clients of '{sim.method.name}' predict with the global model; leave --client out"
        )
    return predictor.personal(sim, state, client)


def described(tree: Tree, name: str = "") -> Any:
    """The structure of a tree of dicts and tuples over its leaves' names, as JSON."""
    inside = lambda key: f"{name}/{key}" if name else str(key)
    if isinstance(tree, dict):
        return {"dict": {key: described(value, inside(key)) for key, value in tree.items()}}
    if isinstance(tree, (tuple, list)):
        fields = list(getattr(tree, "_fields", ()))
        pairs = zip(fields or range(len(tree)), tree, strict=True)
        return {"tuple": [described(v, inside(k)) for k, v in pairs], "fields": fields}
    return name


def rebuilt(how: Any, arrays: dict[str, np.ndarray]) -> Tree:
    """The tree of which `described` returned `how`.

    >>> tree = ({"a": np.ones(2)}, np.zeros(1))
    >>> rebuilt(described(tree), by_name(tree))
    ({'a': array([1., 1.])}, array([0.]))
    """
    if isinstance(how, str):
        return arrays[how]
    if "dict" in how:
        return {key: rebuilt(value, arrays) for key, value in how["dict"].items()}
    values = [rebuilt(value, arrays) for value in how["tuple"]]
    return collections.namedtuple("Own", how["fields"])(*values) if how["fields"] else tuple(values)


def export(
    path: str | pathlib.Path,
    out: str | pathlib.Path | None = None,
    client: int | None = None,
    *,
    fed: Federation | None = None,
    method: Method | None = None,
    model: Any = None,
    optimizer: Any = None,
    loss: Any = None,
    data_dir: str | None = None,
) -> pathlib.Path:
    """Write the model of a run directory to `out` (.npz or .msgpack; default: in the run
    directory); returns the file.

    fed, method, model, optimizer, loss: the objects that the run was started with.
    """
    path = pathlib.Path(path)
    usual = "global.npz" if client is None else f"client-{client}.npz"
    file = path / usual if out is None else pathlib.Path(out)
    if file.suffix not in FORMATS:
        raise UserError(f"'{file}' is neither .npz nor .msgpack; choose one of these endings")
    given = dict(fed=fed, method=method, model=model, optimizer=optimizer, loss=loss)
    setup, state = stored_state(path, data_dir, **given)
    config, data = setup.experiment, setup.fed
    tree = exported_tree(setup, state, client)
    kept = ["method", "options", "model", "model_options", "conv"]
    kept += ["dtype", "activations", "precision"]
    about = {name: config.get(name) for name in kept} | dict(
        version=__version__,
        shape=list(data.shape),
        classes=data.classes,
        task=data.task,
        vocabulary=int(np.max(data.x)) + 1 if len(data.shape) == 1 else None,
        scale=float(np.asarray(data.scale)),
        mean=np.asarray(data.mean).tolist(),
        std=np.asarray(data.std).tolist(),
        round=int(state.t),
        client=client,
        own=bool(setup.found.custom_model or setup.found.custom_method),
        tree=described(tree),
    )
    arrays = {name: np.asarray(value) for name, value in by_name(tree).items()}
    write_bytes(file, as_bytes(file.suffix, arrays, json.dumps(about)))
    return file


def as_bytes(kind: str, arrays: dict[str, np.ndarray], about: str) -> bytes:
    if kind == ".npz":
        return npz_bytes(arrays | {"about": np.array(about)})
    from flax.serialization import msgpack_serialize

    return msgpack_serialize({"arrays": arrays, "about": about})


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model as a function: raw images [B, H, W, C] or tokens [B, T] -> its outputs, such as
    logits [B, classes]."""

    net: Tree  # or whatever the method's `predict` takes
    model: models.Model
    about: dict[str, Any]
    predict: Callable[[Tree, jax.Array], jax.Array]

    def __call__(self, x: npt.ArrayLike) -> jax.Array:
        a = self.about
        if len(a["shape"]) == 1:  # tokens
            return self.predict(self.net, jnp.asarray(x, jnp.int32))
        mean, std = jnp.array(a["mean"]), jnp.array(a["std"])
        images = (jnp.asarray(x, a["dtype"]) * a["scale"] - mean) / std
        return self.predict(self.net, images.astype(a["dtype"]))


def load_model(path: str | pathlib.Path) -> Exported:
    """The model in a file written by `export`, as a function of images as they are stored (0 to
    255 for uint8)."""
    arrays, text = read_arrays(path)
    if not text:
        raise UserError(
            f"'{path}' was not written by fedjax-sim export: it has no description of the model"
        )
    about = json.loads(text)
    if about["own"]:
        raise UserError(
            f"'{path}' is of a model or method given as an object; take its arrays and use them"
            " with that object"
        )
    dtype = jnp.dtype(about["dtype"])
    more = dict(about["model_options"], conv=about["conv"], activations=about.get("activations"))
    if about.get("vocabulary"):
        places = task_called(about["task"]).target == TOKENS
        more |= dict(vocabulary=about["vocabulary"], places=places)
    shape = tuple(about["shape"])
    model = models.build(about["model"], shape, about["classes"], dtype=dtype, **more)
    method = make_method(about["method"], **about["options"])
    model = method.extend(model)
    # prediction reads neither loss nor optimiser
    env = Env(model, None, None, 1, 1, 1, 1.0, 1.0, dtype=dtype, method=method)  # type: ignore[arg-type]
    own = method.ask(Personal) if about["client"] is not None else None
    net = jax.tree.map(jnp.asarray, rebuilt(about["tree"], arrays))
    predict = lambda net, x: (own or Personal()).predict(env, net, x)
    program = jax.jit(multiplying(about.get("precision", "default"), predict))
    return Exported(net, model, about, program)


EXAMPLE = '''"""How to use an exported model: images in, labels out."""

import numpy as np
import fedjax_sim as fs

file = {name}
model = fs.load_model(file)
images = np.zeros((2, *model.about["shape"]))  # as they are stored: {range}
print("{outputs}:", np.asarray(model(images)){read})
print("arrays:", sorted(np.load(file).files)[:3] if file.endswith(".npz") else model.model.groups)
'''


def example(file: pathlib.Path) -> str:
    """A script of ten lines that loads the file, for the file's folder."""
    about = json.loads(read_arrays(file)[1])
    kind = "tokens" if len(about["shape"]) == 1 else "0 to 255" if about["scale"] != 1 else "floats"
    classes = task_called(about.get("task", "classification")).has_classes
    outputs, read = ("labels", ".argmax(-1)") if classes else ("outputs", "")
    return EXAMPLE.format(name=ascii(file.name), range=kind, outputs=outputs, read=read)
