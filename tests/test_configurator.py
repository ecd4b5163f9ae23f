import dataclasses
import re

import pytest
from processes import ROOT

import evaluate
import sample
from bench import BenchConfig
from configurator import accepted_types, load_config, sections_of
from plaingpt.core.settings import TrainConfig
from plaingpt.system.errors import UserError
from plan import PlanConfig
from prepare import PrepareConfig


def load(*argv):
    return load_config(TrainConfig, [str(arg) for arg in argv])


def write(path, text):
    path.write_text(text)
    return path


def test_arguments_apply_from_left_to_right(tmp_path):
    a = write(tmp_path / 'a.py', 'batch_size = 3\nn_layer = 7\n')
    b = write(tmp_path / 'b.py', 'batch_size = 4\n')
    config = load(a, b, '--n_head=2', '--batch_size=5')
    assert (config.batch_size, config.n_layer, config.n_head) == (5, 7, 2)
    assert load('--batch_size=5', a).batch_size == 3


def test_a_former_name_of_a_setting_is_accepted(tmp_path):
    file = write(tmp_path / 'a.py', 'average_decay = 0.9\n')
    assert load(file).ema_decay == load('--average_decay=0.9').ema_decay == 0.9
    for option in ('--ema_decay=0.8', '--average_decay=0.8'):
        assert load(file, option).ema_decay == 0.8
    with pytest.raises(UserError, match='needs a value'):
        load('--average_decay')


def test_the_end_of_the_learning_rate_follows_what_it_depends_on(tmp_path):
    plain = write(tmp_path / 'a.py', 'learning_rate = 1e-3\nmax_iters = 500\nwarmup_iters = 10\n')
    computed = write(tmp_path / 'b.py', plain.read_text() + 'def tenth(x): return x / 10\n'
                     'lr_decay_iters = max_iters\nmin_lr = tenth(learning_rate)\n')
    for options, min_lr, end in (([], 1e-4, 500), (['--learning_rate=5e-4'], 5e-5, 500),
                                 (['--max_iters=70'], 1e-4, 70),
                                 (['--min_lr=0', '--lr_decay_iters=90'], 0, 90)):
        for file in (plain, computed):
            config = load(file, *options)
            assert config.final_lr() == pytest.approx(min_lr)
            assert config.decay_iters() == end


@pytest.mark.parametrize('config', [TrainConfig, sample.SampleConfig, PrepareConfig,
                                    evaluate.EvaluateConfig])
def test_help_lists_each_setting_that_people_set(config, capsys):
    with pytest.raises(SystemExit):
        load_config(config, ['--help'])
    listed = set(re.findall(r'^  --(\w+)=.*  \S', capsys.readouterr().out, re.M))
    hidden = {name for section, fields in sections_of(config).items() for name in fields
              if section.startswith('not listed')}
    assert listed == {field.name for field in dataclasses.fields(config) if field.init} - hidden
    assert len(listed) <= 60


def test_names_of_its_own_in_a_config_file_are_no_settings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / 'mybase_for_test.py', 'n_layer = 3\n')
    config = load(write(tmp_path / 'a.py', '''
import time
from mybase_for_test import n_layer
from math import pi, floor
_tokens = 32 * 1024
def double(x): return 2 * x
batch_size = double(floor(pi))
wandb_run_name = 'ft-' + str(time.time())
'''))
    assert (config.batch_size, config.n_layer) == (6, 3)
    assert config.wandb_run_name.startswith('ft-1')


@pytest.mark.parametrize('settings', [
    dict(wandb_log=True, wandb_project='owt', wandb_run_name='gpt2-124M', batch_size=12,
         block_size=1024, gradient_accumulation_steps=5 * 8, max_iters=600000,
         lr_decay_iters=600000, eval_interval=1000, eval_iters=200, weight_decay=1e-1),
    dict(out_dir='out-shakespeare-char', always_save_checkpoint=False, beta2=0.99,
         dataset='shakespeare_char', n_layer=6, n_head=6, n_embd=384, dropout=0.2,
         learning_rate=1e-3, min_lr=1e-4, warmup_iters=100),
    dict(eval_iters=500, eval_only=True, init_from='gpt2')],
    ids=lambda settings: next(iter(settings)))
def test_a_config_file_of_nanogpt_works_as_it_is(settings, tmp_path):
    text = 'import time\n' + ''.join(f'{key} = {value!r}\n' for key, value in settings.items())
    config = load(write(tmp_path / 'a.py', text))
    assert {key: getattr(config, key) for key in settings} == settings


@pytest.mark.parametrize('path', sorted((ROOT / 'config').glob('*.py')),
                         ids=lambda path: path.stem)
def test_a_recipe_loads(path):
    config = sample.SampleConfig if path.stem.endswith('_sample') else \
        BenchConfig if path.stem == 'grid_cpu' else TrainConfig
    assert load_config(config, [str(path)]).out_dir != 'out'


@pytest.mark.parametrize(('argument', 'value'), [
    ('--learning_rate=1', 1.0), ('--max_iters=6e5', 600000), ('--compile=true', True),
    ('--compile=auto', 'auto'), ('--eval_only', True), ('--out_dir=007', '007'),
    ('--out_dir=a=b', 'a=b')])
def test_a_value_becomes_the_type_of_its_field(argument, value):
    loaded = getattr(load(argument), argument.strip('-').split('=')[0])
    assert loaded == value
    assert type(loaded) is type(value)


def test_all_problems_are_reported_at_once(tmp_path):
    a = write(tmp_path / 'a.py', 'bach_size = 3\nn_layer = 1.5\n')
    with pytest.raises(UserError) as error:
        load(a, '--dropout=high', '--n_head', '--momentum=2')
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    keys = ('bach_size', 'n_layer', 'dropout', 'n_head', 'momentum')
    for key, line in zip(keys, lines, strict=True):
        assert key in line


def test_accumulation_that_does_not_divide_by_the_processes_is_an_error(monkeypatch):
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=3, LOCAL_WORLD_SIZE=3).items():
        monkeypatch.setenv(name, str(value))  # as torchrun does
    with pytest.raises(UserError, match=r'gradient_accumulation_steps=4 .*3'):
        load('--gradient_accumulation_steps=4')


def test_a_recipe_is_found_from_any_folder():
    assert load('config/tiny.py').dataset == 'readme'


def test_a_config_file_of_ones_own_comes_before_a_recipe(tmp_path):
    (tmp_path / 'config').mkdir()
    write(tmp_path / 'config/tiny.py', 'dataset = "mine"')
    assert load('config/tiny.py').dataset == 'mine'


def sampling(*argv):
    return load_config(sample.SampleConfig, list(argv), positional='out_dir')


def test_an_argument_without_dashes_is_the_run():
    assert sampling('out-a').out_dir == 'out-a'
    assert sampling('notes.md').out_dir == 'notes.md'


def test_beside_a_run_a_py_file_is_a_config_file(tmp_path):
    write(tmp_path / 'a.py', 'num_samples = 3\n')
    config = sampling('--chat', 'out=a', 'a.py', '--temperature=1')
    assert (config.out_dir, config.num_samples, config.chat) == ('out=a', 3, True)


@pytest.mark.parametrize('config', [TrainConfig, BenchConfig, PlanConfig, PrepareConfig,
                                    sample.SampleConfig, evaluate.EvaluateConfig])
def test_every_number_has_limits(config):
    numbers = {field.name for field in dataclasses.fields(config)
               if field.init and {int, float} & set(accepted_types(config, field.name))}
    limited = {*config.above_0, *getattr(config, 'at_least_0', ()), *getattr(config, 'below_1', ())}
    assert numbers - limited <= {'max_tokens'}
    assert limited <= numbers


def test_arguments_of_prepare_are_a_list_of_files(tmp_path):
    script = write(tmp_path / 'a.py', f'open({str(tmp_path / "ran")!r}, "w")\n')
    config = load_config(PrepareConfig, ['notes', '--tokenizer=byte', str(script), 'x, y.txt'],
                         positional='input', several=True)
    assert config.input == ['notes', str(script), 'x, y.txt']
    assert not (tmp_path / 'ran').exists()
