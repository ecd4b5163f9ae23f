"""llama.cpp makes of our files what we make of our models.

It comes in llama-cpp-python, which pip builds from source in half an hour: make test-slow skips
these tests without it, and make test does not know them.
"""

import math
from contextlib import closing
from pathlib import Path

import pytest
import torch
from foreign_models import STRANGE, shaken
from processes import fails
from sample_data import CHAT, make_tokenizer
from test_chat_export import ANSWER, KNOWN_BY_HEART, model  # noqa: F401  (model is a fixture)
from test_gguf import BYTES, LLAMA, QWEN3, written

import export
from plaingpt.data.tokenizers import BPETokenizer
from plaingpt.inference.gguf_export import LLAMA_CPP_TOLERANCE, check_gguf
from plaingpt.inference.hf_export import write_hf

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip('llama_cpp', reason='llama-cpp-python is not installed')


def opened(path):
    """The model in llama.cpp, with a cache of keys and values in float32 as ours."""
    import llama_cpp
    return closing(llama_cpp.Llama(
        str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32))


@pytest.mark.parametrize('dtype', LLAMA_CPP_TOLERANCE)
@pytest.mark.parametrize('flags', [
    {}, dict(bias=False, tied_head=False, std=0.5), LLAMA, dict(QWEN3, n_kv_head=2),
    dict(block_size=8)])
def test_llama_cpp_gives_our_logits(tmp_path, dtype, flags):
    ours = shaken(**flags)
    error = check_gguf(written(tmp_path, ours, dtype=dtype), ours, BYTES, text=[*b'def main():'])
    exact = dtype == 'float32' and ours.config.mlp == 'swiglu'  # GELU is in a table of float16
    assert error < (1e-5 if exact else LLAMA_CPP_TOLERANCE[dtype])


@pytest.mark.parametrize('kind', ['byte', 'bpe:700', 'gpt2'])
def test_llama_cpp_encodes_text_as_we_do(tmp_path, kind, text_file):
    code = text_file.read_text(encoding='utf-8')
    tokenizer = make_tokenizer(kind, [code])
    texts = [code[:20_000], *STRANGE, 'x<|endoftext|>y<|padding|> </s><s><|im_end|><EOT>']
    end = tokenizer.end_of_text
    path = written(tmp_path, shaken(tokenizer.vocab_size), tokenizer)
    with opened(path) as theirs:
        for text in texts:
            ids = tokenizer.encode(text).tolist()
            # as a program would that leaves it to the file whether text begins with a token
            assert theirs.tokenize(text.encode(), add_bos=True, special=False) == ids, text[:60]
            assert theirs.detokenize(ids) == text.encode(), text[:60]
        assert theirs.token_eos() == theirs.token_bos() == end
        assert theirs.tokenize(b'<|endoftext|>', special=True) == [end]


# -----------------------------------------------------------------------------
# conversations


def test_llama_cpp_gives_our_answers(model, tmp_path):  # noqa: F811
    with opened(written(tmp_path, model, CHAT)) as theirs:
        answer = theirs.create_chat_completion(KNOWN_BY_HEART[:-1], temperature=0)
    [choice] = answer['choices']
    assert choice['message']['content'] == ANSWER
    assert choice['finish_reason'] == 'stop'


# -----------------------------------------------------------------------------
# export.py asks it


def test_a_gguf_file_that_llama_cpp_computes_differently_is_found(tmp_path):
    ours, bpe = shaken(), BPETokenizer([*(bytes([i]) for i in range(256)), b'ab'])
    path = written(tmp_path, ours)
    assert check_gguf(path, ours, bpe, text=[*b'abba']) == math.inf
    with torch.no_grad():
        ours.transformer.h[1].mlp.c_proj.weight *= -1
    assert check_gguf(path, ours, BYTES) > 2 * max(LLAMA_CPP_TOLERANCE.values())


def test_a_file_that_llama_cpp_reads_otherwise_is_not_exported(tmp_path, capsys, monkeypatch):
    write_hf(tmp_path, shaken(), BYTES)
    command = [f'--init_from={tmp_path}', '--format=gguf', '--dest=a.gguf']
    with monkeypatch.context() as patch:
        patch.setattr(export, 'LLAMA_CPP_TOLERANCE', {'float32': 1e-9})
        assert 'llama.cpp' in fails(capsys, monkeypatch, export.main, *command)
    assert not Path('a.gguf').exists()
    export.main(command)
    assert 'not compared' not in capsys.readouterr().out
