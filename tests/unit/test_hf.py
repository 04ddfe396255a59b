from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.errors import InputError
from sim.model.count import active_params, block_flops, total_params
from sim.model.graph import Block
from sim.model.hf import FAMILIES
from sim.model.load import load_model

SIZES = json.loads((Path(__file__).parents[1] / "data" / "model_sizes.json").read_text())["models"]
GATED = ("swiglu", "geglu")


def as_config(row: dict) -> dict:
    """Write a row of sizes the way the closest family writes them."""
    config = {
        "num_hidden_layers": row["num_hidden_layers"],
        "hidden_size": row["hidden_size"],
        "num_attention_heads": row["num_attention_heads"],
        "num_key_value_heads": row["num_key_value_heads"],
        "head_dim": row["head_dim"],
        "vocab_size": row["vocab_size"],
        "tie_word_embeddings": row["tie_word_embeddings"],
        "max_position_embeddings": 2048,
    }
    if "num_experts" not in row:
        family = "llama" if row["mlp"] in GATED else "gpt2"
        return config | {"model_type": family, "intermediate_size": row["intermediate_size"]}
    shared = row.get("shared_expert_intermediate_size", 0)
    config |= {
        "num_experts_per_tok": row["num_experts_per_tok"],
        "intermediate_size": row.get("dense_intermediate_size", row["moe_intermediate_size"]),
        "moe_intermediate_size": row["moe_intermediate_size"],
    }
    if "mla" in row:
        return (
            config
            | row["mla"]
            | {
                "model_type": "deepseek_v3",
                "n_routed_experts": row["num_experts"],
                "n_shared_experts": shared // row["moe_intermediate_size"],
                "first_k_dense_replace": row["dense_layers"],
            }
        )
    return config | {
        "model_type": "qwen2_moe" if shared else "mixtral",
        "num_local_experts" if not shared else "num_experts": row["num_experts"],
        "shared_expert_intermediate_size": shared,
    }


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row["name"])
def test_parameters_equal_the_published_sizes(row):
    model = load_model(as_config(row))
    assert total_params(model, norms=False) == pytest.approx(row["params"], rel=1e-3)
    if "active" in row:
        # The published count includes the input embedding, which multiplies nothing.
        embedding = row["vocab_size"] * row["hidden_size"] * (not row["tie_word_embeddings"])
        assert active_params(model) + embedding == pytest.approx(row["active"], rel=1e-3)


# Whole counts, norms and biases included, as the checkpoints have them.
EXACT = [
    (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 32000,
        },
        6_738_415_616,
    ),
    (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    (
        {
            "model_type": "opt",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        },
        125_239_296,
    ),
    (
        {
            "model_type": "gpt_neox",
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "intermediate_size": 2048,
            "vocab_size": 50304,
        },
        70_426_624,
    ),
]


@pytest.mark.parametrize(("config", "params"), EXACT, ids=lambda v: str(v)[:30])
def test_whole_parameter_counts_equal_the_checkpoints(config, params):
    assert total_params(load_model(config)) == params


def gpt(hidden=1024, heads=16, **changes) -> dict:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": 2,
        "n_head": heads,
        "n_positions": 2048,
        "vocab_size": 50304,
    } | changes


def kept(block: Block, tokens: int, sequence: int, nbytes: int = 2) -> float:
    return sum(
        tokens
        * s.elements
        * (s.nbytes or nbytes)
        * (sequence if s.per_key else 1)
        * (block.top_k if s.routed else 1)
        for s in block.saved
    )


@pytest.mark.parametrize(("hidden", "heads", "s", "b"), [(1024, 16, 1024, 4), (12288, 96, 2048, 1)])
def test_a_gpt_layer_keeps_what_korthikanti_counts(hidden, heads, s, b):
    """34 s b h + 5 a s^2 b bytes, 10 s b h of it not divided by tp (arXiv:2205.05198, 4.1-4.2)."""
    model = load_model(gpt(hidden, heads), flash=False, dropout=True)
    layer = model.blocks[1:3]
    assert [x.kind for x in layer] == ["attention", "mlp"]
    want = s * b * hidden * (34 + 5 * heads * s / hidden)
    assert sum(kept(x, s * b, s) for x in layer) == pytest.approx(want, rel=1e-12)
    whole = sum(s * b * t.elements * (t.nbytes or 2) for x in layer for t in x.saved if not t.split)
    assert whole == pytest.approx(10 * s * b * hidden, rel=1e-12)
    core = sum(s * b * t.elements * (t.nbytes or 2) * s for x in layer for t in x.saved if t.core)
    assert core == pytest.approx(5 * heads * s * s * b, rel=1e-12)


def test_fused_attention_keeps_a_log_sum_exp_and_no_scores():
    attention = load_model(gpt(), flash=True, dropout=False).blocks[1]
    assert not any(s.per_key for s in attention.saved)
    core = [s for s in attention.saved if s.core]
    assert [(s.elements, s.nbytes) for s in core] == [(16, 4)]


def test_forward_work_of_a_gpt_layer_matches_the_closed_form():
    """24 b s h^2 + 2 b s^2 h per layer, causal (arXiv:2104.04473 has 4 b s^2 h uncut)."""
    h, s = 1024, 2048
    layer = load_model(gpt()).blocks[1:3]
    want = 24 * s * h * h + 2 * s * s * h
    assert sum(block_flops(x, s, s) for x in layer) == pytest.approx(want, rel=1e-12)


def test_gated_mlp_and_grouped_queries_shape_the_products():
    config = EXACT[2][0]
    attention, mlp = load_model(config).blocks[1:3]
    assert [(g.n, g.k, g.split) for g in attention.gemms] == [
        (4096 + 2 * 1024, 4096, "column"),
        (4096, 4096, "row"),
    ]
    assert [(g.n, g.k, g.split) for g in mlp.gemms] == [
        (2 * 14336, 4096, "column"),
        (4096, 14336, "row"),
    ]
    assert attention.attention.kv_heads == 8


def test_dense_layers_of_a_mixture_and_the_chain():
    row = next(r for r in SIZES if r["name"] == "DeepSeek-V3")
    model = load_model(as_config(row))
    kinds = [b.kind for b in model.blocks if b.kind in ("mlp", "moe")]
    assert kinds == ["mlp"] * 3 + ["moe"] * 58
    assert [e.src for e in model.edges] == [b.name for b in model.blocks[:-1]]
    assert [e.dst for e in model.edges] == [b.name for b in model.blocks[1:]]
    attention = model.blocks[1].attention
    assert (attention.head_dim, attention.v_head_dim, attention.kv_heads) == (192, 128, 128)


def test_tied_embedding_is_named_on_both_blocks():
    model = load_model(gpt())
    assert model.blocks[0].shares == model.blocks[-1].shares == "embedding.weight"
    untied = load_model(gpt(tie_word_embeddings=False))
    assert total_params(untied) - total_params(model) == 50304 * 1024


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"model_type": "gpt3"}, "model_type", "nearest known one is gpt2"),
        ({"n_embd": "big"}, "n_embd", "not a size"),
        ({"n_embd": None}, "hidden_size", "required key is missing"),
        ({"n_head": 7}, "n_head", "over 7 heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "16 query heads over 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "not a switch"),
        ({"n_layer": 0}, "n_layer", "a size of zero"),
    ],
)
def test_wrong_configs_name_the_key(changes, key, text):
    with pytest.raises(InputError, match=text) as error:
        load_model(gpt(**changes))
    assert error.value.key == key


def test_errors_of_a_json_file_name_the_line(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{\n  "model_type": "llama",\n  "hidden_size": -4\n}\n')
    with pytest.raises(InputError) as error:
        load_model(file)
    assert (error.value.file, error.value.line, error.value.key) == (str(file), 3, "hidden_size")


def test_text_config_and_sliding_windows_are_said():
    config = EXACT[3][0] | {"sliding_window": 4096}
    model = load_model({"text_config": config})
    assert total_params(model) == EXACT[3][1]
    assert any("window of 4096" in note for note in model.assumptions)
    assert any("text part" in note for note in model.assumptions)


def test_every_family_reads_a_small_config():
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    for family in FAMILIES:
        model = load_model(sizes | {"model_type": family})
        assert (model.family, len(model.blocks), model.num_layers) == (family, 6, 2)
