"""A model → a GGUF file, which llama.cpp runs, and programs that are built on it.

The architectures and names are those of transformers (hf_architectures.py), from which the package
gguf knows llama.cpp's names. tests/inference/test_llama_cpp.py compares logits and text.
"""

import json
from dataclasses import replace

import torch

from model import rotary_frequencies
from plaingpt.data.chat_tokenizer import TEMPLATE
from plaingpt.data.foreign_tokenizer import find_template
from plaingpt.data.tokenizers import is_chat
from plaingpt.inference.hf_architectures import ARCHITECTURES, GPT2, TRANSPOSED
from plaingpt.inference.hf_export import (
    END_OF_TEXT,
    PADDING,
    choose_architecture,
    first_and_last,
    foreign_files,
    hf_tokenizer,
    is_foreign,
)
from plaingpt.inference.pretrained import without_padding
from plaingpt.system.errors import UserError, needs

# llama.cpp's GPT-2 has one activation, the tanh approximation of GELU.
LLAMA_CPP = {**ARCHITECTURES, 'gpt2': replace(ARCHITECTURES['gpt2'],
                                              expressible={**GPT2, 'mlp': ('gelu',)})}
DTYPES = {'float32': ('F32', 'ALL_F32'), 'float16': ('F16', 'MOSTLY_F16'),
          'bfloat16': ('BF16', 'MOSTLY_BF16')}  # dtype → gguf's names for it in tensors and files


def build_gguf(model, tokenizer, dtype):
    """→ gguf.GGUFWriter with the whole content of the file; `write_gguf` writes it. dtype: of the
    matrices, one of DTYPES. Raises UserError where llama.cpp cannot compute what `model` does, or
    cut text into tokens as `tokenizer` does."""
    config = model.config
    name = choose_architecture(config, LLAMA_CPP, 'llama.cpp')
    with needs('gguf', 'a file for llama.cpp'):
        import gguf
    writer = gguf.GGUFWriter(None, name)
    writer.add_type('model')
    writer.add_file_type(gguf.LlamaFileType[DTYPES[dtype][1]])
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
    if config.rotary_factor != 1:  # by how much each pair of channels turns slower
        slower = rotary_frequencies(replace(config, rotary_factor=1.0)) / rotary_frequencies(config)
        writer.add_tensor('rope_freqs.weight', slower.numpy())
    add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.n_layer)
    for theirs, w in to_llama_cpp(model, name).items():
        found = names.get_name(theirs, try_suffixes=('.weight', '.bias'))
        kept = 'float32' if w.dim() == 1 or found.startswith('position_embd') else dtype
        stored = w.to(getattr(torch, kept)).contiguous()
        if kept == 'float16' and stored.isinf().any():
            raise UserError(f'{found} holds {w.abs().max().item():.4g}, which is too large for '
                            'float16: use --dtype=bfloat16')
        writer.add_tensor(found, stored.view(torch.uint8).numpy(),
                          raw_dtype=gguf.GGMLQuantizationType[DTYPES[kept][0]])
    return writer


def write_gguf(path, writer):
    """Write what `build_gguf` made. Raises OSError."""
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def to_llama_cpp(model, name):
    """→ {transformers' name: tensor as llama.cpp wants it}."""
    config = model.config
    weights = without_padding({ours: p.detach().cpu() for ours, p in model.named_parameters()},
                              config.vocab_size)
    weights = LLAMA_CPP[name].write_weights(weights, config)
    for theirs, w in weights.items():
        if name == 'gpt2' and theirs.endswith(TRANSPOSED):
            weights[theirs] = w.t()
        elif name == 'llama' and ('.q_proj.' in theirs or '.k_proj.' in theirs):
            # llama.cpp's Llama turns neighbouring channels, (2i, 2i + 1), and ours (i, i + D/2).
            heads = w.reshape(-1, 2, config.head_size // 2, *w.shape[1:])  # (H or KV, 2, D/2, …)
            weights[theirs] = heads.transpose(1, 2).reshape(w.shape)
    return weights


SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" \
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut before merges, by the patterns in tokenizer.json → llama.cpp's name for it.
CUTS = {('ByteLevel',): 'gpt-2', ('Digits', 'ByteLevel'): 'smollm',
        (SPLIT % r'\p{N}{1,3}', 'ByteLevel'): 'llama-bpe', (SPLIT % r'\p{N}', 'ByteLevel'): 'qwen2'}


def add_tokenizer(writer, tokenizer):
    """The tokens, and how llama.cpp finds them in text. It puts no end of text before a prompt."""
    import gguf
    files = foreign_files(tokenizer) if is_foreign(tokenizer) else {}
    made = json.loads(files['tokenizer.json']) if files else hf_tokenizer(tokenizer)
    added = {token['id']: token for token in made['added_tokens']}
    tokens = {i: token for token, i in made['model']['vocab'].items()} \
        | {i: token['content'] for i, token in added.items()}
    kinds = gguf.TokenType
    writer.add_token_types([
        kinds.UNUSED if i not in tokens else kinds.NORMAL if i not in added
        else kinds.CONTROL if added[i]['special'] else kinds.USER_DEFINED
        for i in range(tokenizer.vocab_size)])
    if made['pre_tokenizer'] is None:
        tokens = as_rwkv(tokens, added)
        writer.add_tokenizer_model('rwkv')
    else:
        add_merges(writer, made, not files)
    writer.add_token_list([tokens.get(i, f'[PAD{i}]') for i in range(tokenizer.vocab_size)])
    begin, end = first_and_last(tokenizer)
    if begin is not None:
        writer.add_bos_token_id(begin)
        writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    if is_chat(tokenizer):
        writer.add_eot_token_id(tokenizer.end_of_turn)
        writer.add_chat_template(find_template(files) or tokenizer.template or TEMPLATE)


def as_rwkv(tokens, added):
    """{id: character} → as llama.cpp reads them, whose kind of RWKV takes the longest token that a
    text starts with. Where that is half of a character, as it may be in others than ASCII,
    llama.cpp 0.3.36 does not end. Raises UserError."""
    if odd := next((char for char in tokens.values() if not char.isascii()), None):
        raise UserError('llama.cpp takes a tokenizer of characters only where all are ASCII, and '
                        f'this one has {odd!r}: prepare the text with --tokenizer=byte or bpe')
    return {i: char if char.isalnum() or i in added else f'\\x{ord(char):02x}'
            for i, char in tokens.items()}


def add_merges(writer, made, is_ours):
    """Of the content of a tokenizer.json, how text is cut and merged. Raises UserError."""
    cut = made['pre_tokenizer']
    steps = cut.get('pretokenizers', [cut])
    names = tuple(step['pattern'].get('Regex') if step.get('type') == 'Split' else step.get('type')
                  for step in steps)
    plain = all(step.get('individual_digits', True) and not step.get('add_prefix_space')
                for step in steps)
    if names not in CUTS or not plain:
        raise UserError(f'llama.cpp has no name here for how this tokenizer cuts text, by '
                        f'{", ".join(map(repr, names))[:200]}: export to transformers')
    vocab, merges = made['model']['vocab'], made['model']['merges']
    if is_ours and (lacking := vocab[END_OF_TEXT] - 256 - len(merges)):
        raise UserError(f'{lacking} tokens of this tokenizer are not merged from two others, as '
                        'llama.cpp finds them')
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(CUTS[names])
    # llama.cpp wants merges. What stands for no bytes is never merged.
    writer.add_token_merges([pair if isinstance(pair, str) else ' '.join(pair) for pair in merges]
                            or [f'{END_OF_TEXT} {END_OF_TEXT}'])
    if is_ours and PADDING in vocab:
        writer.add_pad_token_id(vocab[PADDING])
