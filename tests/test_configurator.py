import dataclasses
import re

import pytest
from processes import ROOT

import evaluate
import prepare
import sample
import train
from bench import BenchConfig
from configurator import accepted_types, load_config, sections_of
from plaingpt.system.errors import UserError
from plaingpt.training.settings import NOT_COMPARED, TrainConfig
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


def test_the_end_of_the_learning_rate_follows_what_it_depends_on(tmp_path):
    plain = write(tmp_path / 'a.py', 'learning_rate = 1e-3\nmax_iters = 500\nwarmup_iters = 10\n')
    computed = write(tmp_path / 'b.py', plain.read_text() + 'def tenth(x): return x / 10\n'
                     'lr_decay_iters = max_iters\nmin_lr = tenth(learning_rate)\n')
    for options, min_lr, end in (([], 1e-4, 500), (['--learning_rate=5e-4'], 5e-5, 500),
                                 (['--max_iters=70'], 1e-4, 70),
                                 (['--min_lr=0', '--lr_decay_iters=90'], 0, 90)):
        for file in (plain, computed):
            config = load(file, *options)
            assert config.min_lr == pytest.approx(min_lr) and config.lr_decay_iters == end


def test_help_tells_the_settings_that_people_set_with_their_defaults_and_meanings(capsys):
    for script, config in ((train, TrainConfig), (sample, sample.SampleConfig),
                           (prepare, PrepareConfig), (evaluate, evaluate.EvaluateConfig)):
        with pytest.raises(SystemExit) as exit_:
            script.main(['--help'])
        assert not exit_.value.code
        listed = set(re.findall(r'^  --(\w+)=.*  \S', capsys.readouterr().out, re.M))
        hidden = {name for section, fields in sections_of(config).items() for name in fields
                  if section.startswith('not listed')}
        assert listed | hidden == {field.name for field in dataclasses.fields(config) if field.init}
        assert not listed & hidden and len(listed) < 60
    assert not NOT_COMPARED - {field.name for field in dataclasses.fields(TrainConfig)}


def test_a_config_file_may_import_and_keep_names_of_its_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / 'mybase_for_test.py', 'n_layer = 3\n')
    a = write(tmp_path / 'a.py', '''
import time
from mybase_for_test import n_layer
from math import pi, floor
_tokens = 32 * 1024
def double(x): return 2 * x
batch_size = double(floor(pi))
wandb_run_name = 'ft-' + str(time.time())
''')
    config = load(a)
    assert (config.batch_size, config.n_layer) == (6, 3)
    assert config.wandb_run_name.startswith('ft-1')


def test_nanogpts_own_config_files_work_as_they_are(tmp_path):
    for settings in (
            dict(wandb_log=True, wandb_project='owt', wandb_run_name='gpt2-124M', batch_size=12,
                 block_size=1024, gradient_accumulation_steps=5 * 8, max_iters=600000,
                 lr_decay_iters=600000, eval_interval=1000, eval_iters=200, weight_decay=1e-1),
            dict(out_dir='out-shakespeare-char', always_save_checkpoint=False, beta2=0.99,
                 dataset='shakespeare_char', n_layer=6, n_head=6, n_embd=384, dropout=0.2,
                 learning_rate=1e-3, min_lr=1e-4, warmup_iters=100),
            dict(init_from='gpt2-xl', batch_size=1, max_iters=20, learning_rate=3e-5,
                 decay_lr=False), dict(eval_iters=500, eval_only=True, init_from='gpt2')):
        text = 'import time\n' + ''.join(f'{key} = {value!r}\n' for key, value in settings.items())
        config = load(write(tmp_path / 'a.py', text))
        assert {key: getattr(config, key) for key in settings} == settings


def test_every_config_file_of_ours_loads():
    for path in (ROOT / 'config').glob('*.py'):
        cls = sample.SampleConfig if path.stem.endswith('_sample') else \
            BenchConfig if path.stem in ('grid_cpu',) else TrainConfig
        assert load_config(cls, [str(path)]).out_dir != 'out', path


def test_values_become_the_type_of_their_field():
    for argument, value in (
            ('--learning_rate=1', 1.0), ('--learning_rate=3e-4', 3e-4), ('--max_iters=6e5', 600000),
            ('--compile=true', True), ('--compile=False', False), ('--compile=auto', 'auto'),
            ('--eval_only', True), ('--out_dir=007', '007'), ('--out_dir=a=b', 'a=b')):
        got = getattr(load(argument), argument.strip('-').split('=')[0])
        assert got == value and type(got) is type(value), argument


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


def test_a_recipe_is_found_from_any_folder_and_a_file_of_ones_own_comes_first(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load('config/tiny.py').dataset == 'readme'
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config/tiny.py').write_text('dataset = "mine"')
    assert load('config/tiny.py').dataset == 'mine'


def sampling(*argv):
    return load_config(sample.SampleConfig, list(argv), positional='out_dir')


def test_an_argument_without_dashes_is_the_run_and_a_py_file_stays_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'a.py', 'num_samples = 3\n')
    ran = write(tmp_path / 'notes.md', 'num_samples = 4\n')
    assert sampling('out-a').out_dir == 'out-a'
    config = sampling('--chat', 'out=a', 'a.py', '--temperature=1')
    assert (config.out_dir, config.num_samples, config.chat) == ('out=a', 3, True)
    assert (sampling(ran.name).out_dir, sampling(ran.name).num_samples) == ('notes.md', 10)


def test_numbers_have_limits_and_one_of_your_own_has_none_unless_it_is_named():
    for cls in (TrainConfig, BenchConfig, PlanConfig, PrepareConfig, sample.SampleConfig,
                evaluate.EvaluateConfig):
        numbers = {field.name for field in dataclasses.fields(cls)
                   if field.init and {int, float} & set(accepted_types(cls, field.name))}
        named = {*cls.above_0, *getattr(cls, 'at_least_0', ()), *getattr(cls, 'below_1', ())}
        assert numbers - named <= {'max_tokens'} and named <= numbers

    @dataclasses.dataclass
    class Own(TrainConfig):
        layer: int = -1
        share: float = 0.5

        above_0 = (*TrainConfig.above_0, 'share')
        below_1 = (*TrainConfig.below_1, 'share')

    assert load_config(Own, ['--layer=-2', '--share=0.9']).layer == -2
    for argument in ('--share=1', '--share=0', '--n_layer=0', '--n_kv_head=-1'):
        with pytest.raises(UserError, match=f'^{argument[2:].partition("=")[0]}='):
            load_config(Own, [argument])


def test_arguments_without_dashes_may_be_a_list_also_of_py_files(tmp_path):
    ran = write(tmp_path / 'a.py', f'open({str(tmp_path / "ran")!r}, "w")\n')

    def load_list(*argv):
        return load_config(PrepareConfig, list(argv), positional='input', several=True)

    config = load_list('notes', '--tokenizer=byte', str(ran), 'x, y.txt')
    assert config.input == f'notes,{ran},x, y.txt' and not (tmp_path / 'ran').exists()
