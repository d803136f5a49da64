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

Case = tuple[Configuration, bool]


def grouped(capability: tuple[int, int], promote: bool) -> Case:
    configuration = grouped_configuration(capability, promote)
    assert configuration is not None
    return configuration, promote


LARGE, SMALL = ((one, True) for one in configurations((9, 0)))
FAST, OLD, OLD_PRECISE = grouped((9, 0), False), grouped((8, 9), False), grouped((8, 9), True)


def explore(case: Case, problem: Problem, change: Change | None = None) -> int:
    return Model(programs(*case, problem, change=change), asynchronous=case[0].family == "gemm_sm90").explore()


def named(case: object) -> str | None:
    return f"{case[0].name} {'promoted' if case[1] else 'fast'}" if isinstance(case, tuple) else None


@pytest.mark.parametrize("case", [LARGE, SMALL, FAST], ids=named)
def test_every_order_of_events_ends_well(case: Case) -> None:
    # two tiles that end within a round through the stages; single blocks are fast to explore, for two rounds and more
    for steps in (case[0].stages + 1 if case[0].cluster == 1 else 5, 1):
        assert explore(case, Problem(2, steps)) > 2 * steps


@pytest.mark.parametrize("case", [OLD, OLD_PRECISE], ids=named)
def test_every_order_on_ada(case: Case) -> None:
    # more steps than stages, as many, and fewer
    for steps in (2 * case[0].stages + 1, case[0].stages, 1):
        assert explore(case, Problem(1, steps)) > steps


@pytest.mark.parametrize("b_scale_rows", [1, 128])
@pytest.mark.parametrize("case", [LARGE, SMALL, OLD_PRECISE], ids=named)
def test_block_scales_leave_the_pipeline_as_it_is(case: Case, b_scale_rows: int) -> None:
    problem = Problem(2 if case[0].family == "gemm_sm90" else 1, 3)
    assert programs(*case, problem, b_scale_rows) == programs(*case, problem)


@pytest.mark.parametrize("case", [SMALL, FAST], ids=named)
def test_groups_of_rows_leave_the_pipeline_as_it_is(case: Case) -> None:
    of_groups = programs(*case, Problem(4, 3), groups=("rows", [1, -1, 0, -1]))
    assert of_groups == programs(*case, Problem(2, 3))


def test_every_order_of_groups_by_depth() -> None:
    # a group without a step first, last and in between
    edges = [0, 0, 7 * 128, 7 * 128, 9 * 128, 9 * 128]
    notes = programs(*SMALL, Problem(1, 10), groups=("depth", edges))
    assert Model(notes).explore() > 9
    for edges in ([0, 3 * 128], [0, 0]):
        notes = programs(*OLD_PRECISE, Problem(1, 8), groups=("depth", edges))
        assert Model(notes, asynchronous=False).explore() >= 1


OVERWRITTEN = "loads .*, which warpgroup . of block . still multiplies"
EARLY = "reads load . of .*, after . loads, of which . have arrived"
TWICE = "loads .* before the former load has arrived"
BROKEN: list[tuple[str, str, Case, str, str]] = [
    # too few arrivals: the other block's, the other warpgroup's; too many
    ("empty without the cluster", TWICE, LARGE, "CONSUMERS * CLUSTER);", "CONSUMERS);"),
    ("empty after one consumer", TWICE, LARGE, "CONSUMERS * CLUSTER);", "CLUSTER);"),
    ("empty after one more", "deadlock", LARGE, "CONSUMERS * CLUSTER);", "CONSUMERS * CLUSTER + 1);"),
    ("full after two", "deadlock", LARGE, "barrier_init(memory.full(i), 1);", "barrier_init(memory.full(i), 2);"),
    # a stage is released while products read it
    ("wait for fewer", OVERWRITTEN, FAST, "mma_wait<1>();", "mma_wait<2>();"),
    ("release of this step", OVERWRITTEN, FAST, "if (step != tile.first_step) release(memory, previous)",
     "release(memory, stage.index)"),
    ("release before the last wait", OVERWRITTEN, FAST, "    mma_wait<0>();\n    release(memory, previous);",
     "    release(memory, previous);\n    mma_wait<0>();"),
    ("release before the promoted wait", OVERWRITTEN, LARGE,
     "            mma_wait<0>();\n            if (piece == PIECES - 1) release(memory, stage.index);",
     "            if (piece == PIECES - 1) release(memory, stage.index);\n            mma_wait<0>();"),
    ("promoted wait for none", OVERWRITTEN, LARGE, "            mma_wait<0>();\n", "            mma_wait<1>();\n"),
    ("release after one piece", EARLY, LARGE, "if (piece == PIECES - 1) release", "if (piece == 0) release"),
    # a stage is not released, released twice, or not everywhere
    ("no release of the last step", "deadlock", FAST, "    mma_wait<0>();\n    release(memory, previous);",
     "    mma_wait<0>();"),
    ("release before the first step", "completes before .* has seen phase 1", FAST,
     "if (step != tile.first_step) release", "release"),
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
    ("no share for the other", "8192 bytes that nobody loads", LARGE, "(1 << CLUSTER) - 1", "1 << block"),
    ("two shares in one place", "8192 bytes that nobody loads", LARGE, "b + block * rows * BLOCK_K", "b"),
    ("stages that overlap", TWICE, SMALL, "return start + index * STAGE_BYTES;", "return start + index * A_BYTES;"),
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


@pytest.mark.parametrize(("said", "case", "old", "new"), [one[1:] for one in BROKEN], ids=[one[0] for one in BROKEN])
def test_a_broken_protocol_is_found(said: str, case: Case, old: str, new: str) -> None:
    steps = case[0].stages + 1
    problem = Problem(1, 2 * steps) if case is OLD else Problem(2, steps)
    with pytest.raises(ProtocolError, match=said):
        explore(case, problem, Change(old, new))
