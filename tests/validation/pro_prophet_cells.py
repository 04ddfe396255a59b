"""Cells of Pro-Prophet's tables, ours beside the printed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tests.validation.pro_prophet_cases import LPWNV2, MODELS, PUBLISHED, Cluster
from tests.validation.pro_prophet_runs import fitted, speedup

LOW, HIGH = 0.7, 1.4


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a cluster: speedups over static, and of what was printed."""

    cluster: Cluster
    k: int
    model: str
    zipf: float
    fastermoe: float
    pro_prophet: float
    spread: float

    @property
    def printed(self) -> tuple[float, float] | None:
        """Of FasterMoE and Pro-Prophet."""
        return PUBLISHED.get((self.cluster.name, self.k, self.model))

    @property
    def ratios(self) -> dict[str, float]:
        """Ours over the printed: FasterMoE, Pro-Prophet, and the second over the first."""
        if self.printed is None:
            return {}
        fast, prophet = self.printed
        return {
            "FasterMoE": self.fastermoe / fast,
            "Pro-Prophet": self.pro_prophet / prophet,
            "PP/FM": self.pro_prophet / self.fastermoe / (prophet / fast),
        }


def fits(
    models: Iterable[str] = MODELS, ks: Iterable[int] = (1, 2)
) -> dict[tuple[str, int], float]:
    """(model, k) -> Zipf exponent."""
    return {(m, k): fitted(m, k) for k in ks for m in models}


def cells(
    exponents: dict[tuple[str, int], float],
    clusters: Iterable[Cluster],
    ours: str = "spread",
) -> list[Cell]:
    """All cells; the large model does not fit the small cluster and is not in the paper's table.

    ``ours`` is the balancer of the last column.
    """
    return [
        Cell(
            cluster=cluster,
            k=k,
            model=model,
            zipf=zipf,
            fastermoe=speedup(cluster, model, k, zipf, "fastermoe"),
            pro_prophet=speedup(cluster, model, k, zipf, "pro-prophet"),
            spread=speedup(cluster, model, k, zipf, ours),
        )
        for cluster in clusters
        for (model, k), zipf in exponents.items()
        if not (cluster.name == LPWNV2.name and model == "L")
    ]


def inside(found: Sequence[Cell], names: Sequence[str]) -> tuple[int, int]:
    """How many ratios of printed cells lie within 0.7 to 1.4, of how many."""
    ratios = [c.ratios[n] for c in found if c.printed for n in names]
    return sum(LOW <= r <= HIGH for r in ratios), len(ratios)
