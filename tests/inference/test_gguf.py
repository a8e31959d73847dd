"""A target in a GGUF file: loaded, probed, and answering as the model it was written from."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from headway.heads.common.errors import HeadwayError
from headway.inference.target import Target, load_info
from tests.inference.helpers import POLICIES, PROMPTS, answer, encode, hf_greedy, random_head
from tests.tiny import build

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", "t1", "1t", *(f"x{i}" for i in range(4, config.vocab_size))])
    writer.add_token_merges(["t 1", "1 t"])
    writer.add_eos_token_id(config.eos_token_id)
    for name, tensor in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if owner.startswith("model.layers."):
            _, _, layer, owner = owner.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{NAMES[owner]}.{kind}", tensor.float().numpy())
        else:
            writer.add_tensor(f"{NAMES[owner]}.{kind}", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_target(tmp_path: Path) -> None:
    model = build(4, model_type="qwen2", num_hidden_layers=4)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model)
    loaded = Target.load(path)
    assert loaded.mode == "tree"
    info = load_info(path)
    assert (info.vocab_size, info.hidden_size, info.num_layers) == (272, 64, 4)
    assert (info.vocab_size, info.num_tokens) == (loaded.info.vocab_size, loaded.info.num_tokens)
    head = random_head("eagle3", loaded)
    for text in PROMPTS[:2]:
        want = hf_greedy(model, encode(text), 16)
        assert answer(loaded, encode(text), head, POLICIES["dynamic"], max_new_tokens=16).token_ids == want


def test_a_damaged_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, build(4, model_type="qwen2", num_hidden_layers=2))
    for size in (0, 3, 200):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(HeadwayError):
            load_info(path)
        with pytest.raises(HeadwayError):
            Target.load(path)
