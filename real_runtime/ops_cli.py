"""``hetlab doctor ops``. Imports no torch, so that help stays quick."""

from __future__ import annotations

from typing import Annotated

import typer

from real_runtime.ops.records import ALIGN_LIMIT
from sim.cli_output import JsonOption, emit, progress
from sim.errors import InputError, ThresholdError

__all__ = ["register"]


def register(doctor_app: typer.Typer) -> None:
    """Add ``ops`` to ``hetlab doctor``."""
    doctor_app.command("ops")(_ops)


def _ops(
    device: Annotated[
        list[str] | None, typer.Option(help="cpu, cuda ...; every one there is when left out.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16, fp16, fp32, fp64; bf16 and fp32 by default.")
    ] = None,
    align: Annotated[
        int, typer.Option(min=0, help="Also compare the losses of so many training steps.")
    ] = 0,
    against: Annotated[
        str, typer.Option(help="Device and dtype that --align compares with.")
    ] = "cpu:fp32",
    align_limit: Annotated[
        float, typer.Option(min=0.0, help="Mean relative error that --align allows.")
    ] = ALIGN_LIMIT,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs, weights and data.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Check the model's operators and a training step on each device against float64."""
    from sim.optional import import_optional

    torch = import_optional("torch")
    from real_runtime.ops.check import DTYPES, check_all, devices
    from real_runtime.ops.records import TOLERANCES, OpResult, OpsDocument
    from real_runtime.ops.table import print_ops
    from real_runtime.ops.train import align as aligned
    from real_runtime.ops.train import losses_of, step_check
    from real_runtime.settings import DTYPES as TRAINED

    torch.set_num_threads(1)  # tensors this small only lose time to more
    here, known = devices(), tuple(DTYPES)
    chosen = [_one_of(d, here, "--device", "a device of this machine") for d in device or here]
    dtypes = [_one_of(d, known, "--dtype", "a dtype") for d in dtype or ("bf16", "fp32")]
    other_device, _, other_dtype = against.partition(":")
    _one_of(other_device, here, "--against", "a device of this machine")
    _one_of(other_dtype, TRAINED, "--against", "a dtype of the runtime")
    results: list[OpResult] = []
    alignment, skipped = [], []
    with progress("checking") as tick:
        reference = losses_of(other_device, other_dtype, seed, align) if align else ()
        for at in chosen:
            for kind in dtypes:
                results += check_all(at, kind, seed)
                if kind not in TRAINED:
                    skipped.append(f"a training step in {kind}: the runtime does not compute in it")
                    continue
                results.append(step_check(at, kind, seed))
                if align and f"{at}:{kind}" != against:
                    alignment.append(aligned(at, kind, against, reference, seed, align_limit))
                tick(1)
    found = OpsDocument(
        torch=str(torch.__version__), reference="float64 on the processor", seed=seed,
        tolerances={kind: TOLERANCES[kind] for kind in dtypes}, results=tuple(results),
        alignment=tuple(alignment), skipped=tuple(dict.fromkeys(skipped)),
    )  # fmt: skip
    emit(found, lambda console: print_ops(console, found), as_json)
    if found.off:
        raise ThresholdError("off: " + ", ".join(found.off))


def _one_of(given: str, known: tuple[str, ...], option: str, what: str) -> str:
    if given not in known:
        raise InputError(
            f"not {what}", key=option, found=given or '""', expected="one of " + " ".join(known)
        )
    return given
