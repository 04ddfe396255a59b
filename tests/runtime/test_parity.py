"""Losses and gradients of real plans equal those of one process (4 gloo processes, one world)."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from numpy.linalg import norm

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from real_runtime.build import specs_of  # noqa: E402
from real_runtime.data import Batches, open_tokens  # noqa: E402
from real_runtime.model.config import read_config  # noqa: E402
from real_runtime.model.parameters import initial  # noqa: E402
from real_runtime.settings import Recipe, RunSettings, learning_rate  # noqa: E402

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import plans  # noqa: E402
import reference  # noqa: E402
import world  # noqa: E402

pytestmark = pytest.mark.timeout(300)

STEPS = 10
RECIPE = Recipe(learning_rate=1e-2, warmup=2, clip=1.0)
TIED = {"tie_word_embeddings": True}
MOE = {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}  # fmt: skip

FOUR = {"num_key_value_heads": 4}
VEE = ("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
VEE_SPLIT = (
    "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0I1 0W0 0W1",
    "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1",
)
"""Stages 0 and 3 on one rank, 1 and 2 on the other."""

CASES: dict[str, tuple[dict[str, Any], list[list[int]], dict[str, Any]]] = {
    # name: (model, tp[stage][replica], knobs)
    "one process": ({}, [[1]], {}),
    "dp2": ({}, [[1, 1]], {"microbatches": (2, 2)}),
    "dp4": ({}, [[1, 1, 1, 1]], {"microbatches": (1, 1, 1, 1)}),
    "dp2 uneven": ({}, [[1, 1]], {"microbatches": (1, 3)}),
    "tp2": ({}, [[2]], {}),
    "pp2 1f1b": ({}, [[1], [1]], {}),
    "pp4 gpipe": ({}, [[1], [1], [1], [1]], {"schedule": "gpipe"}),
    "pp4 1f1b": ({}, [[1], [1], [1], [1]], {}),
    "pp2 interleaved": ({}, [[1], [1]], {"schedule": "interleaved", "chunks": 2}),
    "pp3 zb-h1": ({}, [[1], [1], [1]], {"schedule": "zb-h1"}),
    "pp2 split backward": ({}, [[1], [1]], {"split_backward": True}),
    "pp2 uneven layers": ({}, [[1], [1]], {"cuts": (0, 2, 8)}),
    "tp 2 to 1": ({}, [[2], [1]], {}),
    "tp 1 to 2": ({}, [[1], [2]], {}),
    "tp 1 to 2 split": ({}, [[1], [2]], {"schedule": "zb-h1"}),
    "tp 2 to 2": ({}, [[2], [2]], {}),
    "tp 2 to 2 whole": ({}, [[2], [2]], {"whole_boundaries": True}),
    "unlike replicas": ({}, [[1, 2]], {"microbatches": (2, 2)}),
    "unlike replicas uneven": ({}, [[1, 2]], {"microbatches": (1, 3)}),
    "recompute full": ({}, [[1], [1]], {"recompute": "full"}),
    "recompute full split": ({}, [[1], [1]], {"recompute": "full", "schedule": "zb-h1"}),
    "recompute selective": ({}, [[2]], {"recompute": "selective"}),
    "zero1 dp2": ({}, [[1, 1]], {"microbatches": (2, 2), "zero": 1}),
    "zero1 unlike": ({}, [[1, 2]], {"microbatches": (1, 3), "zero": 1}),
    "zero1 dp2 pp2": ({}, [[1, 1], [1, 1]], {"microbatches": (2, 2), "zero": 1}),
    "tied one stage": (TIED, [[1]], {}),
    "tied pp2": (TIED, [[1], [1]], {}),
    "tied tp 2 to 1": (TIED, [[2], [1]], {}),
    "tied pp2 interleaved": (
        TIED, [[1], [1]], {"schedule": "interleaved", "chunks": 2},
    ),
    "tied dp2 pp2 zero1": (TIED, [[1, 1], [1, 1]], {"microbatches": (2, 2), "zero": 1}),
    "dp2 tp2": ({}, [[2, 2]], {"microbatches": (3, 1), "zero": 1}),
    "pp2 dp2 interleaved": (
        {}, [[1, 1], [1, 1]],
        {"microbatches": (2, 2), "schedule": "interleaved", "chunks": 2, "recompute": "full"},
    ),
    "own pairs": ({}, [[2], [1]], {"schedule": "interleaved", "chunks": 2}),
    "rendezvous": ({}, [[1], [1]], {"buffers": 0}),
    "blocking sends": ({}, [[1], [1], [1]], {"blocking_sends": True}),
    "blocking transfers": ({}, [[1], [1], [1], [1]], {"blocking_p2p": True, "buffers": 1}),
    "interleaved split": (
        {}, [[1], [1]], {"schedule": "interleaved", "chunks": 2, "split_backward": True},
    ),
    "written order, tied on one rank": (
        TIED, [[1], [1]], {"order": VEE, "chunks": 2, "microbatch": 4, "microbatches": (2,)},
    ),
    "written order, split": (
        TIED, [[1], [1]], {"order": VEE_SPLIT, "chunks": 2, "microbatch": 4, "microbatches": (2,)},
    ),
    "tp 4": (FOUR, [[4]], {}),
    "tied, tp 1 to 2, recompute, gpipe": (
        TIED, [[1], [2]], {"recompute": "full", "schedule": "gpipe"},
    ),
    "tied, dp2 uneven, pp2 zb-h1": (
        TIED, [[1, 1], [1, 1]], {"microbatches": (1, 3), "schedule": "zb-h1"},
    ),
    "qwen3 tp2": (
        {"model_type": "qwen3", "head_dim": 8, "attention_bias": True}, [[2]], {},
    ),
    "qwen2 pp2": ({"model_type": "qwen2"}, [[1], [1]], {}),
    "sequence parallel tp2": ({}, [[2]], {"sequence_parallel": True}),
    "sequence parallel tp 1 to 2": ({}, [[1], [2]], {"sequence_parallel": True}),
    "sequence parallel tp 2 to 1": ({}, [[2], [1]], {"sequence_parallel": True}),
    "mixtral dp2": (MOE, [[1, 1]], {"microbatches": (2, 2)}),
    "mixtral tp2": (MOE, [[2]], {}),
    "mixtral ep2": (MOE, [[1, 1]], {"microbatches": (2, 2), "ep": 2}),
    "mixtral ep2 dp4": (MOE, [[1, 1, 1, 1]], {"microbatches": (1, 1, 1, 1), "ep": 2}),
    "mixtral ep2 dp4 zero1": (
        MOE, [[1, 1, 1, 1]], {"microbatches": (1, 1, 1, 1), "ep": 2, "zero": 1},
    ),
    "mixtral ep2 tp2": (MOE, [[2, 2]], {"microbatches": (2, 2), "ep": 2, "zero": 1}),
    "mixtral ep2 pp2": (
        MOE, [[1, 1], [1, 1]],
        {"microbatches": (2, 2), "ep": 2, "recompute": "full", "schedule": "zb-h1"},
    ),
    "mixtral ep4": (MOE, [[1, 1, 1, 1]], {"microbatches": (2, 2, 2, 2), "ep": 4}),
    "mixtral pp2": (MOE, [[1], [1]], {"split_backward": True}),
}  # fmt: skip

BOUNDS = {"fp64": (STEPS, 1e-10, 1e-10), "fp32": (1, 1e-5, 1e-5), "bf16": (1, 1e-1, 1e-2)}
"""dtype -> steps whose gradients are compared, bound on them, bound on the last loss."""
SINGLE = frozenset({
    "dp2 uneven", "tp2", "pp2 1f1b", "pp3 zb-h1", "tp 1 to 2", "unlike replicas uneven",
    "zero1 unlike", "tied tp 2 to 1", "mixtral tp2",
})  # fmt: skip
"""Cases that run in fp32, too."""
HALF = frozenset({"tp 1 to 2", "zero1 unlike", "tied tp 2 to 1"})
"""Cases that run in bf16, too; the oracle is then fp32 with unrounded weights."""


def dtypes(name: str) -> list[str]:
    return ["fp64", *["fp32"] * (name in SINGLE), *["bf16"] * (name in HALF)]


def expected(problem: Any, config: dict[str, Any], plan: Any, settings: RunSettings) -> Any:
    torch.set_num_threads(1)
    dtype = torch.float64 if settings.dtype == "fp64" else torch.float32
    decoder = read_config(config)
    weights = {}
    for specs in specs_of(plan, problem, decoder).values():
        for spec in specs:
            full = initial(spec, decoder.std, settings.seed)[: spec.shape[0]]
            weights[spec.name] = full.to(dtype)
    batches = Batches(
        open_tokens(settings.data), config["vocab_size"], plans.SEQUENCE, plans.BATCH, settings.seed
    )
    data = [batches.microbatch(step, 0, plans.BATCH) for step in range(settings.steps)]
    rates = [learning_rate(settings.recipe, s, settings.steps) for s in range(settings.steps)]
    return reference.train(
        config,
        weights,
        [tuple(torch.from_numpy(x.T) for x in pair) for pair in data],
        settings.recipe,
        rates,
    )


def run_world(folder: Path, cases: list[world.Case], size: int = 4) -> dict[str, Any]:
    (folder / "cases.pickle").write_bytes(pickle.dumps((cases, STEPS)))
    return world.run_processes(FOLDER / "world.py", folder, size)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("world")
    tokens = plans.write_tokens(folder)
    cases = []
    for name, (model, tp, knobs) in CASES.items():
        plan = plans.plan_of(plans.problem_of(**model), tp, **knobs)
        for dtype in dtypes(name):
            settings = RunSettings(
                plan="", data=str(tokens), out="", steps=STEPS, dtype=dtype, recipe=RECIPE,
                own_pairs="own pairs" in name,
            )  # fmt: skip
            cases.append((f"{name} {dtype}", plan, settings))
    return {"cases": {c[0]: c for c in cases}, "found": run_world(folder, cases)}


def errors(found: dict[str, Any], oracle: Any, steps: int) -> float:
    """Largest relative error of any copy of any gradient in the first steps."""
    worst = 0.0
    for step in range(steps):
        _, whole = oracle[step]
        names = set(found["gradients"][step])
        assert names == set(whole), names ^ set(whole)
        for name, copies in found["gradients"][step].items():
            wanted = whole[name].numpy()
            for copy in copies:
                copy = copy[: wanted.shape[0]]
                worst = max(worst, float(norm(copy - wanted) / norm(wanted)))
    return worst


_ORACLES: dict[str, Any] = {}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_equals_one_process(name: str, measured: dict[str, Any]) -> None:
    model = CASES[name][0]
    config = plans.CONFIG | model
    for dtype in dtypes(name):
        steps, bound, last_bound = BOUNDS[dtype]
        _, plan, settings = measured["cases"][f"{name} {dtype}"]
        key = f"{sorted(model.items())} {dtype}"
        if key not in _ORACLES:
            _ORACLES[key] = expected(plans.problem_of(**model), config, plan, settings)
        oracle, found = _ORACLES[key], measured["found"][f"{name} {dtype}"]
        error = errors(found, oracle, steps)
        last = abs(found["loss"][-1] / oracle[-1][0] - 1)
        print(f"{name} {dtype}: gradients {error:.1e}, last loss {last:.1e}")
        assert error <= bound
        assert last <= last_bound
