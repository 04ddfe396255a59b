"""What stands in for a setting that a run's line leaves open: one table, by framework.

A rule reads settings, never a measured value. Its reason is printed with the runs it fills.
"""

from __future__ import annotations

import msgspec

__all__ = ["BLOCKING", "ERAS", "GENERAL", "RULES", "SEQUENCE_PARALLEL", "WHOLE", "Rule", "rules_of"]


class Rule(msgspec.Struct, frozen=True):
    """One rule. Args: column: it fills. value: as the column would say it. reason: why."""

    column: str
    value: str
    reason: str


WHOLE = "gbs / dp"
"""A rule's value: all sequences of a replica in one microbatch."""

GENERAL = (
    Rule("ep", "1", "no expert parallelism where none is stated"),
    Rule("cp", "1", "no context parallelism where none is stated"),
    Rule("vpp", "1", "no interleaving where none is stated"),
    Rule("mbs", "1", "one sequence per microbatch where none is stated"),
    Rule("recompute", "none", "no recomputation where none is stated"),
    Rule("zero", "none", "plain data parallelism where none is stated"),
    Rule("tp", "1", "no tensor parallelism where none is stated"),
    Rule("pp", "1", "no pipeline where none is stated"),
)
"""For every source, after its own rules."""

RULES: dict[str, tuple[Rule, ...]] = {
    "mbridge": (
        Rule("recompute", "none", "the table lists no recomputation; its configs drop single ops"),
    ),
    "flagperf": (
        Rule("gbs", "1024", "the batch most often stated in its tables"),
        Rule("seq", "4096", "context of the pre-training cases"),
        Rule("zero", "ZeRO-1", "Megatron-LM with its distributed optimizer"),
    ),
    "tpurec": (
        Rule("zero", "FSDP", "MaxText shards parameters over all chips"),
        Rule("mbs", WHOLE, "MaxText runs the whole batch of a chip at once"),
        Rule("recompute", "full", "MaxText's default policy keeps the inputs of layers only"),
    ),
    "ironwood": (
        Rule("zero", "FSDP", "MaxText shards parameters over all chips"),
        Rule("mbs", WHOLE, "MaxText runs the whole batch of a chip at once"),
        Rule("recompute", "full", "MaxText's default policy keeps the inputs of layers only"),
    ),
    "mlperf41": (Rule("zero", "ZeRO-1", "NeMo with Megatron's distributed optimizer"),),
    "mlperf50": (Rule("zero", "ZeRO-1", "NeMo with Megatron's distributed optimizer"),),
    "dgxc": (Rule("zero", "ZeRO-1", "NeMo with Megatron's distributed optimizer"),),
    "moezoo": (
        Rule("zero", "ZeRO-1", "Megatron-Core with its distributed optimizer"),
        Rule("pp", "8", "as the rows of the same model and chips that state it"),
        Rule("ep", "32", "as the rows of the same model and chips that state it"),
    ),
    "titan": (Rule("mbs", "1", "a local batch cut into single sequences for the pipeline"),),
    "neuron": (Rule("seq", "4096", "pre-training context of the Llama-2 tutorials"),),
    "primus": (
        Rule("seq", "4096", "the model's context"),
        Rule("gbs", "64", "eight microbatches per pipeline stage"),
    ),
    "colossal": (Rule("recompute", "full", "its FLOP count holds recomputation"),),
    "llama3": (Rule("gbs", "2048", "16M tokens per step of 8,192"),),
}
"""By source."""

SEQUENCE_PARALLEL = (
    "mbridge",
    "mlperf41",
    "mlperf50",
    "dgxc",
    "moezoo",
    "simumax",
    "titan",
    "dsv3",
)
"""Sources whose framework splits the rest of the activations wherever it splits tensors (Megatron
since 2022, torchtitan); korth says so per run."""

BLOCKING = ("amp", "sailor")
"""Sources whose pipeline engine waits for its own transfers (DeepSpeed, Sailor's)."""

ERAS: dict[str, str] = {
    "amp": "DeepSpeed 2021", "bloom": "Megatron-DeepSpeed 2021", "korth": "Megatron-LM 2022",
    "dsazure": "DeepSpeed 2022", "opt175": "metaseq 2022", "foundry": "llm-foundry 2023",
    "flagperf": "FlagPerf 2024", "llama3": "Llama 3 2024", "mlperf31": "NeMo 2023",
    "mlperf41": "NeMo 2024", "mlperf50": "NeMo 2025", "dgxc": "NeMo 2025",
    "moezoo": "Megatron-Core 2025", "simumax": "Megatron-Core 2025", "titan": "torchtitan 2024",
    "tpurec": "MaxText 2025", "ironwood": "MaxText 2025", "gpurec": "NeMo 2024",
    "primus": "Primus 2025", "colossal": "ColossalAI 2025", "neuron": "Neuron 2024",
    "sailor": "Sailor 2025", "dsv3": "DeepSeek 2024", "hexiscale": "FlashFlex 2024",
}  # fmt: skip
"""Software stack of a source; Megatron-Bridge's is its container release (see
sim.fidelity.settings.stack_of)."""


def rules_of(source: str) -> dict[str, Rule]:
    """Return column -> rule for a source, its own before the general ones."""
    found = {r.column: r for r in GENERAL}
    return found | {r.column: r for r in RULES.get(source, ())}
