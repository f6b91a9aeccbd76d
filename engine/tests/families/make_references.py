#!/usr/bin/env python3
"""Makes the tiny checkpoints of tests/families and what an independent implementation says about them.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install torch transformers tokenizers safetensors gguf numpy xxhash
    /tmp/venv/bin/python engine/tests/families/make_references.py

Writes below engine/tests/families/data:
- one safetensors directory per family (random weights, rounded to the type in which they are stored), as transformers
  saves it; three of them with a tokenizer and a chat template;
- GGUF files of the same weights, by the `gguf` package, with Q and K in the order that llama.cpp's converter gives them;
- formats.gguf: every quantization in one file, its values by gguf.quants, not by our code;
- references.json: logits and greedy tokens from transformers (float32, eager attention), and the digest that engine and
  router must find for each directory.
And router/tests/data/directories.json: token ids and rendered chats of the directories' tokenizers.

Every feature that sets a family apart is switched off once, to prove that the reference logits depend on it by far
more than the tests' tolerance. Run again with other versions, the files may change in their last bits only.
"""
import copy
import json
import math
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
import xxhash
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
ROUTER_DATA = HERE.parents[2] / "router" / "tests" / "data"
VOCAB = 320
EOS = 2
PROMPT_LENGTHS = [1, 16, 45, 83]  # 45 and 83 are longer than the windows of 24 and 20
GREEDY_STEPS = 12
SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCAB, max_position_embeddings=512, bos_token_id=1, eos_token_id=EOS, attn_implementation="eager",
)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
NO_ROPE_SCALING = dict(rope_type="default", rope_theta=10000.0)


def main():
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    references = {}

    llama = build("llama", 1, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False)
    depends_on(llama, dict(rope_parameters=NO_ROPE_SCALING))
    save_directory(llama, "llama", torch.bfloat16, shards=2)
    save_gguf(llama, "llama.gguf", "llama", Type.BF16)
    references["llama"] = references["llama.gguf"] = reference(llama)

    mistral = build("mistral", 2, dtype=torch.float16, sliding_window=24, tie_word_embeddings=False)
    depends_on(mistral, dict(sliding_window=None))
    save_directory(mistral, "mistral", torch.float16, shards=1, old_config=True)
    save_gguf(mistral, "mistral.gguf", "llama", Type.F16)
    references["mistral"] = references["mistral.gguf"] = reference(mistral)

    qwen2 = build("qwen2", 3, tie_word_embeddings=True)
    depends_on(qwen2, {}, lambda name, value: value * 0 if name.endswith("_proj.bias") else value)
    save_directory(qwen2, "qwen2", torch.bfloat16, shards=1)
    save_gguf(qwen2, "qwen2.gguf", "qwen2", Type.BF16)
    references["qwen2"] = references["qwen2.gguf"] = reference(qwen2)

    window = dict(use_sliding_window=True, sliding_window=20, max_window_layers=1)
    qwen3 = build("qwen3", 4, head_dim=32, tie_word_embeddings=False, **window)
    depends_on(qwen3, dict(layer_types=["full_attention"] * 2, use_sliding_window=False))
    depends_on(qwen3, {}, lambda name, value: value * 0 + 1 if name.endswith(("q_norm.weight", "k_norm.weight")) else value)
    save_directory(qwen3, "qwen3", torch.bfloat16, shards=1)
    references["qwen3"] = reference(qwen3)
    # GGUF has no key for a window in some layers only.
    everywhere = changed(qwen3, dict(layer_types=["full_attention"] * 2, use_sliding_window=False))
    save_gguf(everywhere, "qwen3.gguf", "qwen3", Type.BF16)
    references["qwen3.gguf"] = reference(everywhere)

    references["formats.gguf"] = reference(save_formats("formats.gguf"))
    texts = {name: save_tokenizer(name, make) for name, (make, _, _) in TOKENIZERS.items()}
    versions = {module.__name__: module.__version__ for module in (torch, transformers, np)}
    digests = {path.name: digest(path) for path in sorted(DATA.iterdir()) if path.is_dir()}
    write_json(DATA / "references.json", {"made_by": versions, "models": references, "digests": digests})
    write_json(ROUTER_DATA / "directories.json", {"made_by": versions, "directories": texts, "digests": digests})


def digest(directory):
    """As proto/src/model.rs defines it; all files that this script writes into a directory are parts."""
    whole = xxhash.xxh3_64()
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        name = path.name.encode()
        whole.update(len(name).to_bytes(8, "little") + name)
        whole.update(xxhash.xxh3_64(path.read_bytes()).intdigest().to_bytes(8, "little"))
    return whole.intdigest()


def build(family, seed, dtype=torch.bfloat16, **config):
    """A model whose attention and features matter: large random weights, norms around 1, exact in `dtype`."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **config})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1 + 0.3 * noise
            elif name.endswith(".bias"):
                value = 0.5 * noise
            else:
                value = noise * (1.5 / math.sqrt(parameter.shape[-1]))
            parameter.copy_(value.to(dtype).float())
    return model


def changed(model, config, weights=lambda name, value: value):
    """The same weights under another configuration, or changed ones."""
    new = copy.deepcopy(model.config)
    for key, value in config.items():
        setattr(new, key, value)
    other = AutoModelForCausalLM.from_config(new, attn_implementation="eager").float().eval()
    other.load_state_dict({name: weights(name, value) for name, value in model.state_dict().items()})
    return other


def depends_on(model, config, weights=lambda name, value: value):
    ids = torch.tensor([prompt(83)])
    with torch.no_grad():
        gap = (model(ids).logits - changed(model, config, weights)(ids).logits)[0, -1].abs().max().item()
    assert gap > 0.1, f"{model.config.model_type}: {config or 'weights'} changes logits by {gap} only"
    print(f"{model.config.model_type}: without its feature the logits are off by {gap:.2f}")


def prompt(length):
    return [(7 + i * 31 + i * i * 5 + length) % (VOCAB - 3) + 3 for i in range(length)]


def reference(model):
    runs = []
    for length in PROMPT_LENGTHS:
        ids, tokens, gaps = prompt(length), [], []
        with torch.no_grad():
            first = model(torch.tensor([ids])).logits[0, -1]
            logits = first
            for _ in range(GREEDY_STEPS):
                best = torch.topk(logits, 2)
                tokens.append(best.indices[0].item())
                gaps.append(round((best.values[0] - best.values[1]).item(), 4))
                # The whole sequence each time: no cache that could hide a mistake in the window.
                logits = model(torch.tensor([ids + tokens])).logits[0, -1]
        runs.append(dict(ids=ids, logits=[float(f"{x:.7g}") for x in first.tolist()], tokens=tokens, gaps=gaps))
    return runs


def save_directory(model, name, dtype, shards, old_config=False):
    directory = DATA / name
    model.config.save_pretrained(directory)
    edit_config(directory / "config.json", dtype, old_config)
    state = {key: value.to(dtype).contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    keys = sorted(state)
    if shards == 1:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = keys[shard::shards]
        save_file({key: state[key] for key in part}, directory / file, metadata={"format": "pt"})
        weight_map.update({key: file for key in part})
    total = sum(value.numel() * value.element_size() for value in state.values())
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def edit_config(path, dtype, old_config):
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    if old_config:  # as transformers 4 wrote it
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = None
        config["head_dim"] = None
    write_json(path, config)


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in fixed:
        return f"{fixed[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def gguf_writer(config, file, architecture):
    writer = gguf.GGUFWriter(DATA / file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim and head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type == "mistral" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    writer.add_eos_token_id(EOS)
    return writer


def save_gguf(model, file, architecture, matrix_type):
    config = model.config
    writer = gguf_writer(config, file, architecture)
    if Path(file).stem in TOKENIZERS:
        add_tokenizer(writer, *TOKENIZERS[Path(file).stem])
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy().astype(np.float32)
        if architecture == "llama" and ".q_proj." in name:
            array = permuted(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            array = permuted(array, config.num_key_value_heads)
        kind = matrix_type if array.ndim == 2 else Type.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    close(writer)


def permuted(array, heads):
    """llama.cpp's converter: halves of a head become neighbours."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def llama3_factors(config):
    """llama.cpp's converter: a divisor for each frequency."""
    rope = config.rope_parameters
    dim = config.hidden_size // config.num_attention_heads
    factors = []
    for frequency in rope["rope_theta"] ** (-np.arange(0, dim, 2, dtype=np.float64) / dim):
        wave = 2 * math.pi / frequency
        original = rope["original_max_position_embeddings"]
        if wave < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wave > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (original / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def save_formats(file):
    """One layer with a matrix of each format; K-quants are random bytes with sensible scales."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1}
    model = build("llama", 5, tie_word_embeddings=True, **sizes)
    kinds = {
        "model.embed_tokens.weight": Type.Q6_K, "model.layers.0.self_attn.q_proj.weight": Type.Q4_K,
        "model.layers.0.self_attn.k_proj.weight": Type.Q5_K, "model.layers.0.self_attn.v_proj.weight": Type.F16,
        "model.layers.0.self_attn.o_proj.weight": Type.Q4_0, "model.layers.0.mlp.gate_proj.weight": Type.Q4_1,
        "model.layers.0.mlp.up_proj.weight": Type.Q8_0, "model.layers.0.mlp.down_proj.weight": Type.BF16,
    }
    writer = gguf_writer(model.config, file, "llama")
    random = np.random.default_rng(6)
    state = model.state_dict()
    for name, value in list(state.items()):
        if name == "lm_head.weight":
            continue
        kind = kinds.get(name, Type.F32)
        # Written in the file's order of rows, read back by the model in its own.
        heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
        heads = next((count for part, count in heads.items() if part in name), None)
        stored = permuted(value.numpy(), heads) if heads else value.numpy()
        if kind in K_BLOCKS:
            raw = k_quant(kind, stored.shape, random)
        else:
            raw = gguf.quants.quantize(stored, kind)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        exact = gguf.quants.dequantize(raw, kind).reshape(stored.shape).astype(np.float32)
        if heads:
            exact = exact.reshape(heads, exact.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(stored.shape)
        state[name] = torch.from_numpy(np.ascontiguousarray(exact))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    close(writer)
    return model


# Bytes before d (and dmin), whether there is a dmin, bytes after; the middle of q and the root mean square of d's factor.
K_BLOCKS = {Type.Q4_K: (0, True, 140), Type.Q5_K: (0, True, 172), Type.Q6_K: (208, False, 0)}


def k_quant(kind, shape, random):
    """Random blocks of 256 weights. Q4_K, Q5_K: d, dmin, 6-bit scales, q; Q6_K: q, 8-bit scales, d."""
    before, with_min, after = K_BLOCKS[kind]
    blocks = shape[0] * shape[1] // 256
    head = random.integers(0, 256, (blocks, before), dtype=np.uint8)
    tail = random.integers(0, 256, (blocks, after), dtype=np.uint8)
    middle = {Type.Q4_K: 7.5, Type.Q5_K: 15.5, Type.Q6_K: 0.0}[kind]
    spread = {Type.Q4_K: 300.0, Type.Q5_K: 600.0, Type.Q6_K: 1400.0}[kind]
    d = (random.uniform(0.5, 1.5, (blocks, 1)) * 1.5 / math.sqrt(shape[1]) / spread).astype(np.float16)
    parts = [head, d.view(np.uint8)]
    if with_min:
        parts.append((d * np.float16(middle)).astype(np.float16).view(np.uint8))
    return np.concatenate([*parts, tail], axis=1).reshape(shape[0], -1)


def add_tokenizer(writer, make, model, pre):
    """A tokenizer.json as llama.cpp's converter writes it into a GGUF file."""
    tokenizer = make()
    parsed = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token["special"] for token in parsed["added_tokens"]}
    by_id = sorted((id, text) for text, id in tokenizer.get_vocab().items())
    assert [id for id, _ in by_id] == list(range(VOCAB)), "the vocabulary is not full"
    texts = [text for _, text in by_id]
    kind = gguf.TokenType
    plain = lambda text: kind.BYTE if text.startswith("<0x") else kind.NORMAL
    types = [plain(text) if i not in added else kind.CONTROL if added[i] else kind.USER_DEFINED for i, text in by_id]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if model == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in parsed["model"]["merges"]])
    else:
        rank = {"".join(pair): place for place, pair in reversed(list(enumerate(parsed["model"]["merges"])))}
        writer.add_token_scores([-float(rank.get(text, 10_000)) for text in texts])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_add_bos_token(tokenizer.bos_token_id is not None)
    writer.add_chat_template(tokenizer.chat_template)


def close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TEXT = """The quick brown fox jumps over the lazy dog. Tandem serves one large language model from two pools of nodes.
Prefill nodes read prompts and build keys and values; decode nodes generate tokens, one after another, 1234 of them."""
QWEN_SPLIT = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def byte_level(split, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def qwen_tokenizer():
    tokenizer = byte_level(QWEN_SPLIT, VOCAB - 2)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(["<think>", "</think>"])  # text with ids of their own
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


def llama3_tokenizer():
    tokenizer = byte_level(LLAMA3_SPLIT, VOCAB)
    tokenizer.model.ignore_merges = True
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML,
    )


def sentencepiece_tokenizer():
    """Llama 2's and Mistral's kind: pieces with a visible space, unknown characters as bytes."""
    characters = Tokenizer(models.BPE(unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - 256, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    characters.train_from_iterator([TEXT], trainer)
    trained = json.loads(characters.to_str())["model"]
    specials = ["<unk>", "<s>", "</s>"]
    pieces = sorted((id, piece) for piece, id in trained["vocab"].items() if piece not in specials)
    listed = specials + [f"<0x{byte:02X}>" for byte in range(256)] + [piece for _, piece in pieces]
    vocab = {piece: id for id, piece in enumerate(listed[:VOCAB])}
    merges = [tuple(pair) for pair in trained["merges"] if "".join(pair) in vocab and all(part in vocab for part in pair)]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=INST,
    )


# By model: the tokenizer, and GGUF's names of its kind and of its way to split text.
TOKENIZERS = {
    "llama": (llama3_tokenizer, "gpt2", "llama-bpe"),
    "mistral": (sentencepiece_tokenizer, "llama", "default"),
    "qwen3": (qwen_tokenizer, "gpt2", "qwen2"),
}
TEXTS = [
    "The quick brown fox", " leading and  double spaces ", "Zwölf Boxkämpfer, 東京 and 🦀!", "I'll pay 1234567 of them\n\n now",
    "tabs\tand\r\nline ends", "plain <think>text</think> here", "e\u0301 composes", "",
]
CHATS = [
    [{"role": "user", "content": "The dog jumps?"}],
    [
        {"role": "user", "content": "Count 1 to 3"}, {"role": "assistant", "content": "1 2 3"},
        {"role": "user", "content": "And back — ünd zurück"},
    ],
]


def save_tokenizer(name, make):
    tokenizer = make()
    tokenizer.save_pretrained(DATA / name)
    texts = [dict(text=text, ids=tokenizer(text)["input_ids"]) for text in TEXTS]
    chats = []
    for messages in CHATS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        chats.append(dict(messages=messages, text=text, ids=ids))
    return dict(texts=texts, chats=chats)


def write_json(path, value):
    path.write_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
