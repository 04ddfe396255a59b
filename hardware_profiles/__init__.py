"""Data about hardware and models; this module only says where the files are.

* ``accelerators/``: one YAML file per accelerator type
* ``links/``: one per port, NIC, trunk or WAN route type
* ``hosts/``: one per processor type
* ``nodes/``: one per host: which accelerators, fabric, processors and NICs it has
* ``clusters/``: whole clusters
* ``jobs/``: a job for each cluster, of the same name
* ``models/``: Hugging Face config.json files, with where their sizes were read in sources.yaml
* ``model_sizes.json``: sizes of published models, loaded by their names
* ``defaults.yaml``: what stands in for a number that nobody measured
* ``measured_runs.csv``: published training runs, one line per measured value, each with its source
* ``measured_models.json``: layer sizes of those runs' models, each with its source
* ``calibration.json``: rates fitted to the runs by ``hetlab calibrate --from-runs``
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["KINDS", "folder"]

KINDS = ("accelerators", "links", "hosts", "nodes", "clusters", "jobs", "models")
"""The folders of this package."""


def folder(kind: str = "") -> Traversable:
    """Return the bundled folder of one kind (one of ``KINDS``), or the root for ``""``."""
    return files(__name__) / kind if kind else files(__name__)
