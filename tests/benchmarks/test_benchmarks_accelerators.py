"""benchmarks.hlo on small compiled programs (tests/golden/make_hlo.py): every number is counted by
hand from their text."""

from __future__ import annotations

import types

import numpy as np
import pytest
from golden.make_benchmarks import TINY
from paths import GOLDEN_FOLDER

from benchmarks import accelerators, hlo
from benchmarks.hlo import Cost
from benchmarks.peers import ours

GOLDEN = GOLDEN_FOLDER


def read(kind: str, steps: int = 8) -> hlo.Node:
    root = hlo.tree(hlo.parse((GOLDEN / f"hlo_{kind}.txt").read_text()))
    hlo.fill(root, steps)
    return root


def loops(root: hlo.Node) -> list[tuple]:
    return [(one.trips, one.filled, one.role, times) for _, one, times in hlo.walk(root)]


# ---- loops ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["tpu", "gpu"])
@pytest.mark.parametrize("steps, blocks", [(8, 2), (9, 3), (4, 1), (3, 1)])
def test_trips_are_known_or_filled_in(kind, steps, blocks):
    """The GPU's text has known_trip_count; on a TPU the four and the three are read from the loops'
    conditions."""
    root = read(kind, steps)
    outer, inner, other = loops(root)
    assert outer == (None, blocks, "block" if steps > 4 else "units", 1)
    assert inner == (4, 4, "steps", blocks)
    assert other == (3, 3, "other", 1)
    first = root.loops[0]
    assert (first.known, first.source) == (
        False,
        "blocks of 4 steps" if steps > 4 else "units of clients",
    )
    assert root.loops[1].known and root.loops[1].source == "compiler"


def bare(
    condition: str, body: str, start: str = "tuple(%zero, %w, %n)", more: str = ""
) -> hlo.Node:
    """A program that is one loop over (counter, w, n)."""
    text = f"""
%back () -> () {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %m = f32[4]{{0}} multiply(%p, %p), metadata={{op_name="a/transpose(jvp())/mul"}}
}}
%body () -> () {{
  %one = s32[] constant(1)
  %t = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[4]{{0}} get-tuple-element(%t), index=1
  %k = s32[] get-tuple-element(%t), index=2
  %step = f32[4]{{0}} fusion(%w), kind=kLoop, calls=%back
  {body}
}}
%test () -> () {{
  %t = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %k = s32[] get-tuple-element(%t), index=2
  {condition}
}}
ENTRY %main () -> () {{
  %zero = s32[] constant(0)
  %w = f32[4]{{0}} parameter(0)
  %n = s32[] constant(12)
  %start = (s32[], f32[4]{{0}}, s32[]) {start}
  ROOT %loop = (s32[], f32[4]{{0}}, s32[]) while(%start), condition=%test, body=%body{more}
}}
"""
    root = hlo.tree(hlo.parse(text))
    hlo.fill(root, 45)
    return root


COUNTED = "ROOT %lt = pred[] compare(%i, %k), direction=LT"
PLUS_ONE = "%j = s32[] add(%i, %one)\n  ROOT %r = (s32[], f32[4]{0}, s32[]) tuple(%j, %step, %k)"


@pytest.mark.parametrize(
    "condition, body, more, trips",
    [
        (COUNTED, PLUS_ONE, "", 12),  # the bound travels in the tuple, and is a constant
        (COUNTED, PLUS_ONE, ', backend_config={"known_trip_count":{"n":"7"}}', 7),
        (COUNTED, PLUS_ONE.replace("%step, %k", "%step, %j"), "", None),  # the bound changes
        (COUNTED.replace("LT", "GT"), PLUS_ONE, "", None),  # counts in another way
        (
            COUNTED,
            "%two = s32[] constant(5)\n  " + PLUS_ONE.replace("%one", "%two"),
            "",
            3,
        ),  # 0, 5, 10
    ],
)
def test_what_counts_as_known(condition, body, more, trips):
    (loop,) = bare(condition, body, more=more).loops
    assert loop.trips == trips
    assert loop.filled == (45 if trips is None else trips)


def test_a_bound_that_only_the_data_know():
    assert bare(COUNTED, PLUS_ONE, "tuple(%zero, %w, %gone)").loops[0].trips is None


# ---- costs ---------------------------------------------------------------------------------------
def test_costs_of_the_gpu_program():
    """Bytes: a step reads w, 8 of 20,000 rows of the pool and one of 40 rows of numbers; the table
    is written in one row."""
    root = read("gpu")
    body = root.loops[0].body.loops[0].body.own
    careful = (512 + 8 * 16 + 32 + 4 + 4 + 512) + 8
    assert body == Cost(0, 2, careful, (512 + 320_000 + 1280 + 4 + 4 + 512) + 8, touched=careful)
    assert root.loops[0].body.own == Cost(0, 2, 8 + 8, 16, touched=16)
    assert root.loops[0].condition == Cost(0, 1, 4 + 4 + 1, 9, touched=9)
    assert root.loops[1].body.own == Cost(0, 2, 1024 + 8, 1032, touched=1032)
    # two copies, a comparison, one row of the table, a copy
    entry = 8 + 8 + 5 + (0 + 512 + 4 + 512) + 1024
    assert (root.own.kernels, root.own.bytes) == (5, entry)
    whole = hlo.total(root)
    # of the conditional the branch with two products
    assert whole.kernels == 5 + 2 * (2 + 4 * 2) + 3 * 1 + 3 * 2 + 2
    assert whole.bytes == entry + 2 * (16 + 4 * 1200) + 3 * 9 + 3 * 1032 + 2 * 1280
    assert whole.syncs == 3 + 1  # two turns and the end of the loop, the conditional
    assert whole.cycles == 0


def test_costs_of_the_tpu_program():
    root = read("tpu")
    body = root.loops[0].body.loops[0].body.own
    assert body.cycles == 1832 + 1817 + 1827
    # all but a counter is in the core's own memory
    assert body.kernels == 4 + 1 and body.bytes == 4
    assert body.unpriced == 1  # the gather has no cycles
    numbers, padded, picked, w = 8 * 4, 4096, 8 * 16, 512
    kernels = [numbers + 4 + numbers, numbers + padded, picked + padded + picked, w + picked + w, 8]
    # wherever it lies; of the pool eight rows
    assert (body.touched, body.fetched) == (sum(kernels), 0)
    assert root.own.fetched == 2 * 2 * w  # w into the core, and out again
    assert root.loops[1].body.own.cycles == 1840
    assert root.own.cycles == 1908 + 10264
    pool, rows, w, numbers = 20_000 * 16, 40 * 8 * 4, 8 * 16 * 4, 2 * 8 + 4 + 4
    # into the core; w comes out again; a row of the table
    assert root.own.bytes == pool + rows + w + w + w + numbers
    assert hlo.total(root).cycles == 12_172 + 8 * 5476 + 3 * 1840 + 2324


def test_a_step_is_everything_in_loops_over_steps():
    root = read("gpu")
    cost, runs = hlo.step(root, 8)
    assert runs == 1
    assert cost.kernels == pytest.approx((2 * (2 + 4 * 2) + 3) / 8)
    assert cost.bytes == pytest.approx((2 * (16 + 4 * 1200) + 27) / 8)
    assert cost.syncs == 3 / 8
    assert hlo.step(read("tpu"), 8)[0].cycles == 5476


def test_a_step_done_twice_costs_twice():
    """Two models, or a compiler that computes the training again."""
    text = (GOLDEN / "hlo_tpu.txt").read_text()
    line = next(line for line in text.splitlines() if "%while.14 = " in line)
    root = hlo.tree(
        hlo.parse(text.replace(line, line + "\n" + line.replace("%while.14", "%while.14b")))
    )
    hlo.fill(root, 8)
    cost, runs = hlo.step(root, 8)
    assert (cost.cycles, runs) == (2 * 5476, 2)


def test_a_program_without_a_loop_is_one_step():
    root = read("mesh")
    cost, runs = hlo.step(root, 1)
    assert (cost.cycles, runs) == (hlo.total(root).cycles, 0)


def test_collectives_of_a_mesh():
    assert dict(hlo.total(read("mesh")).collectives) == {
        ("all-gather", 16 * 32 * 4): 1,
        ("all-reduce", 32 * 4): 1,
    }


def test_the_dearest_instructions():
    rows = hlo.expensive(read("tpu"), 8, 2)
    assert [row["cycles"] for row in rows] == [1832, 1827]
    (first,) = hlo.expensive(read("gpu"), 8, 1)
    assert (first["op"], first["shape"], first["mb"]) == ("fusion", "f32[8,16]{1,0}", 1192 / 1e6)


def test_a_single_step_is_still_a_step():
    """One step per round: the loop that holds it is a loop over steps, the one around it runs over
    units."""
    root = read("gpu", steps=1)
    assert [one[2] for one in loops(root)] == ["units", "steps", "other"]
    unknown = bare(COUNTED, PLUS_ONE, "tuple(%zero, %w, %gone)")
    hlo.fill(unknown, 1)
    assert loops(unknown) == [(None, 1, "steps", 1)]
    assert hlo.step(unknown, 1)[1] == 1


def test_units_of_clients_around_known_steps():
    """The steps are known, the loop around them is not: it runs once."""
    text = (
        (GOLDEN / "hlo_gpu.txt")
        .read_text()
        .replace('known_trip_count":{"n":"4"', 'known_trip_count":{"n":"45"')
    )
    root = hlo.tree(hlo.parse(text))
    hlo.fill(root, 45)
    assert loops(root)[:2] == [(None, 1, "units", 1), (45, 45, "steps", 1)]
    assert hlo.step(root, 45)[0].kernels == 2


def test_steps_that_have_a_loop_inside():
    """The outer body differentiates too: its turns are the steps, and the inner loop belongs to
    each."""
    text = (GOLDEN / "hlo_gpu.txt").read_text()
    mark = (
        "  %loop_add_fusion.2 = s32[] fusion(%get-tuple-element.114), kind=kLoop,"
        " calls=%fused_add.2"
    )
    assert mark in text
    root = hlo.tree(
        hlo.parse(text.replace(mark, mark + ', metadata={op_name="a/transpose(jvp())/mul"}'))
    )
    hlo.fill(root, 8)
    assert loops(root)[:2] == [(None, 8, "steps", 1), (4, 4, "steps", 8)]
    cost, runs = hlo.step(root, 8)
    assert (cost.kernels, runs) == (2 + 4 * 2 + 9 / 8, 1)


def test_several_units_of_clients():
    """Five units of clients, one after another: a local step is done five times, and costs as
    much."""
    text = (GOLDEN / "hlo_gpu.txt").read_text()
    root = hlo.tree(hlo.parse(text))
    hlo.fill(root, steps=4, units=5)
    assert loops(root)[:2] == [(None, 5, "units", 1), (4, 4, "steps", 5)]
    cost, runs = hlo.step(root, 4)
    assert (cost.kernels, runs) == (5 * 2, 5)


# ---- the command ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--device", "v9"], "unknown device 'v9'; allowed: a100, h100, v5e, v5p, v6e"),
        (["--device", "v5e:two"], "topology 'two' of device 'v5e:two' cannot be read; use v5e:2x2"),
        (["--workloads", "W9"], "unknown workload 'W9'; allowed: W1, W2"),
        (["--methods", "fedavgg"], "unknown method 'fedavgg'; allowed:"),
        (["--programs", "theirs"], "unknown program 'theirs'; allowed: ours, naive"),
        (["--pool-times", "0"], "--pool-times 0 is too small; allowed: 1 or more"),
        (
            ["--against", "no-such-revision"],
            "--against 'no-such-revision' is no revision that git knows here",
        ),
    ],
)
def test_bad_input_is_one_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        accelerators.main(argv)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def stepped(cycles=1e6, mb=100.0, touched=300.0, fetched=5.0):
    return dict(
        cycles_per_step=cycles,
        mb_per_step=mb,
        mb_touched_per_step=touched,
        mb_fetched_per_step=fetched,
    )


@pytest.mark.parametrize(
    "larger, ok, said",
    [
        (stepped(cycles=1.01e6), True, "step cycles +1.0 %, step MB +0.0 %, touched +0.0 % ok"),
        (
            stepped(cycles=5e5, mb=104.0),
            True,
            "step cycles -50.0 %, step MB +4.0 %, touched +0.0 % ok, only placed differently",
        ),
        (stepped(touched=309.0), False, "touched +3.0 % GROWS"),
        (stepped(cycles=1.03e6), False, "step cycles +3.0 %, step MB +0.0 %, touched +0.0 % GROWS"),
        (stepped(fetched=100.0), False, "GROWS"),  # of a pool of 20 MB, now 200
        (stepped(fetched=50.0), True, "ok"),
    ],
)
def test_a_pool_that_a_step_feels(larger, ok, said):
    found = accelerators.pool_check(stepped(), larger, 10, 20.0)
    assert found["ok"] is ok and accelerators.pool_line(found).endswith(said)


def test_a_pool_on_a_gpu():
    found = accelerators.pool_check(stepped(cycles=None), stepped(cycles=None), 10, 20.0)
    assert accelerators.pool_line(found) == "pool x10: step MB +0.0 %, touched +0.0 % ok"


def test_a_larger_pool_has_the_same_clients():
    small, _ = ours.federation(TINY)
    large, _ = ours.federation(TINY, pool_times=10)
    assert len(small.x) == 28 + 1 and len(large.x) == 280
    np.testing.assert_array_equal(small.rows["train"], large.rows["train"])
    np.testing.assert_array_equal(small.x[:28], large.x[:28])
    validated, _ = ours.federation(TINY, validation=True)
    assert validated.size["train"].tolist() == small.size["train"].tolist()
    assert validated.size["val"].tolist() == [1] * 4 and len(validated.server_rows["val"]) == 1000


def test_the_naive_program_is_fedavg_on_one_device():
    asked = types.SimpleNamespace(programs="ours,naive", against="lax")
    assert accelerators.programs(asked, "fedavg", False, False) == ["ours", "lax", "naive"]
    assert accelerators.programs(asked, "ditto", False, False) == ["ours", "lax"]
    assert accelerators.programs(asked, "fedavg", True, False) == ["ours", "lax"]
