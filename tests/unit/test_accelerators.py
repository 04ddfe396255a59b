"""Every accelerator of the bundle, beside figures picked by hand from vendors' tables."""

from __future__ import annotations

import pytest

from sim.hardware.catalog import bundled_catalog
from sim.hardware.resolve import resolve_accelerator
from sim.spec.origins import tags

NAMES = bundled_catalog().names("accelerators")

# name: memory [GB], its bandwidth [GB/s], dense peak of one dtype [TFLOP/s]
SAMPLES = {
    "V100-SXM2-32GB": (32, 900, "fp16", 125),
    "A10G": (24, 600, "bf16", 70),
    "A100-PCIe-80GB": (80, 1940, "tf32", 156),
    "H100-PCIe-80GB": (80, 2000, "bf16", 756),
    "H100-96GB-HBM2e": (96, 2400, "bf16", 989),
    "H200-SXM": (141, 4800, "bf16", 989),
    "GH200-96GB": (96, 4000, "fp8", 1979),
    "B200-SXM": (180, 8000, "bf16", 2250),
    "GB200-NVL72": (186, 8000, "bf16", 2500),
    "GB300-NVL72": (288, 8000, "fp8", 5000),
    "RTX-4090": (24, 1008, "bf16", 165),
    "RTX-3090": (24, 936, "fp16", 71),
    "RTX-3080-Ti": (12, 912, "fp16", 68),
    "RTX-2080-Ti": (11, 616, "fp16", 53.8),
    "Titan-RTX": (24, 672, "fp16", 130),
    "MI300X": (192, 5300, "bf16", 1300),
    "Gaudi2": (96, 2460, "bf16", 432),
    "Gaudi3": (128, 3700, "bf16", 1677),
    "Ascend-910C": (128, 3200, "bf16", 800),
    "BR100": (64, 1640, "bf16", 1024),
    "TPU-v4": (32, 1200, "bf16", 275),
    "TPU-v5p": (95, 2765, "bf16", 459),
    "TPU-v6e": (32, 1640, "bf16", 918),
    "Trainium1": (32, 880, "bf16", 190),
    "Trainium2": (96, 2900, "bf16", 667),
    "MLU290-M5": (32, 1228, "int8", 512),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_figures_picked_by_hand(name: str) -> None:
    doc = bundled_catalog().accelerator(name)
    memory, bandwidth, dtype, peak = SAMPLES[name]
    assert doc.memory.value == pytest.approx(memory * 1e9)
    assert doc.memory_bandwidth.value == pytest.approx(bandwidth * 1e9)
    assert doc.peaks[dtype].value == pytest.approx(peak * 1e12)


def test_all_seventy_are_there_and_resolve() -> None:
    assert len(NAMES) >= 70
    for name in NAMES:
        chip, _ = resolve_accelerator(name, None, bundled_catalog())
        assert chip.name == name and chip.vendor


def test_an_efficiency_is_the_measured_product_over_our_peak() -> None:
    """MI355X: 1565 TFLOP/s of 2500, though its source counts against 2300."""
    doc = bundled_catalog().accelerator("MI355X")
    assert doc.gemm_efficiency is not None
    assert doc.gemm_efficiency.value == pytest.approx(1565 / 2500, abs=5e-4)


def test_stand_ins_and_recollections_are_called_so() -> None:
    for name, key, evidence in (
        ("C550", "peaks.bf16", "stand-in"),
        ("BI-V150", "memory_bandwidth", "stand-in"),
        ("P800", "memory_bandwidth", "assumed"),
        ("PPU", "peaks.bf16", "derived"),
        ("H100-96GB-HBM2e", "peaks.bf16", "stand-in"),
        ("Titan-RTX", "peaks.fp16", "remembered"),
        ("RTX-2080-Ti", "memory_bandwidth", "remembered"),
        ("RTX-2080-Ti", "peaks.fp32", "found"),
        ("H200-SXM", "price", "derived"),
    ):
        tag = tags(bundled_catalog().accelerator(name))[key]
        assert (tag.evidence, tag.confidence == "high") == (evidence, False), (name, key)
    _, assumed = resolve_accelerator("C550", None, bundled_catalog())
    assert "peaks.bf16" in assumed[0] and "memory_bandwidth" in assumed[0]
