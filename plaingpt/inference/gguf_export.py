"""A model → a GGUF file, which llama.cpp runs, and programs that are built on it.

llama.cpp's own converter refuses a BPE that someone trained: it knows how text is cut before merges
by a hash of the ids of a test text, and only of published tokenizers. Ours is cut as GPT-2's. The
architectures and names are those of transformers (hf_architectures.py), from which the package gguf
knows llama.cpp's names. tests/inference/test_llama_cpp.py compares logits and text.
"""

from contextlib import closing

import torch

from plaingpt.data.chat_tokenizer import TEMPLATE
from plaingpt.data.tokenizers import is_chat
from plaingpt.inference.hf_architectures import (
    ARCHITECTURES,
    OWN_CODE,
    TRANSPOSED,
    choose_architecture,
)
from plaingpt.inference.hf_export import END_OF_TEXT, first_and_last, hf_tokenizer
from plaingpt.system.errors import UserError, needs

DTYPES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16'}  # dtype → gguf's name for it


def write_gguf(path, model, tokenizer, dtype):
    """Write the file. dtype: of the matrices, one of DTYPES. Raises OSError, and UserError where
    llama.cpp cannot compute what `model` does, or cut text into tokens as `tokenizer` does."""
    config, name = model.config, choose_architecture(model)
    if name == OWN_CODE or config.rotary_factor != 1 or config.mlp not in ('gelu', 'swiglu'):
        raise UserError('format=gguf: llama.cpp has no architecture for these flags, or for a '
                        'model.py that was changed: train with config/qwen3_shape.py after your '
                        'recipe, or export to transformers')
    if getattr(tokenizer, 'base', tokenizer).to_json()['kind'] not in ('byte', 'bpe', 'gpt2'):
        raise UserError('format=gguf takes a tokenizer of byte, bpe or gpt2: export to '
                        "transformers; one of others goes on from there with llama.cpp's "
                        'convert_hf_to_gguf.py')
    with needs('gguf', 'a file for llama.cpp'):
        import gguf
    writer = gguf.GGUFWriter(path, name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head or config.n_head)
    if config.rmsnorm:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if config.rotary:
        writer.add_rope_freq_base(config.rotary_base)
        writer.add_rope_dimension_count(config.head_size)
        writer.add_key_length(config.head_size)
        writer.add_value_length(config.head_size)
    add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.n_layer)
    for theirs, w in to_llama_cpp(model, name).items():
        found = names.get_name(theirs, try_suffixes=('.weight', '.bias'))
        kept = 'float32' if w.dim() == 1 or found.startswith('position_embd') else dtype
        stored = w.to(getattr(torch, kept)).contiguous()
        writer.add_tensor(found, stored.view(torch.uint8).numpy(),
                          raw_dtype=gguf.GGMLQuantizationType[DTYPES[kept]])
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def to_llama_cpp(model, name):
    """→ {transformers' name: tensor as llama.cpp wants it}."""
    weights = {ours: p.detach().cpu() for ours, p in model.named_parameters()}
    weights = ARCHITECTURES[name].write_weights(weights, model.config)
    for theirs, w in weights.items():
        if name == 'gpt2' and theirs.endswith(TRANSPOSED):
            weights[theirs] = w.t()
        elif name == 'llama' and ('.q_proj.' in theirs or '.k_proj.' in theirs):
            # llama.cpp's Llama turns neighbouring channels, (2i, 2i + 1), and ours (i, i + D/2).
            heads = w.unflatten(0, (-1, 2, model.config.head_size // 2))  # (H or KV, 2, D/2, …)
            weights[theirs] = heads.transpose(1, 2).reshape(w.shape)
    return weights


def add_tokenizer(writer, tokenizer):
    """The tokens, and how llama.cpp finds them in text. It puts no end of text before a prompt."""
    import gguf
    made = hf_tokenizer(tokenizer)
    vocab, merges = made['model']['vocab'], made['model']['merges']
    control = {token['id'] for token in made['added_tokens']}
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('gpt-2')
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL
                            for i in range(tokenizer.vocab_size)])
    # llama.cpp wants merges. What stands for no bytes is never merged.
    writer.add_token_merges(merges or [f'{END_OF_TEXT} {END_OF_TEXT}'])
    begin, end = first_and_last(tokenizer)
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    if is_chat(tokenizer):
        writer.add_eot_token_id(tokenizer.end_of_turn)
        writer.add_chat_template(TEMPLATE)
