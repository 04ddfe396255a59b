from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import InputError
from sim.model.amounts import block_table
from sim.model.count import active_params, block_flops, total_params
from sim.model.families import FAMILIES
from sim.model.graph import Block
from sim.model.load import load_model
from sim.model.sizes import published, published_names
from sim.spec.load import read_source

SIZES = [published(name).data for name in published_names()]
CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
CARDS = read_source(CONFIGS / "sources.yaml").data
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
        "intermediate_size": row["dense_intermediate_size"] or row["moe_intermediate_size"],
        "moe_intermediate_size": row["moe_intermediate_size"],
    }
    if row.get("mla"):
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
    assert total_params(model, norms=False) == pytest.approx(row["params_computed"], rel=1e-3)
    if "active_params_computed" in row:
        # The published count includes the input embedding, which multiplies nothing.
        embedding = row["vocab_size"] * row["hidden_size"] * (not row["tie_word_embeddings"])
        active = row["active_params_computed"]
        assert active_params(model) + embedding == pytest.approx(active, rel=1e-3)


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row["name"])
def test_published_sizes_load_through_their_own_keys(row):
    model = load_model(dict(row))
    count = total_params(model, norms=False)
    assert count == pytest.approx(row["params_computed"], rel=1e-3)
    assert (model.name, model.num_layers) == (row["name"], row["num_hidden_layers"])
    assert total_params(model) > count


def test_there_are_47_published_models_each_with_a_source():
    assert len(SIZES) == 47
    assert all(row["source"] for row in SIZES)


@pytest.mark.parametrize("name", CARDS)
def test_configs_written_by_hand_give_the_count_of_their_card(name):
    card = CARDS[name]
    model = load_model(CONFIGS / f"{name}.json")
    assert card["source"] and card["evidence"] in ("found", "remembered")
    assert total_params(model) == pytest.approx(float(card["published"]), rel=5e-3)
    assert total_params(model) == card["exact"]


def test_every_config_written_by_hand_has_a_card():
    assert {f.stem for f in CONFIGS.glob("*.json")} == set(CARDS)
    assert len(CARDS) == 12


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
        both = family in ("t5", "mt5")  # an encoder and a decoder of two layers each
        blocks, layers = (14, 4) if both else (6, 2)
        assert (model.family, len(model.blocks), model.num_layers) == (family, blocks, layers)


def t5(**changes) -> dict:
    return {
        "model_type": "t5",
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 2,
        "num_heads": 8,
        "vocab_size": 32128,
        "feed_forward_proj": "relu",
    } | changes


def test_an_encoder_and_its_decoder_are_one_chain():
    model = load_model(t5())
    names = [b.name for b in model.blocks]
    assert names[:3] == ["embedding", "layers.0.attention", "layers.0.mlp"]
    assert names[5:10] == [
        "encoder.norm", "decoder.embedding",
        "layers.2.attention", "layers.2.cross", "layers.2.mlp",
    ]  # fmt: skip
    assert [b.layer for b in model.blocks[4:8]] == [1, 1, 2, 2]
    # The decoder's blocks pass on the encoder's output beside their own stream.
    assert [e.elements for e in model.edges] == [512] * 6 + [1024] * 7
    assert [b.attention.causal for b in model.blocks if b.attention] == (
        [False, False] + [True, False] * 2
    )
    shared = [b.name for b in model.blocks if b.shares]
    assert shared == ["embedding", "decoder.embedding", "head"]
    assert any("as long as the encoder's" in note for note in model.assumptions)


def test_an_untied_head_leaves_the_two_embeddings_shared():
    """T5 1.1 unties the head and gates the MLP; encoder and decoder still share the embedding."""
    plain, newer = load_model(t5()), load_model(t5(tie_word_embeddings=False))
    assert total_params(newer) - total_params(plain) == 32128 * 512
    gated = load_model(t5(feed_forward_proj="gated-gelu"))
    assert total_params(gated) - total_params(plain) == 4 * 512 * 2048


def test_work_of_an_encoder_and_decoder_by_hand():
    """Per token: products 2 n k each; a whole score matrix 4 s h, a causal one half of it."""
    h, f, s = 512, 2048, 128
    model = load_model(t5())
    work = {b.name: block_flops(b, 1.0, s) for b in model.blocks}
    assert work["layers.0.attention"] == 2 * 4 * h * h + 4 * s * h
    assert work["layers.2.attention"] == 2 * 4 * h * h + 2 * s * h
    assert work["layers.2.cross"] == 2 * 4 * h * h + 4 * s * h
    assert work["layers.2.mlp"] == 2 * 2 * h * f
    assert work["decoder.embedding"] == work["encoder.norm"] == 0


def test_what_a_cross_attention_keeps():
    """Norm in and out, queries, keys and values, the core's output; 4 bytes a head for the core."""
    block = load_model(t5()).blocks[8]
    assert kept(block, 10, 128) == 10 * (2 * (2 * 512 + 3 * 512 + 512) + 8 * 4)
    dropped = load_model(t5(), flash=False, dropout=True).blocks[8]
    scores = 10 * 8 * 128 * (2 + 2 + 1)
    assert kept(dropped, 10, 128) == 10 * (2 * 6 * 512 + 512) + scores


def test_a_shared_parameter_counts_once_in_any_range():
    model = load_model(t5())
    table = block_table(model, 128, 2)
    end = len(model.blocks)
    shared = 32128 * 512
    for low, high in ((0, end), (0, 7), (6, end), (7, end), (1, 6)):
        held = model.blocks[low:high]
        raw = sum(b.params for b in held)
        holders = sum(bool(b.shares) for b in held)
        dense, _ = table.rank_params(low, high, 1, 1)
        want = raw - shared * max(holders - 1, 0) + sum(b.params_replicated for b in held)
        assert dense == want, (low, high)


def test_a_masked_model_sees_all_tokens_and_has_a_transform_before_the_head():
    config = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 1000,
        "max_position_embeddings": 32,
        "type_vocab_size": 2,
    }
    model = load_model(config)
    assert all(not b.attention.causal for b in model.blocks if b.attention)
    embedding, head = model.blocks[0], model.blocks[-1]
    assert embedding.params_replicated == (32 + 2) * 64 + 2 * 64
    assert head.params_replicated == 64 * 64 + 64 + 2 * 64 + 1000
    layer = 12 * 64 * 64 + 13 * 64  # products, their biases and two norms
    assert total_params(model) == 1000 * 64 + 34 * 64 + 128 + 2 * layer + head.params_replicated
    assert block_flops(model.blocks[1], 1.0, 32) == 2 * 4 * 64 * 64 + 4 * 32 * 64


def test_latent_attention_by_hand():
    """DeepSeek-V2, section 2.1: down and up projections, and heads of 192 and 128."""
    config = read_source(CONFIGS / "deepseek_v2.json").data
    attention = load_model(config).blocks[1]
    h, heads, q, kv = 5120, 128, 1536, 512
    weights = h * (q + kv + 64) + q * heads * 192 + kv * heads * 256 + heads * 128 * h
    assert sum(g.n * g.k for g in attention.gemms) == weights
    core = 2 * 1024 / 2 * heads * (192 + 128)
    assert block_flops(attention, 1.0, 1024) == 2 * weights + core
    experts = load_model(config).blocks[4]
    assert experts.params_experts == 160 * 3 * h * 1536
    assert experts.params == 3 * h * 2 * 1536  # two shared ones
    assert load_model(config).blocks[2].kind == "mlp"  # the first layer is dense


def test_experts_with_biases_and_routers_with_them():
    """GPT-OSS 120B: 116.83e9 parameters (its card), biases on experts, router and attention."""
    config = {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "num_local_experts": 128,
        "experts_per_token": 4,
        "tie_word_embeddings": False,
    }
    model = load_model(config)
    assert total_params(model) == pytest.approx(116.83e9, rel=1e-4)
    assert model.blocks[2].top_k == 4


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"params_computed": 7e9}, "params_computed", "not what the sizes give"),
        ({"intermediate_size": None}, "intermediate_size", "a required key is missing"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "32 query heads over 5"),
        ({"mlp": "glu"}, "mlp", "swiglu"),
        ({"hiden_size": 3}, "hiden_size", "nearest valid key is hidden_size"),
        ({"hidden_size": 0}, "hidden_size", "1"),
        ({"type": "moe"}, "num_experts", "a required key is missing"),
    ],
)
def test_wrong_sizes_name_the_key(changes, key, text):
    row = dict(published("Llama-2-7B").data) | changes
    with pytest.raises(InputError, match=text) as error:
        load_model(row)
    assert error.value.key == key


def test_an_unknown_family_says_that_nothing_is_assumed():
    with pytest.raises(InputError, match="unknown model_type") as error:
        load_model(gpt(model_type="llama5"))
    assert "nothing is assumed" in error.value.expected
    assert "llama" in error.value.message and "deepseek_v3" in error.value.expected
