import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import exit_code, fork, size_of_png

import train
from plaingpt.benchmarks import grid
from plaingpt.benchmarks.grid import (
    COLUMNS,
    ROWS,
    add_target,
    cell_config,
    draw_grid,
    format_tables,
    interaction_effects,
    seconds_to,
    summarize,
    train_cells,
    train_once,
)
from plaingpt.system.errors import UserError
from plaingpt.training.settings import TrainConfig

SMALL = TrainConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=8, max_iters=20,
                    gradient_accumulation_steps=2, log_interval=5, lr_decay_iters=20,
                    warmup_iters=2)
CPU = torch.device('cpu')
CELLS = [(row, column) for row in ROWS for column in COLUMNS]


def test_the_24_cells_are_different_runs_that_can_run():
    cells = [cell_config(SMALL, *cell) for cell in CELLS]
    assert len(set(map(repr, cells))) == 24
    assert [cell.problems() for cell in cells] == [[]] * 24
    whole = cell_config(SMALL, 'default', 'none').step_tokens()
    assert cell_config(SMALL, 'default', 'accumulation').step_tokens() == whole
    assert cell_config(SMALL, 'default', 'reduced batch').step_tokens() == whole // 4
    assert cell_config(SMALL, 'context × 2', 'none').step_tokens() == whole * 2
    fixed_total = replace(SMALL, total_batch_size=1024)
    assert cell_config(fixed_total, 'context × 2', 'none').problems() == []


def test_effects_off_the_sum_and_the_product_of_both_changes():
    base = {('default', column): 10.0 * (k + 1) for k, column in enumerate(COLUMNS)}
    rows = dict(zip(ROWS, (0.0, 5.0, 10.0, 20.0), strict=True))
    added = {(row, column): base['default', column] + rows[row] for row, column in CELLS}
    multiplied = {(row, column): base['default', column] * (1 + rows[row] / 10)
                  for row, column in CELLS}
    assert len(interaction_effects(added)) == 15
    assert all(pair[0] == 0 and pair[1] < 0 for pair in interaction_effects(added).values())
    assert all(pair[1] == 0 and pair[0] > 0 for pair in interaction_effects(multiplied).values())
    # 10 alone, 15 with twice the context, 20 with SGD: together 25, or 30
    assert interaction_effects({**added, ('context × 2', 'SGD + cosine'): 27.0})[
        'context × 2', 'SGD + cosine'] == pytest.approx((27 / 25 - 1, 27 / 30 - 1))


def test_the_time_to_a_loss_lies_between_evaluations():
    curve = [(0.0, 4.0), (10.0, 3.0), (20.0, 2.0), (30.0, 2.5), (40.0, 1.5)]
    assert seconds_to(2.5, curve) == 15.0 and seconds_to(2.0, curve) == 20.0
    assert seconds_to(1.0, curve) is None and seconds_to(2.5, [(0.0, 4.0), (9.0, None)]) is None
    # No line can be drawn from before the first evaluation, or from one that was not finite.
    assert seconds_to(5.0, curve) == 0.0
    assert seconds_to(2.5, [(0.0, 4.0), (9.0, None), (20.0, 2.0)]) == 20.0


def test_training_time_is_of_median_steps_and_nothing_else():
    lines = [{'iter': 0, 'train_loss': 4.0, 'val_loss': 4.0}]
    lines += [{'iter': 5 * k, 'tokens_per_s': rate, 'peak_memory_bytes': 100 * k}
              for k, rate in ((1, 8.0), (2, 256.0), (3, 256.0), (4, 512.0))]
    lines += [{'iter': 20, 'train_loss': 2.0, 'val_loss': 3.0}]
    found = summarize(lines, SMALL)  # 256 tokens a step
    assert found == {'memory_bytes': 400, 'step_ms': 1000.0, 'train_s': 20.0, 'final_loss': 3.0,
                     'curve': [(0.0, 4.0), (20.0, 3.0)]}


def fake_train(config):
    if config.dtype == 'float16':
        raise UserError('no float16 here')
    step_s = 0.5
    return summarize([
        {'iter': 0, 'val_loss': 4.0},
        {'iter': 20, 'tokens_per_s': config.step_tokens() / step_s, 'peak_memory_bytes': 2**20},
        {'iter': 20, 'val_loss': 3.0 + config.seed / 1e5}], config)


@pytest.fixture
def trained(monkeypatch):
    """Configs that were trained by a training that takes no time, and fails in float16."""
    trained = []

    def train(config):
        trained.append(config)
        return fake_train(config)
    monkeypatch.setattr(grid, 'train_once', train)
    monkeypatch.setattr(grid, 'predict', lambda *_: SimpleNamespace(peak=2**20))
    return trained


def test_a_run_that_fails_is_told_and_the_others_stand(trained, tmp_path):
    runs = train_cells(SMALL, 2, 65, CPU)
    add_target(runs, 3.5)
    assert len(runs) == 48 and sum(bool(run['failed']) for run in runs) == 8
    text = format_tables(runs, 'x')
    assert text.count('no float16 here') == 8
    losses = text.split('| final validation loss')[1].split('\n\n')[0].splitlines()[2:]
    cells = [cell.strip() for line in losses for cell in line.split('|')[2:-1]]
    assert len(cells) == 24 and cells.count('–') == 4
    assert cells[0] == '3.013 ± 0.000'
    draw_grid(runs, tmp_path / 'grid.png')
    assert size_of_png(tmp_path / 'grid.png') > (1000, 500)


def test_a_grid_that_was_killed_is_resumed(trained, tmp_path, monkeypatch):
    def train_grid(config=SMALL, machine='here'):
        return train_cells(config, 2, 65, CPU, tmp_path / 'grid.jsonl', machine)

    def killed_after_30(config):
        if len(trained) == 30:
            raise KeyboardInterrupt
        return to_the_end(config)
    to_the_end = grid.train_once
    monkeypatch.setattr(grid, 'train_once', killed_after_30)
    with pytest.raises(KeyboardInterrupt):
        train_grid()
    monkeypatch.setattr(grid, 'train_once', to_the_end)
    with (tmp_path / 'grid.jsonl').open('ab') as f:
        f.write(b'{"key": "cut\xff')
    first = train_grid()
    assert [(run['row'], run['column']) for run in first] == 2 * CELLS
    count = len(trained)
    assert count == 48 + 5  # a cell that failed before is tried again
    assert json.dumps(train_grid()) == json.dumps(first)
    count = len(trained)
    train_grid(machine='elsewhere')
    train_grid(replace(SMALL, max_iters=40))
    assert len(trained) == count + 2 * 48


def test_a_default_that_fails_ends_it(trained, monkeypatch):
    def broken(config):
        raise UserError('data/none is not prepared')

    monkeypatch.setattr(grid, 'train_once', broken)
    with pytest.raises(UserError, match='not prepared'):
        train_cells(SMALL, 1, 65, CPU)


def test_a_cell_is_a_training_run(char_data, tmp_path, monkeypatch):
    def run_in_a_fork(command, **_):
        log = tmp_path / 'log'
        code = exit_code(fork(train.main, *command[2:], log=log))
        return SimpleNamespace(returncode=code, stderr=log.read_text())
    monkeypatch.setattr(grid, 'subprocess', SimpleNamespace(run=run_in_a_fork))
    config = replace(cell_config(SMALL, 'default', 'SGD + cosine'), dataset=str(char_data),
                     eval_interval=10, eval_iters=2, device='cpu')
    found = train_once(config)
    assert [round(seconds / found['train_s'], 6) for seconds, _ in found['curve']] == [0, 0.5, 1]
    assert found['final_loss'] < found['curve'][0][1] and found['memory_bytes'] > 2**20
    with pytest.raises(UserError, match='give the folder of a prepared dataset'):
        train_once(replace(config, dataset=str(tmp_path / 'none')))


@pytest.mark.slow
def test_a_run_is_a_process_of_its_own(char_data):
    config = replace(SMALL, dataset=str(char_data), eval_iters=2, device='cpu')
    assert train_once(config)['final_loss'] < 5
