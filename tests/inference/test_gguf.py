"""A file of gguf holds our model as llama.cpp wants it. The package gguf reads the files back;
test_llama_cpp.py lets llama.cpp itself read them."""

import importlib.util
import os
import resource

import gguf
import numpy as np
import pytest
import torch
from foreign_models import save_tokenizer, shaken
from processes import die_before_change, exit_code, fails, fork
from sample_data import CHAT

import export
from plaingpt.data import tokenizers
from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS, TEMPLATE
from plaingpt.data.foreign_tokenizer import read_tokenizer
from plaingpt.inference.gguf_export import write_gguf
from plaingpt.inference.hf_export import write_hf
from plaingpt.system.errors import UserError

LLAMA = dict(rotary=True, rmsnorm=True, mlp='swiglu')
QWEN3 = dict(LLAMA, qk_norm=True, bias=False)
BYTES = tokenizers.ByteTokenizer()


def written(folder, model, tokenizer=BYTES, dtype='float32'):
    write_gguf(folder / 'model.gguf', model, tokenizer, dtype)
    return folder / 'model.gguf'


def read(path):
    """→ ({name: (type, array)}, {key: value})"""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: (t.tensor_type.name, gguf.dequantize(t.data, t.tensor_type).copy())
               for t in reader.tensors}
    return tensors, {key: field.contents() for key, field in reader.fields.items()}


def learned(model, ids, steps):
    """`model`, which then knows the text `ids` by heart: no two tokens are about as likely."""
    data = torch.tensor(ids)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = model(data[:, :-1], data[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    return model


# -----------------------------------------------------------------------------
# what is in the file


def test_a_gpt2_without_biases_is_written_with_biases_of_zero(tmp_path):
    model = shaken(bias=False)
    tensors, keys = read(written(tmp_path, model))
    assert keys['general.architecture'] == 'gpt2'
    block = model.transformer.h[1]
    for name, w in {'token_embd.weight': model.transformer.wte.weight[:257],
                    'position_embd.weight': model.transformer.wpe.weight,
                    'blk.1.attn_qkv.weight': block.attn.c_attn.weight,
                    'blk.1.ffn_norm.weight': block.ln_2.weight,
                    'blk.1.ffn_up.bias': torch.zeros(192),
                    'output_norm.bias': torch.zeros(48)}.items():
        assert tensors[name][0] == 'F32'
        assert np.array_equal(tensors[name][1], w.detach()), name


def test_the_keys_that_llama_cpp_needs_are_written(tmp_path):
    _, keys = read(written(tmp_path, shaken(**QWEN3)))
    sizes = {'vocab_size': 257, 'context_length': 256, 'embedding_length': 48, 'block_count': 2,
             'attention.head_count': 4, 'attention.head_count_kv': 4, 'feed_forward_length': 128,
             'attention.layer_norm_rms_epsilon': 1e-5, 'rope.freq_base': 10_000,
             'rope.dimension_count': 12, 'attention.key_length': 12, 'attention.value_length': 12}
    for name, value in sizes.items():
        assert keys[f'qwen3.{name}'] == pytest.approx(value), name


def test_the_head_is_written_without_its_padding_if_it_is_not_tied(tmp_path):
    model = shaken(tied_head=False)
    tensors, keys = read(written(tmp_path, model))
    assert np.array_equal(tensors['output.weight'][1], model.lm_head.weight[:257].detach())
    assert len(keys['tokenizer.ggml.tokens']) == 257
    tensors, _ = read(written(tmp_path, shaken()))
    assert 'output.weight' not in tensors


def test_rotary_channels_are_reordered_as_llama_cpp_pairs_them(tmp_path):
    model = shaken(**LLAMA)
    tensors, _ = read(written(tmp_path, model))
    order = [12 * head + i + half for head in range(4) for i in range(6) for half in (0, 6)]
    for kind in ('weight', 'bias'):
        q, k, v = getattr(model.transformer.h[0].attn.c_attn, kind).detach().chunk(3)
        for name, rows in (('q', q[order]), ('k', k[order]), ('v', v)):
            assert np.array_equal(tensors[f'blk.0.attn_{name}.{kind}'][1], rows), (name, kind)


def test_only_matrices_are_rounded(tmp_path):
    model = shaken()
    exact, _ = read(written(tmp_path, model))
    for dtype, kind in (('float16', 'F16'), ('bfloat16', 'BF16')):
        rounded, _ = read(written(tmp_path, model, dtype=dtype))
        for name, (found, values) in rounded.items():
            matrix = values.ndim == 2 and 'position' not in name
            wanted = torch.tensor(exact[name][1])
            wanted = wanted.to(getattr(torch, dtype)).float() if matrix else wanted
            assert found == (kind if matrix else 'F32'), name
            assert np.array_equal(values, wanted), name


def test_a_model_that_llama_cpp_does_not_support_is_refused(tmp_path):
    save_tokenizer(tmp_path, 'smollm2', ['a text'], vocab_size=300)
    theirs = tokenizers.from_json(read_tokenizer(tmp_path, 300))
    for flags, tokenizer, fix in (
            (dict(mlp='gelu_erf'), BYTES, 'qwen3_shape'), (dict(LLAMA, conv=3), BYTES, 'qwen3_sh'),
            ({}, tokenizers.ListTokenizer('abc'), 'bpe'), ({}, theirs, 'convert_hf_to_gguf.py')):
        with pytest.raises(UserError, match=fix):
            written(tmp_path, shaken(tokenizer.vocab_size, **flags), tokenizer)


def test_the_pattern_of_a_bpe_is_named_as_llama_cpp_knows_it(tmp_path):
    tokens = [bytes([i]) for i in range(256)]
    for tokenizer, name in (
            (tokenizers.BPETokenizer(tokens), 'qwen35'), (BYTES, 'gpt-2'),
            (tokenizers.BPETokenizer(tokens, tokenizers.GPT2_PATTERN), 'gpt-2')):
        _, keys = read(written(tmp_path, shaken(tokenizer.vocab_size), tokenizer))
        assert keys['tokenizer.ggml.pre'] == name


def test_a_chat_model_is_written_with_its_template(tmp_path):
    _, keys = read(written(tmp_path, shaken(CHAT.vocab_size), CHAT))
    ids = {name: keys[f'tokenizer.ggml.{name}_token_id'] for name in ('bos', 'eos', 'eot')}
    assert ids == dict(bos=CHAT.bos_id, eos=CHAT.end_of_turn, eot=CHAT.end_of_turn)
    assert keys['tokenizer.chat_template'] == TEMPLATE
    assert keys['tokenizer.ggml.tokens'][-6:] == ['<|endoftext|>', *SPECIAL_TOKENS]
    control = [kind == gguf.TokenType.CONTROL for kind in keys['tokenizer.ggml.token_type']]
    assert control == [False] * 256 + [True] * 6


# -----------------------------------------------------------------------------
# the command


@pytest.fixture
def command(tmp_path):
    """An export of a folder as transformers has them, to a/my.gguf."""
    (tmp_path / 'hf').mkdir()
    write_hf(tmp_path / 'hf', shaken(), BYTES)
    return [f'--init_from={tmp_path}/hf', '--format=gguf', f'--dest={tmp_path}/a/my.gguf']


def test_an_export_to_a_full_disk_leaves_no_file(command, tmp_path):
    pid = fork(export.main, *command, log=tmp_path / 'log',
               before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)))
    assert exit_code(pid) == 2
    assert 'error: dest=' in (tmp_path / 'log').read_text()
    assert not any((tmp_path / 'a').iterdir())


def test_a_file_with_another_tensor_than_the_model_is_not_exported(
        command, tmp_path, capsys, monkeypatch):
    def add_tensor(writer, name, tensor, original=gguf.GGUFWriter.add_tensor, **how):
        original(writer, name, tensor * (name != 'blk.1.ffn_up.weight'), **how)

    monkeypatch.setattr(gguf.GGUFWriter, 'add_tensor', add_tensor)
    assert 'blk.1.ffn_up.weight' in fails(capsys, monkeypatch, export.main, *command)
    assert not any((tmp_path / 'a').iterdir())


def test_an_export_overwrites_nothing(command, tmp_path, capsys, monkeypatch):
    export.main(command)
    if importlib.util.find_spec('llama_cpp') is None:
        assert 'pip install llama-cpp-python' in capsys.readouterr().out  # to compare the file
    [path] = (tmp_path / 'a').iterdir()
    before = path.read_bytes()
    assert 'my.gguf' in fails(capsys, monkeypatch, export.main, *command)
    assert [*path.parent.iterdir()] == [path]
    assert path.read_bytes() == before


@pytest.mark.parametrize('format', ['gguf', 'transformers'])
def test_an_export_after_one_that_was_killed_leaves_nothing_of_it(command, tmp_path, format):
    command = [*command, f'--format={format}', f'--dest={tmp_path}/a/my']
    pid = fork(export.main, *command, log=tmp_path / 'log',
               before=lambda: die_before_change(1, f'my.tmp{os.sep}'))
    assert exit_code(pid) == 9
    assert [*(tmp_path / 'a').iterdir()] == [tmp_path / 'a/my.tmp']
    export.main(command)
    assert [*(tmp_path / 'a').iterdir()] == [tmp_path / 'a/my']
