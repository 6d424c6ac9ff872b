"""Reading the optimised HLO text of a compiled program: loops and their trips, kernels, cycles,
bytes, collectives.

    module = parse(compiled.as_text())
    root = tree(module)                # the program, loop by loop; what one execution of each costs
    fill(root, steps=45)                # trips that only the workload knows, each said in
    `Loop.source` total(root), step(root, 45)

Cycles are the compiler's own estimates (`estimated_cycles`, TPU only). A kernel is an instruction
that is launched. Bytes are counted in two ways: *simple*, every operand and every result in full;
and *careful* (`bytes`), where what is sliced or gathered counts as much as is taken from it, what
is updated in place counts as much as is written, and on a TPU what lies in the core's own memory
counts nothing. `touched` counts that too: where things lie is the compiler's choice, and changes
with all the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

WIDTHS = {
    "f64": 8,
    "s64": 8,
    "u64": 8,
    "c64": 8,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "u8": 1,
    "s8": 1,
    "pred": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
}
COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}
# nothing is launched for these
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "domain",
    "add-dependency",
    "async-update",
}
# counted on a TPU even where the compiler gives no cycles
HEAVY = {
    "fusion",
    "custom-call",
    "copy",
    "convolution",
    "dot",
    "scatter",
    "gather",
    "sort",
    "reduce",
    "transpose",
    "dynamic-update-slice",
} | COLLECTIVES
# a value handed on, for constants and slices
SAME = {"bitcast", "reshape", "copy", "convert", "optimization-barrier"}
SOME = 4096  # bytes from which a kernel without cycles is worth mentioning
# of our models; of anything
BACKWARD = (r"transpose\(jvp\([^)]*\.(features|head)\)\)", r"transpose\(jvp")


# ---- the text ------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    op: str
    inside: str  # the text in the brackets: operands, or the value of a constant
    rest: str  # what follows: attributes, metadata, backend_config
    root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.inside)

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    def called(self, attribute: str) -> list[str]:
        """Names of computations in `attribute=%a` or `attribute={%a, %b}`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
        return re.findall(r"%?([\w.\-]+)", found[1]) if found else []

    @property
    def cycles(self) -> int | None:
        found = re.search(r'"estimated_cycles":"?(\d+)', self.rest)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]  # in the order of the text

    @property
    def root(self) -> Instruction:
        return next(
            (i for i in self.instructions.values() if i.root), list(self.instructions.values())[-1]
        )

    def parameter(self, number: int) -> Instruction | None:
        return next(
            (
                i
                for i in self.instructions.values()
                if i.op == "parameter" and i.inside == str(number)
            ),
            None,
        )


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str

    @property
    def tpu(self) -> bool:
        return any(
            i.cycles is not None
            for c in self.computations.values()
            for i in c.instructions.values()
        )


def closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text) - 1


def instruction(line: str) -> Instruction | None:
    """One line of a computation.

    >>> one = instruction("  ROOT %add.1 = f32[2]{0} add(%a, %b), metadata={op_name=\\"f/add\\"}")
    >>> one.name, one.shape, one.op, one.operands, one.op_name, one.root
    ('add.1', 'f32[2]{0}', 'add', ['a', 'b'], 'f/add', True)
    """
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    start = head.end()
    end = closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    op = re.match(r" ?([\w\-]+)\(", line[end:])
    if not op:
        return None
    opening = end + op.end() - 1
    close = closing(line, opening)
    return Instruction(
        head[2], line[start:end], op[1], line[opening + 1 : close], line[close + 1 :], bool(head[1])
    )


def parse(text: str) -> Module:
    """Every computation of a module, by name."""
    found: dict[str, Computation] = {}
    now: dict[str, Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head:
            now = {}
            found[head[2]] = Computation(head[2], now)
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            now = None
        elif now is not None and (one := instruction(line)):
            now[one.name] = one
    return Module(found, entry)


# ---- bytes ---------------------------------------------------------------------------------------
def size(shape: str, far: bool = False) -> int:
    """Bytes of a shape or a tuple of them. far: only what is in the device's main memory, not in
    the core's own.

    >>> size("(f32[2,3]{1,0}, u8[4]{0:T(8)S(1)})"), size(
    ...     "(f32[2,3]{1,0}, u8[4]{0:T(8)S(1)})", far=True
    ... ), size("pred[]")
    (28, 24, 1)
    """
    total = 0
    for kind, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape):
        count = WIDTHS.get(kind, 0)
        for dim in dims.split(",") if dims else []:
            count *= int(dim)
        total += 0 if far and re.search(r"S\([1-9]", layout) else count
    return total


def parts(shape: str) -> list[str]:
    """The shapes of a tuple; of anything else, itself."""
    return re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", shape)


def readers(inside: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """Who reads the value `name`, through what only hands it on: (instruction, the name by which it
    reads)."""
    for one in inside.instructions.values():
        if name in one.operands:
            if one.op in ("bitcast", "reshape"):
                yield from readers(inside, one.name)
                if one.root:
                    yield one, name
            else:
                yield one, name


def taken(module: Module, inside: Computation, name: str, full: int) -> int:
    """Bytes that the computation reads of its parameter `name`, which has `full` bytes."""
    read = 0
    for one, by in readers(inside, name):
        if (
            one.op in ("dynamic-slice", "gather", "slice")
            and one.operands[0] == by
            and by not in one.operands[1:]
        ):
            read += size(one.shape)
        elif (
            one.op in ("dynamic-update-slice", "scatter")
            and one.operands[0] == by
            and by not in one.operands[1:]
        ):
            read += 0  # in place: what is overwritten is not read
        elif one.op == "fusion" and (called := one.called("calls")):
            within = module.computations[called[0]]
            for number, operand in enumerate(one.operands):
                if operand == by and (parameter := within.parameter(number)):
                    read += taken(module, within, parameter.name, full)
        else:
            return full
        if read >= full:
            return full
    return read


def written(module: Module, inside: Computation, result: Instruction, far: bool) -> int:
    """Bytes that one result of a computation writes: of an update in place the update."""
    while result.op in ("bitcast", "reshape") and result.operands[0] in inside.instructions:
        result = inside.instructions[result.operands[0]]
    if result.op == "tuple":
        return sum(
            written(module, inside, inside.instructions[o], far)
            for o in result.operands
            if o in inside.instructions
        )
    place = {"dynamic-update-slice": 1, "scatter": 2}.get(result.op)
    if place is not None and len(result.operands) > place:
        update = inside.instructions.get(result.operands[place])
        return min(size(update.shape), size(result.shape)) if update else size(result.shape, far)
    if result.op == "fusion" and (called := result.called("calls")):
        within = module.computations[called[0]]
        return written(module, within, within.root, far)
    return size(result.shape, far)


def moved(module: Module, comp: Computation, one: Instruction, far: bool) -> tuple[int, int]:
    """(careful, simple) bytes that an instruction reads and writes; far: the careful ones in main
    memory only."""
    shapes = [comp.instructions[o].shape if o in comp.instructions else "" for o in one.operands]
    simple = size(one.shape) + sum(map(size, shapes))
    if one.op.endswith("-done"):
        return 0, 0
    if one.op == "copy-start":  # (to, from, …)
        return sum(size(s, far) for s in parts(one.shape)[:2]), simple
    if one.op in ("slice-start", "dynamic-slice-start"):  # ((from, …), to, …)
        to = parts(one.shape)[-2]
        return min(size(to), size(shapes[0], far)) + size(to, far), simple
    if one.op == "fusion" and (called := one.called("calls")) and called[0] in module.computations:
        within = module.computations[called[0]]
        read = 0
        for number, shape in enumerate(shapes):
            full, parameter = size(shape, far), within.parameter(number)
            read += taken(module, within, parameter.name, full) if parameter and full else 0
        out = written(module, within, within.root, far)
        return read + min(out, size(one.shape, far)), simple
    if one.op in ("dynamic-slice", "gather", "slice"):
        read = min(size(one.shape), size(shapes[0], far)) + sum(size(s, far) for s in shapes[1:])
        return read + size(one.shape, far), simple
    if one.op in ("dynamic-update-slice", "scatter"):
        update = shapes[1] if one.op == "dynamic-update-slice" else shapes[-1]
        return (
            sum(size(s, far) for s in shapes[1:]) + min(size(update), size(one.shape, far)),
            simple,
        )
    return size(one.shape, far) + sum(size(s, far) for s in shapes), simple


# ---- loops ---------------------------------------------------------------------------------------
@dataclasses.dataclass
class Cost:
    """What one execution costs, without the loops inside."""

    cycles: float = 0
    kernels: float = 0
    bytes: float = 0
    simple_bytes: float = 0
    syncs: float = 0  # times that the GPU waits for the host
    touched: float = 0  # bytes as above, wherever they lie, of kernels
    fetched: float = 0  # and of copies beside them (TPU)
    # kernels of some size to which the compiler gives no cycles (TPU): gathers, calls of own
    # kernels
    unpriced: float = 0
    # (operation, bytes) -> how often
    collectives: Counter = dataclasses.field(default_factory=Counter)

    def plus(self, other: Cost, times: float = 1) -> Cost:
        counted = Counter(self.collectives)
        for key, number in other.collectives.items():
            counted[key] += number * times
        names = [field.name for field in dataclasses.fields(self)][:-1]
        return Cost(
            *(getattr(self, name) + times * getattr(other, name) for name in names), counted
        )


@dataclasses.dataclass
class Loop:
    op_name: str
    trips: int | None  # as the compiler knows them
    body: Node
    condition: Cost
    filled: int = 0  # as they are counted: `trips`, or what `fill` found
    source: str = "compiler"
    role: str = ""  # steps, block (of steps), units (of clients), other

    @property
    def known(self) -> bool:
        return self.trips is not None


@dataclasses.dataclass
class Node:
    """A computation: what it costs once, the loops and the branches in it."""

    name: str
    own: Cost
    rows: list[tuple[Instruction, float, float]]  # kernels: (instruction, cycles, bytes)
    loops: list[Loop]
    branches: list[list[Node]]  # conditionals, with their branches
    trains: bool  # holds a backward pass itself, not only in a loop inside


def constant(
    module: Module, comp: Computation, name: str, outer: list[tuple[Computation, Instruction]]
) -> int | None:
    """The number that a value certainly is; `outer`: the loops around, innermost last, as
    (computation, while)."""
    one = comp.instructions.get(name)
    if one is None:
        return None
    if one.op == "constant":
        return int(one.inside) if re.fullmatch(r"-?\d+", one.inside) else None
    if one.op in SAME and one.operands:
        return constant(module, comp, one.operands[0], outer)
    if one.op == "get-tuple-element" and outer:
        number = int(re.search(r"index=(\d+)", one.rest)[1])  # type: ignore[index]
        source = comp.instructions.get(one.operands[0])
        if source is not None and source.op == "parameter":
            return carried(module, number, outer)
    return None


def carried(
    module: Module, number: int, outer: list[tuple[Computation, Instruction]], first: bool = False
) -> int | None:
    """The number that element `number` of a loop's tuple is: at the start (`first`), or always, if
    the body hands it on."""
    comp, loop = outer[-1]
    start = comp.instructions.get(loop.operands[0])
    if start is None or start.op != "tuple" or number >= len(start.operands):
        return None
    if not first:
        body = module.computations[loop.called("body")[0]]
        after = body.root
        value = body.instructions.get(after.operands[number]) if after.op == "tuple" else None
        while value is not None and value.op in SAME:
            value = body.instructions.get(value.operands[0])
        same = (
            value is not None
            and value.op == "get-tuple-element"
            and f"index={number}" in value.rest.split(", ")[1]
        )
        if not (same and body.instructions[value.operands[0]].op == "parameter"):  # type: ignore[union-attr]
            return None
    return constant(module, comp, start.operands[number], outer[:-1])


def known_trips(module: Module, outer: list[tuple[Computation, Instruction]]) -> int | None:
    """How often the innermost loop of `outer` runs, if the program itself says so: written there,
    or counted from 0."""
    _, loop = outer[-1]
    said = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
    if said:
        return int(said[1])
    test = module.computations[loop.called("condition")[0]]
    root = test.root
    if root.op != "compare" or "direction=LT" not in root.rest:
        return None
    counter, bound = (test.instructions.get(o) for o in root.operands)
    if counter is None or bound is None or counter.op != "get-tuple-element":
        return None
    number = int(re.search(r"index=(\d+)", counter.rest)[1])  # type: ignore[index]
    start = carried(module, number, outer, first=True)
    end = constant(module, test, bound.name, outer)
    return (
        None
        if start is None or end is None
        else max(0, -(-(end - start) // stride(module, loop, number)))
    )


def stride(module: Module, loop: Instruction, number: int) -> int:
    """What a turn adds to the counter, element `number` of the loop's tuple; 1 where the body does
    not say it plainly."""
    body = module.computations[loop.called("body")[0]]
    after = body.instructions.get(body.root.operands[number]) if body.root.op == "tuple" else None
    while after is not None and after.op in SAME:
        after = body.instructions.get(after.operands[0])
    if after is None or after.op != "add":
        return 1
    added = [constant(module, body, operand, []) for operand in after.operands]
    return next((n for n in added if n is not None and n > 0), 1)


def tree(module: Module) -> Node:
    """The program loop by loop."""
    text = [i.op_name for c in module.computations.values() for i in c.instructions.values()]
    pattern = next((p for p in BACKWARD if any(re.search(p, name) for name in text)), BACKWARD[-1])
    return _node(module, module.entry, [], re.compile(pattern))


def _node(
    module: Module, name: str, outer: list[tuple[Computation, Instruction]], backward: re.Pattern
) -> Node:
    comp = module.computations[name]
    node = Node(name, Cost(), [], [], [], False)
    for one in comp.instructions.values():
        if one.op == "while":
            inner = [*outer, (comp, one)]
            body = _node(module, one.called("body")[0], inner, backward)
            test = _node(module, one.called("condition")[0], inner, backward).own
            trips = known_trips(module, inner)
            node.loops.append(Loop(one.op_name, trips, body, test, trips or 0))
        elif one.op == "conditional":
            names = one.called("branch_computations") or [
                *one.called("true_computation"),
                *one.called("false_computation"),
            ]
            node.branches.append([_node(module, b, [], backward) for b in names])
        elif one.op == "call" or (one.op.endswith("-start") and one.called("calls")):
            names = one.called("to_apply") or one.called("calls")
            merge(node, _node(module, names[0], [], backward))
        else:
            _count(module, comp, one, node)
            node.trains = node.trains or any(backward.search(text) for text in _names(module, one))
    return node


def _names(module: Module, one: Instruction) -> Iterator[str]:
    yield one.op_name
    for called in one.called("calls") if one.op == "fusion" else []:
        yield from (i.op_name for i in module.computations[called].instructions.values())


def merge(node: Node, other: Node) -> None:
    """A computation that is called: as if it stood there."""
    node.own = node.own.plus(other.own)
    node.rows += other.rows
    node.loops += other.loops
    node.branches += other.branches
    node.trains = node.trains or other.trains


def _count(module: Module, comp: Computation, one: Instruction, node: Node) -> None:
    plain = one.op.removesuffix("-start")
    cycles = one.cycles
    launched = one.op in HEAVY or plain in COLLECTIVES or cycles is not None
    if not module.tpu:
        launched = one.op not in FREE and not one.op.endswith("-done")
    moves = launched or one.op.endswith("-start")
    careful, simple = moved(module, comp, one, far=module.tpu) if moves else (0, 0)
    anywhere = moved(module, comp, one, far=False)[0] if moves else 0
    blind = (
        module.tpu and launched and cycles is None and plain not in COLLECTIVES and simple > SOME
    )
    cost = Cost(cycles or 0, int(launched), careful, simple if launched else 0, unpriced=int(blind))
    cost.touched, cost.fetched = (anywhere, 0) if launched else (0, anywhere)
    if plain in COLLECTIVES:
        cost.collectives[plain, size(parts(one.shape)[-1] if one.op != plain else one.shape)] += 1
    node.own = node.own.plus(cost)
    if launched:
        node.rows.append((one, float(cycles or 0), float(careful)))


# ---- trips that only the workload knows ----------------------------------------------------------
def holds_training(node: Node) -> bool:
    inner = [loop.body for loop in node.loops] + [
        branch for several in node.branches for branch in several
    ]
    return node.trains or any(map(holds_training, inner))


def fill(node: Node, steps: int, units: int = 1) -> int:
    """Give every loop its trips; returns how many local steps one execution of `node` does (of one
    of its passes).

    A loop that holds a backward pass itself is a loop over steps, whatever loops a step has inside.
    A loop around such a loop runs over blocks of steps, if the inner one alone does fewer than
    there are, and else over units of clients. Trips that the compiler does not know: `steps`,
    ⌈steps / steps of a block⌉, `units`; any other loop is counted once.
    """
    done = [0]
    for loop in node.loops:
        each = fill(loop.body, steps, units)
        if not holds_training(loop.body):
            loop.role, guess, why = "other", 1, "unknown, counted once"
        elif each < steps or loop.body.trains:
            loop.role = "steps" if each == 1 else "block"
            guess, why = (
                -(-steps // max(each, 1)),
                "steps of the workload" if each == 1 else f"blocks of {each} steps",
            )
        else:
            loop.role, guess, why = "units", units, "units of clients"
        if not loop.known:
            loop.filled, loop.source = guess, why
        done.append(each * loop.filled if loop.role != "other" else 0)
    done += [max(fill(branch, steps, units) for branch in several) for several in node.branches]
    return 1 if node.trains and max(done) < steps else max(done)


def total(node: Node) -> Cost:
    """One execution of a computation with everything inside; of a conditional the most expensive
    branch."""
    cost = node.own
    for loop in node.loops:
        cost = cost.plus(total(loop.body), loop.filled)
        if (
            not loop.known
        ):  # the condition is computed and read by the host before each turn and after the last
            cost = cost.plus(loop.condition, loop.filled + 1).plus(Cost(syncs=loop.filled + 1))
    for several in node.branches:
        cost = cost.plus(
            max(map(total, several), key=lambda c: (c.cycles, c.bytes, c.kernels))
        ).plus(Cost(syncs=1))
    return cost


def walk(node: Node, times: float = 1) -> Iterator[tuple[Node, Loop, float]]:
    """(where it stands, loop, how often it is started) of every loop, outermost first."""
    for loop in node.loops:
        yield node, loop, times
        yield from walk(loop.body, times * loop.filled)
    for several in node.branches:
        for branch in several:
            yield from walk(branch, times)


def training(node: Node, times: float = 1) -> Iterator[tuple[Loop, float]]:
    """The outermost loops over local steps, or blocks of them, and how often each is started in a
    round."""
    for loop in node.loops:
        if loop.role in ("steps", "block"):
            yield loop, times
        else:
            yield from training(loop.body, times * loop.filled)
    for several in node.branches:
        for branch in several:
            yield from training(branch, times)


def step(node: Node, steps: int) -> tuple[Cost, float]:
    """(what a local step costs, how often it is done): everything in loops over steps ÷ `steps`.

    Done twice is counted twice: a method that trains two models, or a compiler that computes
    something again. A program without such a loop is a single step.
    """
    cost, turns = Cost(), 0.0
    for loop, times in training(node):
        one = Node("", Cost(), [], [loop], [], False)
        cost = cost.plus(total(one), times / steps)
        turns += times * turns_of(loop) / steps
    return (cost, turns) if turns else (total(node), 0.0)


def turns_of(loop: Loop) -> int:
    """Local steps in one execution of a loop."""
    inner = [turns_of(one) for one in loop.body.loops if one.role in ("steps", "block")]
    return loop.filled * (1 if loop.role == "steps" else max(inner))


def expensive(node: Node, steps: int, most: int) -> list[dict]:
    """The instructions of the step that cost most, by cycles (TPU) or bytes, per step."""
    found: list[dict] = []

    def collect(body: Node, times: float) -> None:
        for one, cycles, moved in body.rows:
            found.append(
                {
                    "cycles": cycles * times,
                    "mb": moved * times / 1e6,
                    "op": one.op,
                    "shape": one.shape,
                    "op_name": one.op_name,
                }
            )
        for loop in body.loops:
            collect(loop.body, times * loop.filled)

    for loop, times in training(node):
        collect(loop.body, times * loop.filled / steps)
    return sorted(found, key=lambda row: (row["cycles"], row["mb"]), reverse=True)[:most]
