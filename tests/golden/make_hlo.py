"""Small compiled programs:  python tests/golden/make_hlo.py  writes hlo_tpu.txt, hlo_gpu.txt and
hlo_mesh.txt; needs [aot].

A toy round: blocks of four steps in a loop whose length only the data know, a loop of three, a
conditional, rows gathered from a pool, a row written into a table in place. On the mesh, rows
travel. Only what `benchmarks.hlo` reads is kept.
"""

from __future__ import annotations

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]
from fedjax_sim import accelerators  # noqa: E402

accelerators.quiet_environment()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402


def round_(state, pool, rows, turns):
    """state (w [8, 16], table [64, 128]), pool [20000, 16] u8, rows [40, 8], turns []."""
    w, table = state

    def step(k, w):
        picked = jax.lax.dynamic_slice(rows, (k, 0), (1, 8))[0]
        x = pool.at[picked].get(mode="promise_in_bounds").astype(jnp.float32)  # [8, 16]
        return w - 0.1 * jax.grad(lambda w: jnp.square(x * w).sum())(w)

    w = jax.lax.fori_loop(
        0, turns, lambda b, w: jax.lax.fori_loop(0, 4, lambda i, w: step(4 * b + i, w), w), w
    )
    w = jax.lax.cond(turns > 0, lambda: w @ w.T @ w, lambda: w)
    w = jax.lax.fori_loop(0, 3, lambda i, w: w * w, w)
    return w, jax.lax.dynamic_update_slice(table, w.reshape(1, 128), (turns, 0))


def travel(mesh, clients, who):
    """clients [16, 32] spread over the mesh, who [8]: rows to everybody, and their sum."""

    def share(clients, who):
        everybody = jax.lax.all_gather(clients, "clients", tiled=True)
        return jax.lax.psum(clients.sum(0), "clients"), everybody[who] + clients[:1]

    spread, same = PartitionSpec("clients"), PartitionSpec()
    return jax.shard_map(
        share, mesh=mesh, in_specs=(spread, same), out_specs=(same, spread), check_vma=False
    )(clients, who)


def trimmed(text: str) -> str:
    """Without what nobody reads: source places, types of parameters, tiles, most of the backend's
    notes."""
    kept = []
    for line in text[text.index("\n\n%" if "\n\n%" in text else "\n\nENTRY") :].splitlines():
        line = re.sub(r"^((?:ENTRY )?%[\w.\-]+) \(.*\{$", r"\1 () -> () {", line)
        named = (
            re.search(r'op_name="[^"]*"', line)
            if " while(" in line or "transpose(jvp" in line
            else None
        )
        found = re.search(r", backend_config=(\{.*\})", line)
        notes = (
            re.findall(r'"estimated_cycles":"\d+"|"known_trip_count":\{"n":"\d+"\}', found[1])
            if found
            else []
        )
        useless = (
            "metadata|backend_config|frontend_attributes|control-predecessors|sharding|offset_dims"
            "|operand_layout"
        )
        line = re.split(rf", (?:{useless})[a-z_]*=", line)[0]
        line = re.sub(r"T\([\d,]*\)(\([\d,]+\))*", "", line).replace("{:}", "").replace(":}", "}")
        line += f", metadata={{{named[0]}}}" if named else ""
        kept.append(line + (f", backend_config={{{notes[0]}}}" if notes else ""))
    return "HloModule toy\n" + "\n".join(kept).strip("\n") + "\n"


def main() -> None:
    like = lambda shape, dtype, where: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    for name, file in (("v5e", "hlo_tpu.txt"), ("h100", "hlo_gpu.txt")):
        device = accelerators.target_device(name)
        here = SingleDeviceSharding(device.devices[0])
        state = (like((8, 16), "float32", here), like((64, 128), "float32", here))
        more = (
            like((20000, 16), "uint8", here),
            like((40, 8), "int32", here),
            like((), "int32", here),
        )
        text = accelerators.compile_for(device, round_, (state, *more)).as_text()
        (HERE / file).write_text(trimmed(text))
    device = accelerators.target_device("v5e:2x4")
    mesh = Mesh(device.devices, ("clients",))
    spread, same = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("clients",), ()))
    arguments = like((16, 32), "float32", spread), like((8,), "int32", same)
    text = accelerators.compile_for(
        device, lambda *a: travel(mesh, *a), arguments, donate=False
    ).as_text()
    (HERE / "hlo_mesh.txt").write_text(trimmed(text))


if __name__ == "__main__":
    main()
