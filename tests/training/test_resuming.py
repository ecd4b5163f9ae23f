"""What a run that resumes takes over, what it keeps beside, and what it refuses."""

import itertools
import json
import os
import shutil

import pytest
from processes import die_before_change, exit_code, fails, fork
from runs import lines, same, weights

import prepare
import train
from plaingpt.monitoring.run_record import read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import lock_output_dir
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import start


@pytest.fixture
def out(trained, tmp_path):
    """The out_dir of a run that ended at iteration 6, with a checkpoint of iteration 3 too."""
    return shutil.copytree(trained, tmp_path / 'out')


def flip_a_bit(checkpoint):
    path = checkpoint / 'model-00001-of-00001.safetensors'
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def let_a_newer_version_write_it(checkpoint):
    state = checkpoints.open_checkpoint(checkpoint).state
    checkpoints.write_state(checkpoint, {**state, 'format_version': 99})


@pytest.mark.parametrize(('spoil', 'words'), [
    (flip_a_bit, 'is damaged'), (let_a_newer_version_write_it, 'from another version')])
def test_auto_starts_nothing_anew_where_no_checkpoint_can_be_used(
        tiny, out, tmp_path, spoil, words):
    shutil.rmtree(out / 'checkpoints/iter-00000003')
    checkpoint = out / 'checkpoints/iter-00000006'
    spoil(checkpoint)
    before = sorted(tmp_path.rglob('*'))
    for init_from in ('auto', 'resume'):
        with pytest.raises(UserError) as refused:
            train.main([*tiny, f'--init_from={init_from}'])
        message = str(refused.value)
        assert str(checkpoint) in message and words in message
        assert '--init_from=scratch' in message
        assert sorted(tmp_path.rglob('*')) == before
    train.main([*tiny, '--init_from=scratch', '--max_iters=1'])
    assert (out / 'old-001/checkpoints' / checkpoint.name).exists()


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(tiny, out, capsys):
    whole = weights(out)
    flip_a_bit(out / 'checkpoints/iter-00000006')
    with pytest.raises(UserError, match='name another with --checkpoint'):
        train.main([*tiny, '--init_from=resume', '--checkpoint=6'])
    train.main([*tiny, '--init_from=auto'])
    warned = capsys.readouterr().err
    assert f'skipped a checkpoint: {out}/checkpoints/iter-00000006' in warned
    assert same(weights(out), whole) and (out / 'old-001').exists()
    assert checkpoints.KEPT >= 2  # so there is one before it


@pytest.mark.parametrize('record', ['[]', '{"config": null}', '\x00'])
def test_a_run_with_damaged_logs_is_resumed_as_one_with_whole_ones(tiny, out, record, capsys):
    whole, before = weights(out), lines(out, 'loss')
    (out / 'run.json').write_text(record)
    for name in ('metrics.jsonl', 'film.jsonl', 'anomalies.jsonl'):
        path = out / name
        rows = path.read_text().splitlines() if path.exists() else []
        damage = ['[]', '{}', '{"iter": "3"}', '{"iter": 2, "val_loss": NaN}', '\x00\x00',
                  '{"iter": 2, "tokens": 9, "elapsed_s": 1.0, "train_loss": "3", "val_loss": "3"}']
        path.write_text('\n'.join([*damage, *rows, '{"iter": 6, ']))
    train.main([*tiny, '--film', '--report=True', '--init_from=resume', '--checkpoint=3'])
    said, warned = capsys.readouterr()
    assert same(weights(out), whole) and 'report.md says' in said and (out / 'loss.png').exists()
    for name in ('run.json is damaged', 'metrics.jsonl: skipped 6 '):
        assert f'{out}/{name}' in warned
    after = [row['loss'] for row in read_rows(out / 'metrics.jsonl') if 'loss' in row]
    assert after == [row['loss'] for row in before]


def test_another_model_tokenizer_or_dataset_is_refused(
        tiny, trained, text_file, char_data, tmp_path, capsys, monkeypatch):
    text = text_file.read_text()  # other tokens; as many characters, but others
    for name, other in (('reversed', text[::-1]), ('accents', text.replace('e', 'é'))):
        (tmp_path / 'text').write_text(other)
        prepare.main(['text', '--input=text', '--tokenizer=char', f'--data_dir=data/{name}'])
    resume = ['--init_from=resume', f'--out_dir={trained}']
    for argv, words in [
            ([*resume, '--n_layer=3'], 'n_layer=2, not 3'),
            ([*resume, '--dataset=accents'], 'another tokenizer'),
            ([*resume, '--dataset=accents'], f'it has dataset={char_data}'),
            ([*resume, '--dataset=reversed'], 'on other tokens'),
            ([f'--init_from={trained}', '--dataset=accents'], 'another tokenizer')]:
        assert words in fails(capsys, monkeypatch, train.main, *tiny, *argv), argv
    assert checkpoints.find(trained).iter_num == 6


def test_settings_that_changed_are_told_and_no_text_is_repeated_or_skipped(tiny, out, capsys):
    train.main([*tiny, '--init_from=resume', '--checkpoint=3', '--batch_size=2', '--dtype=auto',
                '--parallel=auto'])
    printed = capsys.readouterr().out
    assert 'changed: batch_size 4 → 2' in printed and 'changed: dtype float32 → auto' in printed
    assert 'changed: parallel' not in printed
    assert checkpoints.find(out).state['sequences'] == 3 * 8 + 3 * 4
    assert lines(out, 'loss')[-1]['tokens'] == (3 * 8 + 3 * 4) * 16


def test_a_resumed_run_with_another_batch_size_evaluates_the_same_sequences(tiny, out, capsys):
    resume = [*tiny, '--init_from=resume', '--eval_iters=5']  # which were 2
    train.main([*resume, '--max_iters=7'])
    assert checkpoints.find(out).state['eval_sequences'] == 5 * 4
    capsys.readouterr()
    train.main([*resume, '--eval_only', '--batch_size=1'])
    expected = lines(out, 'val_loss')[-1]['val_loss']
    assert f'val loss {expected:.4f}' in capsys.readouterr().out


def test_a_run_goes_on_in_every_other_dtype(tiny, out):
    for i, dtype in enumerate(('float16', 'bfloat16', 'float32'), start=7):
        train.main([*tiny, f'--dtype={dtype}', '--init_from=resume', f'--max_iters={i}'])
        found = checkpoints.find(out)
        assert found.iter_num == i and lines(out, 'loss')[-1]['loss'] < 5
        assert (found.state['scaler'].get('scale', 0) > 1) == (dtype == 'float16')


def test_a_run_that_patience_ended_stays_ended_until_told_otherwise(tiny, tmp_path, capsys):
    # without a learning rate no evaluation is better than that after the first step
    tiny = [*tiny, '--init_from=auto', '--eval_interval=1', '--max_iters=4', '--learning_rate=0',
            '--min_lr=0', '--eval_iters=1']
    for patience, end in ((2, 3), (2, 3), (0, 4)):
        train.main([*tiny, f'--patience={patience}'])
        assert checkpoints.find(tmp_path / 'out').iter_num == end
        assert ('patience=2' in capsys.readouterr().out) == (end == 3)


# -----------------------------------------------------------------------------
# the settings of a resumed run


def test_what_the_command_line_says_changes_the_settings_of_the_run_and_what_follows_from_them(
        out, tmp_path, capsys):
    (tmp_path / 'more.py').write_text('max_iters = max_iters + 1\ngrad_clip = grad_clip / 2\n')
    resume = ['--init_from=resume', f'--out_dir={out}']
    train.main([f'{tmp_path}/more.py', *resume, '--weight_decay=0', '--learning_rate=3e-4'])
    printed = capsys.readouterr().out
    changes = [line.split() for line in printed.splitlines() if '→' in line]
    assert [change[1:] for change in changes if change[1] != 'out_dir'] == [
        change.split() for change in (
            'learning_rate 0.0006 → 0.0003', 'max_iters 6 → 7', 'weight_decay 0.1 → 0.0',
            'grad_clip 1.0 → 0.5', 'lr_decay_iters 6 → 7', 'min_lr 6e-05 → 3e-05')]
    for words, expected in (([], (7, 3e-5)), (['--max_iters=8', '--min_lr=0'], (8, 0)),
                            (['--max_iters=9', '--lr_decay_iters=8'], (8, 0)),
                            (['--max_iters=10'], (8, 0))):  # what was said stays
        train.main([*resume, *words])
        config = checkpoints.find(out).state['config']
        assert (config['lr_decay_iters'], config['min_lr']) == pytest.approx(expected), words
        assert config['weight_decay'] == 0


def test_fewer_iterations_than_the_run_has_are_refused_where_the_command_names_them(
        out, capsys, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in out.rglob('*')}
    resume = ['--init_from=resume', f'--out_dir={out}']
    message = fails(capsys, monkeypatch, train.main, *resume, '--max_iters=5')
    assert 'max_iters=5 is behind iteration 6' in message and 'leave it out' in message
    assert {path: path.stat().st_mtime_ns for path in out.rglob('*')} == before
    train.main([*resume, '--max_iters=5', '--eval_only'])  # trains nothing
    train.main([*resume, '--max_iters=5', '--checkpoint=3'])
    assert checkpoints.find(out).iter_num == 5


# -----------------------------------------------------------------------------
# going back


def test_going_back_keeps_all_of_the_later_steps_in_the_archive(tiny, out):
    bad_steps = [{'iter': i, 'loss': ['nan']} for i in (1, 5)]
    (out / 'anomalies.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in bad_steps))
    names = ('metrics.jsonl', 'anomalies.jsonl', 'run.json')
    before, last = {name: (out / name).read_text() for name in names}, weights(out)
    train.main([*tiny, '--init_from=resume', '--checkpoint=3', '--max_iters=4'])
    assert {name: (out / 'old-001' / name).read_text() for name in names} == before
    assert same(weights(out / 'old-001'), last)
    assert checkpoints.find(out).iter_num == 4
    assert [row['iter'] for row in lines(out, 'loss')] == [1, 2, 3, 4]
    assert (out / 'anomalies.jsonl').read_text() == json.dumps(bad_steps[0]) + '\n'


def test_a_restart_by_torchrun_does_not_go_back_once_more(tiny, out, monkeypatch):
    back = [*tiny, '--init_from=auto', '--checkpoint=3']
    train.main([*back, '--max_iters=4'])
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    train.main([*back, '--max_iters=5'])
    assert [row['iter'] for row in lines(out, 'loss')] == [1, 2, 3, 4, 5]
    assert not (out / 'old-002').exists()


# -----------------------------------------------------------------------------
# a new run where an earlier one is


def contents(folder):
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in folder.rglob('*') if path.is_file()}


@pytest.fixture
def earlier(out):
    """The out_dir of a run that wrote all that a run may write."""
    (out / 'tensorboard').mkdir()
    for name in ('report.md', 'tensorboard/events.out.tfevents.1'):
        (out / name).write_text('of the earlier run')
    return out


def test_a_run_that_is_refused_leaves_the_earlier_one_as_it_was(tiny, earlier):
    before = contents(earlier)
    for wrong in ('--dataset=nowhere', '--n_head=7', '--total_batch_size=7'):
        with pytest.raises((UserError, SystemExit)):
            train.main([*tiny, wrong])
    train.main([*tiny, '--check=True'])
    assert contents(earlier) == before


def test_a_folder_in_use_is_refused_and_may_be_evaluated(tiny, out, capsys, monkeypatch):
    resume, before = [*tiny, '--init_from=resume'], contents(out)
    with lock_output_dir(out):
        assert 'a run is writing there' in fails(capsys, monkeypatch, train.main, *resume)
        train.main([*resume, '--eval_only'])
    assert contents(out) == before
    train.main(resume)  # and is free again


# -----------------------------------------------------------------------------
# killed while it writes


def test_a_run_killed_while_it_saves_goes_on_to_the_same_bits(tiny, tmp_path):
    tiny = [*tiny, '--dropout=0.2', '--max_iters=4', '--eval_interval=2',
            '--init_from=auto']
    whole, out = tmp_path / 'whole', tmp_path / 'out'
    train.main([*tiny, f'--out_dir={whole}'])
    for n in itertools.count(2, 7):
        code = exit_code(fork(train.main, *tiny, log=tmp_path / 'log',
                              before=lambda n=n: die_before_change(n, '/checkpoints/')))
        if code == 0:
            break
        assert code == 9, (n, (tmp_path / 'log').read_text())
        train.main(tiny)
        assert same(weights(out), weights(whole)) and not list(out.rglob('*.tmp')), n
        assert [(row['iter'], row['loss']) for row in lines(out, 'loss')] \
            == [(row['iter'], row['loss']) for row in lines(whole, 'loss')], n
        shutil.rmtree(out)
    assert n > 10


def test_killed_between_any_two_changes_no_file_of_the_earlier_run_is_lost(earlier, tmp_path):
    def files(out):
        return sorted((path.name, path.read_bytes()) for path in out.rglob('*') if path.is_file())

    for n in itertools.count(1):
        out = shutil.copytree(earlier, tmp_path / str(n))
        before = files(out)
        pid = os.fork()
        if not pid:
            die_before_change(n, str(out))
            start.archive_previous_run(out)
            os._exit(0)
        code = exit_code(pid)
        assert files(out) == before, n
        start.archive_previous_run(out)  # by the next run
        assert files(out) == before and not checkpoints.checkpoint_paths(out), n
        if code == 0:
            break
    assert n > 8
