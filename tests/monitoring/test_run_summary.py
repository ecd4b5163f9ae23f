"""What a person looks at: report.md, plot.py, references; and one run at a time in a folder."""

import json
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import make_reference
import pytest
from helpers import fails
from matplotlib.figure import Figure
from test_train import lines

import plot
import train
from configurator import load_config
from plaingpt.monitoring import figures as curves
from plaingpt.monitoring import references as reference
from plaingpt.monitoring import run_summary as run_report
from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.references import Reference
from plaingpt.system.errors import UserError
from plaingpt.system.folder_lock import lock_output_dir
from plaingpt.training.settings import TrainConfig


def size_of_png(path):
    data = path.read_bytes()
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    return int.from_bytes(data[16:20], 'big'), int.from_bytes(data[20:24], 'big')


def test_a_report_says_what_was_run_and_what_came_of_it(tiny, tmp_path, capsys):
    train.main([*tiny, '--report=True', '--sample_tokens=7', '--health_interval=2'])
    text = (tmp_path / 'out/report.md').read_text()
    assert size_of_png(tmp_path / 'out/loss.png') > (1000, 1000)
    best = min(line['val_loss'] for line in lines(tmp_path / 'out', 'val_loss'))
    for words in (f'{best:.4f}', 'bits a byte', '| iterations | 6 |', '| tokens | 768,',
                  'n_embd = 32', '(loss.png)', '28,064 parameters', 'After 0 iterations:',
                  'After 6 iterations:'):
        assert words in text, words
    assert 'learning_rate' not in text  # it is the default
    samples = [line['sample'] for line in lines(tmp_path / 'out', 'sample')]
    assert len(samples) == 3 and all(len(sample) == 1 + 7 for sample in samples)


def test_without_matplotlib_a_run_ends_well(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    train.main([*tiny, '--report=True'])
    assert 'no loss.png: curves need matplotlib: pip install matplotlib' in capsys.readouterr().out
    assert (tmp_path / 'out/report.md').exists() and not (tmp_path / 'out/loss.png').exists()


def test_runs_are_drawn_beside_each_other(trained, tmp_path, capsys):
    plot.main([str(trained), str(trained), f'--output={tmp_path}/both.png'])
    out = capsys.readouterr().out
    assert out.count('iteration 6, 768 tokens') == 2
    assert size_of_png(tmp_path / 'both.png') > (1000, 600)


def test_what_differs_late_fills_the_picture_and_not_the_steep_start():
    rows = [{'iter': i, 'tokens': i, 'elapsed_s': float(i), 'loss': 10.0 if i < 2 else 3 - i / 100,
             'val_loss': None} for i in range(100)]
    axes = Figure().add_subplot()
    curves.PANELS[0].draw(axes, [('out', rows, 'black')], None)
    low, high = axes.get_ylim()
    assert 1.9 < low < 2.01 < 2.95 < high < 3.1


def test_a_run_without_a_step_says_so(tmp_path, capsys, monkeypatch):
    (tmp_path / 'metrics.jsonl').write_text('nonsense\n')
    assert 'nothing to draw yet' in fails(capsys, monkeypatch, plot.main, tmp_path)
    plot_dir = tmp_path / 'nowhere'
    assert 'name the out_dir of a run' in fails(capsys, monkeypatch, plot.main, plot_dir)


def test_lines_of_others_are_named_when_they_are_skipped(trained, tmp_path, capsys):
    text = (trained / 'metrics.jsonl').read_text()
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "loss": 2}\n' + text)
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert 'metrics.jsonl: skipped 1 of' in out and 'line 1' in out


@pytest.mark.parametrize('text', ['{', '[]', '{"config": 5}', '{"foo": 1}'])
def test_a_strange_run_json_costs_the_diagnosis_only(text, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plot, 'draw', lambda *_: None)
    (tmp_path / 'metrics.jsonl').write_bytes((trained / 'metrics.jsonl').read_bytes())
    (tmp_path / 'run.json').write_text(text)
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert 'iteration 6, 768 tokens' in out and 'nothing is diagnosed' in out


def test_a_run_that_was_interrupted_is_not_told_that_it_saw_little_text(trained):
    rows = [{**row, 'iter': 100 * row['iter']} for row in lines(trained, 'iter')]
    run = run_report.read_run(trained)
    assert 'it ended after' in run_report.text_of(trained, rows, run, ended=True)
    assert 'it ended after' not in run_report.text_of(trained, rows, run, ended=False)


# -----------------------------------------------------------------------------
# references

CONFIG = {**dict.fromkeys(run_report.SETTINGS, 0), 'n_embd': 128, 'seed': 1}
FACTS = {**dict.fromkeys(run_report.FACTS, ''), 'config': CONFIG, 'versions': {},
         'machine': {'device': 'cpu', 'cpu': 'A CPU', 'cores': 2, 'processes': 1, 'system': ''},
         'vocab_size': 65, 'train_tokens': 1000, 'parameters': 500,
         'data': {'folder': 'data/ours', 'source': {'corpus': 'ours'}}}


def curve(offset, speed=1000.0, step=100):
    return [{'iter': i, 'tokens': 512 * i, 'elapsed_s': float(i), 'val_loss': 4 - i / 500 + offset,
             'tokens_per_s': speed} for i in range(0, 1001, step)]


def made(offsets=(-0.01, 0.0, 0.01)):
    return Reference('small', dict.fromkeys(range(len(offsets)), FACTS),
                     {i: curve(offset) for i, offset in enumerate(offsets)})


@pytest.mark.parametrize('offset, words', [
    (0.005, 'inside the band of small (3 seeds)'), (0.3, 'above (worse) the band'),
    (-0.3, 'below (better) the band')])
def test_a_sentence_says_where_a_run_lies(offset, words):
    assert words in made().compare('out', curve(offset))
    assert words in made().compare('out', curve(offset, step=250))  # evaluated elsewhere


def compared(**changes):
    return made().compare('out', curve(0.0), {**FACTS, **changes})


def test_a_run_on_other_text_is_not_compared():
    assert 'their losses do not compare' in compared(train_tokens=2000)
    assert 'their losses do not compare' in compared(vocab_size=66)
    assert 'their losses do not compare' in compared(train_tokens=990, data={'folder': 'other'})


def test_what_a_run_does_otherwise_than_the_reference_is_said():
    same = compared(config={**CONFIG, 'seed': 2})
    assert 'unlike the reference' not in same and 'times as fast' in same
    sentence = compared(config={**CONFIG, 'n_embd': 64}, train_tokens=990, parameters=200)
    assert 'inside' in sentence and 'times as fast' not in sentence  # of another model
    assert sentence.endswith(
        'unlike the reference: n_embd=64 (there 128), training tokens=990 (there 1000)')


def test_there_is_no_verdict_where_the_reference_has_no_evaluation():
    early = [row for row in curve(0.0, step=20) if row['iter'] < 100]
    assert 'no evaluation between 51,200 and 512,000 tokens (100 and 1000 iterations' \
        in made().compare('out', early)
    assert 'has one seed' in made([0.0]).compare('out', curve(0.0))


def test_a_run_that_leaves_the_band_is_above_from_there():
    rows = curve(0.0)
    for row in rows:
        row['val_loss'] += 0.2 if row['iter'] >= 600 else 0.0
    sentence = made().compare('out', rows)
    assert 'above (worse) the band of small (3 seeds) from iteration 600 on, by 0.15' in sentence
    assert '2.00 times as fast as there (A CPU, 2 cores)' in made().compare(
        'out', curve(0.0, speed=2000.0))


def test_the_band_holds_a_new_seed_in_95_of_100():
    import numpy as np
    chance, inside = np.random.default_rng(0), 0
    for _ in range(1000):
        *seeds, new = chance.normal(0, 0.01, 4).tolist()
        inside += 'inside' in made(seeds).compare('out', curve(new))
    assert 930 <= inside <= 970


def test_a_reference_comes_back_as_it_was_written_and_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, 'FOLDER', tmp_path)
    reference.write_reference(made())
    found = reference.read_reference('small')
    assert found.band() == made().band() and found.runs == made().runs
    out = tmp_path / 'out'
    out.mkdir()
    (out / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, curve(0.0))))
    plot.main([str(out), '--reference=small'])
    assert 'inside the band' in capsys.readouterr().out
    assert 'there are small' in fails(capsys, monkeypatch, plot.main, out, '--reference=big')
    assert 'mean small?' in fails(capsys, monkeypatch, plot.main, out, '--reference=smal')


@pytest.mark.parametrize('spoil, words', [
    (lambda lines: [], 'empty'),
    (lambda lines: [b'\xff\xfe'], 'line 1'),
    (lambda lines: lines[1:], 'line 1: of no run before it'),
    (lambda lines: [b'{"seed": 0, "run": 5}', *lines[1:]], 'line 1: these are no facts of a run'),
    (lambda lines: [lines[0], lines[1][:9]], 'line 2'),
    (lambda lines: lines[:1], 'seed 0 has no rows'),
    (lambda lines: [b'[]', *lines], 'line 1')])
def test_a_damaged_reference_is_named(spoil, words, tmp_path, monkeypatch):
    monkeypatch.setattr(reference, 'FOLDER', tmp_path)
    reference.write_reference(made())
    path = tmp_path / 'small.jsonl'
    path.write_bytes(b'\n'.join(spoil(path.read_bytes().splitlines())))
    with pytest.raises(UserError, match=words):
        reference.read_reference('small')


@pytest.fixture
def small_config(tmp_path, monkeypatch):
    """config/NAME.py of a run that takes no time, and training that logs a curve."""
    config = Path(train.__file__).with_name('config') / 'quickstart.py'
    monkeypatch.setattr(make_reference, 'FOLDER', tmp_path)
    monkeypatch.setattr(reference, 'FOLDER', tmp_path)
    facts = {**FACTS, 'config': asdict(load_config(TrainConfig, [str(config)]))}
    trained = []

    def train_one(name, seed):
        trained.append(seed)
        if seed == 3:
            raise KeyboardInterrupt
        return facts, curve(0.0)
    monkeypatch.setattr(make_reference, 'train', train_one)
    return trained


def test_a_reference_grows_seed_by_seed_and_made_again_stays_until_all_are_there(
        small_config, tmp_path):
    make_reference.main(['quickstart', '--seeds=1'])
    with pytest.raises(KeyboardInterrupt):
        make_reference.main(['config/quickstart.py', '--seeds=1,2,3'])
    assert sorted(reference.read_reference('quickstart').runs) == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        make_reference.main(['quickstart', '--seeds=1,3', '--again'])
    assert sorted(reference.read_reference('quickstart').runs) == [1, 2]
    assert small_config == [1, 2, 3, 1, 3]  # what is there is not trained again


def test_seeds_of_two_configs_are_not_mixed(small_config, tmp_path):
    make_reference.main(['quickstart', '--seeds=1'])
    path = tmp_path / 'quickstart.jsonl'
    path.write_text(path.read_text().replace('"n_embd": 192', '"n_embd": 64'))
    with pytest.raises(UserError, match='made with another n_embd'):
        make_reference.main(['quickstart', '--seeds=2'])


REFERENCES = sorted(path.stem for path in reference.FOLDER.glob('*.jsonl'))


@pytest.mark.parametrize('name', REFERENCES)
def test_our_references_give_no_alarm(name):
    found = reference.read_reference(name)
    assert len(found.rows) >= 3
    for seed, rows in found.rows.items():
        assert diagnose(rows, found.runs[seed], ended=True) == []


@pytest.mark.parametrize('locks', [True, False])
def test_live_drawing_ends_with_the_run(locks, trained, tmp_path, capsys, monkeypatch):
    out, seen = tmp_path / 'out', []
    shutil.copytree(trained, out)
    rows = (out / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (out / 'metrics.jsonl').write_text(''.join(rows[:-2]))
    with ExitStack() as training:
        training.enter_context(lock_output_dir(out))

        def wait(seconds):  # meanwhile the run logs its last rows, and ends
            seen.append(seconds)
            (out / 'metrics.jsonl').write_text(''.join(rows))
            training.close()
        monkeypatch.setattr(plot.time, 'sleep', wait)
        if not locks:
            monkeypatch.setattr(plot, 'in_use', lambda folder: None)
        plot.main([str(out), '--live', '--every=7'])
    assert seen == [7.0] and 'iteration 6' in capsys.readouterr().out


def test_live_drawing_waits_for_the_first_row(trained, tmp_path, capsys, monkeypatch):
    text = (trained / 'metrics.jsonl').read_text()
    with ExitStack() as training:
        training.enter_context(lock_output_dir(tmp_path))

        def wait(_):
            (tmp_path / 'metrics.jsonl').write_text(text)
            training.close()
        monkeypatch.setattr(plot.time, 'sleep', wait)
        plot.main([str(tmp_path), '--live'])
    assert 'iteration 6' in capsys.readouterr().out


# -----------------------------------------------------------------------------
# the run itself


def test_a_folder_in_use_is_refused_and_may_be_evaluated(tiny, trained, capsys, monkeypatch):
    tiny = [*tiny, f'--out_dir={trained}', '--init_from=resume']
    before = (trained / 'metrics.jsonl').read_bytes()
    with lock_output_dir(trained):
        assert 'a run is writing there' in fails(capsys, monkeypatch, train.main, *tiny)
        train.main([*tiny, '--eval_only'])
    assert (trained / 'metrics.jsonl').read_bytes() == before
    train.main(tiny)  # and is free again


def test_patience_ends_a_run_that_gets_no_better_and_survives_a_resume(tiny, tmp_path, capsys):
    still = [*tiny, '--learning_rate=0.0', '--min_lr=0.0', '--eval_interval=2', '--max_iters=20',
             '--lr_decay_iters=20', '--weight_decay=0.0', '--patience=3']
    train.main(still)
    assert 'stopped after iteration 6, patience=3' in capsys.readouterr().out
    assert [line['iter'] for line in lines(tmp_path / 'out', 'val_loss')] == [0, 2, 4, 6]
    cut = [*still, f'--out_dir={tmp_path}/cut']
    train.main([*cut, '--max_iters=4'])
    train.main([*cut, '--init_from=resume', '--report=True'])
    assert [line['iter'] for line in lines(tmp_path / 'cut', 'val_loss')] == [0, 2, 4, 6]
    assert '| ended | patience=3: 3 evaluations' in (tmp_path / 'cut/report.md').read_text()


def test_a_run_that_gave_up_says_so_ever_after(tiny, tmp_path, capsys, monkeypatch):
    wild = [*tiny, '--learning_rate=1e9', '--warmup_iters=0', '--decay_lr=False',
            '--max_bad_steps=2', '--max_iters=20', '--report=True']
    assert 'not finite' in fails(capsys, monkeypatch, train.main, *wild)
    given_up = 'given up: 2 steps in a row were not finite'
    assert f'| ended | {given_up} |' in (tmp_path / 'out/report.md').read_text()
    plot.main([str(tmp_path / 'out')])
    assert given_up in capsys.readouterr().out
