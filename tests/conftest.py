"""One process-wide set-up: eight fake CPU devices (sharding tests), quick compilation, the
persistent cache."""

import ctypes
import gc
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# tests compile much and compute little: skip the expensive passes of the code generator (3x faster)
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
import chex
import jax
import pytest
from jaxtyping import install_import_hook

CHECKED = [f"fedjax_sim.{name}" for name in ("engine", "local", "models", "plans")]
# shapes in the signatures of these subpackages are checked whenever a test calls one of their
# functions
install_import_hook(CHECKED, "shapes.checked")

from fedjax_sim.methods import METHODS  # noqa: E402
from fedjax_sim.runner import compilation  # noqa: E402

# tracing makes many objects that live: looking through all of them for cycles took 7 % of the time
gc.freeze()
gc.set_threshold(50_000, 20, 50)

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # started now: a command with --devices 1 as the first test would leave one for all
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get(
        "FEDJAX_SIM_TEST_CACHE", os.path.join(tempfile.gettempdir(), "fedjax_sim_test_cache")
    ),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


# files whose tests share no fixture and no compiled program: any worker may take any of them
SPREAD = (
    "test_docs",
    "test_golden",
    "test_layouts",
    "test_models",
    "test_numbers",
    "test_options",
    "test_cli_options",
)
# of the system's usual 65,530: every compiled program holds some, and beyond the limit XLA crashes
MOST_MAPS = 30_000
MOST_BYTES = 3 << 30  # of one test process: several of them must fit beside each other
_tests_run = _kept = 0

# ---- two tiers ----------------------------------------------------------------------------------
# `make test` leaves out what is marked `full`, `make test-all` runs it.
# Whole files: the same properties on more methods, settings and processes, or what takes minutes.
FULL = (
    "test_accelerators",
    "test_across",
    "test_agents_learning",
    "test_agents_probes",
    "test_ahead",
    "test_autotune",
    "test_benchmarks",
    "test_benchmarks_accelerators",
    "test_benchmarks_headroom",
    "test_benchmarks_headroom_small",
    "test_benchmarks_pfedrlla",
    "test_benchmarks_revisions",
    "test_benchmarks_scaling",
    "test_benchmarks_startup",
    "test_benchmarks_tasks",
    "test_benchmarks_teacher",
    "test_benchmarks_values",
    "test_corners",
    "test_damage",
    "test_episode",
    "test_examples",
    "test_fedpolicy_learning",
    "test_fuzz",
    "test_fuzz_cli",
    "test_host_clients",
    "test_interrupts",
    "test_layouts",
    "test_numbers",
    "test_paper",
    "test_personal_methods",
    "test_pfedrlla_learning",
    "test_pfedrlla_switches",
    "test_pfedrlla_transfer",
    "test_precision",
    "test_processes",
    "test_production_flags",
    "test_resident",
    "test_run_files",
    "test_selection",
    "test_start_from",
    "test_sweep_pivot",
    "test_text",
    "test_unfinished",
    "test_values",
)
# The first tier takes one method of every family: its contract, its reference, its own file.
FAMILIES = (
    "fedavg",  # a mean
    "scaffold",  # control variates
    "ditto",  # a model of each client's own
    "fedper",  # private groups
    "fedfomo",  # reads other clients' rows
    "fedpac",  # all uploads at once
    "fedrod",  # a predictor of its own
    "fedbabu",  # fine-tunes at evaluation
    "ccvr",  # a last step of the server
    "fedpolicy",
    "pfedrlla",
    "fedpam",
    "qbandit",
    "private_scale",
)
PER_METHOD = ("test_contract", "test_numpy_loops", "test_pytorch_loops", "test_global_methods")
# Tests that compile programs for every parameter: the parameters that the first tier takes. Of the
# contract every family meets one such property, except pfedrlla, whose programs are the largest.
FIRST: dict[str, tuple[str, ...]] = {
    "test_a_neutral_transform_is_the_plain_run": (
        "fedavg",
        "scaffold",
        "fedpac",
        "fedbabu",
        "fedpolicy",
        "private_scale",
    ),
    "test_vmap_width_two_is_width_one": ("fedavg", "ditto", "fedfomo", "fedrod"),
    "test_loop_backend_agrees": ("fedavg", "fedper", "ccvr", "fedpam", "qbandit"),
    "test_documented_python_runs": ("README.md", "docs/add-a-method.md"),
    "test_every_rule_makes_a_round": ("adamw", "lion"),
    "test_schedules_within_a_round": ("sgd",),
    "test_every_task_learns": ("sequence",),
    "test_files_resume_report_and_export": (),
    "test_clients_side_by_side_are_clients_one_after_another": (),
    "test_methods_of_classes_say_so": ("sequence",),
    "test_the_estimated_arrays_are_those_of_the_compiler": ("mlp",),
    "test_poisoned_first_turns_cost_nothing": ("sac",),
    "test_forced_choices_teach_nothing": ("sac",),
}
# Single tests that take the longest, where shorter ones of the first tier meet the same code.
LONG = (
    "test_a_forced_turn_that_is_completed_later_teaches_nothing",
    "test_a_method_that_fine_tunes_and_one_without_a_global_model",
    "test_a_method_with_a_name_is_a_run_by_that_name",
    "test_a_round_needs_the_state_and_the_rows_it_reads",
    "test_clipped_learner_stays_within_budgets_that_vary",
    "test_cohorts_are_kept_and_resumed",
    "test_everybody_trains_before_round_one",
    "test_extended_run_equals_the_straight_one",
    "test_extension_on_the_grid_drops_the_last_fine_tuning",
    "test_float32_forms_agree_and_clients_under_vmap_equal_separate_runs",
    "test_float64_runs_in_double_precision",
    "test_given_as_an_object_it_is_the_run_by_its_words",
    "test_interrupted_seeds_name_every_directory",
    "test_kept_state_is_counted_and_resumed",
    "test_layerwise_and_mix",
    "test_linen_nnx_and_a_pair_are_one_model",
    "test_long_training_on_noise_is_not_rewarded",
    "test_method_objects_keep_their_own_options",
    "test_on_a_mesh",
    "test_one_target_per_text",
    "test_own_weight_alone_is_local_training",
    "test_pairs_are_trained_with_some_peers_and_used_with_others",
    "test_personal_models_and_layouts",
    "test_pretraining_keeps_bodies_at_home",
    "test_resume_does_not_need_the_initial_weights",
    "test_seeds_start_from_the_callers_weights",
    "test_segments_off_the_grid_are_not_evaluated_for_nothing",
    "test_size_weights_everywhere_are_the_weighted_rule",
    "test_switches_of_the_reward",
    "test_the_next_state_has_the_next_budgets",
    "test_the_two_minibatches_of_a_meta_step_differ_without_shuffling",
    "test_untrained_pairs_mix_as_similarity_does",
    "test_user_models_are_recorded_by_their_shapes",
    "test_values_of_a_rule_side_by_side",
    "test_what_is_payload_is_clipped_too_and_what_is_logged_is_not",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With several workers, the other files go to one worker each: it compiles what their tests
    share once."""
    for item in items:
        if in_second_tier(item):
            item.add_marker("full")
        if item.path.stem not in SPREAD and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def in_second_tier(item: pytest.Item) -> bool:
    file = item.path.stem
    if file in FULL or item.originalname in LONG:
        return True
    if item.path.parent.name == "methods" and file[len("test_") :] in {*METHODS} - {*FAMILIES}:
        return True
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if item.originalname in FIRST:
        return not {*FIRST[item.originalname]} & {*map(str, given.values())}
    method = next((given[key] for key in ("sim", "name", "method") if key in given), None)
    if file == "test_contract" and method == "pfedrlla":  # the largest programs
        return item.originalname != "test_resume_is_exact_and_compiles_once"
    return file in PER_METHOD and method is not None and method not in FAMILIES


@pytest.fixture(autouse=True)
def few_programs():
    """Compiled programs are forgotten before one process holds too many of them."""
    yield
    global _tests_run, _kept
    _tests_run += 1
    if _tests_run % 10 == 0 and (
        memory_maps() > MOST_MAPS or resident_bytes() > max(MOST_BYTES, 1.5 * _kept)
    ):
        compilation.forget()
        jax.clear_caches()
        chex.clear_trace_counter()  # what is traced again after this is no mistake
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            # else what was freed stays with the process, and the next test would forget again
            libc.malloc_trim(0)
        _kept = resident_bytes()


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def memory_maps() -> int:
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:  # not Linux
        return 0
