import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import yaml
from helpers import fails, same_logits
from safetensors.torch import load_file, save_file

import evaluate
import export
import sample
import train
from model import GPT, GPTConfig
from plaingpt.data import tokenizers
from plaingpt.inference.hf_export import hf_tokenizer
from plaingpt.system.errors import UserError

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32)
LLAMA = dict(rotary=True, rmsnorm=True, mlp='swiglu')
BYTES = tokenizers.ByteTokenizer()


def tokens(*shape, vocab_size=65):
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL).eval()


def theirs_of(folder):
    """A GPT-2 of transformers with weights large enough that every part matters, saved."""
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=48, n_layer=2,
                                        n_head=4, initializer_range=0.2)).eval()
    theirs.save_pretrained(folder)
    return theirs


def test_logits_equal_those_of_transformers_on_its_weights(tmp_path):
    theirs = theirs_of(tmp_path / 'one_file')
    theirs.save_pretrained(tmp_path / 'several', max_shard_size='100KB')
    assert len(list((tmp_path / 'several').glob('*.safetensors'))) >= 4
    for folder in tmp_path.iterdir():
        assert same_logits(GPT.from_pretrained(folder), theirs, tokens(2, 32, vocab_size=100))


@pytest.mark.slow
@pytest.mark.parametrize(('n_head', 'n_embd'), [(12, 768), (25, 1600)])  # GPT-2's, GPT-2 XL's
def test_logits_equal_those_of_transformers_both_ways_at_full_width(n_head, n_embd, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=n_embd, n_layer=2, n_head=n_head,
                                        initializer_range=0.05))
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert same_logits(ours, theirs, tokens(2, 32, vocab_size=50257))
    export.write_hf(tmp_path, ours, BYTES, '')
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same_logits(ours, back, tokens(2, 32, vocab_size=50257))


def shaken(**flags):
    """A small model of ours in which every parameter matters."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(32, 100, 2, 4, 48, **flags))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def exported(folder, **flags):
    """→ the folder, with a model of these flags in it."""
    folder.mkdir(exist_ok=True)
    export.write_hf(folder, shaken(**flags), BYTES, '')
    return folder


def change_config(folder, **changes):
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(('name', 'flags'), [
    ('gpt2', {}),
    ('gpt2', dict(mlp='relu2', tied_head=False, bias=False)),
    ('llama', LLAMA),
    ('llama', dict(LLAMA, tied_head=False, bias=False)),
    ('qwen3', dict(LLAMA, qk_norm=True, tied_head=False, bias=False))])
def test_an_export_has_the_same_logits_in_transformers_and_when_read_back(tmp_path, name, flags):
    from transformers import AutoModelForCausalLM
    ours = shaken(**flags)
    export.write_hf(tmp_path, ours, BYTES, '')
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    idx = tokens(2, 32, vocab_size=100)
    assert theirs.config.model_type == name and same_logits(ours, theirs, idx)
    theirs.save_pretrained(tmp_path / 'theirs')
    for folder in (tmp_path, tmp_path / 'theirs'):
        assert same_logits(GPT.from_pretrained(folder), theirs, idx)


def test_the_flag_that_prevents_an_export_is_named(tmp_path):
    for flags, words in (
            (dict(conv=3), 'gpt2 needs conv=0'),
            (dict(rotary=True, mlp='swiglu'), 'llama needs rmsnorm=True'),
            (dict(LLAMA, qk_norm=True, mlp='relu2'), 'mlp=swiglu'),
            (dict(LLAMA, qk_norm=True), 'qwen3 needs bias=False')):
        with pytest.raises(UserError, match=words):
            export.write_hf(tmp_path, shaken(**flags), BYTES, '')
    assert not list(tmp_path.iterdir())


def test_a_llama_that_computes_something_else_is_refused_by_name(tmp_path):
    whole = (exported(tmp_path, **LLAMA) / 'config.json').read_text()
    for key, value in (
            ('hidden_act', 'gelu'), ('mlp_bias', False)):
        (tmp_path / 'config.json').write_text(whole)
        change_config(tmp_path, **{key: value})
        assert f'config.json says {key}=' in refused(tmp_path), key


@dataclass
class FutureConfig(GPTConfig):
    alibi: bool = False


@pytest.mark.parametrize('flags', [{}, LLAMA])
def test_a_flag_that_no_architecture_lists_is_refused_unless_it_has_its_default(tmp_path, flags):
    model = GPT(FutureConfig(32, 100, 2, 4, 48, **flags))
    export.write_hf(tmp_path, model, BYTES, '')
    model.config.alibi = True
    with pytest.raises(UserError, match='needs alibi=False'):
        export.write_hf(tmp_path, model, BYTES, '')


def test_export_and_import_come_back_to_the_same_files(trained, tmp_path):
    export.main([f'--out_dir={trained}', f'--dest={tmp_path}/a'])
    export.main([f'--init_from={tmp_path}/a', f'--dest={tmp_path}/b'])
    names = sorted(path.name for path in (tmp_path / 'a').iterdir())
    assert names == sorted(path.name for path in (tmp_path / 'b').iterdir())
    for name in names:
        if name != 'README.md':
            assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()


def test_the_card_has_what_the_hub_reads_and_figures_and_no_path_of_this_machine(
        model, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / 'secret-place/out')
    path, = (out / 'checkpoints').glob('*6/state.json')
    state = json.loads(path.read_text())
    state['config'] |= {'dataset': f'tinystories:0.5,{tmp_path}/data/mine:0.5',
                        'init_from': f'{tmp_path}/base', 'wandb_project': str(tmp_path),
                        'out_dir': str(out), 'learning_rate': 0.125}
    card = export.model_card('mine', model, BYTES, str(path.parent), state, license='mit')
    assert 'secret' not in card and str(tmp_path) not in card
    assert yaml.safe_load(card.split('---')[1]) == {
        'library_name': 'transformers', 'pipeline_tag': 'text-generation', 'license': 'mit',
        'tags': ['plaingpt'], 'datasets': ['roneneldan/TinyStories']}
    row = next(row for line in (out / 'metrics.jsonl').read_text().splitlines()
               if 'val_bpb' in (row := json.loads(line)) and row['iter'] == 6)
    for fact in (f"| {row['val_loss']:.4f} nats a token |", f"| {row['val_bpb']:.4f} |",
                 '| tinystories, mine |', '| base |', f"| {row['tokens']:,} |",
                 ' learning_rate=0.125 '):
        assert fact in card, fact


def test_an_export_ends_with_the_line_that_publishes_it(trained, tmp_path, capsys):
    export.main([f'--out_dir={trained}', f'--dest={tmp_path}/my gpt', '--datasets=a/b'])
    assert capsys.readouterr().out.endswith(f"hf upload 'my gpt' '{tmp_path}/my gpt'\n")
    assert '\ndatasets: [a/b]\n' in (tmp_path / 'my gpt/README.md').read_text()


@pytest.mark.parametrize('option', ['--license=a: b', '--datasets=a b', '--datasets=a/b/c'])
def test_a_card_takes_names_only(option, trained, tmp_path):
    with pytest.raises(UserError, match=option[2:10]):
        export.main([f'--out_dir={trained}', f'--dest={tmp_path}/a', option])


STRANGE = ['Hello, wörld!  日本語\n\n\t 12345 ', '    ', 'a    b', '🎉🎉\r\n', '\x00\x7f\xad¡',
           'aaaaaaaaaaa' * 3, 'ÀÈÌ' * 5, "it's"]


@pytest.mark.parametrize('kind', [
    'char', 'byte', 'bpe:700', pytest.param('gpt2', marks=pytest.mark.slow)])
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
    if kind == 'gpt2':
        made = hf_tokenizer(ours)['model']  # the published merges
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


@pytest.mark.parametrize(('prefix', 'bias'), [
    ('', True), ('_orig_mod.', False), ('module._orig_mod.', True)])
def test_a_checkpoint_of_nanogpt_is_read(tmp_path, prefix, bias):
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 65, 2, 4, 32, bias=bias, mlp='gelu_erf')).eval()
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, prefix)
    again = GPT.from_pretrained(str(tmp_path / 'ckpt.pt')).eval()
    assert torch.equal(again(tokens(2, 16))[0], model(tokens(2, 16))[0])


def test_the_folder_of_a_nanogpt_run_says_how_to_go_on(
        tiny, char_data, tmp_path, capsys, monkeypatch):
    vocab_size = json.loads((char_data / 'meta.json').read_text())['vocab_size']
    (run := tmp_path / 'nano').mkdir()
    nanogpt_checkpoint(run / 'ckpt.pt', GPT(GPTConfig(16, vocab_size, 1, 1, 16, mlp='gelu_erf')))
    assert '--tokenizer=data/NAME' in fails(capsys, monkeypatch, sample.main, '--device=cpu',
                                            f'--init_from={run}/ckpt.pt')
    for main, argv in ((sample.main, []), (evaluate.main, []),
                       (export.main, [f'--dest={tmp_path}/hf'])):
        line = fails(capsys, monkeypatch, main, f'--out_dir={run}', *argv)
        assert f'--init_from={run}/ckpt.pt' in line and '--tokenizer' in line
    line = fails(capsys, monkeypatch, train.main, *tiny, '--init_from=resume', f'--out_dir={run}')
    assert f'--init_from={run}/ckpt.pt' in line and 'weights' in line
    train.main([*tiny, f'--init_from={run}', '--max_iters=1'])
    printed = capsys.readouterr().out
    assert f'the run has the shape of {run}: n_layer=1 (not 2)' in printed
    assert str(run) in next(line for line in printed.splitlines() if 'anew' in line)


def test_nanogpts_padding_of_gpt2s_vocabulary_is_cut_off(tmp_path):
    model = GPT(GPTConfig(8, 50304, 1, 1, 8, mlp='gelu_erf'))
    nanogpt_checkpoint(tmp_path / 'ckpt.pt', model, vocab_size=50304)
    again = GPT.from_pretrained(tmp_path / 'ckpt.pt')
    assert again.config.vocab_size == 50257
    assert torch.equal(again(tokens(1, 8))[0], model(tokens(1, 8))[0][..., :50257])


def test_a_checkpoint_of_build_nanogpt_is_read(tmp_path, model, monkeypatch):
    @dataclass
    class TheirConfig:  # an instance of a class in the script that wrote the file
        block_size: int = 1024
        vocab_size: int = 50257
        n_layer: int = 12
        n_head: int = 12
        n_embd: int = 768

    TheirConfig.__module__, TheirConfig.__qualname__ = '__main__', 'GPTConfig'
    weights = model.state_dict()
    for name in ('transformer.wte.weight', 'lm_head.weight'):
        weights[name] = weights[name][:65].clone()
    with monkeypatch.context() as script:
        script.setattr(sys.modules['__main__'], 'GPTConfig', TheirConfig, raising=False)
        torch.save({'model': weights, 'config': TheirConfig(16, 65, 2, 4, 32), 'step': 9,
                    'val_loss': 3.0}, tmp_path / 'model_00009.pt')
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


def refused(source):
    """The one line that says why a model is refused."""
    with pytest.raises(UserError) as e:
        GPT.from_pretrained(source)
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


def test_a_config_that_is_not_gpt2s_is_named(tmp_path):
    theirs_of(tmp_path)
    whole = (tmp_path / 'config.json').read_text()
    for key, value, words in (
            ('model_type', 'opt', "model_type='opt'"),
            ('activation_function', 'silu', "activation_function='silu'"),
            ('scale_attn_by_inverse_layer_idx', True, 'scale_attn_by_inverse_layer_idx'),
            ('n_inner', 7, 'mlp.c_fc.weight is (192, 48), expected (7, 48)'),
            ('n_head', 5, 'n_embd=48'), ('n_layer', 'two', 'n_layer')):
        (tmp_path / 'config.json').write_text(whole)
        change_config(tmp_path, **{key: value})
        assert words in refused(tmp_path)


def test_weights_that_are_not_those_of_the_config_are_named(tmp_path):
    theirs_of(tmp_path)
    path, bias = tmp_path / 'model.safetensors', 'transformer.h.1.mlp.c_fc.bias'
    whole = load_file(path)
    for change, words in (
            (lambda w: w.pop(bias), f'it has no {bias}'),
            (lambda w: w.update({'transformer.h.7.mlp.c_fc.bias': torch.zeros(3)}),
             "it has an unknown 'transformer.h.7.mlp.c_fc.bias'"),
            (lambda w: w.update({'transformer.wpe.weight': torch.zeros(3, 48)}),
             'transformer.wpe.weight is (3, 48), expected (32, 48)'),
            (lambda w: w.update({'lm_head.weight': torch.zeros(100, 48)}),
             'lm_head.weight is not its wte.weight')):
        change(weights := dict(whole))
        save_file(weights, path)
        assert words in refused(tmp_path)
    path.write_bytes(b'no tensors')
    assert 'cannot be read' in refused(tmp_path)
    path.unlink()
    assert 'model.safetensors' in refused(tmp_path)
    (tmp_path / 'config.json').unlink()
    assert 'config.json' in refused(tmp_path)


def test_a_corrupt_or_foreign_ckpt_is_one_line(tmp_path, model):
    path = tmp_path / 'ckpt.pt'
    nanogpt_checkpoint(path, model)
    whole = path.read_bytes()
    for data in (b'', b'garbage', whole[:len(whole) // 2], b"cposix\nsystem\n(S'exit'\ntR."):
        path.write_bytes(data)
        line = refused(path)
        assert 'ckpt.pt: damaged' in line or 'ckpt.pt: refused' in line
    torch.save({'model': {}}, path)
    assert "KeyError: 'config'" in refused(path)
    path.unlink()
    assert 'No such file' in refused(path)


def save_as_nanogpt(path, weights):
    torch.save({'model': weights, 'model_args': dict(
        n_layer=2, n_head=4, n_embd=48, block_size=32, vocab_size=128)}, path)


def test_weights_that_are_no_numbers_of_a_model_are_refused_by_name(tmp_path):
    ours, folder = shaken(), exported(tmp_path / 'hf')
    whole = load_file(folder / 'model.safetensors')
    name = 'transformer.h.1.mlp.c_fc.weight'
    for spoil, words in (
            (lambda w: torch.full_like(w, math.nan), 'is not finite'),
            (lambda w: torch.full_like(w, 1e300, dtype=torch.float64), 'is not finite'),
            (lambda w: w.to(torch.int8), 'weights are float32'),
            (lambda w: w.to(torch.complex64), 'weights are float32')):
        save_file({**whole, name: spoil(whole[name]).contiguous()}, folder / 'model.safetensors')
        save_as_nanogpt(tmp_path / 'ckpt.pt',
                        {**ours.state_dict(), name: spoil(ours.get_parameter(name))})
        for path in (folder, tmp_path / 'ckpt.pt'):
            line = refused(path)
            assert name in line and words in line


def test_without_a_network_gpt2_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('huggingface_hub.snapshot_download',
                        lambda *a, **k: (_ for _ in ()).throw(ConnectionError('no route')))
    line = fails(capsys, monkeypatch, sample.main, '--init_from=gpt2')
    assert 'connect to the internet once, or give a folder' in line


def test_mistakes_of_export_are_one_line(trained, tmp_path, capsys, monkeypatch):
    for arguments, words in (
            ([], 'dest is empty'), ([f'--dest={tmp_path}'], 'exists already'),
            ([f'--dest={tmp_path}/x', f'--out_dir={tmp_path}/nowhere'], 'no checkpoint there')):
        assert words in fails(capsys, monkeypatch, export.main, f'--out_dir={trained}', *arguments)
    assert not [*tmp_path.iterdir()]
