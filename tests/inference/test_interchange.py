import json
import math
import subprocess
import sys
import zipfile
from dataclasses import dataclass

import pytest
import torch
from helpers import fails, run
from hostile_models import Call
from safetensors.torch import load_file, save_file

import evaluate
import export
import sample
import train
from model import GPT, GPTConfig
from plaingpt.inference.hf_export import hf_tokenizer
from plaingpt.inference.pretrained import load_pretrained
from plaingpt.system.errors import UserError
from plaingpt.tokens import tokenizers

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32)
SHAPES = {'gpt2': (12, 768), 'gpt2-medium': (16, 1024), 'gpt2-large': (20, 1280),
          'gpt2-xl': (25, 1600)}  # heads, channels


def tokens(*shape, vocab_size=65):
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL).eval()


def theirs_of(folder, **config):
    """A GPT-2 of transformers with weights large enough that every part matters, saved."""
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=48, n_layer=2,
                                        n_head=4, initializer_range=0.2, **config)).eval()
    theirs.save_pretrained(folder)
    return theirs


@torch.no_grad()
def difference(ours, theirs, vocab_size):
    idx = tokens(2, 32, vocab_size=vocab_size)
    return (ours.eval()(idx)[0] - theirs.eval()(idx).logits).abs().max().item()


@pytest.mark.parametrize(('max_shard_size', 'files'), [('5GB', 1), ('100KB', 4)])
def test_logits_equal_those_of_transformers_on_its_weights(tmp_path, max_shard_size, files):
    theirs = theirs_of(tmp_path)
    theirs.save_pretrained(tmp_path / 'again', max_shard_size=max_shard_size)
    assert len(list((tmp_path / 'again').glob('*.safetensors'))) >= files
    assert difference(GPT.from_pretrained(tmp_path / 'again'), theirs, 100) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('name', SHAPES)
def test_logits_equal_those_of_transformers_both_ways_at_full_width(name, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    n_head, n_embd = SHAPES[name]
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=n_embd, n_layer=4, n_head=n_head,
                                        initializer_range=0.05))
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert difference(ours, theirs, 50257) < 1e-4
    export.write_hf(tmp_path, ours, tokenizers.ByteTokenizer(), '')
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert difference(ours, back, 50257) < 1e-4


def shaken(**flags):
    """A small model of ours in which every parameter matters."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(32, 100, 2, 4, 48, **flags))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize(('name', 'flags'), [
    ('gpt2', {}),
    ('gpt2', dict(mlp='relu2', tied_head=False)),
    ('llama', dict(rotary=True, rmsnorm=True, mlp='swiglu')),
    ('llama', dict(rotary=True, rmsnorm=True, mlp='swiglu', tied_head=False)),
    ('qwen3', dict(rotary=True, rmsnorm=True, mlp='swiglu', qk_norm=True, tied_head=False)),
])
def test_an_export_has_the_same_logits_in_transformers_and_when_read_back(
        tmp_path, name, flags, bias):
    from transformers import AutoModelForCausalLM
    ours = shaken(**flags, bias=bias and name != 'qwen3')
    export.write_hf(tmp_path, ours, tokenizers.ByteTokenizer(), '')
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.model_type == name and difference(ours, theirs, 100) < 1e-4
    theirs.save_pretrained(tmp_path / 'theirs')
    for folder in (tmp_path, tmp_path / 'theirs'):
        assert difference(GPT.from_pretrained(folder), theirs, 100) < 1e-4


@pytest.mark.parametrize(('flags', 'words'), [
    (dict(logit_softcap=15.0), 'gpt2 needs logit_softcap=0.0 instead of 15.0'),
    (dict(rmsnorm=True), 'gpt2 needs rmsnorm=False'),
    (dict(qk_norm=True), 'gpt2 needs qk_norm=False'),
    (dict(rotary=True, mlp='swiglu'), 'llama needs rmsnorm=True'),
    (dict(rotary=True, rmsnorm=True, mlp='relu2', qk_norm=True), 'mlp=swiglu instead of relu2'),
    (dict(rotary=True, rmsnorm=True, mlp='swiglu', qk_norm=True), 'qwen3 needs bias=False'),
])
def test_the_flag_that_prevents_an_export_is_named(tmp_path, flags, words):
    with pytest.raises(UserError, match=words):
        export.write_hf(tmp_path, shaken(**flags), tokenizers.ByteTokenizer(), '')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(('key', 'value'), [
    ('num_key_value_heads', 2), ('rms_norm_eps', 1e-6), ('hidden_act', 'gelu'), ('mlp_bias', False),
    ('rope_parameters', {'rope_type': 'linear', 'rope_theta': 10000.0, 'factor': 2.0})])
def test_a_llama_that_computes_something_else_is_refused_by_name(tmp_path, key, value):
    ours = shaken(rotary=True, rmsnorm=True, mlp='swiglu')
    export.write_hf(tmp_path, ours, tokenizers.ByteTokenizer(), '')
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=f'config.json says {key}='):
        GPT.from_pretrained(tmp_path)


@dataclass
class FutureConfig(GPTConfig):
    alibi: bool = False


@pytest.mark.parametrize('flags', [{}, dict(rotary=True, rmsnorm=True, mlp='swiglu')])
def test_a_flag_that_no_architecture_lists_is_refused_unless_it_has_its_default(tmp_path, flags):
    model = GPT(FutureConfig(32, 100, 2, 4, 48, **flags))
    export.write_hf(tmp_path, model, tokenizers.ByteTokenizer(), '')
    model.config.alibi = True
    with pytest.raises(UserError, match='alibi=False instead of True'):
        export.write_hf(tmp_path, model, tokenizers.ByteTokenizer(), '')


def test_export_and_import_come_back_to_the_same_files(trained, tmp_path):
    export.main([f'--out_dir={trained}', f'--dest={tmp_path}/a'])
    export.main([f'--init_from={tmp_path}/a', f'--dest={tmp_path}/b'])
    names = sorted(path.name for path in (tmp_path / 'a').iterdir())
    assert names == sorted(path.name for path in (tmp_path / 'b').iterdir())
    for name in names:
        if name != 'README.md':
            assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()
    card = (tmp_path / 'a/README.md').read_text()
    assert '| iterations | ' in card and 'nats a token' in card


def test_an_exported_run_writes_in_transformers_what_it_writes_here(trained, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    export.main([f'--out_dir={trained}', f'--dest={tmp_path}/hf'])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / 'hf')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / 'hf')
    ids = tokenizer('def main', return_tensors='pt').input_ids
    theirs = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])
    capsys.readouterr()
    sample.main([f'--init_from={tmp_path}/hf', '--start=def main', '--num_samples=1',
                 '--max_new_tokens=8', '--temperature=0', '--device=cpu', '--dtype=float32'])
    assert theirs in capsys.readouterr().out


STRANGE = ['Hello, wörld!  日本語\n\n\t 12345 ', '    ', 'a    b', '🎉🎉\r\n', '\x00\x7f\xad¡',
           'aaaaaaaaaaa' * 3, 'ÀÈÌ' * 5, "it's"]


@pytest.mark.parametrize('kind', ['char', 'byte', 'gpt2', 'bpe:700'])
def test_tokenizers_open_in_transformers_and_agree(kind, text_file, tmp_path):
    from transformers import AutoTokenizer
    text = text_file.read_text(encoding='utf-8')
    try:
        ours = tokenizers.make_tokenizer(kind, [text, *STRANGE])
    except UserError as e:
        pytest.skip(str(e))
    export.write_hf(tmp_path, GPT(SMALL), ours, '')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size and theirs.eos_token_id == ours.end_of_text
    for piece in [text[:20_000], *STRANGE]:
        ids = ours.encode(piece).tolist()
        assert theirs.encode(piece) == ids
        assert theirs.decode(ids) == piece
    if ours.end_of_text is not None:
        assert theirs.encode('a<|endoftext|>')[-1] == ours.end_of_text


def test_gpt2s_merges_are_the_published_ones():
    try:
        tokenizer = tokenizers.from_json({'kind': 'gpt2'})
    except UserError as e:
        pytest.skip(str(e))
    made = hf_tokenizer(tokenizer)['model']
    assert made['merges'][:3] == ['Ġ t', 'Ġ a', 'h e'] and len(made['merges']) == 50_000
    assert made['merges'][-1] == 'Ġg azed' and made['vocab']['ĠGitHub'] == 21722


# -----------------------------------------------------------------------------
# nanoGPT's checkpoints


def nanogpt_checkpoint(path, model, prefix='', vocab_size=None, **more):
    """What nanoGPT's train.py saves: the tied matrix twice, padded as it pads."""
    c = model.config
    weights = {prefix + name: w.clone() for name, w in model.state_dict().items()}
    for name in ('transformer.wte.weight', 'lm_head.weight'):
        weights[prefix + name] = weights[prefix + name][:vocab_size or c.vocab_size].clone()
    torch.save({'model': weights, 'optimizer': {'state': {0: {'step': torch.tensor(1.0)}}},
                'model_args': dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd,
                                   block_size=c.block_size, bias=c.bias, dropout=0.1,
                                   vocab_size=vocab_size or c.vocab_size),
                'iter_num': 5, 'best_val_loss': torch.tensor(2.0), 'config': {'dataset': 'x'},
                **more}, path)


@pytest.mark.parametrize('prefix', ['', '_orig_mod.', 'module._orig_mod.'])
@pytest.mark.parametrize('bias', [True, False])
def test_a_checkpoint_of_nanogpt_is_read(tmp_path, prefix, bias):
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 65, 2, 4, 32, bias=bias, mlp='gelu_erf')).eval()
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, prefix)
    again = GPT.from_pretrained(str(tmp_path / 'ckpt.pt')).eval()
    assert torch.equal(again(tokens(2, 16))[0], model(tokens(2, 16))[0])


def test_a_checkpoint_of_nanogpt_writes_with_the_tokenizer_of_a_dataset(
        char_data, tmp_path, capsys, monkeypatch):
    vocab_size = json.loads((char_data / 'meta.json').read_text())['vocab_size']
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', GPT(GPTConfig(16, vocab_size, 1, 1, 16)))
    arguments = [f'--init_from={tmp_path}/ckpt.pt', '--start=def', '--num_samples=1',
                 '--max_new_tokens=5', '--device=cpu']
    assert '--tokenizer=data/NAME' in fails(capsys, monkeypatch, sample.main, *arguments)
    sample.main([*arguments, f'--tokenizer={char_data}'])
    assert '\ndef' in capsys.readouterr().out


def test_the_folder_of_a_nanogpt_run_says_how_to_go_on(
        tiny, char_data, tmp_path, capsys, monkeypatch):
    vocab_size = json.loads((char_data / 'meta.json').read_text())['vocab_size']
    (nano := tmp_path / 'nano').mkdir()
    nanogpt_checkpoint(nano / 'ckpt.pt', GPT(GPTConfig(16, vocab_size, 1, 1, 16, mlp='gelu_erf')))
    for main, argv in ((sample.main, []), (evaluate.main, []),
                       (export.main, [f'--dest={tmp_path}/hf'])):
        line = fails(capsys, monkeypatch, main, f'--out_dir={nano}', *argv)
        assert f'--init_from={nano}/ckpt.pt' in line and '--tokenizer' in line
    line = fails(capsys, monkeypatch, train.main, *tiny, '--init_from=resume', f'--out_dir={nano}')
    assert f'--init_from={nano}/ckpt.pt' in line and 'optimizer' in line and 'anew' in line
    for source in (nano / 'ckpt.pt', nano):
        train.main([*tiny, f'--init_from={source}', '--max_iters=1'])
        said = next(line for line in capsys.readouterr().out.splitlines() if 'anew' in line)
        assert str(source) in said and 'iteration 5, validation loss 2.0000' in said
    train.main([*tiny, f'--init_from={tmp_path}/out', f'--out_dir={tmp_path}/more'])
    said = capsys.readouterr().out
    assert 'iteration 1, validation loss' in said and 'anew' in said


@pytest.mark.parametrize('more', [
    {'iter_num': 'x', 'best_val_loss': []}, {'iter_num': -1, 'best_val_loss': torch.zeros(3)},
    {'iter_num': None, 'best_val_loss': float('nan')}])
def test_a_ckpt_without_usable_counters_still_gives_its_weights(tmp_path, more):
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', GPT(GPTConfig(8, 65, 1, 1, 8, mlp='gelu_erf')), **more)
    assert load_pretrained(tmp_path / 'ckpt.pt')[1] == ''


def test_nanogpts_padding_of_gpt2s_vocabulary_is_cut_off(tmp_path):
    model = GPT(GPTConfig(8, 50304, 1, 1, 8, mlp='gelu_erf'))
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, vocab_size=50304)
    again = GPT.from_pretrained(tmp_path / 'ckpt.pt')
    assert again.config.vocab_size == 50257
    assert torch.equal(again(tokens(1, 8))[0], model(tokens(1, 8))[0][..., :50257])


def test_a_checkpoint_of_build_nanogpt_is_read(tmp_path, model):
    # Its config is an instance of a class in the script, so a process of its own must write it.
    torch.save(model.state_dict(), tmp_path / 'weights.pt')
    (tmp_path / 'train_gpt2.py').write_text('''
import torch
from dataclasses import dataclass
@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
weights = torch.load('weights.pt', weights_only=True)
for name in ('transformer.wte.weight', 'lm_head.weight'):
    weights[name] = weights[name][:65].clone()
torch.save({'model': weights, 'config': GPTConfig(16, 65, 2, 4, 32), 'step': 9, 'val_loss': 3.0},
           'model_00009.pt')
''')
    run('train_gpt2.py', cwd=tmp_path)
    again = GPT.from_pretrained(tmp_path / 'model_00009.pt').eval()
    assert torch.equal(again(tokens(2, 16))[0], model(tokens(2, 16))[0])


class Harmful:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return subprocess.call, ([sys.executable, '-c', f"open('{self.folder}/hacked', 'w')"],)


def test_a_pickle_that_holds_code_is_refused_and_nothing_run(tmp_path, model, capsys, monkeypatch):
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, more=Harmful(tmp_path))
    line = fails(capsys, monkeypatch, sample.main, f'--init_from={tmp_path}/ckpt.pt')
    assert 'it holds commands.call' in line and 'nothing in it was run' in line
    assert not (tmp_path / 'hacked').exists()


# -----------------------------------------------------------------------------
# what is not a model


def broken_folder(tmp_path, how):
    theirs_of(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    weights = load_file(tmp_path / 'model.safetensors')
    match how:
        case 'empty':
            (tmp_path / 'config.json').unlink()
        case 'no weights':
            (tmp_path / 'model.safetensors').unlink()
        case 'cut short':
            (tmp_path / 'model.safetensors').write_bytes(b'no tensors')
        case 'missing':
            del weights['transformer.h.1.mlp.c_fc.bias']
        case 'extra':
            weights['transformer.h.7.mlp.c_fc.bias'] = torch.zeros(3)
        case 'shape':
            weights['transformer.wpe.weight'] = torch.zeros(3, 48)
        case 'untied':
            weights['lm_head.weight'] = torch.zeros(100, 48)
        case (key, value):
            config[key] = value
    if how in ('missing', 'extra', 'shape', 'untied'):
        save_file(weights, tmp_path / 'model.safetensors')
    elif isinstance(how, tuple):
        (tmp_path / 'config.json').write_text(json.dumps(config))


@pytest.mark.parametrize(('how', 'words'), [
    ('empty', 'config.json'),
    ('no weights', 'model.safetensors'),
    ('cut short', 'cannot be read'),
    ('missing', 'it has no transformer.h.1.mlp.c_fc.bias'),
    ('extra', 'it has an unknown transformer.h.7.mlp.c_fc.bias'),
    ('shape', r'transformer.wpe.weight is \(3, 48\), expected \(32, 48\)'),
    ('untied', 'lm_head.weight is not its wte.weight'),
    (('model_type', 'opt'), "model_type='opt'"),
    (('activation_function', 'silu'), "activation_function='silu'"),
    (('scale_attn_by_inverse_layer_idx', True), 'scale_attn_by_inverse_layer_idx'),
    (('n_inner', 7), 'n_inner=7'),
    (('n_head', 5), 'n_embd=48'),
    (('n_layer', 'two'), 'n_layer'),
])
def test_a_folder_that_is_not_gpt2_is_named_with_what_is_wrong(tmp_path, how, words):
    broken_folder(tmp_path, how)
    with pytest.raises(UserError, match=words) as e:
        GPT.from_pretrained(tmp_path)
    assert '\n' not in str(e.value)


def test_a_corrupt_or_foreign_ckpt_is_one_line(tmp_path, model):
    path = tmp_path / 'ckpt.pt'
    nanogpt_checkpoint(path, model)
    whole = path.read_bytes()
    for data in (b'', b'garbage', whole[:len(whole) // 2], b"cposix\nsystem\n(S'exit'\ntR."):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r'ckpt.pt: (damaged|refused)'):
            GPT.from_pretrained(path)
    torch.save({'model': {}}, path)
    with pytest.raises(UserError, match="KeyError: 'config'"):
        GPT.from_pretrained(path)
    path.unlink()
    with pytest.raises(UserError, match='No such file'):
        GPT.from_pretrained(path)


def refused(source):
    """The one line that says why a model is refused."""
    with pytest.raises(UserError) as e:
        GPT.from_pretrained(source)
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


SPOILED = {  # weights that are none → words of the error
    'nan': (lambda w: torch.full_like(w, math.nan), 'is not finite'),
    'inf': (lambda w: torch.full_like(w, 1e300, dtype=torch.float64), 'is not finite'),
    'int8': (lambda w: w.to(torch.int8), 'is torch.int8'),
    'bool': (lambda w: w > 0, 'is torch.bool'),
    'complex': (lambda w: w.to(torch.complex64), 'is torch.complex64')}


@pytest.mark.parametrize('how', SPOILED)
def test_weights_that_are_no_numbers_of_a_model_are_refused_by_name(tmp_path, how):
    spoil, words = SPOILED[how]
    export.write_hf(tmp_path, shaken(), tokenizers.ByteTokenizer(), '')
    weights = load_file(tmp_path / 'model.safetensors')
    name = 'transformer.h.1.mlp.c_fc.weight'
    weights[name] = spoil(weights[name]).contiguous()
    save_file(weights, tmp_path / 'model.safetensors')
    assert f'{name} {words}' in refused(tmp_path)
    ours = shaken()
    torch.save({'model': {**ours.state_dict(), name: spoil(ours.get_parameter(name))},
                'config': None, 'model_args': dict(
                    n_layer=2, n_head=4, n_embd=48, block_size=32, vocab_size=128)},
               tmp_path / 'ckpt.pt')
    assert f'{name} {words}' in refused(tmp_path / 'ckpt.pt')


@pytest.mark.parametrize('value', [10**9, 2**30, 2**62, 10**400, 0, -1, 1.0, math.nan, True, '2'])
@pytest.mark.parametrize('key', ['n_layer', 'n_embd', 'n_head', 'n_positions', 'vocab_size'])
def test_a_shape_that_no_file_holds_is_refused_before_anything_is_built(tmp_path, key, value):
    export.write_hf(tmp_path, GPT(GPTConfig(16, 65, 1, 1, 8)), tokenizers.ByteTokenizer(), '')
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps({**config, key: value, 'n_inner': None}))
    assert str(tmp_path) in refused(tmp_path)


@pytest.mark.parametrize('positions', [2**21, 2**30, 2**62])
def test_positions_that_no_tensor_vouches_for_have_a_bound(tmp_path, positions):
    export.write_hf(tmp_path, shaken(rotary=True, rmsnorm=True, mlp='swiglu'),
                    tokenizers.ByteTokenizer(), '')
    config = json.loads((tmp_path / 'config.json').read_text())
    config['max_position_embeddings'] = positions
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert 'max_position_embeddings' in refused(tmp_path) or 'block_size' in refused(tmp_path)


def in_a_tuple(value, times):
    for _ in range(times):
        value = (value,)
    return value


@pytest.mark.parametrize(('change', 'words'), [
    (lambda w: w.update(x=torch.zeros(1).expand(10**9)), 'the file has fewer'),
    (lambda w: w.update(x=torch.empty(10**12, device='meta')), '_rebuild_meta_tensor'),
    (lambda w: w.update(x=torch.zeros(3, 3).to_sparse()), '_rebuild_sparse_tensor'),
    (lambda w: w.update(x=Call(bytearray, 10**12)), 'bytearray'),
    (lambda w: w.update(x=in_a_tuple(1, 300)), 'no plain tensor'),
    (lambda w: w.update(x=[0] * 600_000), 'pickle is too long'),
    (lambda w: w.update({f'transformer.h.{i}.ln_1.weight': w['transformer.wte.weight']
                         for i in range(900)}), 'the file has fewer')])
def test_what_would_take_more_than_the_file_holds_is_refused(tmp_path, change, words):
    weights = {name: w.clone() for name, w in shaken().state_dict().items()}
    change(weights)
    torch.save({'model': weights, 'model_args': dict(
        n_layer=2, n_head=4, n_embd=48, block_size=32, vocab_size=128)}, tmp_path / 'ckpt.pt')
    assert words in refused(tmp_path / 'ckpt.pt')


def test_a_compressed_archive_is_refused(tmp_path, model):
    nanogpt_checkpoint(tmp_path / 'stored.pt', model)
    with zipfile.ZipFile(tmp_path / 'stored.pt') as old, \
            zipfile.ZipFile(tmp_path / 'ckpt.pt', 'w', zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert 'it is compressed' in refused(tmp_path / 'ckpt.pt')


def test_without_a_network_gpt2_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('huggingface_hub.snapshot_download',
                        lambda *a, **k: (_ for _ in ()).throw(ConnectionError('no route')))
    line = fails(capsys, monkeypatch, sample.main, '--init_from=gpt2')
    assert 'connect to the internet once, or give a folder' in line


@pytest.mark.parametrize(('arguments', 'words'), [
    ([], 'dest is empty'),
    (['--dest={tmp}'], 'exists already'),
    (['--dest={tmp}/x', '--out_dir={tmp}/nowhere'], 'no checkpoint there'),
])
def test_mistakes_of_export_are_one_line(trained, tmp_path, capsys, monkeypatch, arguments, words):
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    assert words in fails(capsys, monkeypatch, export.main, f'--out_dir={trained}', *arguments)
    assert not (tmp_path / 'x').exists() and not (tmp_path / 'x.tmp').exists()
