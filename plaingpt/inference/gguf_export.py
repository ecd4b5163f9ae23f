"""Export to GGUF, the format of llama.cpp and of the programs built on it.

llama.cpp's own converter rejects a BPE tokenizer that you trained: it identifies the pre-tokenizer
by a hash of the ids of a test text, and knows those of published tokenizers only. Ours
pre-tokenizes as GPT-2 or Qwen3.5 does. Architectures and tensor names are those of transformers
(hf_architectures.py), which the package gguf maps to llama.cpp's names.
"""

import math
from contextlib import closing

import numpy as np
import torch

from plaingpt.data.chat_tokenizer import TEMPLATE
from plaingpt.data.tokenizers import GPT2_PATTERN, PATTERN, is_chat
from plaingpt.inference.generation import generate, relative_error
from plaingpt.inference.hf_architectures import (
    ARCHITECTURES,
    OWN_CODE,
    TRANSPOSED,
    choose_architecture,
)
from plaingpt.inference.hf_export import (
    END_OF_TEXT,
    bos_and_eos,
    export_prompt,
    hf_tokenizer,
)
from plaingpt.system.errors import UserError, needs

PRE_TOKENIZERS = {GPT2_PATTERN: 'gpt-2', PATTERN: 'qwen35'}  # llama.cpp's names of patterns
MAX_LLAMA_CPP_TOKENS = 256  # that are compared: their logits are in memory at once
# Relative error. llama.cpp reads GELU from a table in float16, and rounds activations to the dtype
# of the matrices: up to 0.001, 0.002 and 0.09 with random weights. A wrong matrix gives about 1.
LLAMA_CPP_TOLERANCE = {'float32': 0.01, 'float16': 0.02, 'bfloat16': 0.2}
DTYPES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16'}  # dtype → its name in GGUF


def write_gguf(path, model, tokenizer, dtype):
    """Write a GGUF file, and read it back. dtype: of the matrices, one of DTYPES. Raises OSError,
    and UserError if llama.cpp does not support the model or the tokenizer."""
    config = model.config
    architecture = choose_architecture(model)
    if architecture == OWN_CODE or config.rotary_factor != 1 \
            or config.mlp not in ('gelu', 'swiglu'):
        raise UserError('format=gguf: llama.cpp has no architecture for these model flags, or for '
                        'a model.py that was edited; restore it, train with config/qwen3_shape.py '
                        'after your recipe, or export with --format=transformers')
    kind = getattr(tokenizer, 'base', tokenizer).to_json()['kind']
    if kind not in ('byte', 'bpe', 'gpt2'):
        raise UserError('format=gguf: the tokenizer must be byte, bpe or gpt2; export with '
                        "--format=transformers, then try llama.cpp's convert_hf_to_gguf.py")
    with needs('gguf', 'format=gguf'):
        import gguf
    writer = gguf.GGUFWriter(path, architecture)
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
    tensors = llama_cpp_tensors(model, architecture, getattr(torch, dtype))
    for name, w in tensors.items():
        dtype_name = DTYPES[str(w.dtype).removeprefix('torch.')]
        writer.add_tensor(name, w.view(torch.uint8).numpy(),
                          raw_dtype=gguf.GGMLQuantizationType[dtype_name])
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    for tensor in gguf.GGUFReader(path).tensors:
        written = gguf.dequantize(tensor.data, tensor.tensor_type)
        if not np.array_equal(written, tensors.pop(tensor.name).float()):
            raise UserError(f'format=gguf: {tensor.name} in the file differs from the model')
    assert not tensors, f'missing in the file: {[*tensors]}'


def llama_cpp_tensors(model, architecture, dtype):
    """→ {name in GGUF: tensor in llama.cpp's layout}. dtype: of the matrices"""
    import gguf
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], model.config.n_layer)
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    tensors = {}
    for hf_name, w in ARCHITECTURES[architecture].write_weights(weights, model.config).items():
        if architecture == 'gpt2' and hf_name.endswith(TRANSPOSED):
            w = w.t()
        elif architecture == 'llama' and ('.q_proj.' in hf_name or '.k_proj.' in hf_name):
            # llama.cpp's Llama rotates the channel pairs (2i, 2i + 1), ours (i, i + D/2).
            heads = w.unflatten(0, (-1, 2, model.config.head_size // 2))  # (H or KV, 2, D/2, …)
            w = heads.transpose(1, 2).reshape(w.shape)
        name = names.get_name(hf_name, try_suffixes=('.weight', '.bias'))
        is_matrix = w.dim() == 2 and not name.startswith('position_embd')
        tensors[name] = w.to(dtype if is_matrix else torch.float32).contiguous()
    return tensors


@torch.no_grad()
def check_gguf(path, model, tokenizer, text=()):
    """Let llama.cpp open what write_gguf() wrote → the relative error of its logits; infinity if it
    encodes text to other tokens, or None without llama-cpp-python.

    They are compared on a prompt (see export_prompt) and greedily generated tokens after it."""
    try:
        import llama_cpp
    except ImportError:
        return None
    model.config.document_attention = False  # llama.cpp gets one document
    T = min(model.config.block_size, MAX_LLAMA_CPP_TOKENS)
    [prompt] = export_prompt(text, model.config.vocab_size, T).tolist()
    [new_ids] = generate(model, [prompt], T - len(prompt), temperature=0)
    ids = prompt + new_ids  # T of them
    decoded = tokenizer.decode(prompt)
    with closing(llama_cpp.Llama(
            str(path), n_ctx=T, logits_all=True, verbose=False,
            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)) as theirs:
        encoded = theirs.tokenize(decoded.encode(), add_bos=True, special=False)
        if encoded != tokenizer.encode(decoded).tolist():
            return math.inf
        theirs.eval(ids)
        logits = torch.tensor(theirs.scores[:T])  # (T, V)
    return relative_error(logits, model(torch.tensor([ids]))[0][0])


def add_tokenizer(writer, tokenizer):
    """Add the tokens and merges. llama.cpp will not put a BOS token before a prompt."""
    import gguf
    tokenizer_json = hf_tokenizer(tokenizer)
    base = getattr(tokenizer, 'base', tokenizer)
    vocab, merges = tokenizer_json['model']['vocab'], tokenizer_json['model']['merges']
    types = [gguf.TokenType.NORMAL] * tokenizer.vocab_size
    for token in tokenizer_json['added_tokens']:
        types[token['id']] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(PRE_TOKENIZERS[getattr(base, 'pattern', GPT2_PATTERN)])
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types(types)
    # llama.cpp needs at least one merge; this one never applies.
    writer.add_token_merges(merges or [f'{END_OF_TEXT} {END_OF_TEXT}'])
    bos_id, eos_id = bos_and_eos(tokenizer)
    writer.add_bos_token_id(bos_id)
    writer.add_eos_token_id(eos_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    if is_chat(tokenizer):
        writer.add_eot_token_id(tokenizer.end_of_turn)
        writer.add_chat_template(TEMPLATE)
