"""The GEMM kernels' pipelines in every order in which a GPU may run them, and what is found in broken ones. No GPU.

``support/pipeline_model.py`` explores what ``support/traces.py`` notes from the kernels' own sources, here also changed
ones.
"""

from __future__ import annotations

import pytest
from changed_sources import Change
from pipeline_model import Model, ProtocolError
from traces import Problem, programs

from kernels_cuda.gemm_variants import Configuration, configurations, grouped_configuration

FAST, PROMOTED = (configurations((9, 0), promote) for promote in (False, True))
ADA = {promote: configurations((8, 9), promote)[0] for promote in (False, True)}
EVERY = [(one, False) for one in FAST] + [(one, True) for one in PROMOTED]


def explore(configuration: Configuration, promote: bool, problem: Problem, change: Change | None = None) -> int:
    hopper = configuration.family == "gemm_sm90"
    return Model(programs(configuration, promote, problem, change=change), asynchronous=hopper).explore()


@pytest.mark.parametrize(
    ("configuration", "promote"),
    EVERY,
    ids=lambda value: value.name if isinstance(value, Configuration) else "promoted" if value else "fast",
)
def test_every_order_of_events_ends_well(configuration: Configuration, promote: bool) -> None:
    # two tiles that end within a round through the stages; single blocks are fast to explore, for two rounds and more
    steps = configuration.stages + 1 if configuration.cluster == 1 else 5
    assert explore(configuration, promote, Problem(2, steps)) > 2 * steps
    # parts of K of different lengths, one of them a single step
    assert explore(configuration, promote, Problem(1, 3, splits=2)) > 3


@pytest.mark.parametrize("b_scale_rows", [1, 128])
@pytest.mark.parametrize("configuration", PROMOTED[::2], ids=lambda one: one.name)
def test_block_scales_leave_the_pipeline_as_it_is(configuration: Configuration, b_scale_rows: int) -> None:
    problem = Problem(2, 3)
    assert programs(configuration, True, problem, b_scale_rows) == programs(configuration, True, problem)


@pytest.mark.parametrize("promote", [False, True])
def test_groups_of_rows_leave_the_pipeline_as_it_is(promote: bool) -> None:
    for capability in ((9, 0), (8, 9)):
        configuration = grouped_configuration(capability, promote)
        assert configuration is not None
        # on Ada, a block without a group ends at once
        tiles = [1, -1, 0, -1] if capability == (9, 0) else [1]
        plain, used = Problem(sum(one >= 0 for one in tiles), 3), Problem(len(tiles), 3)
        grouped = programs(configuration, promote, used, groups=("rows", tiles))
        assert grouped == programs(configuration, promote, plain)


def test_every_order_of_groups_by_depth() -> None:
    hopper, ada = (grouped_configuration(capability, True) for capability in ((9, 0), (8, 9)))
    assert hopper is not None
    assert ada is not None
    # a group without a step first, last and in between
    edges = [0, 0, 7 * 128, 7 * 128, 9 * 128, 9 * 128]
    notes = programs(hopper, True, Problem(1, 10), groups=("depth", edges))
    assert Model(notes).explore() > 9
    for edges in ([0, 3 * 128], [0, 0]):
        assert Model(programs(ada, True, Problem(1, 8), groups=("depth", edges)), asynchronous=False).explore() >= 1


@pytest.mark.parametrize("promote", [False, True])
def test_every_order_on_ada(promote: bool) -> None:
    # more steps than stages, as many, and fewer
    for steps in (2 * ADA[promote].stages + 1, ADA[promote].stages, 1):
        assert explore(ADA[promote], promote, Problem(1, steps)) > steps


LARGE, SMALL, PRECISE, OLD = FAST[0], FAST[-2], PROMOTED[0], ADA[False]
OVERWRITTEN = "loads .*, which warpgroup . of block . still multiplies"
EARLY = "reads load . of .*, after . loads, of which . have arrived"
TWICE = "loads .* before the former load has arrived"
BROKEN: list[tuple[str, str, Configuration, str, str]] = [
    # too few arrivals: the other block's, the other warpgroup's; too many
    ("empty without the cluster", TWICE, LARGE, "CONSUMERS * CLUSTER);", "CONSUMERS);"),
    ("empty after one consumer", TWICE, LARGE, "CONSUMERS * CLUSTER);", "CLUSTER);"),
    ("empty after one more", "deadlock", LARGE, "CONSUMERS * CLUSTER);", "CONSUMERS * CLUSTER + 1);"),
    ("full after two", "deadlock", LARGE, "barrier_init(memory.full(i), 1);", "barrier_init(memory.full(i), 2);"),
    # a stage is released while products read it
    ("wait for fewer", OVERWRITTEN, LARGE, "mma_wait<1>();", "mma_wait<2>();"),
    ("release of this step", OVERWRITTEN, LARGE, "if (step != tile.first_step) release(memory, previous)",
     "release(memory, stage.index)"),
    ("release before the last wait", OVERWRITTEN, LARGE, "    mma_wait<0>();\n    release(memory, previous);",
     "    release(memory, previous);\n    mma_wait<0>();"),
    ("release before the promoted wait", OVERWRITTEN, PRECISE,
     "            mma_wait<0>();\n            if (piece == PIECES - 1) release(memory, stage.index);",
     "            if (piece == PIECES - 1) release(memory, stage.index);\n            mma_wait<0>();"),
    ("promoted wait for none", OVERWRITTEN, PRECISE, "            mma_wait<0>();\n", "            mma_wait<1>();\n"),
    ("release after one piece", EARLY, PRECISE, "if (piece == PIECES - 1) release", "if (piece == 0) release"),
    # a stage is not released, released twice, or not everywhere
    ("no release of the last step", "deadlock", LARGE, "    mma_wait<0>();\n    release(memory, previous);",
     "    mma_wait<0>();"),
    ("release before the first step", TWICE, LARGE, "if (step != tile.first_step) release", "release"),
    ("release in one block", TWICE, LARGE, "memory.empty(stage), thread)", "memory.empty(stage), 0)"),
    ("release by one thread", "deadlock", LARGE, "if (thread < CLUSTER) barrier", "if (thread < 1) barrier"),
    # parities
    ("parity of the producer", "deadlock", LARGE, "memory.empty(stage.index), stage.parity ^ 1);\n            const",
     "memory.empty(stage.index), stage.parity);\n            const"),
    ("parity at first", EARLY, LARGE, "u32 parity = 0;", "u32 parity = 1;"),
    ("no new parity", "waits for phase 1 of .*, and passes in phase 0", LARGE, "            parity ^= 1;\n        }\n",
     "        }\n"),
    ("a new parity one stage early", EARLY, LARGE, "            parity ^= 1;\n        }\n",
     "        }\n        if (index == STAGES - 1) parity ^= 1;\n"),
    ("no wait of the producer", "where no arrival is missing", LARGE,
     "            barrier_wait(memory.empty(stage.index), stage.parity ^ 1);\n            const u32 full",
     "            const u32 full"),
    # bytes
    ("half of the bytes", EARLY, SMALL, "barrier_expect(full, STAGE_BYTES)", "barrier_expect(full, STAGE_BYTES / 2)"),
    ("more bytes", "deadlock", SMALL, "barrier_expect(full, STAGE_BYTES)", "barrier_expect(full, STAGE_BYTES + 16)"),
    ("no share for the other", "16384 bytes that nobody loads", LARGE, "(1 << CLUSTER) - 1", "1 << block"),
    ("two shares in one place", "16384 bytes that nobody loads", LARGE, "b + block * rows * BLOCK_K", "b"),
    ("stages that overlap", TWICE, LARGE, "return start + index * STAGE_BYTES;", "return start + index * A_BYTES;"),
    # the beginning and the end of a cluster
    ("no fence", "shows barriers to others without a fence", LARGE, "        barrier_init_fence();\n", ""),
    ("no barrier at the start", "before its initialisation", LARGE, "    cluster_sync<true>();\n", ""),
    ("no barrier at the end", "shared memory of block ., which has ended", LARGE, "    cluster_sync<false>();\n", ""),
    # Ada: a group too few, no barrier, the stage that is read, no empty group
    ("wait for fewer copies", EARLY, OLD, "copy_wait<STAGES - 2>", "copy_wait<STAGES - 1>"),
    ("no barrier", EARLY, OLD, "        __syncthreads();\n", ""),
    ("copies to this stage", EARLY, OLD, "stage == 0 ? STAGES - 1 : stage - 1", "stage"),
    ("no empty group", EARLY, OLD, "        }\n        copy_commit();\n", "            copy_commit();\n        }\n"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "configuration", "old", "new"), [one[1:] for one in BROKEN], ids=[one[0] for one in BROKEN]
)
def test_a_broken_protocol_is_found(said: str, configuration: Configuration, old: str, new: str) -> None:
    steps = configuration.stages + 1
    problem = Problem(1, 2 * steps) if configuration is OLD else Problem(2, steps)
    with pytest.raises(ProtocolError, match=said):
        explore(configuration, configuration is PRECISE, problem, Change(old, new))
