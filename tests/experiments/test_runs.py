import csv
import json
import os
import random
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from processes import ROOT
from runs import TINY, lines

import bench
from configurator import load_config
from model import GPTConfig
from plaingpt.core.progress import FINISHED
from plaingpt.core.settings import TrainConfig
from plaingpt.experiments import runs
from plaingpt.experiments.comparison import compare, format_comparison
from plaingpt.experiments.runs import (
    make_variant,
    read_variants,
    summarize,
    sweep_variants,
    train_once,
    train_or_reuse,
)
from plaingpt.monitoring.references import p_value, t_quantile
from plaingpt.system import devices
from plaingpt.system.errors import UserError

# -----------------------------------------------------------------------------
# lists of variants


def read(words):
    return load_config(TrainConfig, words)


def test_the_grid_is_24_different_runs():
    words = ['--batch_size=8', '--block_size=16', '--total_batch_size=1024', '--vocab_size=65']
    grid = {name: read(make_variant(name, changes, words, seeds=1).argv)
            for name, changes in read_variants('grid', read(words)).items()}
    assert len({repr(cell) for cell in grid.values()}) == 24
    assert grid['accumulation'].step_tokens() == grid['default'].step_tokens()
    assert grid['reduced batch'].step_tokens() == grid['default'].step_tokens() / 4


def test_the_ladder_ends_at_the_recipe(monkeypatch):
    monkeypatch.setattr(devices, 'compile_problem', lambda device: None)
    recipe = read([f'{ROOT}/config/quickstart.py', '--dtype=bfloat16', '--compile=True'])
    ladder = list(read_variants('ladder', recipe).values())
    assert len(ladder) == 10
    for below, above in pairwise(ladder):
        assert above != below
    assert all(getattr(recipe, key) == value for key, value in ladder[-1].items())
    words = [f'--{key}={value}' for key, value in ladder[0].items()]
    assert read([f'{ROOT}/config/quickstart.py', *words]).gpt_config(2048) == GPTConfig(
        vocab_size=2048, n_layer=4, n_head=2, n_embd=128, block_size=256, bias=False)


def test_the_ladder_of_a_gpt2_recipe_is_of_speed(monkeypatch):
    monkeypatch.setattr(devices, 'compile_problem', lambda device: None)
    recipe = read([f'{ROOT}/config/gpt2_124m.py', '--dtype=bfloat16', '--compile=True'])
    assert [*read_variants('ladder', recipe)] == [
        'float32, eager', '+ bfloat16', '+ torch.compile']


def test_the_ablation_undoes_one_change_at_a_time():
    ablation = read_variants('ablation', TrainConfig()).values()
    assert [len(changes) for changes in ablation] == [0] + 7 * [1]


def test_a_sweep_trains_all_combinations_of_its_values():
    variants = [make_variant(name, changes, ['--max_iters=7'], seeds=2) for name, changes
                in sweep_variants('learning_rate=1e-3,2e-3 conv=0,4').items()]
    assert [variant.name for variant in variants] == [
        'learning_rate=1e-3, conv=0', 'learning_rate=1e-3, conv=4',
        'learning_rate=2e-3, conv=0', 'learning_rate=2e-3, conv=4']
    assert variants[-1].seeds == [1337, 1338]
    config = read(variants[-1].argv)
    assert (config.conv, config.max_iters) == (4, 7)
    assert config.final_lr() == pytest.approx(2e-4)  # which follows the learning rate


# -----------------------------------------------------------------------------
# runs


@pytest.fixture
def trainings(monkeypatch, char_data):
    """The words that train.py was called with. It trains nothing, but writes the files of a run
    that ended. The first run prepares the data. `meanwhile` is called when a run trains."""
    class Trainings(list):
        ending = FINISHED

        @staticmethod
        def meanwhile():
            pass

    def run_python(command):
        argv = command[1:]
        trainings.append(argv)
        options = dict(word[2:].split('=', 1) for word in argv if word.startswith('--'))
        folder = Path(options['out_dir'])
        if options.get('seed') == '7' and options.get('conv') == '4':
            raise UserError('no convolution here')
        if not Path('data/bare').exists():
            shutil.copytree(char_data, 'data/bare', ignore=lambda *_: ['meta.json'])
        row = {'iter': 9, 'tokens': 9, 'elapsed_s': 1.0, 'tokens_per_s': 9.0, 'loss': 3.0,
               'train_loss': 3.0, 'val_loss': 3.0}
        (folder / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
        (folder / 'run.json').write_text(json.dumps({
            'changed': {}, 'config': {'dataset': 'here'}, 'dtype': 'float32',
            'ending': trainings.ending}))
        trainings.meanwhile()

    trainings = Trainings()
    monkeypatch.setattr(runs, 'run_python', run_python)
    monkeypatch.setattr(bench, 'draw_runs', lambda curves, path: Path(path).touch())  # saves time
    return trainings


def folders_of(trainings):
    return [argument.removeprefix('--out_dir=') for argv in trainings for argument in argv
            if argument.startswith('--out_dir=out-experiments')]


SWEEP = ['--sweep=conv=0,4', '--device=cpu']


def test_the_runs_of_a_sweep_have_folders_of_their_own(trainings):
    words = ['--sweep=dataset=a,data/a', '--seeds=2', '--seed=5', '--device=cpu']
    bench.main(words)
    folder = 'out-experiments/sweep-dataset'
    assert folders_of(trainings) == [f'{folder}/dataset={value},seed={seed}'
                                     for value, seed in (('a', 5), ('data%2fa', 5),
                                                         ('data%2fa', 6), ('a', 6))]
    bench.main(words)
    assert len(trainings) == 4  # no run is repeated
    assert Path(f'{folder}.csv').exists()
    assert Path(f'{folder}.png').exists()


def test_the_runs_of_a_sweep_may_be_timed_and_record_no_film(trainings):
    Path('recipe.py').write_text('film = True\nminutes = 3\n')
    bench.main(['recipe.py', *SWEEP, '--seeds=1', '--report=True'])
    bench.main(['recipe.py', *SWEEP, '--seeds=1', '--minutes=1'])
    configs = [read(words) for words in trainings]
    assert [config.minutes for config in configs] == [3, 3, 1, 1]
    assert not any(config.film or config.report for config in configs)


def test_a_run_that_was_stopped_or_killed_is_trained_again(trainings, tmp_path):
    def kill():
        raise KeyboardInterrupt
    trainings.ending = 'SIGTERM'
    with pytest.raises(UserError, match='SIGTERM'):
        train_or_reuse([], tmp_path / 'run')
    trainings.ending = FINISHED
    trainings.meanwhile = kill
    with pytest.raises(KeyboardInterrupt):
        train_or_reuse([], tmp_path / 'run')
    del trainings.meanwhile
    assert train_or_reuse([], tmp_path / 'run')['final_loss'] == 3.0
    assert len(trainings) == 3


def test_a_finished_run_of_1_0_is_finished():
    assert runs.has_ended(ROOT / 'tests/data/format_1/run')


def test_a_run_that_never_began_does_not_get_the_numbers_of_other_settings(trainings, tmp_path):
    train_or_reuse(['--n_layer=2'], tmp_path / 'run')
    for _ in range(2):
        with pytest.raises(UserError, match='no convolution here'):
            train_or_reuse(['--seed=7', '--conv=4'], tmp_path / 'run')
    assert len(trainings) == 3


@pytest.fixture
def repeat(trainings, tmp_path, monkeypatch):
    """repeat(*words) → whether the run was trained. The code is that of tmp_path/code, and the
    recipe imports a file of the working directory."""
    for name, text in (('train.py', 'import model\n'), ('serve.py', 'import model\n'),
                       ('model.py', 'def f():\n    from mine.layer import Layer\n'),
                       ('mine/__init__.py', ''),
                       ('mine/layer.py', 'from . import parts\nimport plaingpt.core.weights'),
                       ('mine/parts.py', ''),
                       ('plaingpt/core/weights.py', '')):
        Path('code', name).parent.mkdir(parents=True, exist_ok=True)
        Path('code', name).write_text(text)
    monkeypatch.setattr(runs, 'ROOT', tmp_path / 'code')
    monkeypatch.syspath_prepend(tmp_path)
    Path('recipe.py').write_text("from numbers_of_mine import max_iters\ndataset = 'bare'\n")
    Path('numbers_of_mine.py').write_text('max_iters = 9\n')
    write_weights(Path('weights'))

    def repeat(*words):
        before = len(trainings)
        sys.modules.pop('numbers_of_mine', None)
        train_or_reuse(['recipe.py', '--init_from=weights', '--device=cpu', *words], 'run')
        return len(trainings) > before
    repeat()
    return repeat


def append(path):
    with open(path, 'a', encoding='utf-8') as f:
        f.write('\n')


def write_weights(folder):
    """Files as those of a GPT-2; nothing loads the weights."""
    folder.mkdir(exist_ok=True)
    (folder / 'config.json').write_text('{"model_type": "gpt2", "n_positions": 1024}')
    (folder / 'tokenizer.json').write_text('{}')
    (folder / 'model.safetensors').write_text('weights')


def replace(path, text):
    """Write another text to a file, which keeps its time."""
    status = os.stat(path)
    Path(path).write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_a_token(path):
    data = bytearray(Path(path).read_bytes())
    data[100] ^= 1
    Path(path).write_bytes(data)


def change_ingredient(key):
    made_of = json.loads(Path('run/asked.json').read_text())
    Path('run/asked.json').write_text(json.dumps({**made_of, key: 'another'}))


def test_a_run_of_the_same_ingredients_is_not_repeated(repeat):
    Path('empty.py').touch()
    append('recipe.py')  # the same settings
    append('code/serve.py')  # which training does not import
    for words in ([], ['--beta2=95e-2'], ['--wandb_run_name=now'], ['--device=auto'],
                  ['--dataset=data/bare'], ['--init_from=./weights'], ['empty.py']):
        assert not repeat(*words), words


def test_a_run_of_other_ingredients_is_trained_again(repeat):
    for i, change in enumerate((
            lambda: Path('numbers_of_mine.py').write_text('max_iters = 8888\n'),
            lambda: append('code/model.py'), lambda: append('code/mine/__init__.py'),
            lambda: append('code/mine/layer.py'), lambda: append('code/mine/parts.py'),
            lambda: append('code/plaingpt/core/weights.py'),
            lambda: replace('weights/model.safetensors', 'wejghts'),
            lambda: replace('weights/config.json', '{"model_type": "gpt2", "n_positions": 2048}'),
            lambda: replace('weights/tokenizer.json', '[]'),
            lambda: Path('weights/generation_config.json').write_text('{}'),
            lambda: change_a_token('data/bare/train.bin'),
            lambda: change_a_token('data/bare/val.bin'),
            lambda: change_ingredient('torch'), lambda: change_ingredient('device'),
            lambda: Path('run/metrics.jsonl').write_text('[]\n'),
            lambda: Path('run/run.json').write_text('[]'),
            lambda: Path('run/asked.json').write_text('["--a"]'))):
        change()
        assert repeat(), i
        assert not repeat(), i


def test_a_run_from_weights_on_the_hub_is_trained_again_if_they_have_changed(trainings, hub):
    def repeat():
        train_or_reuse(['--init_from=OWNER/NAME', '--dataset=bare', '--device=cpu'], 'run')
        return len(trainings)
    write_weights(hub.model('OWNER/NAME'))
    assert [repeat(), repeat()] == [1, 1]
    (hub.model('OWNER/NAME') / 'config.json').write_text('{"model_type": "gpt2", "n_head": 8}')
    assert [repeat(), repeat()] == [2, 2]


def test_a_run_from_a_checkpoint_is_trained_again_if_another_one_is_loaded(trainings, trained):
    def repeat(*words):
        train_or_reuse(['--init_from=link', '--dataset=bare', '--device=cpu', *words], 'run')
        return len(trainings)
    for run in 'long', 'short':
        shutil.copytree(trained, run)
    shutil.rmtree('short/checkpoints/iter-00000006')
    Path('link').symlink_to('long')
    assert [repeat(), repeat()] == [1, 1]
    assert [repeat('--checkpoint=3'), repeat('--checkpoint=3')] == [2, 2]
    Path('link').unlink()
    Path('link').symlink_to('short')
    assert [repeat('--checkpoint=3'), repeat()] == [2, 2]  # the same weights
    shutil.move('long/checkpoints/iter-00000006', 'short/checkpoints')
    assert repeat() == 3


def test_results_have_the_date_of_their_run(trainings, capsys):
    bench.main([*SWEEP, '--seeds=1'])
    asked = Path('out-experiments/sweep-conv/conv=0,seed=1337/asked.json')
    made_of = json.loads(asked.read_text())
    asked.write_text(json.dumps({**made_of, 'ended': '2020-01-02'}))
    bench.main([*SWEEP, '--seeds=1'])
    assert f'2020-01-02 to {made_of["ended"]}' in capsys.readouterr().out
    first, _ = csv.DictReader(open('out-experiments/sweep-conv.csv'))
    assert first['date'] == '2020-01-02'


def test_a_recipe_that_changes_while_its_runs_train_is_told(trainings, capsys):
    Path('recipe.py').write_text('beta1 = 0.8\n')
    trainings.meanwhile = lambda: Path('recipe.py').write_text('beta1 = 0.7\n')
    bench.main(['recipe.py', *SWEEP, '--seeds=1'])
    assert 'config file changed' in capsys.readouterr().err


def test_a_run_that_fails_does_not_stop_the_others(trainings, capsys):
    bench.main([*SWEEP, '--seeds=2', '--seed=6'])
    rows = list(csv.DictReader(open('out-experiments/sweep-conv.csv')))
    assert [row['final_loss'] for row in rows] == ['3.0', '3.0', '', '3.0']
    assert rows[2]['problem'] == 'no convolution here'
    assert 'no convolution here' in capsys.readouterr().err


@pytest.mark.parametrize('stderr, line', [
    ('warning: a\nerror: b\nerror: c\n', 'b'), ('a\nb\n', 'b'), ('', ''),
    ('Traceback (most recent call last):\n  File "a.py", line 3\n    f()\nKeyError: 1\n\n'
     'Traceback (most recent call last):\n  File "b.py"\nValueError: x\n  more of it\na note\n',
     'ValueError: x')])
def test_the_error_of_a_script_is_one_line(stderr, line):
    assert runs.error_line(stderr) == line


def test_the_time_of_a_step_is_the_median(tmp_path):
    lines = [{'iter': 0, 'train_loss': 4.0, 'val_loss': 4.0}]
    lines += [{'iter': 5 * k, 'tokens_per_s': rate}
              for k, rate in ((1, 8.0), (2, 256.0), (3, 256.0), (4, 512.0))]
    lines += [{'iter': 20, 'train_loss': 2.0, 'val_loss': 3.0}]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(  # 256 tokens a step
        {**line, 'tokens': 256 * line['iter'], 'elapsed_s': 1.0}) + '\n' for line in lines))
    (tmp_path / 'run.json').write_text(json.dumps({
        'changed': {}, 'config': {'dataset': 'here'}, 'dtype': 'float32'}))
    assert summarize(tmp_path) == {'step_ms': 1000.0, 'final_loss': 3.0, 'seconds': 1.0,
                                   'iterations': 20, 'dtype': 'float32', 'dataset': 'here'}


def test_a_run_is_a_training(char_data, tmp_path):
    numbers = train_once([*TINY, f'--dataset={char_data}'], tmp_path / 'run')
    assert numbers['iterations'] == 6
    assert numbers['final_loss'] == lines(tmp_path / 'run', 'val_loss')[-1]['val_loss']


# -----------------------------------------------------------------------------
# their comparison


def runs_of(**losses):
    return [{'variant': name, 'seed': seed, 'final_loss': loss, 'step_ms': 10.0,
             'iterations': 9}
            for name, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)]


def test_a_variant_is_compared_with_the_first_at_the_same_seeds():
    rows = compare(runs_of(first=[2.0, 3.0, 2.5], other=[1.5, 2.0, 2.5], lower=[1.9, 2.91, 2.4]))
    first, other, lower = rows
    assert first['loss'] == 2.5
    assert first['change'] is None
    # differences of -0.5, -1 and 0: mean -0.5, standard error 0.5/√3, of which 4.3 reach past zero
    assert other['change'] == pytest.approx(-0.5)
    assert other['change_error'] == pytest.approx(0.5 / 3**0.5)
    assert other['significant'] is False
    assert lower['significant'] is True  # -0.1, -0.09, -0.1
    assert '-0.5000 ± 0.2887' in format_comparison(rows)


def test_p_values_are_those_of_the_table():
    # two-sided 5%, 1% and 0.1% points of Student's t: Fisher and Yates 1963, table III
    for df, points in {1: (12.706, 63.657, 636.62), 2: (4.303, 9.925, 31.599),
                       3: (3.182, 5.841, 12.924), 10: (2.228, 3.169, 4.587),
                       30: (2.042, 2.750, 3.646)}.items():
        assert [p_value(-t, 1.0, df) for t in points] == pytest.approx([0.05, 0.01, 1e-3], rel=2e-3)
        assert t_quantile(df) == pytest.approx(points[0], abs=6e-4)
    assert [p_value(0.1, 0.0, 2), p_value(0.0, 0.0, 2)] == [0, 1]  # all differences are equal


def nine_variants(generator, effect=0.0):
    losses = {f'{i}': [generator.gauss(3.0, 0.01) for seed in range(3)] for i in range(9)}
    losses['8'] = [loss + effect for loss in losses['8']]
    return [row['variant'] for row in compare(runs_of(**losses)) if row['significant']]


def test_of_identical_variants_few_comparisons_find_any_significant():
    generator = random.Random(1)  # 5% of 200, and two standard deviations
    assert sum(bool(nine_variants(generator)) for _ in range(200)) <= 10 + 6


def test_a_large_effect_is_significant_among_many_variants():
    generator = random.Random(1)
    assert sum('8' in nine_variants(generator, effect=-0.5) for _ in range(20)) >= 18


def test_a_judgement_is_that_of_one_comparison():
    losses = dict(base=[2.0, 3.0, 2.5], change=[1.9, 2.91, 2.39])  # -0.1, -0.09, -0.11
    both, *others = compare(runs_of(**losses)), compare(runs_of(**losses, a=[2, 3, 2], b=[1, 4, 2]))
    assert both[1]['significant'] is True
    assert abs(both[1]['change']) > both[1]['half_width']
    assert 'Holm' not in format_comparison(both)
    assert '3 comparisons' in format_comparison(*others)
